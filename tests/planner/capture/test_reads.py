"""Values that a model's code reads outside of its modules are compared at every call."""

import contextvars
import cProfile
import dataclasses
import gc
import os
import sys
import threading
import types
import weakref

import pytest
import torch
from conftest import assert_as_eager, model_of
from reading_models import Config, Model, X
from torch import nn

import ackpt

SCALE = 2.0
MODE = "sin"
TABLE = {"scale": 2.0, "nested": [1.0, 2.0]}
NAMES = set()
settings = types.ModuleType("settings")
settings.__file__ = __file__


class Slots:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 2.0


class Shared:
    """Its scale is one of the class until an object gets its own."""

    scale = 2.0

    def scaled(self, x):
        return x * self.scale


CONFIG, OUTER, SLOTS, SHARED = Config(), types.SimpleNamespace(config=Config()), Slots(), Shared()
MADE, HELD = dataclasses.make_dataclass("Made", [("scale", float, 2.0)])(), types.SimpleNamespace(act=torch.tanh)
settings.config = Config()
CONFIGS, VARIABLES, LOCAL = [None, Config()], os.environ, threading.local()
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("scale")


def helper(x):
    return x * SCALE


def with_default(model, x, scales=TABLE["nested"], *, config=CONFIG):
    return x * scales[1] * config.scale


def closed_over():
    scale = 2.0

    def change(value):
        nonlocal scale
        scale = value

    return (lambda model, x: x * scale), change


def closed_over_by_a_generator(is_suspended):
    scale = 2.0

    def scales():
        yield scale
        yield 1.0

    def function(model, x):
        generator = scales()
        x = x * next(generator)
        return x if is_suspended else x * next(generator) + sum(generator)

    def change(value):
        nonlocal scale
        scale = value

    return function, change, (2.0, 4.0)


def named(namespace, name):
    def change(value):
        vars(namespace)[name] = value

    return change


HERE = sys.modules[__name__]
FUNCTION, CHANGE = closed_over()
# the model's function, what it reads is changed by, its values
SEEN = {
    "global": (lambda model, x: x * SCALE, named(HERE, "SCALE"), (2.0, 4.0)),
    "in a helper": (lambda model, x: helper(x), named(HERE, "SCALE"), (2.0, 4.0)),
    "string": (lambda model, x: x.sin() if MODE == "sin" else x.cos(), named(HERE, "MODE"), ("sin", "cos")),
    "closure": (FUNCTION, CHANGE, (2.0, 4.0)),
    "object": (lambda model, x: x * CONFIG.scale, named(CONFIG, "scale"), (2.0, 4.0)),
    "object of a made class": (lambda model, x: x * MADE.scale, named(MADE, "scale"), (2.0, 4.0)),
    "getattr": (lambda model, x: x * getattr(CONFIG, "scale"), named(CONFIG, "scale"), (2.0, 4.0)),  # noqa: B009
    "function of an object": (lambda model, x: HELD.act(x), named(HELD, "act"), (torch.tanh, torch.relu)),
    "generator": closed_over_by_a_generator(False),
    "suspended generator": closed_over_by_a_generator(True),
    "another object": (lambda model, x: x * CONFIG.scale, named(HERE, "CONFIG"), (CONFIG, Config(4.0))),
    "chain": (lambda model, x: x * OUTER.config.scale, named(OUTER.config, "scale"), (2.0, 4.0)),
    "module": (lambda model, x: x * settings.config.scale, named(settings.config, "scale"), (2.0, 4.0)),
    "slots": (lambda model, x: x * SLOTS.scale, lambda value: setattr(SLOTS, "scale", value), (2.0, 4.0)),
    "class": (lambda model, x: SHARED.scaled(x), lambda value: setattr(Shared, "scale", value), (2.0, 4.0)),
    "own instead of the class's": (lambda model, x: SHARED.scaled(x), named(SHARED, "scale"), (2.0, 4.0)),
    "dict": (lambda model, x: x * TABLE["scale"], lambda value: TABLE.update(scale=value), (2.0, 4.0)),
    "list in a dict": (
        lambda model, x: x * TABLE["nested"][1],
        lambda value: TABLE["nested"].__setitem__(1, value),
        (2.0, 4.0),
    ),
    "set": (
        lambda model, x: x * (1.0 if "name" in NAMES else 2.0),
        lambda value: NAMES.symmetric_difference_update(NAMES ^ value),
        (set(), {"name"}),
    ),
    "environment": (
        lambda model, x: x * float(os.environ.get("ACKPT_TEST_SCALE", "1")),
        lambda value: os.environ.update(ACKPT_TEST_SCALE=value),
        ("2", "4"),
    ),
    "getenv": (
        lambda model, x: x * float(os.getenv("ACKPT_TEST_SCALE", "1")),
        lambda value: os.environ.update(ACKPT_TEST_SCALE=value),
        ("2", "4"),
    ),
    "environment by another name": (
        lambda model, x: x * float(VARIABLES["ACKPT_TEST_SCALE"]),
        lambda value: os.environ.update(ACKPT_TEST_SCALE=value),
        ("2", "4"),
    ),
    "name in globals()": (lambda model, x: x * globals()["SCALE"], named(HERE, "SCALE"), (2.0, 4.0)),
    "function": (lambda model, x: x * helper.scale, named(helper, "scale"), (2.0, 4.0)),
    "object in a list": (lambda model, x: x * CONFIGS[1].scale, named(CONFIGS[1], "scale"), (2.0, 4.0)),
    "default argument": (
        lambda model, x: with_default(model, x),
        lambda value: TABLE["nested"].__setitem__(1, value),
        (2.0, 4.0),
    ),
    "object as a default argument": (with_default, named(CONFIG, "scale"), (2.0, 4.0)),
    "context variable": (lambda model, x: x * VARIABLE.get(), lambda value: VARIABLE.set(value), (2.0, 4.0)),
    "thread": (lambda model, x: x * LOCAL.scale, lambda value: setattr(LOCAL, "scale", value), (2.0, 4.0)),
    "class of a module": (lambda model, x: x * model.factor, lambda value: setattr(Model, "factor", value), (2.0, 4.0)),
}


def follows(model, change, values, *args):
    change(values[0])
    step = ackpt.compile(model, *args, policy="full")
    plans = []
    try:
        for value in (*values, values[0], values[1]):
            change(value)
            assert_as_eager(model, step, *args)
            plans.append(step.plan)
    finally:
        change(values[0])
    assert plans[0] is plans[2] and plans[1] is plans[3] and plans[0] is not plans[1]


@pytest.mark.parametrize("case", SEEN)
def test_a_changed_value_gets_its_own_plan_and_the_first_value_its_first_plan(case):
    function, change, values = SEEN[case]
    follows(Model(function), change, values, X)


def test_attributes_of_objects_held_by_modules_and_calls_are_compared():
    config = Config()
    follows(Model(lambda model, x: x * model.config.scale, config=config), named(config, "scale"), (2.0, 4.0), X)
    given = Hashed(scale=2.0)
    follows(Model(lambda model, x, y: x * y.scale), named(given, "scale"), (2.0, 4.0), X, given)


class Hashed(types.SimpleNamespace):
    __hash__ = object.__hash__


def test_an_active_profiler_keeps_running():
    calls = []
    previous = sys.getprofile()

    def profiler(frame, event, argument):
        if event == "call":
            calls.append(frame.f_code)

    sys.setprofile(profiler)
    try:
        ackpt.trace(Model(SEEN["global"][0]), X)
        assert sys.getprofile() is profiler
        helper(X)
    finally:
        sys.setprofile(previous)
    assert helper.__code__ in calls
    with cProfile.Profile() as profile:
        ackpt.trace(Model(SEEN["global"][0]), X)
        helper(X)
    assert any("helper" in str(entry.code) for entry in profile.getstats())


def test_a_changed_global_recompiles_in_dynamo():
    torch._dynamo.reset()
    model, plans = Model(SEEN["string"][0]), []
    step = torch.compile(model, backend="ackpt", options={"policy": "full", "on_plan": plans.append})
    change, values = SEEN["string"][1:]
    try:
        for value in values:
            change(value)
            assert_as_eager(model, step, X)
    finally:
        change(values[0])
    assert len(plans) == 2


collected = 0


def count_collected(phase, info):
    global collected
    collected += 1


def test_gc_callbacks_are_not_code_of_the_model():
    class Collects(nn.Linear):
        def forward(self, x):
            gc.collect()
            return super().forward(x)

    gc.callbacks.append(count_collected)
    try:
        step = ackpt.compile(Collects(4, 4), X)
    finally:
        gc.callbacks.remove(count_collected)
    assert collected > 0 and step(X).shape == X.shape


def test_variables_of_all_functions_with_the_same_code_are_compared():
    pairs = [closed_over(), closed_over()]
    gc.freeze()
    functions, changes = zip(*pairs, closed_over())  # the last one is not frozen

    model = Model(lambda model, x: sum(function(model, x) for function in functions))
    step = ackpt.compile(model, X, policy="none")
    for change in changes:
        change(3.0)
        assert torch.equal(step(X), model(X))
    assert [event.kind for event in step.history] == ["capture"] * 4


def test_variables_of_a_function_that_does_not_run_are_not_compared():
    (function, change), (_, change_other) = closed_over(), closed_over()
    change_other(3.0)  # otherwise it closes over the same object
    model = Model(function)
    step = ackpt.compile(model, X, policy="none")
    for number, changed in enumerate((change_other, change), 1):
        changed(4.0)
        assert torch.equal(step(X), model(X)) and len(step.history) == number


def test_a_capture_keeps_no_tensor_of_its_call():
    class Doubled(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return sum([y * factor for factor in (1, 2)]) + (lambda: y)()

    model, x = Doubled(4, 4), X.clone()
    step = ackpt.compile(model, x)
    reference = weakref.ref(x)
    del x
    assert reference() is None and step(X).shape == X.shape


SETTINGS = {
    "torch.are_deterministic_algorithms_enabled()": (
        *(False, True),
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled,
    ),
    "torch.get_float32_matmul_precision()": (
        *("highest", "high"),
        torch.set_float32_matmul_precision,
        torch.get_float32_matmul_precision,
    ),
    "torch.is_anomaly_enabled()": (
        *(False, True),
        lambda value: torch.autograd.set_detect_anomaly(value, check_nan=False),
        lambda: torch.is_anomaly_enabled(),  # noqa: PLW0108 (a capture replaces it)
    ),
    "torch.get_default_dtype()": (
        *(torch.float32, torch.float64),
        torch.set_default_dtype,
        lambda: torch.full((), 1.0).dtype,
    ),
    "torch.backends.cudnn.benchmark": (
        *(False, True),
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
        lambda: torch.backends.cudnn.benchmark,
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_torch_that_the_forward_reads_is_compared(name):
    was, value, put, read = SETTINGS[name]

    model = model_of(lambda self, x: self.layer(x).sum() * (2 if read() == value else 1), layer=nn.Linear(4, 4))
    step = ackpt.compile(model, X, policy="none")
    assert torch.equal(step(X), model(X))
    try:
        put(value)
        assert torch.equal(step(X), model(X)) and step.history[-1].cause == f"{name} changed"
    finally:
        put(was)
