"""What stands in for a module's forward is reached by every call of it, and by nothing else."""

import copy
import functools
import gc
import inspect
import pickle
import types

import pytest
import torch
from conftest import model_of
from torch import nn

import ackpt
from ackpt.checkpointing import standing_in
from ackpt.checkpointing.reachable import IN_PLACE, TRAVELING
from ackpt.checkpointing.standing_in import StandIn


class Doubles(nn.Module):
    def forward(self, x, scale=2.0):
        """Twice the argument."""
        return scale * x


class Inherits(Doubles):
    pass


class CallsParent(Doubles):
    def forward(self, x, scale=2.0):
        return super().forward(x, scale)


class OwnCall(Doubles):
    def __call__(self, x):
        return self.forward(x)


def replaced(wrap):
    """A module whose instance has a forward that calls its class's, as hook libraries make it."""

    def make():
        module = Doubles()
        module.forward = wrap(module, module.forward)
        return module

    return make


def as_method(module, own):
    @functools.wraps(own)
    def forward(self, *args, **kwargs):
        return own(*args, **kwargs)

    return types.MethodType(forward, module)


def as_partial(module, own):
    return functools.update_wrapper(functools.partial(lambda owner, *args, **kwargs: own(*args, **kwargs), module), own)


MAKE = {
    **{kind.__name__: kind for kind in (Doubles, Inherits, CallsParent, OwnCall)},
    **{wrap.__name__: replaced(wrap) for wrap in (as_method, as_partial)},
}
CALLS = {
    "call": lambda module, x: module(x),
    "forward": lambda module, x: module.forward(x),
    "kept": lambda module, x: copy.copy(module.forward)(x),
    "class": lambda module, x: (module.forward if "forward" in vars(module) else type(module).forward.__get__(module))(
        x
    ),
}
X = torch.ones(2)


def adds_one(module, forward, args, kwargs):
    return forward(*args, **kwargs) + 1


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_of_this_module_and_no_other_is_reached(name, call):
    module, other = MAKE[name](), MAKE[name]()
    standing_in.put_in_place(module, adds_one)
    assert call(module, X).tolist() == [3, 3] and call(other, X).tolist() == [2, 2]
    assert standing_in.call_own(module, X).tolist() == [2, 2]
    assert call(CallsParent(), X).tolist() == [2, 2]
    standing_in.remove_from(module)
    assert call(module, X).tolist() == [2, 2]
    assert isinstance(vars(Doubles)["forward"], types.FunctionType) and "forward" not in vars(Inherits)


@pytest.mark.parametrize("wrap", [as_method, as_partial])
def test_a_forward_that_is_replaced_later_is_reached_once(wrap):
    module = Doubles()
    standing_in.put_in_place(module, adds_one)
    for _ in range(3):
        own = module.forward
        module.forward = wrap(module, own)
        assert module(X).tolist() == [3, 3]
        module.forward = own
    assert module(X).tolist() == [3, 3]
    del module.forward
    standing_in.remove_from(module)
    assert module(X).tolist() == own(X).tolist() == [2, 2]


@pytest.mark.parametrize("name", ["Doubles", "Inherits", "CallsParent"])
def test_a_forward_that_is_assigned_to_the_class_is_reached(name):
    kind = type(name, (MAKE[name],), {})  # a class of this test's own
    module, other, own = kind(), kind(), kind.forward
    standing_in.put_in_place(module, adds_one)
    kept = kind.forward
    kind.forward = lambda self, x: 10 * kept(self, x)
    assert (module(X).tolist(), kind.forward(module, X).tolist(), other(X).tolist()) == ([21, 21], [21, 21], [20, 20])
    kind.forward = kept
    assert module(X).tolist() == [3, 3]
    del kind.forward
    assert module(X).tolist() == [3, 3]
    standing_in.remove_from(module)
    assert module(X).tolist() == [2, 2] and kind.forward is own


def test_super_and_a_base_class_reach_the_stand_in_of_a_class_that_inherits():
    class Task(Inherits):
        def training_step(self, x):
            return super().forward(x)

    module, overrides = Task(), CallsParent()
    for each in (module, overrides):
        standing_in.put_in_place(each, adds_one)
    assert module.training_step(X).tolist() == Doubles.forward(module, X).tolist() == [3, 3]
    assert overrides(X).tolist() == [3, 3] and Doubles.forward(overrides, X).tolist() == [2, 2]
    assert Task().training_step(X).tolist() == [2, 2]
    own = vars(Doubles)["forward"].own
    Doubles.forward.__defaults__ = (4.0,)  # pyright: ignore[reportFunctionMemberAccess]
    assert (module(X).tolist(), Doubles()(X).tolist(), own.__defaults__) == ([5, 5], [4, 4], (4.0,))
    Doubles.forward.__defaults__ = (2.0,)  # pyright: ignore[reportFunctionMemberAccess]
    for each in (module, overrides):
        standing_in.remove_from(each)
    assert vars(Doubles)["forward"] is own and own.__defaults__ == (2.0,)


class CallsOther(Doubles):
    def __call__(self, x):
        return self.compute(x)

    def compute(self, x):
        return 2 * x


class CallsByName(CallsOther):
    def compute(self, x):
        return getattr(self, "forward")(x)  # noqa: B009


class CallsByClosure(CallsOther):
    compute = (lambda double: lambda self, x: double(x))(lambda x: 2 * x)


@pytest.mark.parametrize("kind", [OwnCall, CallsByName, CallsByClosure, Doubles])
def test_a_call_without_forward_is_refused(kind):
    standing_in.require_call_of_forward(kind(), "the model")
    for refuse in (
        ackpt.compile,
        ackpt.trace,
        lambda model, x: ackpt.apply_activation_checkpointing(model, CallsOther),
    ):
        with pytest.raises(TypeError, match=r"the model \(CallsOther\) has a __call__ that does not call forward"):
            refuse(CallsOther(), X)


@pytest.mark.parametrize("name", MAKE)
def test_names_and_signatures_are_the_modules_own(name):
    module = MAKE[name]()
    own = module.forward
    standing_in.put_in_place(module, adds_one)
    forward = module.forward
    assert inspect.signature(forward) == inspect.signature(own)
    assert [getattr(forward, each) for each in ("__name__", "__doc__")] == [own.__name__, own.__doc__]
    assert getattr(forward, "__self__", None) is (None if name == "as_partial" else module)
    assert isinstance(type(module).forward, types.FunctionType)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "replica": lambda module: module._replicate_for_data_parallel(),
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize(("name", "expected"), [(IN_PLACE, 2), (TRAVELING, 3)])
def test_copies_have_only_what_travels(duplicate, name, expected):
    module = Doubles()
    vars(module)[name] = StandIn(Doubles, adds_one, module if name == IN_PLACE else None)
    duplicated = duplicate(module)
    del module
    gc.collect()
    assert duplicated(X).tolist() == [expected] * 2
    del duplicated
    gc.collect()
    assert isinstance(vars(Doubles)["forward"], types.FunctionType)


def test_a_module_that_calls_itself_is_reached_once():
    module = model_of(lambda self, x: [self.forward(each) for each in x] if isinstance(x, list) else 2 * x)
    standing_in.put_in_place(module, lambda module, forward, args, kwargs: [*forward(*args), "run"])
    assert module([1, [2]]) == [2, [4], "run"]


def test_modules_of_a_shared_class_compile_as_one_graph(fresh_dynamo):
    model, block = nn.Sequential(Doubles(), Inherits()), Doubles()
    standing_in.put_in_place(block, adds_one)
    assert torch.compile(model, backend="eager", fullgraph=True)(X).tolist() == [4, 4]
    for call in CALLS.values():
        assert torch.compile(lambda x, call=call: call(block, x), backend="eager")(X).tolist() == [3, 3]
