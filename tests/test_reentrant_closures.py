"""What a function reaches besides its arguments: closures, globals, attributes, partials, and autograd of its own."""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import Case, assert_equal, assert_same_step, plain_call, seed, total
from torch import nn

import ackpt


def batch(*shape):
    return torch.randn(shape or (3, 4), requires_grad=True)


def history(*tensors):
    """The tensors with a history and their gradients kept."""
    made = [tensor * 1.5 for tensor in tensors]
    for tensor in made:
        tensor.retain_grad()
    return made


class Holder:
    """A plain object that computes with what it holds."""

    def __init__(self, weight, scale=2.0):
        self.weight = weight
        self.scale = scale

    def method(self, x):
        return (x * self.weight * self.scale).sin()

    __call__ = method


def with_default(weight):
    def function(x, w=weight, *, shift=weight):
        return (x * w + shift).sin()

    return function


def through_helper(weight):
    def helper(x):
        return x * weight

    def function(x):
        return helper(x).sin() + helper(x.cos())

    return function


def in_closure(thing, function):
    return lambda x: function(x, thing)


WAYS = {
    "closure": lambda w: lambda x: (x * w).sin(),
    "default": with_default,
    "partial": lambda w: functools.partial(lambda w, x: (x * w).sin(), w),
    "partial keyword": lambda w: functools.partial(lambda x, w: (x * w).sin(), w=w),
    "partial of a partial": lambda w: functools.partial(functools.partial(lambda a, w, x: (x * w * a).sin(), 2), w),
    "bound method": lambda w: Holder(w).method,
    "callable object": lambda w: Holder(w),
    "object in a closure": lambda w: in_closure(Holder(w), lambda x, holder: holder.method(x)),
    "list in a closure": lambda w: in_closure([w], lambda x, ws: (x * ws[0]).sin()),
    "dict of tuples in a closure": lambda w: in_closure({"a": (1, w)}, lambda x, ws: (x * ws["a"][1]).sin()),
    "set in a closure": lambda w: in_closure({w}, lambda x, ws: (x * sum(ws)).sin()),
    "objects in a closure": lambda w: in_closure(Holder(Holder(w)), lambda x, deep: deep.weight.method(x)),
    "helper": through_helper,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", ["leaf", "history", "no grad", "parameter"])
def test_closed_over_tensors(way, kind):
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


def test_no_argument_at_all():
    def build():
        (h,) = history(batch())
        weight = nn.Parameter(torch.ones(4))
        return Case(lambda: (h * weight).sin(), also=[h, weight])

    assert_same_step(build)


def test_several_regions_close_over_one_tensor():
    def run(call):
        seed()
        x, root = batch(), batch()
        (memory,) = history(root)
        for _ in range(3):
            x = call(lambda x: (x * memory).sin(), x)
        x = x + memory
        total(x).backward()
        return [root.grad, memory.grad]

    assert_equal(run(plain_call), run(ackpt.checkpoint), "gradient")


def test_a_closed_over_tensor_made_from_what_the_region_uses_itself():
    """The recompute's backward must stop at it, not run on into its history."""

    def build():
        weight, x = nn.Parameter(torch.randn(4)), batch()
        h = weight.exp()
        g = h.sin() * x
        for tensor in (h, g):
            tensor.retain_grad()
        return Case(lambda x: (h * weight * x + g).sin(), (x,), also=[weight, x, h, g])

    assert_same_step(build)


def test_a_region_closes_over_its_own_input_and_its_history():
    def build():
        x = batch()
        h = x.exp()
        h.retain_grad()
        return Case(lambda a: (a * h + x).sin(), (h,), also=[x, h])

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


def test_a_nested_region_gets_a_closed_over_tensor_as_argument():
    def build():
        root = batch()
        (h,) = history(root)
        return Case(lambda x: ackpt.checkpoint(lambda a, b: (a * b).sin(), x, h), (batch(),), also=[root, h])

    assert_same_step(build)


def test_a_custom_function_on_a_closed_over_tensor_is_refused():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    root = batch()
    h = root.exp()
    y = ackpt.checkpoint(lambda x: Double.apply(h) * x, batch())
    with pytest.raises(ackpt.CheckpointError, match="straight to a torch.autograd.Function .* Pass that tensor"):
        y.sum().backward()
    assert root.grad is None


def late(x, call):
    for i in range(1, 4):
        x = call(lambda x: (x * i).sin(), x)  # noqa: B023
    return x


def late_in_a_helper(x, call):
    for i in range(1, 4):

        def scale(x):
            return x * i  # noqa: B023

        x = call(lambda x: scale(x).sin(), x)  # noqa: B023
    return x


def late_in_a_partial(x, call):
    for i in range(1, 4):
        x = call(functools.partial(lambda k, x: (x * i * k).sin(), 0.5), x)  # noqa: B023
    return x


def rebound_tensor(x, call):
    weight = torch.ones(4)
    for _ in range(3):
        x = call(lambda x: (x * weight).sin(), x)  # noqa: B023
        weight = weight + 1
    return x


def closes_over_what_it_makes(x, call):
    y = x.exp()
    for _ in range(3):
        y = call(lambda: (y * x).sin())  # noqa: B023
    return y


LATE = [late, late_in_a_helper, late_in_a_partial, rebound_tensor, closes_over_what_it_makes]


@pytest.mark.parametrize("loop", LATE, ids=lambda loop: loop.__name__)
def test_names_that_move_on_after_the_forward(loop):
    def gradient(call):
        seed()
        x = batch()
        total(loop(x, call)).backward()
        return x.grad

    assert torch.equal(gradient(plain_call), gradient(ackpt.checkpoint))


SCRIPT = """
x = torch.ones(3, requires_grad=True)
weights = [torch.full((3,), 0.5, requires_grad=True) for _ in range(3)]

def helper(x):
    return x * i

y = x
for i, weight in enumerate(weights):
    y = call(lambda x: (helper(x) + x * weight * (i + 1)).sin(), y)
y.sum().backward()
after = (i, weight is weights[-1])
"""


def test_a_loop_at_the_top_of_a_script():
    spaces = []
    for call in (plain_call, ackpt.checkpoint):
        spaces.append({"torch": torch, "call": call, "__name__": "script"})
        exec(SCRIPT, spaces[-1])
    plain, checkpointed = spaces
    assert torch.equal(plain["x"].grad, checkpointed["x"].grad)
    assert_equal([w.grad for w in plain["weights"]], [w.grad for w in checkpointed["weights"]], "gradient")
    assert checkpointed["after"] == plain["after"] and checkpointed["i"] == 2


_scale = 2.0
_layer = nn.Linear(4, 4)
_layers = [_layer]


def _helper(x):
    return _layer(x) * _scale


def test_helpers_that_use_globals():
    def build():
        _layer.zero_grad()
        return Case(lambda x: _helper(x).sin() + _layers[0](x), (batch(),))

    assert_same_step(build)
    assert_same_step(lambda: Case(_helper, (batch(),)))
    assert_same_step(lambda: Case(lambda x: _helper(x), (batch(),)), loss=lambda y: (y * _layer.weight.sum()).sum())


def test_a_nonlocal_counter_stays_the_callers():
    count = 0

    def function(x):
        nonlocal count
        count += 1
        return x.sin()

    ackpt.checkpoint(function, batch()).sum().backward()
    assert count == 2

    def through_a_helper():
        calls = 0

        def add():
            nonlocal calls
            calls += 1

        def function(x):
            add()
            return x * min(calls, 1)

        ackpt.checkpoint(function, batch()).sum().backward()
        return calls

    assert through_a_helper() == 2


def state_in_a_dict(layer):
    state = {"h": torch.zeros(3, 4)}

    def function(x):
        h = (layer(x) + state["h"]).tanh()
        state["h"] = h.detach()
        return h

    return function, lambda: state["h"]


def state_in_a_list(layer):
    state = [torch.zeros(3, 4)]

    def function(x):
        h = (layer(x) + state[0]).tanh()
        state[0] = h.detach()
        return h

    return function, lambda: state[0]


def state_in_an_object(layer):
    state = Holder(torch.zeros(3, 4))

    def function(x):
        h = (layer(x) + state.weight).tanh()
        state.weight = h.detach()
        return h

    return function, lambda: state.weight


def state_in_a_name(layer):
    state = torch.zeros(3, 4)

    def function(x):
        nonlocal state
        h = (layer(x) + state).tanh()
        state = h.detach()
        return h

    return function, lambda: state


def state_in_a_method(layer):
    class Recurrent:
        h = torch.zeros(3, 4)

        def step(self, x):
            h = (layer(x) + self.h).tanh()
            self.h = h.detach()
            return h

    recurrent = Recurrent()
    recurrent.h = recurrent.h
    return recurrent.step, lambda: recurrent.h


STATES = [state_in_a_dict, state_in_a_list, state_in_an_object, state_in_a_name, state_in_a_method]


@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
def test_tensors_that_a_function_replaces_each_time(make):
    """A recurrent state: each recompute starts from the one its forward saw, the last one stays."""

    def run(call):
        seed()
        layer, x = nn.Linear(4, 4), batch()
        function, state = make(layer)
        y = x
        for _ in range(3):
            y = call(function, y)
        last = state()
        total(y).backward()
        assert state() is last
        return [x.grad, last]

    assert_equal(run(plain_call), run(ackpt.checkpoint), "gradient")


def force(net):
    def function(positions):
        energy = net(positions).sin().sum()
        (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -gradient

    return function


def energy_and_force(net, prepare):
    def function(positions):
        return force(net)(prepare(positions))

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
        return Case(energy_and_force(net, prepare), (positions,), also=net)

    assert_same_step(build)


def test_a_backward_of_its_own_inside_of_the_region():
    def build():
        def function(x):
            inside = x.detach().clone().requires_grad_()
            inside.sin().sum().backward()
            return x * inside.grad

        return Case(function, (batch(),))

    assert_same_step(build)
