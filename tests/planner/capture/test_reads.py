"""Values that a model's code reads outside of its modules: a change is seen at the next call, or refused."""

from __future__ import annotations

import collections
import cProfile
import dataclasses
import gc
import os
import random
import sys
import types
import weakref

import mpmath
import numpy as np
import pytest
import sympy
import torch
from torch import nn

import ackpt
from ackpt.graph import TraceError
from ackpt.planner.capture.inspection.value_walk import is_of_model

X = torch.linspace(-1, 1, 12).reshape(3, 4)
SCALE = 2.0
MODE = "sin"
TABLE = {"scale": 2.0, "nested": [1.0, 2.0]}
COUNT = 0
settings = types.ModuleType("settings")
settings.__file__ = __file__


@dataclasses.dataclass
class Config:
    scale: float = 2.0


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
settings.config = Config()


def helper(x):
    return x * SCALE


class Model(nn.Module):
    factor = 2.0

    def __init__(self, function, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(4, 4), function
        vars(self).update(attributes)

    def forward(self, x, *others):
        return self.function(self, self.linear(x), *others).sum()


def closed_over():
    scale = 2.0

    def function(model, x):
        return x * scale

    def change(value):
        nonlocal scale
        scale = value

    return function, change


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
    "class of a module": (lambda model, x: x * model.factor, lambda value: setattr(Model, "factor", value), (2.0, 4.0)),
}


def gradient(call, model, *args):
    model.zero_grad()
    loss = call(*args)
    loss.backward()
    return loss.detach(), model.linear.weight.grad.clone()


def follows(model, change, values, *args):
    change(values[0])
    step = ackpt.compile(model, *args, policy="full")
    plans = []
    try:
        for value in (*values, values[0], values[1]):
            change(value)
            for expected, found in zip(gradient(model, model, *args), gradient(step, model, *args)):
                assert torch.equal(expected, found)
            plans.append(step.plan)
    finally:
        change(values[0])
    assert plans[0] is plans[2] and plans[1] is plans[3] and plans[0] is not plans[1]


@pytest.mark.parametrize("case", SEEN)
def test_a_changed_value_gives_another_plan_and_its_return_the_first_one(case):
    function, change, values = SEEN[case]
    follows(Model(function), change, values, X)


def test_objects_that_modules_and_calls_hold_are_followed():
    config = Config()
    follows(Model(lambda model, x: x * model.config.scale, config=config), named(config, "scale"), (2.0, 4.0), X)
    given = Hashed(scale=2.0)
    follows(Model(lambda model, x, y: x * y.scale), named(given, "scale"), (2.0, 4.0), X, given)


class Hashed(types.SimpleNamespace):
    __hash__ = object.__hash__


def counts(model, x):
    global COUNT
    COUNT += 1
    return x * COUNT


def counting():
    count = 0

    def function(model, x):
        nonlocal count
        count += 1
        return x * count

    return function, lambda: count


def counts_in_object(model, x):
    CONFIG.scale += 1
    return x * CONFIG.scale


def counts_in_dict(model, x):
    TABLE["scale"] += 1
    return x * TABLE["scale"]


COUNTING, NOW = counting()
REFUSED = {
    "global 'COUNT'": (counts, lambda: COUNT, 0),
    "'count' of function\\(\\)": (COUNTING, NOW, 0),
    "'scale' of global 'CONFIG'": (counts_in_object, lambda: CONFIG.scale, 2.0),
    "global 'TABLE'.*'scale'": (counts_in_dict, lambda: TABLE["scale"], 2.0),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_forward_that_changes_such_a_value_is_refused_and_the_value_put_back(case):
    function, value, before = REFUSED[case]
    for call in (ackpt.trace, ackpt.compile):
        with pytest.raises(TraceError, match=f"changes .*{case}.* from {before}"):
            call(Model(function), X)
        assert value() == before


def count(*_):
    global COUNT
    COUNT += 1


def hooked(model, x):
    y = x.tanh()
    y.register_hook(count)
    return y


def hooked_node(model, x):
    y = x.tanh()
    y.grad_fn.register_hook(count)
    return y


@pytest.mark.parametrize("how", ["tensor", "node", "module"])
def test_a_hook_that_counts_is_refused_and_runs_in_planned_regions_as_in_eager(how):
    def model():
        made = Model(hooked if how == "tensor" else hooked_node if how == "node" else lambda model, x: x)
        if how == "module":
            made.linear.register_full_backward_hook(count)
        return made

    global COUNT
    x = X.clone().requires_grad_()
    try:
        with pytest.raises(TraceError, match="changes global 'COUNT' .* from 0 to 1"):
            ackpt.trace(model(), x)
        assert COUNT == 0
        step = ackpt.compile(model(), x, budget="1MiB")
        assert COUNT == 0 and step.plan.policy == "regions"
        for number in range(1, 4):
            step(x).backward()
            assert COUNT == number
    finally:
        COUNT = 0


def notes(model, x):
    """What a first call notes, as models of transformers do of their labels, and what that changes."""
    if CONFIG.scale == 2.0:
        CONFIG.scale = 4.0
    return x * (CONFIG.scale if model.uses else 1)


def test_a_value_that_only_the_first_call_changes_may_change_if_the_step_stays_the_same():
    try:
        for call in (ackpt.trace, ackpt.compile):
            CONFIG.scale = 2.0
            call(Model(notes, uses=False), X)
            assert CONFIG.scale == 4.0
    finally:
        CONFIG.scale = 2.0


def first_only(model, x):
    factor = 2.0 if CONFIG.scale == 2.0 else 1.0
    CONFIG.scale = 4.0
    return x * factor


def test_a_first_call_that_computes_otherwise_is_refused_and_its_values_put_back():
    with pytest.raises(TraceError, match="'scale' of global 'CONFIG' .* from 2.0 to 4.0"):
        ackpt.compile(Model(first_only), X)
    assert CONFIG.scale == 2.0


class Holder:
    pass


HOLDER = Holder()


def first_sets_none(model, x):
    factor = 1.0 if HOLDER.scale is None else 2.0
    HOLDER.scale = None
    return x * factor


def first_deletes(model, x):
    factor = 2.0 if hasattr(HOLDER, "scale") else 1.0
    vars(HOLDER).pop("scale", None)
    return x * factor


@pytest.mark.parametrize(("forward", "value"), [(first_sets_none, "None"), (first_deletes, "no value")])
def test_a_first_call_that_sets_a_value_to_none_or_deletes_it_is_refused_and_the_value_put_back(forward, value):
    HOLDER.scale = 2.0
    with pytest.raises(TraceError, match=f"'scale' of global 'HOLDER' .*from 2.0 to {value}"):
        ackpt.compile(Model(forward), X)
    assert HOLDER.scale == 2.0


NAMES, QUEUE = set(), collections.deque()


def adds_to_set(model, x):
    factor = 1.0 if "name" in NAMES else 2.0
    NAMES.add("name")
    return x * factor


def adds_to_own_set(model, x):
    factor = 1.0 if "name" in model.names else 2.0
    model.names.add("name")
    return x * factor


def adds_to_deque(model, x):
    factor = 1.0 if QUEUE else 2.0
    QUEUE.append("name")
    return x * factor


@pytest.mark.parametrize("forward", [adds_to_set, adds_to_own_set, adds_to_deque])
def test_a_forward_that_adds_to_a_set_or_a_deque_is_refused_and_leaves_no_trace(forward):
    model = Model(forward, names=set())
    with pytest.raises(TraceError, match="changes .* from None to 'name'"):
        ackpt.compile(model, X)
    assert not NAMES and not QUEUE and not model.names


class Unprintable:
    def __repr__(self):
        raise AssertionError("planning ran code of the model's object")


def replaces_tensor(model, x):
    model.kept = None
    return x * 2.0


def replaces_tensor_in_dict(model, x):
    model.table["kept"] = None
    return x * 2.0


def replaces_unprintable(model, x):
    model.unprintable = 3.0
    return x * 2.0


@pytest.mark.parametrize("forward", [replaces_tensor, replaces_tensor_in_dict, replaces_unprintable])
def test_a_value_without_a_short_text_that_every_forward_replaces_is_as_after_the_first_call(forward):
    model = Model(forward, kept=torch.ones(2), table={"kept": torch.ones(2)}, unprintable=Unprintable())
    step = ackpt.compile(model, X, policy="full")
    assert torch.equal(step(X), model(X))
    assert None in (model.kept, model.table["kept"]) or model.unprintable == 3.0


def toggles_unprintable(model, x):
    model.unprintable = Unprintable() if model.unprintable is None else None
    return x * 2.0


def test_the_refusal_of_a_change_names_the_type_of_an_object():
    model = Model(toggles_unprintable, unprintable=Unprintable())
    with pytest.raises(TraceError, match=r"from Unprintable\(…\) to None, which a captured step would not repeat"):
        ackpt.compile(model, X, policy="full")
    assert isinstance(model.unprintable, Unprintable)


def reads_set(model, x):
    return x * (1.0 if "name" in NAMES else 2.0)


def test_an_item_that_a_set_receives_gives_another_plan():
    step = ackpt.compile(model := Model(reads_set), X, budget="1MiB")
    assert torch.equal(step(X), model(X))
    NAMES.add("name")
    try:
        assert torch.equal(step(X), model(X))
    finally:
        NAMES.clear()


def replaces_object(model, x):
    factor = 1.0 + HOLDER.state.scale
    HOLDER.state = Config(HOLDER.state.scale + 1.0)
    return x * factor


def replaces_list(model, x):
    factor = 1.0 + len(HOLDER.state)
    HOLDER.state = [*HOLDER.state, "name"]
    return x * factor


@pytest.mark.parametrize(("forward", "state"), [(replaces_object, Config()), (replaces_list, [])])
def test_a_forward_that_replaces_an_object_or_a_container_is_refused_and_leaves_no_trace(forward, state):
    HOLDER.state = state
    with pytest.raises(TraceError, match="'state' of global 'HOLDER'"):
        ackpt.compile(Model(forward), X)
    assert HOLDER.state is state


class Counted:
    count = 0


COUNTED = Counted()


def counts_in_instance(model, x):
    COUNTED.count += 1  # creates an attribute of the instance, which hides that of the class
    return x * COUNTED.count


def test_a_forward_that_hides_an_attribute_of_a_class_is_refused_and_leaves_no_trace():
    with pytest.raises(TraceError, match="'count' of global 'COUNTED' .*from no value to 1"):
        ackpt.compile(Model(counts_in_instance), X)
    assert vars(COUNTED) == {} and Counted.count == 0


def test_a_profiler_goes_on_afterwards():
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


def test_a_changed_global_recompiles_behind_dynamo():
    torch._dynamo.reset()
    model, plans = Model(SEEN["string"][0]), []
    step = torch.compile(model, backend="ackpt", options={"policy": "full", "on_plan": plans.append})
    change, values = SEEN["string"][1:]
    try:
        for value in values:
            change(value)
            for expected, found in zip(gradient(model, model, X), gradient(step, model, X)):
                assert torch.equal(expected, found)
    finally:
        change(values[0])
    assert len(plans) == 2


GENERATOR = random.Random(5)


class Draws(nn.Module):
    """Draws random numbers of its own, or seeds torch's."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.ones(4))
        self.own, self.several = random.Random(3), {"numpy": np.random.default_rng(0)}

    def forward(self, x):
        y = self.weight * x
        if self.how == "nothing":
            return y
        if self.how == "own":
            return y * self.own.random()
        if self.how == "several":
            return y * self.several["numpy"].normal()
        if self.how == "GENERATOR":
            return y * GENERATOR.random()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return y * torch.randn(4)


@pytest.mark.parametrize("how", ["own", "several", "GENERATOR", "manual_seed"])
def test_random_numbers_that_a_capture_would_repeat_are_refused_and_put_back(how):
    model, states = Draws(how), (torch.get_rng_state(), GENERATOR.getstate())
    own, numpy_state = model.own.getstate(), model.several["numpy"].bit_generator.state
    with pytest.raises(TraceError, match=how):
        ackpt.compile(model, torch.ones(4))
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == GENERATOR.getstate()
    assert own == model.own.getstate() and numpy_state == model.several["numpy"].bit_generator.state


def test_a_generator_that_is_not_drawn_from_does_not_matter():
    assert torch.equal(ackpt.compile(Draws("nothing"), torch.ones(4))(torch.ones(4)), torch.ones(4))


class ByName(nn.Module):
    """Reads an attribute by `getattr`, and calls a function that it holds."""

    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), torch.tanh

    def forward(self, x):
        return self.act(self.linear(x)) * getattr(options, "factor")  # noqa: B009


@dataclasses.dataclass
class Options:
    factor: float = 2.0


options = Options()


def test_getattr_and_a_function_that_is_replaced_are_seen(monkeypatch):
    model = ByName()
    step = ackpt.compile(model, X, policy="none")
    monkeypatch.setattr(options, "factor", 5.0)
    assert torch.equal(step(X), model(X))
    model.act = torch.relu
    assert torch.equal(step(X), model(X))


collections = 0


def count_collections(phase, info):
    global collections
    collections += 1


def test_what_the_garbage_collector_calls_is_not_the_models_code():
    class Collects(nn.Linear):
        def forward(self, x):
            gc.collect()
            return super().forward(x)

    gc.callbacks.append(count_collections)
    try:
        step = ackpt.compile(Collects(4, 4), X)
    finally:
        gc.callbacks.remove(count_collections)
    assert collections > 0 and step(X).shape == X.shape


def test_what_computes_sizes_is_not_the_models_code():
    # torch evaluates symbolic sizes by these during a forward; sympy stores hashes in its objects as it goes.
    assert not is_of_model(sympy.functions.elementary.complexes.__file__)
    assert not is_of_model(mpmath.__file__)
    assert is_of_model(__file__)


def test_a_variable_that_a_frozen_function_closes_over_is_seen():
    scale = 2.0

    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * scale

    gc.freeze()  # hides the function from gc.get_referrers
    model = Scaled(4, 4)
    step = ackpt.compile(model, X, policy="none")
    for value in (2.0, 3.0, 2.0):
        scale = value
        assert torch.equal(step(X), model(X))
    assert [event.kind for event in step.history] == ["capture"] * 2
    assert gc.get_freeze_count() > 0


def test_variables_of_all_functions_with_the_same_code_are_seen():
    pairs = [closed_over(), closed_over()]
    gc.freeze()
    functions, changes = zip(*pairs, closed_over())  # the last one is not frozen

    def summed(model, x):
        return sum(function(model, x) for function in functions)

    model = Model(summed)
    step = ackpt.compile(model, X, policy="none")
    for change in changes:
        change(3.0)
        assert torch.equal(step(X), model(X))
    assert [event.kind for event in step.history] == ["capture"] * 4


@pytest.mark.parametrize("is_suspended", [False, True])
def test_a_variable_that_a_generator_closes_over_is_seen(is_suspended):
    scale = 2.0

    def scales():
        yield scale
        yield 1.0

    def scaled(model, x):
        generator = scales()
        x = x * next(generator)
        return x if is_suspended else x * next(generator) + sum(generator)

    model = Model(scaled)
    step = ackpt.compile(model, X, policy="none")
    for value in (2.0, 3.0):
        scale = value
        assert torch.equal(step(X), model(X))
    assert [event.kind for event in step.history] == ["capture"] * 2


def test_no_tensor_of_a_call_is_kept_by_the_functions_that_ran():
    class Doubled(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return sum([y * factor for factor in (1, 2)]) + (lambda: y)()

    model, x = Doubled(4, 4), X.clone()
    step = ackpt.compile(model, x)
    reference = weakref.ref(x)
    del x
    assert reference() is None and step(X).shape == X.shape


class Seeds(nn.Module):
    """Seeds a generator itself, so that every call leaves it in the same state."""

    def __init__(self, how):
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 4)
        self.own, self.generator = random.Random(0), torch.Generator().manual_seed(0)  # noqa: S311

    def forward(self, x):
        if self.how == "random":
            random.seed(0)
            factor = random.random()
        elif self.how == "numpy":
            np.random.seed(0)  # noqa: NPY002
            factor = float(np.random.rand())  # noqa: NPY002
        elif self.how == "own":
            self.own.seed(0)
            factor = self.own.random()
        elif self.how == "generator":
            factor = torch.rand(4, generator=self.generator.manual_seed(0))
        else:
            with torch.random.fork_rng():
                factor = torch.rand(4)
        return (self.linear(x) * factor).sum()


@pytest.mark.parametrize("how", ["random", "numpy", "own", "generator", "set_rng_state"])
def test_a_forward_that_seeds_itself_is_refused_also_right_after_a_call(how):
    model, x = Seeds(how), torch.ones(2, 4)
    model(x)
    states = random.getstate(), np.random.get_state()[1].tobytes(), model.own.getstate()  # noqa: NPY002
    of_torch = torch.get_rng_state(), model.generator.get_state()
    with pytest.raises(TraceError, match=f"{how}.*regions=True"):
        ackpt.compile(model, x, policy="full")
    assert states == (random.getstate(), np.random.get_state()[1].tobytes(), model.own.getstate())  # noqa: NPY002
    assert all(map(torch.equal, of_torch, (torch.get_rng_state(), model.generator.get_state())))


class OwnGenerator(nn.Module):
    def __init__(self, is_new: bool):
        super().__init__()
        self.linear, self.is_new, self.generator = nn.Linear(4, 4), is_new, torch.Generator()

    def forward(self, x):
        generator = torch.Generator().manual_seed(3) if self.is_new else self.generator
        return (self.linear(x) * torch.rand(4, generator=generator)).sum()


def test_a_generator_that_the_forward_creates_is_refused():
    with pytest.raises(TraceError, match=r"torch\.Generator that it creates.*regions=True"):
        ackpt.compile(OwnGenerator(is_new=True), X, policy="full")


def test_a_generator_of_the_model_draws_on():
    model, expected = OwnGenerator(is_new=False), OwnGenerator(is_new=False)
    expected.load_state_dict(model.state_dict())
    step = ackpt.compile(model, X, policy="full")
    assert all(torch.equal(step(X), expected(X)) for _ in range(3))


class OtherDefaults(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        torch.set_default_dtype(torch.float64)
        try:
            factor = torch.linspace(0, 1, 4).exp().float()
        finally:
            torch.set_default_dtype(torch.float32)
        return (self.linear(x) * factor).tanh().sum()


@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_default_dtype_that_the_forward_sets_is_planned(policy):
    model = OtherDefaults()
    step = ackpt.compile(model, X, policy=policy)
    assert torch.equal(step(X), model(X))


class LeavesDefault(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x):
        if self.kind == "dtype":
            torch.set_default_dtype(torch.float64)
        else:
            torch.set_default_device("meta")
        return self.layer(x).sum()


@pytest.mark.parametrize("kind", ["dtype", "device"])
def test_a_default_that_the_forward_leaves_set_is_refused_without_a_trace(kind):
    before = torch.get_default_dtype(), torch.get_default_device()
    with pytest.raises(ackpt.TraceError, match=f"changes torch's default {kind} and does not restore it.*regions=True"):
        ackpt.compile(LeavesDefault(kind), X, policy="full")
    assert (torch.get_default_dtype(), torch.get_default_device()) == before


def test_another_default_dtype_is_another_call():
    class Ones(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum() * torch.full((), 1 / 3).double().sum()

    model = Ones(4, 4)
    step = ackpt.compile(model, X, policy="none")
    assert torch.equal(step(X), model(X))
    try:
        torch.set_default_dtype(torch.float64)
        assert torch.equal(step(X), model(X)) and step.history[-1].cause == "torch.get_default_dtype() changed"
    finally:
        torch.set_default_dtype(torch.float32)


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
    "torch.backends.cudnn.benchmark": (
        *(False, True),
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
        lambda: torch.backends.cudnn.benchmark,
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_torch_that_the_forward_reads_is_compared(name):
    was, value, put, read = SETTINGS[name]

    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum() * (2 if read() == value else 1)

    model = Reads(4, 4)
    step = ackpt.compile(model, X, policy="none")
    assert torch.equal(step(X), model(X))
    try:
        put(value)
        assert torch.equal(step(X), model(X)) and step.history[-1].cause == f"{name} changed"
    finally:
        put(was)


def test_an_object_of_a_class_that_make_dataclass_made_is_compared():
    class Scales(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum() * self.config.scale

    model = Scales(4, 4)
    model.config = dataclasses.make_dataclass("Config", [("scale", float, 2.0)])()
    step = ackpt.compile(model, X, policy="none")
    model.config.scale = 5.0
    assert torch.equal(step(X), model(X))
