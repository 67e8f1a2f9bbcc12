"""State that a function reads besides its arguments: closures, globals, attributes, partials, custom autograd."""

import functools

import pytest
import torch
from conftest import Case, assert_same_step, batch, bit_equal, function_of, plain_call, seed, total
from torch import nn

import ackpt


def history(*tensors):
    """The tensors with a history and their gradients kept."""
    made = [tensor * 1.5 for tensor in tensors]
    for tensor in made:
        tensor.retain_grad()
    return made


class Holder:
    """A plain object that computes with its attributes."""

    def __init__(self, weight, scale=2.0):
        self.weight = weight
        self.scale = scale

    def method(self, x):
        return (x * self.weight * self.scale).sin()

    __call__ = method


def through_helper(weight):
    def helper(x):
        return x * weight

    return lambda x: helper(x).sin() + helper(x.cos())


def in_closure(thing, function):
    return lambda x: function(x, thing)


WAYS = {
    "closure": lambda w: lambda x: (x * w).sin(),
    "default": lambda weight: lambda x, w=weight, *, shift=weight: (x * w + shift).sin(),
    "partial": lambda w: functools.partial(lambda w, x: (x * w).sin(), w),
    "partial of a partial": lambda w: functools.partial(functools.partial(lambda a, w, x: (x * w * a).sin(), 2), w),
    "bound method": lambda w: Holder(w).method,
    "callable object": lambda w: Holder(w),
    "object in a closure": lambda w: in_closure(Holder(w), lambda x, holder: holder.method(x)),
    "list in a closure": lambda w: in_closure([w], lambda x, ws: (x * ws[0]).sin()),
    "dict of tuples in a closure": lambda w: in_closure({"a": (1, w)}, lambda x, ws: (x * ws["a"][1]).sin()),
    "objects in a closure": lambda w: in_closure(Holder(Holder(w)), lambda x, deep: deep.weight.method(x)),
    "helper": through_helper,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", ["leaf", "history", "no grad", "parameter"])
def test_closed_over_tensors_get_their_gradients(way, kind):
    def build():
        root = batch()
        weight = {
            "leaf": lambda: root,
            "history": lambda: history(root)[0],
            "no grad": lambda: root.detach(),
            "parameter": lambda: nn.Parameter(root.detach()),
        }[kind]()
        return Case(way(weight), (batch(),), also=[root, weight])

    step = assert_same_step(build)
    assert sum(grad is not None for grad in step.grads) >= (1 if kind == "no grad" else 2)


def test_a_closed_over_tensor_made_from_what_the_region_uses_itself():
    """The backward of the recomputation must stop at this tensor and not run into its history."""

    def build():
        weight, x = nn.Parameter(torch.randn(4)), batch()
        h = weight.exp()
        g = h.sin() * x
        for tensor in (h, g):
            tensor.retain_grad()
        return Case(lambda x: (h * weight * x + g).sin(), (x,), also=[weight, x, h, g])

    assert_same_step(build)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nested_regions_close_over_tensors_of_every_level(depth):
    def nested(call, level, outside):
        if level == 0:
            return lambda x: (x * sum(outside)).sin()

        def function(x):
            here = x.cos() * outside[-1]
            return call(nested(call, level - 1, [*outside, here]), x) * here

        return function

    def run(call):
        seed()
        x, root = batch(), batch()
        (h,) = history(root)
        total(call(nested(call, depth, [h]), x)).backward()
        return [x.grad, root.grad, h.grad]

    first, second = run(plain_call), run(ackpt.checkpoint)
    for one, other in zip(first, second):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_custom_function_on_a_closed_over_tensor_is_refused():
    double = function_of(lambda ctx, x: x * 2, lambda ctx, grad: grad * 2)
    root = batch()
    h = root.exp()
    y = ackpt.checkpoint(lambda x: double.apply(h) * x, batch())
    with pytest.raises(ackpt.CheckpointError, match="straight to a torch.autograd.Function .* Pass that tensor"):
        y.sum().backward()
    assert root.grad is None


_scale = 2.0
_layer = nn.Linear(4, 4)
_layers = [_layer]


def _helper(x):
    return _layer(x) * _scale


def test_globals_of_helpers_get_their_gradients():
    def build():
        _layer.zero_grad()
        return Case(lambda x: _helper(x).sin() + _layers[0](x), (batch(),))

    assert_same_step(build)
    assert_same_step(lambda: Case(_helper, (batch(),)))
    assert_same_step(lambda: Case(lambda x: _helper(x), (batch(),)), loss=lambda y: (y * _layer.weight.sum()).sum())


def force(net):
    def function(positions):
        energy = net(positions).sin().sum()
        (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -gradient

    return function


PREPARE = {
    "input that needs grad": (lambda positions: positions, True),
    "made to need grad": (lambda positions: positions.requires_grad_(), False),
    "leaf of its own": (lambda positions: positions.detach().clone().requires_grad_(), False),
    "leaf of its own from one that needs grad": (lambda positions: positions.detach().requires_grad_(), True),
}


@pytest.mark.parametrize(("prepare", "grad"), PREPARE.values(), ids=PREPARE)
def test_autograd_of_its_own_inside_of_the_region(prepare, grad):
    def build():
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        positions = torch.randn(3, 4, requires_grad=grad)
        return Case(lambda positions: force(net)(prepare(positions)), (positions,), also=net)

    assert_same_step(build)


class _Result:
    """An object that a region returns, or that its caller keeps."""

    def __init__(self):
        self.items = []


def _shared(layer, x, kept):
    h = layer(x)
    kept.items.append(h)
    return torch.tanh(h)


def _side(layer, x, kept):
    h = layer(x)
    kept.items.append(h.square().mean())
    return torch.tanh(h)


def _several(layer, x, kept):
    parts = layer(x).chunk(2, -1)
    kept.items += [parts[1], parts[1][0].exp()]
    return parts[0].sin()


def _nothing_else(layer, x, kept):
    kept.items.append(layer(x).sin())


LEAVES = {"shared": _shared, "side": _side, "several": _several, "nothing else": _nothing_else}
CALLS = {
    "argument": lambda call, function, x: call(function, x),
    "closed over": lambda call, function, x: call(lambda: function(x)),
    "nested": lambda call, function, x: call(lambda x: call(function, x), x),
}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("way", CALLS)
@pytest.mark.parametrize("name", LEAVES)
@bit_equal
def test_a_tensor_that_leaves_a_region_in_an_object_gets_its_gradient(call, name, way, large):
    """As router logits that hooks collect; the recomputation may collect them again."""
    layer, gradients = nn.Linear(8, 8), []
    for _ in range(5):
        kept, root = _Result(), torch.randn(40_000 if large else 4, 8, requires_grad=True)
        out = CALLS[way](call, lambda x, kept=kept: LEAVES[name](layer, x, kept), root.sin())
        losses = [each.sum() * (place + 0.5) for place, each in enumerate(kept.items)]
        (sum(losses) if out is None else out.sum() + sum(losses)).backward()
        gradients += [root.grad, layer.weight.grad.clone()]
    return gradients


class _Keeps(torch.nn.Module):
    """A hook on the block keeps its result, which is used beside what the block returns."""

    def __init__(self):
        super().__init__()
        self.block, self.kept = torch.nn.Sequential(torch.nn.Tanh()), {}
        self.block[-1].register_forward_hook(lambda module, args, output: self.kept.update(last=output))

    def forward(self, x):
        return self.block(x) + self.kept.pop("last").mean()


@pytest.mark.parametrize("choice", [["1.block"], ["1", "1.block"]], ids=["alone", "nested"])
def test_a_tensor_kept_by_a_hook_gets_its_gradient_inside_another_region(choice):
    """An earlier version dropped its gradient: a recomputation asks only for the gradients of its own inputs."""
    gradients, x = [], torch.randn(4, 8)
    for is_region in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), _Keeps())
        if is_region:
            ackpt.apply_activation_checkpointing(model, choice)
        model(x).sum().backward()
        gradients.append([each.grad for each in model.parameters()])
    assert all(map(torch.equal, *gradients))
