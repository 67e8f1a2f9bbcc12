"""Names that are rebound before the recomputation, and state that a function changes."""

import enum
import functools
import types

import pytest
import torch
from conftest import assert_equal, batch, bit_equal, total
from torch import nn

import ackpt


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
@bit_equal
def test_names_rebound_after_the_forward_have_their_earlier_values(call, loop):
    x = batch()
    total(loop(x, call)).backward()
    return [x.grad]


def test_a_nonlocal_counter_counts_both_runs():
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
    state = types.SimpleNamespace(weight=torch.zeros(3, 4))

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
@bit_equal
def test_tensors_replaced_in_every_run_are_bit_equal(call, make):
    """A recurrent state: each recompute starts from the one its forward saw, the last one stays."""
    layer, x = nn.Linear(4, 4), batch()
    function, state = make(layer)
    y = x
    for _ in range(3):
        y = call(function, y)
    last = state()
    total(y).backward()
    assert state() is last
    return [x.grad, last]


noise = torch.Generator()
scale = torch.ones(4)


def draw(x):
    return torch.rand(x.shape, generator=noise)


class ReadsGlobals(torch.nn.Module):
    def __init__(self, way):
        super().__init__()
        self.linear, self.way = torch.nn.Linear(4, 4), way

    def forward(self, x):
        if self.way == "generator":
            return self.linear(x) * torch.rand(x.shape, generator=noise)
        return self.linear(x) * (draw(x) if self.way == "helper" else scale)


@pytest.mark.parametrize("way", ["generator", "helper", "tensor"])
def test_a_recomputation_reads_the_globals_of_the_forward(way):
    def run(checkpointed):
        global scale
        scale = torch.ones(4)
        torch.manual_seed(0)
        noise.manual_seed(0)
        model = torch.nn.Sequential(ReadsGlobals(way), ReadsGlobals(way))
        if checkpointed:
            ackpt.apply_activation_checkpointing(model, ReadsGlobals)
        loss = model(torch.ones(3, 4)).sum()
        scale = scale * 3
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_equal(run(False), run(True), "gradient")


class _Task(enum.Enum):
    A = 1
    B = 2


class _Settings:
    def __init__(self, task):
        self.task, self.inner = task, types.SimpleNamespace(task=task)


class _Adapters(nn.Module):
    """Two adapters and buffers, of which `key` reads the name in an attribute `v`."""

    v: object = "a"  # of the class, until a value is set

    def __init__(self, key, **values):
        super().__init__()
        self.layer, self.act, self.key = nn.Linear(4, 4), nn.Tanh(), key
        self.adapters = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "ab"})
        self.register_buffer("offset_a", torch.ones(4))
        self.register_buffer("offset_b", -torch.ones(4))
        for name, value in values.items():
            setattr(self, name, value)

    def forward(self, x):
        name = self.key(self)
        return self.act(self.adapters[name](self.layer(x) + getattr(self, f"offset_{name}")))


def _assign(value):
    return lambda module: setattr(module, "v", value)


# The value, how it is read, and how it changes between two forwards.
ATTRIBUTES = {
    "str": ("a", lambda m: m.v, _assign("b")),
    "bytes": (b"a", lambda m: m.v.decode(), _assign(b"b")),
    "enum": (_Task.A, lambda m: m.v.name.lower(), _assign(_Task.B)),
    "None": (None, lambda m: m.v or "a", _assign("b")),
    "frozenset": (frozenset("a"), lambda m: min(m.v), _assign(frozenset("b"))),
    "dtype": (torch.float32, lambda m: "ba"[m.v is torch.float32], _assign(torch.float16)),
    "device": (torch.device("cpu"), lambda m: "ba"[m.v.type == "cpu"], _assign(torch.device("meta"))),
    "range": (range(1), lambda m: "ba"[len(m.v)], _assign(range(0))),
    "slice": (slice(1), lambda m: "ba"[m.v.stop], _assign(slice(0))),
    "function": (torch.tanh, lambda m: "ba"[m.v is torch.tanh], _assign(torch.sin)),
    "tuple": (("a",), lambda m: m.v[0], _assign(("b",))),
    "item of a list": (["a"], lambda m: m.v[0], lambda m: m.v.__setitem__(0, "b")),
    "item of a dict": ({"k": "a"}, lambda m: m.v["k"], lambda m: m.v.update(k="b")),
    "object": (_Settings("a"), lambda m: m.v.task, _assign(_Settings("b"))),
    "attribute of an object": (_Settings("a"), lambda m: m.v.task, lambda m: setattr(m.v, "task", "b")),
    "attribute of an inner object": (
        _Settings("a"),
        lambda m: m.v.inner.task,
        lambda m: setattr(m.v.inner, "task", "b"),
    ),
    "module": ("a", lambda m: m.v, lambda m: setattr(m, "act", nn.Sigmoid())),
    "hook removed": ("a", lambda m: m.v, lambda m: m.handle.remove()),
    "hook added": ("a", lambda m: m.v, lambda m: m.act.register_forward_hook(lambda m, args, out: out * 2)),
}


@pytest.mark.parametrize("name", [*ATTRIBUTES, "attribute of the class"])
@bit_equal
def test_attributes_changed_between_two_forwards_are_used_by_each(call, name):
    value, key, change = ATTRIBUTES.get(name, ("a", lambda m: m.v, _assign("b")))
    value = (
        _Settings("a") if isinstance(value, _Settings) else value.copy() if isinstance(value, (list, dict)) else value
    )
    module = _Adapters(key, **({} if name not in ATTRIBUTES else {"v": value}))
    module.handle = module.layer.register_forward_hook(lambda m, args, out: out * 3)
    module.layer.register_forward_hook(lambda m, args, out: out + 1)
    x = batch()
    one = total(call(module, x))
    change(module)
    two = total(call(module, x))
    (one + 2 * two).backward()
    assert name == "None" or module.v is not value or "assign" not in change.__qualname__
    return [p.grad for p in module.parameters() if p.grad is not None]


class _Engine:
    """Hands out blocks of memory, also while a region is recomputed, and counts them."""

    def __init__(self):
        self.idle, self.given, self.count = [bytearray(4) for _ in range(9)], {}, 0

    def take(self):
        self.count += 1
        self.given[self.count] = block = self.idle.pop()
        return float(block[0] + 2)


def test_objects_used_by_a_function_keep_working_in_the_recomputation():
    engine, counts = _Engine(), []

    def scaled(x):
        y = x * engine.take()
        counts.append((engine.count, len(engine.given), len(engine.idle)))
        return y.sin()

    outputs = [total(ackpt.checkpoint(scaled, batch())) for _ in range(2)]
    sum(outputs).backward()
    assert counts == [(1, 1, 8), (2, 2, 7), (3, 3, 6), (4, 4, 5)]


@pytest.mark.parametrize("given", ["closure", "default", "partial", "method", "argument", "both"])
@bit_equal
def test_a_configuration_changed_between_two_forwards_is_used_by_each(call, given):
    class Settings:
        scale = 1.0

        def scaled(self, x):
            return (x * self.scale).sin()

    settings = Settings()
    settings.scale = 2.0
    function = {
        "closure": lambda x: settings.scaled(x),
        "default": lambda x, settings=settings: settings.scaled(x),
        "partial": functools.partial(Settings.scaled, settings),
        "method": settings.scaled,
        "argument": lambda x, settings: settings.scaled(x),
        "both": lambda x, given: settings.scaled(x) if given is settings else x,
    }[given]
    args = [settings] if given in ("argument", "both") else []
    settings.inner = types.SimpleNamespace() if args else None  # not only plain values
    x = batch()
    one = total(call(function, x, *args))
    settings.scale = 3.0
    (one + total(call(function, x, *args))).backward()
    assert settings.scale == 3.0
    return x.grad
