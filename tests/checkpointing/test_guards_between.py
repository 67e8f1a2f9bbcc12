"""Changes between forward and backward are detected or undone, and changes that a region must not make are errors."""

import contextlib
import copy
from functools import partial

import pytest
import torch
from conftest import batch, bit_equal, function_of, raises, raises_cleanly, seed, total, with_layer
from torch import nn

import ackpt

Error = ackpt.CheckpointError


def model_and_loss():
    seed()
    model = with_layer(nn.Tanh())
    model.register_buffer("offset", torch.zeros(4))
    other = copy.deepcopy(model.state_dict())
    x, mask = batch(6), torch.ones(4)
    loss = ackpt.checkpoint(lambda x: model(x) * mask + model.offset, x).sum()
    return model, x, mask, other, loss


def optimizer_step(model, x, mask, other):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def fused_step(model, x, mask, other):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()  # raises no version counter


def flat_fused_step(model, *_):
    """The weights are views of one parameter, which the optimizer has."""
    flat = nn.Parameter(torch.zeros(0).set_(model[0].weight.untyped_storage()))
    flat.grad = torch.ones_like(flat)
    torch.optim.SGD([flat], lr=0.1, fused=True).step()


def from_vector(model, *_):
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


def swapped(model, *_):
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.zeros(4, 4)))


@torch.no_grad()
def foreach(model, x, mask, other):
    torch._foreach_add_(list(model.parameters()), 1)


def swap_data_twice(model, *_):
    for _ in range(2):  # the second may get the memory of the one that the forward saw
        model[0].bias.data = model[0].bias.data + 1


CHANGES = {
    "optimizer": (optimizer_step, "parameter 'model."),
    "fused optimizer": (fused_step, "parameter 'model."),
    "fused optimizer of a flat parameter": (flat_fused_step, "parameter 'model.0.weight'"),
    "vector to parameters": (from_vector, "parameter 'model."),
    "half and back": (lambda model, *_: model.half().float(), "parameter 'model."),
    "swap_tensors": (swapped, "parameter 'model.0.weight'"),
    "input data": (lambda model, x, *_: setattr(x, "data", torch.zeros(6, 4)), "input tensor number 0"),
    "foreach": (foreach, "parameter 'model."),
    "add": (lambda model, *_: model[2].bias.detach().add_(1), "parameter 'model.2.bias'"),
    "copy": (lambda model, *_: model[0].bias.detach().copy_(torch.ones(4)), "parameter 'model.0.bias'"),
    "load": (lambda model, x, mask, other: model.load_state_dict(other), "parameter 'model."),
    "data": (lambda model, *_: setattr(model[0].weight, "data", torch.zeros(4, 4)), "parameter 'model.0.weight'"),
    "data twice": (swap_data_twice, "parameter 'model.0.bias'"),
    "init": (lambda model, *_: nn.init.zeros_(model[0].weight), "parameter 'model.0.weight'"),
    "frozen": (lambda model, *_: model.requires_grad_(False), "parameter 'model.*, was frozen"),
    "buffer": (lambda model, *_: model.offset.add_(1), "buffer or closed-over tensor 'model.offset'"),
    "buffer data": (lambda model, *_: setattr(model.offset, "data", torch.ones(4)), "'model.offset'"),
    "input": (lambda model, x, *_: x.detach().add_(1), "input tensor number 0, shape \\[6, 4\\] float32 on cpu,"),
    "closed over": (lambda model, x, mask, other: mask.zero_(), "buffer or closed-over tensor 'mask'"),
    "part": (lambda model, *_: model[0].weight.detach()[0].zero_(), "parameter 'model.0.weight'"),
}


@pytest.mark.parametrize(("change", "what"), CHANGES.values(), ids=CHANGES)
def test_a_change_between_forward_and_backward_is_named(change, what):
    model, x, mask, other, loss = model_and_loss()
    change(model, x, mask, other)
    with raises_cleanly(Error, what + ".* between the forward .* Run backward before the change"):
        loss.backward()
    assert x.grad is None


def steps_of_others(model):
    """Optimizers of other parameters, and of these without gradients."""
    other = nn.Parameter(torch.ones(4))
    other.grad = torch.ones(4)
    optimizer = torch.optim.AdamW([other, *model.parameters()], lr=0.1, fused=True)
    optimizer.step()


def average(model):
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    torch._foreach_lerp_(averages, [parameter.detach() for parameter in model.parameters()], 0.1)


UNSEEN = {
    "steps of other parameters": steps_of_others,
    "averages of parameters": average,
    "nothing": lambda model: None,
    "gradients": lambda model: model.zero_grad(),
    "a module to eval": lambda model: model.eval(),
    "another parameter in the place": lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(4, 4))),
    "another buffer in the place": lambda model: setattr(model, "offset", torch.ones(4)),
    "loaded by assignment": lambda model: model.load_state_dict(
        {key: value + 1 for key, value in model.state_dict().items()}, assign=True
    ),
    "a parameter deleted": lambda model: delattr(model[0], "bias"),
    "unfrozen": lambda model: model[2].bias.requires_grad_(),
}


@pytest.mark.parametrize("change", UNSEEN.values(), ids=UNSEEN)
@bit_equal
def test_replaced_names_have_the_values_of_the_forward(call, change):
    model = with_layer(nn.Dropout(0.5))
    model[2].bias.requires_grad_(False)
    model.register_buffer("offset", torch.zeros(4))
    parameters, x = list(model.parameters()), batch(6)
    loss = total(call(lambda x: model(x) * (model.offset + 1), x))
    change(model)
    now = [name for name, _ in model.named_parameters()], list(model.state_dict()), model.training
    loss.backward()
    assert now == ([name for name, _ in model.named_parameters()], list(model.state_dict()), model.training)
    return [x.grad, *(p.grad for p in parameters), *(p.detach() for p in model.parameters()), model.offset]


def test_changes_after_the_last_backward_are_allowed():
    model, x, mask, other, loss = model_and_loss()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer_step(model, x, mask, other)
    ackpt.checkpoint(model, x).sum().backward()
    assert x.grad is not None


REFUSED_BEFORE = "changes a tensor that requires grad"  # torch raises before the tensor changes
IN_REGION = {
    "input": (lambda x, w: x.mul_(2), REFUSED_BEFORE),
    "view of the input, with gradient": (lambda x, w: x.t()[0].add_(1) * w[0], REFUSED_BEFORE),
    "input without grad": (lambda x, w: x.detach().mul_(2) * w, "its input tensor number 0"),
    "view of the input": (lambda x, w: x.detach()[0].zero_().sum() * w, "its input tensor number 0"),
    "relu first": (lambda x, w: nn.functional.relu(x, inplace=True) * w, REFUSED_BEFORE),
    "parameter": (lambda x, w: x * w * w.detach().mul_(2), "changes the parameter 'w'"),
    "leaf": (lambda x, w: x * w.add_(1), REFUSED_BEFORE),
}


@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize(("function", "message"), IN_REGION.values(), ids=IN_REGION)
def test_a_region_that_changes_its_own_input_or_parameter(function, message, history):
    w, x = nn.Parameter(torch.ones(4)), batch(6)
    x = x * 1 if history else x
    before, node = x.detach().clone(), x.grad_fn
    with raises_cleanly(Error, message + ".*(clone|before the region)"):
        ackpt.checkpoint(lambda x: function(x, w), x).sum().backward()
    assert x.grad_fn is node and (message != REFUSED_BEFORE or torch.equal(x, before))


def test_an_embedding_with_max_norm_is_refused():
    layer = nn.Embedding(5, 4, max_norm=0.1)
    with raises_cleanly(Error, "changes the parameter 'weight'.*max_norm"):
        ackpt.checkpoint(layer, torch.tensor([1, 2]))


def test_guarantees_can_be_switched_off_and_on_again():
    model, x = with_layer(nn.Tanh()), batch(6)
    with ackpt.guarantees(unchanged=False):
        loss = ackpt.checkpoint(model, x).sum()
        with ackpt.guarantees():
            guarded = ackpt.checkpoint(model, x).sum()
    again = ackpt.checkpoint(model, x).sum()
    with torch.no_grad():
        model[0].weight.add_(1)
    loss.backward()
    assert x.grad is not None
    for each in (guarded, again):
        with pytest.raises(Error, match="'0.weight'"):
            each.backward()


def test_guarantees_are_restored_after_an_exception():
    with pytest.raises(KeyError), ackpt.guarantees(unchanged=False):
        raise KeyError
    model, x, mask, other, loss = model_and_loss()
    mask.add_(1)
    raises(Error, "'mask'", loss.backward)


_Times = function_of(lambda ctx, x, factor: x * factor, lambda ctx, gradient: (gradient, None))
READS = {
    "nothing": (lambda x, b: x * 2, False),
    "its shape": (lambda x, b: x * b.shape[0] * b.dim(), False),
    "elements": (lambda x, b: x * b, True),
    "one element": (lambda x, b: x * b[0].item(), True),
    "in a list": (lambda x, b: x + torch.stack([b, b]).sum(0), True),
    "a view": (lambda x, b: x * b.real, True),
    "in a Function": (lambda x, b: _Times.apply(x, b), True),
}


@pytest.mark.parametrize(("function", "reads"), READS.values(), ids=READS)
def test_only_values_that_a_region_reads_must_not_change(function, reads):
    layer, buffer = nn.Linear(4, 4), torch.ones(4)
    loss = ackpt.checkpoint(lambda x: function(layer(x), buffer), torch.ones(1, 4)).sum()
    buffer.add_(1)
    if reads:
        with raises_cleanly(Error, "buffer or closed-over tensor 'buffer'.* was changed between"):
            loss.backward()
    else:
        loss.backward()
        assert layer.weight.grad is not None


@bit_equal
def test_regions_of_a_list_of_blocks_that_each_closure_holds(call):
    """Each region reaches the buffers of all blocks, and the next forward changes those of the others."""

    class OwnNorm(nn.BatchNorm1d):
        def forward(self, x):
            return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True)

    blocks = [nn.Sequential(nn.Linear(4, 4), OwnNorm(4)) for _ in range(3)]
    x = h = batch(6)
    for place in range(3):
        h = call(lambda x, place=place: blocks[place](x), h)
    total(h).backward()
    modules = nn.ModuleList(blocks)
    return [x.grad, *(p.grad for p in modules.parameters()), *modules.buffers()]


@bit_equal
def test_a_parameter_set_to_its_own_value_is_no_change(call):
    p = nn.Parameter(torch.eye(2))

    def function(x):
        with torch.no_grad():
            p.set_(p.data)
        return (x @ p).tanh()

    for _ in range(2):
        call(function, torch.ones(1, 2)).sum().backward()
    return [p.grad, p.detach()]


def test_a_parameter_that_is_set_to_another_value_is_refused():
    p = nn.Parameter(torch.eye(2))

    def function(x):
        y = x @ p
        with torch.no_grad():
            p.set_(torch.ones(2, 2))
        return y

    with raises_cleanly(Error, "changes the parameter 'p'"):
        ackpt.checkpoint(function, torch.ones(1, 2))


@bit_equal
def test_a_weight_released_and_gathered_again_keeps_gradients_exact(call):
    """As ZeRO-3 does: hooks gather the weight before its use, and replace it by an empty tensor afterwards."""

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, layer, x):
            ctx.layer = layer
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            gather(ctx.layer)
            return None, gradient

    def gather(layer, args=None):
        layer.weight.data = torch.eye(4) * 0.5

    def release(layer, args, output):
        layer.weight.data = torch.empty(0)
        return Gather.apply(layer, output)

    layer, x = nn.Linear(4, 4, bias=False), batch(6)
    layer.register_forward_pre_hook(gather)
    layer.register_forward_hook(release)
    release(layer, None, x)
    call(nn.Sequential(layer, nn.Tanh()), x * 1).sum().backward()
    return [x.grad, layer.weight.grad]


_state = {"n": 0, "t": torch.ones(1), "list": [0, torch.ones(1)]}


def _through_dict():
    return _state["t"] * 2


READS = {
    "helper": lambda: _through_dict(),
    "list": lambda: _state["list"][1],
    "choice": lambda: torch.ones(1) * _state["list"][1] if _state["n"] else _state["t"] * 1,
}
CHANGES = {
    "in place": lambda: [each.mul_(3) for each in (_state["t"], _state["list"][1])],
    "another": lambda: _state.update(n=1, t=torch.full((1,), 3.0), list=[0, torch.full((1,), 3.0)]),
}


@pytest.mark.parametrize("rows", [4, 40_000])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", READS)
def test_reads_by_every_route(name, change, rows):
    layer = nn.Linear(8, 8)
    for depth in (1, 2):
        function = lambda x: torch.tanh(layer(x)) * READS[name]()  # noqa: E731
        for _ in range(depth):
            function = partial(ackpt.checkpoint, function)
        for changes in (False, True, False, False, False, True):
            _state.update(n=0, t=torch.ones(1), list=[0, torch.ones(1)])
            x = torch.randn(rows, 8)
            (expected,) = torch.autograd.grad((torch.tanh(layer(x)) * READS[name]()).sum(), layer.weight)
            loss, layer.weight.grad = function(x).sum(), None
            if changes:
                CHANGES[change]()
            with contextlib.suppress(ackpt.CheckpointError) if changes else contextlib.nullcontext():
                loss.backward()
            assert layer.weight.grad is None if change == "in place" and changes else True
            assert layer.weight.grad is None or torch.equal(layer.weight.grad, expected)
