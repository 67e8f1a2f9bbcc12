"""What the model's code stores during a capture is real afterwards, or it is gone: caches, attributes, logs."""

import contextvars
import functools
import gc
import types
import weakref
from types import SimpleNamespace

import pytest
import torch
from caches import Attends, in_closure, in_default, in_dict, in_function_of, in_list, mask
from conftest import left_by, model_of, raises
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensor

import ackpt
from ackpt.graph import TraceError

GLOBAL: dict = {}
NAME = None


def in_tuple(model, x):
    length = x.shape[1]
    if length not in model.known:
        pair = types.SimpleNamespace(both=(mask(length), x.new_ones(length)))
        model.known[length] = pair
    return model.known[length].both[0] * model.known[length].both[1]


def in_global(model, x):
    global NAME
    if NAME is None or NAME.shape[0] < x.shape[1]:
        NAME = mask(x.shape[1])
    return NAME[: x.shape[1], : x.shape[1]]


def in_attribute(model, x):
    if model.attribute is None or model.attribute.shape[0] < x.shape[1]:
        model.attribute = mask(x.shape[1]) * model.slope
    return model.attribute[: x.shape[1], : x.shape[1]]


def in_new_attribute(model, x):
    if getattr(model, "length", 0) < x.shape[1]:
        model.length, model.table = x.shape[1], torch.zeros(x.shape[1], 8)
        model.table[:, ::2] = torch.arange(x.shape[1])[:, None].sin()
    return (model.table @ model.table.T)[: x.shape[1], : x.shape[1]]


def in_class(model, x):
    if not hasattr(Attends, "of_class"):
        Attends.of_class = mask(16)
    return Attends.of_class[: x.shape[1], : x.shape[1]]


def weakly():
    known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
    return in_dict(lambda model: known.setdefault(model.linear, {}))


TABLES: contextvars.ContextVar = contextvars.ContextVar("TABLES")


def in_context_dict():
    TABLES.set({})
    return in_dict(lambda model: TABLES.get())


CACHES = {
    "functools.cache": lambda: in_function_of(None),
    "functools.lru_cache": lambda: in_function_of(2),
    "global dict": lambda: in_dict(lambda model: GLOBAL),
    "dict of the model": lambda: in_dict(lambda model: model.known),
    "new object": lambda: in_tuple,
    "global": lambda: in_global,
    "attribute": lambda: in_attribute,
    "new attribute": lambda: in_new_attribute,
    "class": lambda: in_class,
    "closure": in_closure,
    "list": lambda: in_list([]),
    "default argument": lambda: in_default,
    "weak dict": weakly,
    "dict of a context variable": in_context_dict,
}


# Those whose second length is captured with symbols: once for each way to find a cache.
WITH_SYMBOLS = "functools.lru_cache", "dict of the model", "attribute", "closure", "list", "weak dict"
# No name in the code finds them.
UNNAMED = "new attribute", "class", "default argument", "weak dict", "dict of a context variable"


def without_data() -> int:
    """The number of a capture's tensors that anything holds."""
    gc.collect()
    return sum(type(each) is FunctionalTensor for each in gc.get_objects())


@pytest.fixture(autouse=True)
def empty_caches():
    global NAME
    GLOBAL.clear()
    NAME = None
    in_default.__defaults__[0].clear()
    if hasattr(Attends, "of_class"):
        del Attends.of_class


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_the_first_call_fills_gets_real_tensors(name):
    before, model = without_data(), Attends(CACHES[name]())
    batches = [torch.randn(2, length, 8) for length in (6, 5, 6)]
    dynamic = None if name in WITH_SYMBOLS else False
    ackpt.apply_budget(model, batches[0], policy="full", dynamic=dynamic)
    found = [left_by(model, model, x) for x in batches]
    with torch.no_grad():
        model(torch.randn(2, 4, 8))
    found.append(left_by(model, model, batches[0]))
    ackpt.remove_budget(model)
    expected = [left_by(model, model, x) for x in (*batches, batches[0])]
    assert all(torch.equal(a, b) for one, other in zip(found, expected) for a, b in zip(one, other))
    assert without_data() == before


@pytest.mark.parametrize("name", ["functools.cache", "functools.lru_cache", "global dict", "new object", *UNNAMED])
def test_a_refused_capture_leaves_caches_empty(name):
    mask_of = CACHES[name]()

    def looks(model, x):
        mask = mask_of(model, x)
        return mask * 2 if x.sum() > 1e9 else mask

    before, model, x = without_data(), Attends(looks), torch.randn(2, 6, 8)
    raises(TraceError, "looks at the values of a tensor", lambda: ackpt.trace(model, x))
    assert without_data() == before and not GLOBAL and NAME is None and not hasattr(Attends, "of_class")
    assert model.attribute is None and not model.known and not hasattr(model, "table")
    assert torch.isfinite(model(x))


def test_earlier_results_of_lru_cache_are_kept():
    cached = functools.lru_cache(maxsize=4)(mask)
    four, model = cached(4), Attends(lambda model, x: cached(x.shape[1]))
    x = torch.randn(2, 6, 8)
    step = ackpt.compile(model, x, policy="none")
    assert cached(4) is four and torch.equal(cached(6), mask(6))
    assert cached.cache_info().currsize == 2 and torch.equal(step(x), model(x))


LOG: list = []


def logs(model, x):
    LOG.append(model.linear(x).detach())
    return 0.0


DEEP: dict = {"a": {"b": {"c": {"d": []}}}}


def logs_deep(model, x):
    DEEP["a"]["b"]["c"]["d"].append(model.linear(x).detach())
    return 0.0


def changes_every_time(model, x):
    model.attribute = torch.zeros(()) if model.attribute is None else model.attribute + 1
    return model.attribute


def counts_in_place(model, x):
    if model.attribute is None:
        model.attribute = torch.zeros(())
    model.attribute += 1
    return model.attribute


def draws_once(model, x):
    if model.attribute is None:
        model.attribute = torch.rand(())
    return model.attribute


def uses_only_once(model, x):
    if "mask" in model.known:
        return model.known["mask"]
    model.known["mask"] = mask(x.shape[1])
    return model.known["mask"] * x.mean()


REFUSED = {
    "log": (logs, "stores a tensor in global 'LOG' of test_kept_tensors"),
    "deep log": (logs_deep, r"stores a tensor that it computes at .*test_kept_tensors.py:\d+"),
    "input": (lambda model, x: model.known.update(x=x) or 0.0, "stores a tensor in attribute 'known'"),
    "accumulates": (changes_every_time, "stores a tensor in attribute 'attribute'"),
    "in place": (counts_in_place, "stores a tensor in attribute 'attribute'"),
    "random": (draws_once, "stores a tensor in attribute 'attribute'"),
    "other path": (uses_only_once, "stores a tensor in attribute 'known'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_kept_tensors_that_are_not_constants_are_refused_and_removed(case):
    mask_of, message = REFUSED[case]
    before, model, x = without_data(), Attends(mask_of), torch.randn(2, 6, 8)
    LOG.clear()
    DEEP["a"]["b"]["c"]["d"].clear()
    raises(TraceError, f"{message}.*regions=True", lambda: ackpt.trace(model, x))
    assert without_data() == before and model.attribute is None and not model.known
    assert not LOG and not DEEP["a"]["b"]["c"]["d"]
    assert torch.isfinite(model(x))


@pytest.mark.parametrize("value", [lambda x: x, lambda x: (1, [x]), lambda x: lambda: x], ids=["x", "list", "closure"])
def test_an_argument_that_is_stored_in_an_object_is_refused(value):
    target = SimpleNamespace()

    def stores(model, x):
        target.value = value(x)
        return 0.0

    with pytest.raises(TraceError, match=r"stores an argument, a tensor of shape \[2, 6, 8\].*regions=True"):
        ackpt.trace(Attends(stores), torch.randn(2, 6, 8))


def test_an_argument_that_a_caught_error_holds_is_not_stored():
    def catches(model, x):
        try:
            raise ValueError(x)
        except ValueError as error:
            caught = error  # the frame and the error refer to each other
        return caught.args[0].mean()

    x = torch.randn(2, 6, 8)
    assert ackpt.trace(Attends(catches), x).nodes


def test_models_without_data_leave_caches_empty():
    model = Attends(in_dict(lambda model: GLOBAL)).to("meta")
    assert ackpt.trace(model, torch.empty(2, 6, 8, device="meta")).nodes
    assert not GLOBAL and not model.known


class Holds:
    def __init__(self, value):
        self.value = value


DEFAULT, DEEP_OBJECT = torch.ones(4), Holds(Holds(Holds(torch.ones(4))))
MANY = {number: torch.ones(4) for number in range(200)}
OBJECTS = [Holds({"x": torch.ones(4)})]


class Weighted(nn.Module):
    weights = torch.ones(4)

    def __init__(self, how):
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 4)

    def forward(self, x, default=DEFAULT):
        weights = {
            "class": lambda: self.weights,
            "deep object": lambda: DEEP_OBJECT.value.value.value,
            "large dict": lambda: MANY[150],
            "object in a list": lambda: OBJECTS[0].value["x"],
            "default argument": lambda: default,
        }[self.how]()
        return (self.linear(x) * weights).sum()


TOTAL = Holds(torch.zeros(()))


def test_a_running_sum_in_place_is_part_of_the_step():
    def forward(self, x):
        loss = self.linear(x).square().mean()
        TOTAL.value += loss.detach()
        return loss

    total, model, x = TOTAL.value, model_of(forward, linear=nn.Linear(4, 4)), torch.randn(3, 4)
    step = ackpt.compile(model, x, policy="none")
    assert TOTAL.value is total and total == 0
    loss = step(x).detach()
    step(x)
    assert TOTAL.value is total and torch.equal(total, loss + loss)


REBINDS = {
    "class": lambda value: setattr(Weighted, "weights", value),
    "deep object": lambda value: setattr(DEEP_OBJECT.value.value, "value", value),
    "large dict": lambda value: MANY.update({150: value}),
    "object in a list": lambda value: OBJECTS[0].value.update(x=value),
    "default argument": lambda value: setattr(Weighted.forward, "__defaults__", (value,)),
}


@pytest.mark.parametrize("how", REBINDS)
def test_a_replaced_tensor_is_read_at_the_next_call(how):
    model, x = Weighted(how), torch.randn(3, 4)
    step = ackpt.compile(model, x, policy="none")
    assert torch.equal(step(x), model(x))
    try:
        REBINDS[how](torch.arange(4.0))
        assert torch.equal(step(x), (model.linear(x) * torch.arange(4.0)).sum()) and len(step.history) == 2
    finally:
        REBINDS[how](torch.ones(4))


NESTED = [[[types.SimpleNamespace()]]]


class Sees(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        ctx.model.see(ctx.model, gradient)
        return gradient.cos(), None


SEE = {
    "attribute": (lambda model, gradient: setattr(model, "last", gradient.detach()), "attribute 'last' of the model"),
    "buffer": (lambda model, gradient: setattr(model, "norm", gradient.norm()), "buffer 'norm' of the model"),
    "gradient": (lambda model, gradient: setattr(NESTED[0][0][0], "last", gradient), "in a backward or a hook of it"),
    "count": (lambda model, gradient: setattr(model, "n", getattr(model, "n", 0) + 1), "attribute 'n' of the model"),
}


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("case", SEE)
def test_a_backward_that_stores_something_is_refused_and_leaves_nothing(case, hooks):
    def forward(self, x):
        y = self.linear(x)
        if self.hooks:
            y.register_hook(lambda gradient: self.see(self, gradient))
            return y.sin().sum()
        return Sees.apply(y, self).sum()

    see, named = SEE[case]
    model = model_of(forward, see=see, hooks=hooks, linear=nn.Linear(4, 4), norm=nn.Buffer(torch.zeros(())))
    before, norm = [*vars(model)], model.norm
    raises(TraceError, f"{named}.*regions=True", lambda: ackpt.graph.trace(model, torch.ones(3, 4)))
    assert [*vars(model)] == before and model.norm is norm and vars(NESTED[0][0][0]) == {}
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is FunctionalTensor]


VARIABLE: contextvars.ContextVar = contextvars.ContextVar("VARIABLE", default=None)
WEAK: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def in_context_variable(model, x):
    if VARIABLE.get() is None:
        VARIABLE.set(mask(x.shape[1]))
    return VARIABLE.get()


def in_weak_values(model, x):
    if (found := WEAK.get(x.shape[1])) is None:
        LOG.append(found := mask(x.shape[1]))
        WEAK[x.shape[1]] = found
    return found


@pytest.mark.parametrize("mask_of", [in_context_variable, in_weak_values])
def test_a_cache_that_cannot_get_data_is_refused_and_left_empty(mask_of):
    LOG.clear()
    before, model, x = without_data(), Attends(mask_of), torch.randn(2, 6, 8)
    with pytest.raises(TraceError, match="the context variable 'VARIABLE'|stores a tensor in global 'LOG'") as error:
        ackpt.compile(model, x, policy="none")
    assert VARIABLE.get() is None and not WEAK and without_data() == before  # while the error exists
    assert "regions=True" in str(error.value)
    step = ackpt.apply_budget(model, x, budget="1MiB")
    assert type(step.plan).__name__ == "RegionsPlan" and VARIABLE.get() is None and not WEAK
    found = model(x)
    ackpt.remove_budget(model)
    assert torch.equal(found, model(x))
    VARIABLE.set(None)
