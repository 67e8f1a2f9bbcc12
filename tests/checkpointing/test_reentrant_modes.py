"""Regions under autocast, saved-tensor hooks, anomaly mode, and inside or around torch.compile."""

import contextlib
import functools

import pytest
import torch
from conftest import Case, assert_equal, batch, model_of, plain_call, raises, seed, surroundings, total
from torch import nn

import ackpt

bf16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)
no_cache = functools.partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(4), nn.Linear(4, 4))


def region():
    return Case(model(), (batch(),))


@pytest.mark.parametrize("first_is_leaf", [True, False])
@pytest.mark.parametrize("offload", [None, "async"])
def test_an_input_that_is_cast_for_several_layers(first_is_leaf, offload):
    def step(call):
        seed()
        blocks = [
            model_of(lambda self, x: (self.a(x) * self.b(x)).float(), a=nn.Linear(32, 32), b=nn.Linear(32, 32))
            for _ in range(3)
        ]
        x = torch.randn(16, 32, requires_grad=True)
        with bf16():
            h = x if first_is_leaf else x * 1.5
            for block in blocks:
                h = call(block, h)
        h.square().sum().backward()
        return [x.grad, *(parameter.grad for block in blocks for parameter in block.parameters())]

    checkpointed = step(functools.partial(ackpt.checkpoint, offload=offload))
    assert_equal(step(plain_call), checkpointed, "gradient")


def gradients(call, forward, backward):
    seed()
    layers, x = model(), batch()
    with forward():
        y = call(layers, x)
    with backward():
        total(y).backward()
    return [y.detach(), x.grad, *(p.grad for p in layers.parameters())]


fp16 = functools.partial(torch.autocast, "cpu", torch.float16)


@pytest.mark.parametrize("backward", [contextlib.nullcontext, bf16, fp16])
@pytest.mark.parametrize("forward", [contextlib.nullcontext, bf16, no_cache])
def test_the_recompute_runs_under_the_forwards_autocast(forward, backward):
    first = gradients(plain_call, forward, backward)
    assert_equal(first, gradients(ackpt.checkpoint, forward, backward), "gradient")


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("cast", [bf16, no_cache])
@pytest.mark.parametrize("order", ["before", "after", "both"])
def test_a_weight_used_inside_and_outside_of_the_region_under_autocast(order, cast, inside):
    """The cache of casts must not tie the region's graph to the outer one; sums are grouped per region."""

    def run(call):
        seed()
        weight, x = nn.Parameter(torch.randn(4, 4)), batch()
        with cast():
            y = x @ weight if order in ("before", "both") else x
            y = call(lambda y: (y @ weight).sin(), y)
            y = y @ weight if order in ("after", "both") else y
            loss = total(y)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [y.detach(), x.grad], weight.grad

    (first, weight), (second, other) = run(plain_call), run(ackpt.checkpoint)
    assert_equal(first, second, "value")
    torch.testing.assert_close(weight, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("cast", [bf16, no_cache])
def test_a_closed_over_tensor_and_a_backward_inside_of_autocast(cast):
    """A cast that was cached outside the region would look like a part of the closed-over tensor's history."""

    def run(call):
        seed()
        weight, x = nn.Parameter(torch.randn(4, 4)), batch()
        with cast():
            h = (x @ weight).sin()
            y = call(lambda y: (y @ weight) * h, x) @ weight
            total(y).backward()
        return [y.detach()], [x.grad, weight.grad]

    (first, grads), (second, others) = run(plain_call), run(ackpt.checkpoint)
    assert_equal(first, second, "value")
    for one, other in zip(grads, others):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=5e-2)


def test_the_state_of_autocast_survives_a_backward():
    x, layers = batch(), model()
    with no_cache():
        y = ackpt.checkpoint(layers, x).sum()
    with torch.autocast("cpu", torch.float16):
        before = surroundings()
        y.backward()
        assert surroundings() == before


def test_saved_tensors_hooks_around_a_region_see_its_input_only():
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor

    layers, x = model(), batch()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = ackpt.checkpoint(layers, x)
    assert packed == [x.shape]
    y.sum().backward()


def test_lossy_hooks_around_a_region_change_its_input_only():
    def gradients(call, x, around=contextlib.nullcontext):
        seed()
        with around():
            y = call(layers, x).sum()
        layers.zero_grad()
        y.backward()
        return [parameter.grad for parameter in layers.parameters()]

    def lossy():
        return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.bfloat16, torch.Tensor.float)

    layers, x = model(), batch()
    rounded = gradients(plain_call, x.bfloat16().float())
    assert not torch.equal(gradients(plain_call, x)[0], rounded[0])
    assert_equal(rounded, gradients(ackpt.checkpoint, x, lossy), "gradient")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_that_is_wrapped_and_a_compiled_function_in_a_region(fresh_dynamo, backend):
    seed()
    layers, x = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))), batch()
    total(layers(x)).backward()
    expected = [x.grad, *(p.grad for p in layers.parameters())]

    ackpt.apply_activation_checkpointing(layers)
    x.grad = None
    layers.zero_grad()
    total(torch.compile(layers, backend=backend)(x)).backward()
    assert_equal(expected, [x.grad, *(p.grad for p in layers.parameters())], "wrapped")

    ackpt.remove_activation_checkpointing(layers)
    x.grad = None
    layers.zero_grad()
    total(ackpt.checkpoint(torch.compile(layers, backend=backend), x)).backward()
    assert_equal(expected, [x.grad, *(p.grad for p in layers.parameters())], "compiled inside")


def test_fullgraph_is_refused_by_name(fresh_dynamo):
    function = torch.compile(lambda x: ackpt.checkpoint(torch.sin, x), backend="eager", fullgraph=True)
    raises(torch._dynamo.exc.Unsupported, "ackpt.checkpoint runs outside of compiled code", lambda: function(batch()))
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    ackpt.apply_activation_checkpointing(layers)
    compiled = torch.compile(layers, backend="eager", fullgraph=True)
    raises(torch._dynamo.exc.Unsupported, "compile what runs inside, as by block.compile", lambda: compiled(batch()))


class Dropping(nn.Sequential):
    def forward(self, x):
        for layer in self:  # Dynamo does not follow super().forward while any nn.Sequential has a region or a plan
            x = layer(x)
        return torch.nn.functional.dropout(x, 0.3)


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("order", ["regions first", "compiled first"])
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo reads of every input, as without regions
def test_regions_run_around_blocks_that_are_compiled(fresh_dynamo, order, fullgraph):
    sizes, runs = [], []

    def backend(module, inputs):
        sizes.append(len(module.graph.nodes))
        return module.forward

    for wraps in (False, True):
        seed()
        layers, x = nn.Sequential(*(Dropping(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(2))), batch()
        both = [ackpt.apply_activation_checkpointing, compiled(backend, fullgraph)] if wraps else []
        for step in both if order == "regions first" else reversed(both):
            step(layers)
        for _ in range(2):
            total(layers(x)).backward()
        runs.append([x.grad, *(p.grad for p in layers.parameters()), *layers.buffers()])
    assert_equal(*runs, order)
    assert min(sizes) >= 6
    assert ackpt.remove_activation_checkpointing(layers) == ["0", "1"]
    assert layers[0]._compiled_call_impl is not None


@pytest.mark.parametrize("chosen", [None, Dropping])
def test_a_region_contains_the_code_that_torch_compile_returned(fresh_dynamo, chosen):
    own = [Dropping(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    layers, x = nn.Sequential(*(torch.compile(each, backend="eager", fullgraph=True) for each in own)), batch()
    seed()
    total(own[1](own[0](x))).backward()
    expected, x.grad = x.grad, None
    assert ackpt.apply_activation_checkpointing(layers, chosen) == ["0", "1"]
    seed()
    total(layers(x)).backward()
    assert_equal([expected], [x.grad], "gradient")


def compiled(backend, fullgraph):
    return lambda layers: [block.compile(backend=backend, fullgraph=fullgraph) for block in layers]
