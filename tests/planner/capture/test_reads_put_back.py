"""A forward that changes what its code reads is refused, and every value is put back."""

import collections

import pytest
import torch
from conftest import raises
from reading_models import Config, Model, X

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
