"""Regions are bit-equal to the baseline: parameters, graph shapes, modes, several backward passes."""

import copy
import threading

import pytest
import torch
import torch.utils.checkpoint
from conftest import Case, assert_same, assert_same_step, batch, bit_equal, plain_call, raises, run_step, total
from torch import nn

import ackpt


def mlp(*middle):
    return nn.Sequential(nn.Linear(4, 4), *(middle or (nn.Tanh(),)), nn.Linear(4, 4))


def frozen(module):
    return module.requires_grad_(False)


def half_frozen():
    model = mlp()
    frozen(model[0])
    model[2].bias.requires_grad_(False)
    return model


class Shared(nn.Module):
    """One weight under two names, used three times."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh()) + x @ self.first.weight


MODELS = {
    "mlp": mlp,
    "frozen first layer": half_frozen,
    "all frozen": lambda: frozen(mlp()),
    "shared weight": Shared,
    "in place": lambda: mlp(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Dropout(0.5, inplace=True)),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True),
    "recurrent": lambda: nn.LSTM(4, 4, num_layers=2, dropout=0.5),
    "bilinear with dropout": lambda: mlp(nn.Dropout(0.5), nn.GELU(), nn.AlphaDropout(0.2)),
}


@pytest.mark.parametrize("grad", [True, False], ids=["input needs grad", "input needs none"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_modules_are_bit_equal(make, grad):
    step = assert_same_step(lambda: Case(make(), (batch(grad=grad),)))
    assert any(value is not None for value in step.grads) == any(step.requires_grad)


def nest(depth, function):
    """`function` inside of `depth` regions, each with an operation of its own."""
    if depth == 0:
        return function
    inner = nest(depth - 1, function)
    return lambda x: ackpt.checkpoint(lambda x: inner(x * 1.01).sin() + x, x)


@pytest.mark.parametrize("depth", [1, 2, 5, 25])  # of 25 each is run again up to 25 times
def test_nested_regions_are_bit_equal(depth):
    def build():
        model = mlp(nn.Dropout(0.3))
        return Case(nest(depth - 1, model), (batch(),), also=model)

    def without(function, x):
        with_regions, ackpt.checkpoint = ackpt.checkpoint, plain_call
        try:
            return function(x)
        finally:
            ackpt.checkpoint = with_regions

    assert_same(run_step(build, without), run_step(build, ackpt.checkpoint))


@pytest.mark.parametrize("backward", [True, False], ids=["backward", "destroyed"])
def test_a_chain_of_2000_regions(no_gc, backward):
    x = batch()
    y = x
    with ackpt.guarantees(other_rng=False):
        for _ in range(2000):
            y = ackpt.checkpoint(torch.sin, y)
    if backward:
        y.sum().backward()
        plain = x.detach().requires_grad_()
        z = plain
        for _ in range(2000):
            z = z.sin()
        z.sum().backward()
        assert torch.equal(x.grad, plain.grad)
    del y
    assert x.grad_fn is None


IN_PLACE = {
    "on an intermediate": lambda x: x.sin().add_(1).mul_(x),
    "on a part of an intermediate": lambda x: _part(x),
    "on a fresh buffer": lambda x: torch.zeros(3, 4).copy_(x).index_add_(0, torch.tensor([1]), x[:1]),
}


def _part(x):
    y = x * 2
    y[0] = x[1] * x[2]
    y[:, 1].mul_(3)
    return y


@pytest.mark.parametrize("function", IN_PLACE.values(), ids=IN_PLACE)
def test_in_place_operations_inside(function):
    assert_same_step(lambda: Case(function, (batch(),)))


@bit_equal
def test_several_forwards_before_one_backward_and_accumulation(call):
    model = mlp(nn.Dropout(0.5), nn.BatchNorm1d(4))
    inputs = [batch() for _ in range(3)]
    for _ in range(2):
        losses = [total(call(model, x)) for x in inputs]
        torch.stack(losses).sum().backward()
    for x in inputs:  # one backward each, in another order
        total(call(model, x)).backward()
    return [tensor.grad for tensor in [*inputs, *model.parameters()]] + list(model.buffers())


def inner(model):
    return lambda x: ackpt.checkpoint(model, x).sin()


@pytest.mark.parametrize("wrap", [lambda model: model, inner], ids=["flat", "nested"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_second_backward_without_retain_graph_is_torchs_own_error(wrap, grad):
    y = ackpt.checkpoint(wrap(mlp()), batch(grad=grad)).sum()
    y.backward()
    raises(RuntimeError, "backward through the graph a second time", y.backward)


def test_eval_no_grad_and_inference_mode_are_plain_calls():
    model, x = mlp(nn.Dropout(0.5)).eval(), batch()
    assert_same_step(lambda: Case(model, (x.detach().requires_grad_(),)))
    with torch.no_grad():
        y = ackpt.checkpoint(model, x)
        assert not y.requires_grad and torch.equal(y, model(x))
    with torch.inference_mode():
        y = ackpt.checkpoint(model, x)
        assert y.is_inference() and torch.equal(y, model(x))
    y = ackpt.checkpoint(lambda x: _without_grad(model, x) * x, x)
    y.sum().backward()
    assert torch.equal(x.grad, model(x).detach())


def _without_grad(model, x):
    with torch.no_grad():
        return model(x)


@pytest.mark.parametrize("preserve", [True, False])
def test_two_threads_at_once(preserve):
    """The recomputation has the forward's dropout mask, even if regions of another thread draw in between."""
    inputs = torch.randn(30, 8, 4)  # drawn here: draws outside of regions are not kept apart
    models = [mlp(nn.Dropout(0.5) if preserve else nn.Tanh()) for _ in range(2)]
    twins = copy.deepcopy(models)
    barrier = threading.Barrier(2)
    equal = []

    def work(model, twin):
        barrier.wait()
        for x in inputs:
            x = x.clone().requires_grad_()
            masks = []
            hook = model[1].register_forward_hook(
                lambda module, args, out, masks=masks: masks.append(out.detach() / args[0].detach())
            )
            ackpt.checkpoint(model, x, preserve_rng_state=preserve).pow(2).sum().backward()
            hook.remove()
            y = x.detach().requires_grad_()
            middle = twin[0](y)
            twin[2](middle * masks[0] if preserve else middle.tanh()).pow(2).sum().backward()
            equal.append(torch.allclose(x.grad, y.grad, rtol=1e-4, atol=1e-5))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(models, twins)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 60


def test_forward_in_one_thread_backward_in_another():
    def build():
        model, x = mlp(nn.Dropout(0.5)), batch()
        h = model[0](x)
        for _ in range(50):  # numbers of graph nodes count per thread
            h = h + 0
        h.retain_grad()
        return Case(lambda x: (h * model(x), h), (batch(),), also=[model, x, h])

    def in_thread(function, *args):
        out = []
        thread = threading.Thread(target=lambda: out.append(ackpt.checkpoint(function, *args)))
        thread.start()
        thread.join()
        return out[0]

    assert_same_step(build, call=in_thread)
