"""What a forward changes outside of its modules, seeds or draws is put back, and planned as it runs or refused."""

import collections
import random

import numpy as np
import pytest
import torch
from conftest import model_of, raises
from reading_models import Config, Model, X
from torch import nn

import ackpt
from ackpt.graph import TraceError

COUNT, CONFIG, TABLE = 0, Config(), {"scale": 2.0}


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


class Holder:
    count = 0


COUNTED, HOLDER = Holder(), Holder()
NAMES, QUEUE = set(), collections.deque()
COUNTING, NOW = counting()


def first_only(model, x):
    factor = 2.0 if CONFIG.scale == 2.0 else 1.0
    CONFIG.scale = 4.0
    return x * factor


def first_sets_none(model, x):
    factor = 1.0 if HOLDER.scale is None else 2.0
    HOLDER.scale = None
    return x * factor


def first_deletes(model, x):
    factor = 2.0 if hasattr(HOLDER, "scale") else 1.0
    vars(HOLDER).pop("scale", None)
    return x * factor


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


def replaces_object(model, x):
    factor = 1.0 + HOLDER.config.scale
    HOLDER.config = Config(HOLDER.config.scale + 1.0)
    return x * factor


def replaces_list(model, x):
    factor = 1.0 + len(HOLDER.items)
    HOLDER.items = [*HOLDER.items, "name"]
    return x * factor


def counts_in_instance(model, x):
    COUNTED.count += 1  # creates an attribute of the instance, which hides that of the class
    return x * COUNTED.count


ADDS = "changes .* from no value to 'name'"
REFUSED = {  # the forward, what it changes, what the error says of it
    "global": (counts, lambda model: COUNT, "changes .*global 'COUNT'.* from 0"),
    "closure": (COUNTING, lambda model: NOW(), r"changes .*'count' of function\(\).* from 0"),
    "object": (counts_in_object, lambda model: CONFIG.scale, "changes .*'scale' of global 'CONFIG'.* from 2.0"),
    "dict": (counts_in_dict, lambda model: TABLE["scale"], "changes .*global 'TABLE'.*'scale'.* from 2.0"),
    "first call": (first_only, lambda model: CONFIG.scale, "'scale' of global 'CONFIG' .* from 2.0 to 4.0"),
    "to None": (first_sets_none, lambda model: HOLDER.scale, "'scale' of global 'HOLDER' .*from 2.0 to None"),
    "deletes": (first_deletes, lambda model: HOLDER.scale, "'scale' of global 'HOLDER' .*from 2.0 to no value"),
    "set": (adds_to_set, lambda model: [*NAMES], ADDS),
    "own set": (adds_to_own_set, lambda model: [*model.names], ADDS),
    "deque": (adds_to_deque, lambda model: [*QUEUE], ADDS),
    "another object": (replaces_object, lambda model: id(HOLDER.config), "'config' of global 'HOLDER'"),
    "another list": (replaces_list, lambda model: id(HOLDER.items), "'items' of global 'HOLDER'"),
    "hidden attribute of a class": (
        counts_in_instance,
        lambda model: (vars(COUNTED) | {}, Holder.count),
        "'count' of global 'COUNTED' .*from no value to 1",
    ),
}


@pytest.mark.parametrize("call", [ackpt.trace, ackpt.compile])
@pytest.mark.parametrize("case", REFUSED)
def test_a_forward_that_changes_what_it_reads_is_refused_and_leaves_no_trace(case, call):
    forward, read, said = REFUSED[case]
    model = Model(forward, names=set())
    HOLDER.scale, HOLDER.config, HOLDER.items = 2.0, Config(), []
    before = read(model)
    raises(TraceError, said, lambda: call(model, X))
    assert read(model) == before


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
        raises(TraceError, "changes global 'COUNT' .* from 0 to 1", lambda: ackpt.trace(model(), x))
        assert COUNT == 0
        step = ackpt.compile(model(), x, budget="1MiB")
        assert COUNT == 0 and step.plan.policy == "regions"
        for number in range(1, 4):
            step(x).backward()
            assert COUNT == number
    finally:
        COUNT = 0


class Counting:
    def __init__(self):
        self.count = 0

    def __call__(self, module, args, output):
        self.count += 1
        return output * self.count


def counting_in_a_list():
    counts = [0]

    def hook(module, args, output):
        counts[0] += 1
        return output * counts[0]

    return hook


HOOKS = {"object": Counting, "method": lambda: Counting().__call__, "list": counting_in_a_list}


@pytest.mark.parametrize("how", HOOKS)
def test_the_state_of_a_submodules_hook_changes_as_in_eager(how):
    model, own = (Model(lambda model, x: x) for _ in range(2))
    own.load_state_dict(model.state_dict())
    for each in (model, own):
        each.linear.register_forward_hook(HOOKS[how]())
    raises(TraceError, "changes .*count.* from 0 to 1", lambda: ackpt.trace(model, X))
    step = ackpt.compile(model, X, budget="1MiB")
    assert all(torch.equal(step(X), own(X)) for _ in range(3))


def notes(model, x):
    """What a first call notes, as models of transformers do of their labels, and what that changes."""
    if CONFIG.scale == 2.0:
        CONFIG.scale = 4.0
    return x * (CONFIG.scale if model.uses else 1)


def test_a_value_changed_by_the_first_call_alone_is_kept_if_the_step_stays_the_same():
    try:
        for call in (ackpt.trace, ackpt.compile):
            CONFIG.scale = 2.0
            call(Model(notes, uses=False), X)
            assert CONFIG.scale == 4.0
    finally:
        CONFIG.scale = 2.0


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
def test_a_value_replaced_by_every_forward_is_as_after_the_first_call(forward):
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


# A forward that seeds, draws from generators of its own or sets torch's defaults is planned as it runs, or refused.


GENERATOR = random.Random(5)


def forked(model):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return torch.randn(4)


def restored(model):
    with torch.random.fork_rng():
        return torch.rand(4)


def seeded_own(model):
    model.own.seed(0)
    return model.own.random()


def seeded_python(model):
    random.seed(0)
    return random.random()


def seeded_numpy(model):
    np.random.seed(0)  # noqa: NPY002
    return float(np.random.rand())  # noqa: NPY002


# A forward that draws from a generator, or seeds one itself, so that every call leaves it in the same state.
DRAWS = {
    "own": lambda model: model.own.random(),
    "several": lambda model: model.several["numpy"].normal(),
    "GENERATOR": lambda model: GENERATOR.random(),
    "manual_seed": forked,
    "seeded own": seeded_own,
    "seeded random": seeded_python,
    "seeded numpy": seeded_numpy,
    "seeded generator": lambda model: torch.rand(4, generator=model.generator.manual_seed(0)),
    "set_rng_state": restored,
}


def drawing(factor):
    return model_of(
        lambda self, x: (self.linear(x) * self.factor(self)).sum(),
        linear=nn.Linear(4, 4),
        factor=factor,
        own=random.Random(3),  # noqa: S311
        several={"numpy": np.random.default_rng(0)},
        generator=torch.Generator().manual_seed(0),
    )


def states(model):
    """The states of all generators, comparable by ``==``."""
    of_torch = torch.get_rng_state().tolist(), model.generator.get_state().tolist()
    of_numpy = np.random.get_state()[1].tobytes(), model.several["numpy"].bit_generator.state  # noqa: NPY002
    return *of_torch, *of_numpy, random.getstate(), GENERATOR.getstate(), model.own.getstate()


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("how", DRAWS)
def test_a_forward_that_seeds_or_draws_itself_is_refused_and_generators_are_put_back(how, is_called):
    model, x = drawing(DRAWS[how]), torch.ones(2, 4)
    if is_called:
        model(x)
    before = states(model)
    raises(TraceError, f"{how.split()[-1]}.*regions=True", lambda: ackpt.compile(model, x, policy="full"))
    assert states(model) == before


def test_an_unused_generator_is_allowed():
    model = drawing(lambda model: 1.0)
    assert torch.equal(ackpt.compile(model, X)(X), model(X))


def own_generator(is_new: bool):
    def forward(self, x):
        generator = torch.Generator().manual_seed(3) if self.is_new else self.generator
        return (self.linear(x) * torch.rand(4, generator=generator)).sum()

    return model_of(forward, linear=nn.Linear(4, 4), is_new=is_new, generator=torch.Generator())


def test_a_generator_that_the_forward_creates_is_refused():
    with pytest.raises(TraceError, match=r"torch\.Generator that it creates.*regions=True"):
        ackpt.compile(own_generator(is_new=True), X, policy="full")


def test_a_generator_of_the_model_continues_from_step_to_step():
    model, expected = own_generator(is_new=False), own_generator(is_new=False)
    expected.load_state_dict(model.state_dict())
    step = ackpt.compile(model, X, policy="full")
    assert all(torch.equal(step(X), expected(X)) for _ in range(3))


@pytest.mark.parametrize("kind", ["dtype", "device"])
def test_a_default_that_the_forward_leaves_set_is_refused_without_a_trace(kind):
    def forward(self, x):
        if self.kind == "dtype":
            torch.set_default_dtype(torch.float64)
        else:
            torch.set_default_device("meta")
        return self.layer(x).sum()

    before = torch.get_default_dtype(), torch.get_default_device()
    with pytest.raises(ackpt.TraceError, match=f"changes torch's default {kind} and does not restore it.*regions=True"):
        ackpt.compile(model_of(forward, layer=nn.Linear(4, 4), kind=kind), X, policy="full")
    assert (torch.get_default_dtype(), torch.get_default_device()) == before
