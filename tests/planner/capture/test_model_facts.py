"""`WatchedModel` reads the facts of a model again when, and only when, something that they depend on changed."""

import functools
import gc
import operator
import weakref
from collections import deque
from fractions import Fraction
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend
from torch.nn.utils import parametrize

import ackpt
from ackpt.planner.capture.call_facts import ModelFacts, WatchedModel


class Holder(nn.Module):
    """A module with an attribute of every kind."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("offset", torch.zeros(4))
        self.scale, self.name, self.flags = 0.5, "holder", [True, {"depth": 2}]
        self.config, self.shape = SimpleNamespace(width=4), (1, (2, 3))
        self.act, self.constant, self.object = torch.relu, torch.ones(4), object()
        self.chosen, self.recent, self.unregistered = {1}, deque([1]), [nn.Tanh()]
        self.between, self.again = nn.Tanh(), self.first
        self.register_buffer("spare", None)
        self.parametrized = nn.Linear(4, 4)
        parametrize.register_parametrization(self.parametrized, "weight", nn.Tanh())

    def forward(self, x):
        return self.act(self.first(x) * self.scale + self.offset) + self.second(x)


def _set(name, value):
    return lambda model: setattr(model, name, value)


class OtherHolder(Holder):
    """Another class with the same attributes."""


class Twice(torch.autograd.Function):
    """A function with another `apply` than `Thrice`."""


class Thrice(torch.autograd.Function):
    """See `Twice`."""


def _renamed(model):
    del model.object
    model.other = 1


def _reordered(model):
    model.first = model._modules.pop("first")


def _renamed_buffer(model):
    model.register_buffer("shift", model._buffers.pop("offset"))


def _reparametrized(model):
    parametrize.remove_parametrizations(model.parametrized, "weight", leave_parametrized=False)
    parametrize.register_parametrization(model.parametrized, "weight", nn.Sigmoid())


CHANGES = {
    "number": _set("scale", 0.25),
    "sign of zero": lambda model: [setattr(model, "scale", 0.0), setattr(model, "scale", -0.0)],
    "type of an equal number": _set("name", True),
    "text": _set("name", "other"),
    "item of a list": lambda model: model.flags.__setitem__(0, False),
    "item of a dict in a list": lambda model: model.flags[1].update(depth=3),
    "field of a namespace": lambda model: setattr(model.config, "width", 5),
    "tuple": _set("shape", (1, (2, 4))),
    "function": _set("act", torch.tanh),
    "tensor": lambda model: setattr(model, "constant", torch.ones(4)),
    "an object becomes a number": _set("object", 3),
    "new attribute": _set("added", 1),
    "removed attribute": lambda model: delattr(model, "name"),
    "renamed attribute": _renamed,
    "item of a set": lambda model: model.chosen.add(2),
    "item of a deque": lambda model: model.recent.append(2),
    "module in a list": lambda model: model.unregistered.__setitem__(0, nn.Sigmoid()),
    "own forward": lambda model: setattr(model.first, "forward", MethodType(lambda _, x: 2 * x, model.first)),
    "class of an instance": _set("__class__", OtherHolder),
    "type of a submodule": _set("between", nn.Sigmoid()),
    "shared submodule": lambda model: setattr(model, "again", model.second),
    "order of submodules": _reordered,
    "renamed submodule": lambda model: setattr(model, "third", model._modules.pop("second")),
    "removed submodule": lambda model: delattr(model, "between"),
    "renamed buffer": _renamed_buffer,
    "buffer that becomes None": lambda model: [setattr(model, "spare", model.offset), setattr(model, "offset", None)],
    "parametrization": _reparametrized,
    "training": lambda model: model.first.eval(),
    "requires_grad": lambda model: model.first.weight.requires_grad_(False),
    "dtype": lambda model: setattr(model.first.weight, "data", model.first.weight.data.double()),
    "shape": lambda model: setattr(model, "offset", torch.zeros(1)),
    "strides": lambda model: setattr(model.first.weight, "data", model.first.weight.data.t()),
    "storages": lambda model: setattr(model.second.weight, "data", model.second.weight.data.clone()),
    "no bias": lambda model: setattr(model.first, "bias", None),
    "submodule": lambda model: setattr(model, "first", nn.Linear(4, 4, bias=False)),
    "added submodule": lambda model: model.add_module("third", nn.ReLU()),
    "hook": lambda model: model.first.register_forward_hook(lambda *_: None),
    "hook before the forward": lambda model: model.second.register_forward_pre_hook(lambda *_: None),
    "hook of backward": lambda model: model.second.register_full_backward_hook(lambda *_: None),
}


# Values that torch or Python provides, of one attribute.
VALUES = {
    "methods": (deque([1]).append, deque([1]).append),
    "methods of one object": (CHANGES.get, CHANGES.pop),
    "methods of one class": (SimpleNamespace(a=1).__eq__, SimpleNamespace(a=1).__eq__),
    "methods in Python": (Holder().extra_repr, Holder().extra_repr),
    "functions of autograd": (Twice.apply, Thrice.apply),
    "partials": (functools.partial(torch.add, 1), functools.partial(torch.add, 2)),
    "classes": (nn.Tanh, nn.Sigmoid),
    "operators": (torch.ops.aten.tanh, torch.ops.aten.relu),
    "callables": (operator.methodcaller("tanh"), operator.methodcaller("relu")),
    "sets": ({1}, {2}),
    "frozensets": (frozenset({1}), frozenset({2})),
    "deques": (deque([1]), deque([2])),
    "ranges": (range(2), range(3)),
    "slices": (slice(0, 4), slice(4, 8)),
    "fractions": (Fraction(1, 2), Fraction(1, 3)),
    "memory formats": (torch.contiguous_format, torch.channels_last),
    "layouts": (torch.strided, torch.sparse_coo),
    "enums": (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION),
}


def _watched() -> tuple[Holder, WatchedModel]:
    model = Holder()
    model.second.weight.data = model.first.weight.data
    return model, WatchedModel(model)


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_change_gives_the_facts_that_reading_the_model_gives(change):
    model, watched = _watched()
    before = watched.facts()
    assert watched.facts() is before and watched.storages
    change(model)
    after = watched.facts()
    assert after != before
    assert after == ModelFacts(list(model.modules())) and hash(after) == hash(ModelFacts(list(model.modules())))
    assert list(watched.modules.values()) == list(model.modules())
    assert watched.facts() is after


@pytest.mark.parametrize("values", VALUES.values(), ids=list(VALUES))
def test_values_of_every_type_are_compared(values):
    model, watched = _watched()
    seen = []
    for value in (*values, values[0]):
        model.object = value
        seen.append(watched.facts())
        assert watched.facts() is seen[-1] and seen[-1] == ModelFacts(list(model.modules()))
    assert seen[0] != seen[1] and seen[0] == seen[2]


def test_another_function_with_the_id_of_a_freed_one_is_another_value():
    model, watched = _watched()
    model.act = lambda x: x
    before, identifier, freed = watched.facts(), id(model.act), weakref.ref(model.act)
    model.act = torch.relu
    assert watched.facts() != before
    gc.collect()
    assert freed() is None  # the facts do not keep it
    candidates = []
    for _ in range(1000):
        candidates.append(lambda x: 3 * x)
        if id(candidates[-1]) == identifier:
            break
    model.act = candidates[-1]
    assert watched.facts() != before


@pytest.mark.parametrize(
    "change, cause",
    [
        (_set("between", nn.Sigmoid()), "module 'between' changed from Tanh to Sigmoid"),
        (_set("__class__", OtherHolder), "the model changed from Holder to OtherHolder"),
        (_reparametrized, "the class of module 'parametrized' changed"),
        (lambda model: delattr(model, "between"), "module 'between' was removed"),
        (_set("added", nn.Tanh()), "module 'added' was added"),
        (_set("again", nn.Tanh()), "module 'again' changed from Linear to Tanh"),
        (_renamed_buffer, "the names of the parameters or buffers of the model changed"),
        (_reordered, "the order or the sharing of submodules changed"),
        (lambda model: setattr(model, "again", model.second), "the order or the sharing of submodules changed"),
        (_set("scale", 0.25), "scale of the model changed from 0.5 to 0.25; "),
        (lambda model: model.chosen.add(2), "chosen of the model changed; "),
    ],
)
def test_the_cause_names_the_module_or_the_attribute(change, cause):
    model = Holder()
    watched = WatchedModel(model)
    before = watched.facts()
    change(model)
    words, _ = watched.facts().change_since(before, watched.modules)
    assert words.startswith(cause)


def test_a_replaced_method_of_the_class_gives_another_capture(monkeypatch):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def act(self, x):
            return torch.relu(x)

        def forward(self, x):
            return self.act(self.linear(x))

    model, x = Model(), torch.ones(2, 4)
    step = ackpt.compile(model, x, policy="none", differentiate="all")
    monkeypatch.setattr(Model, "act", lambda self, x: 3 * x)
    assert torch.equal(step(x), model(x))
    assert list(step.history)[-1].cause == "attribute 'act' of the class of the model changed"
    monkeypatch.undo()
    assert torch.equal(step(x), model(x)) and len(list(step.history)) == 2


@pytest.mark.parametrize("change", [_set("object", object()), lambda model: model.offset.add_(1), Holder.zero_grad])
def test_changes_that_no_capture_depends_on_cause_no_reading(change):
    model, watched = _watched()
    model(torch.ones(2, 4)).sum().backward()
    before = watched.facts()
    change(model)
    assert watched.facts() is before


def test_an_argument_that_shares_the_storage_of_a_parameter_is_another_call():
    model = Holder()
    step = ackpt.compile(model, torch.ones(4, 4), policy="none", differentiate="all")
    shared = model.first.weight.detach()
    assert torch.equal(step(shared), model(shared)) and len(step.history) == 2
    assert torch.equal(step(torch.ones(4, 4)), model(torch.ones(4, 4))) and len(step.history) == 2


def test_a_parameter_like_the_one_before_is_the_models_own():
    model, watched = _watched()
    before, earlier = watched.facts(), weakref.ref(model.first.bias)
    model.first.bias = nn.Parameter(torch.zeros(4))
    assert earlier() is None
    assert watched.facts() == before and watched.facts().tensors == before.tensors
    own = {id(tensor) for tensor in watched.own_tensors()}
    assert own == set(map(id, [*model.parameters(), *model.buffers()]))


def test_sparse_tensors_which_torchs_guards_do_not_check_are_compared():
    model, watched = _watched()
    before = watched.facts()
    plain, model.offset = model.offset, torch.eye(4).to_sparse()
    sparse = watched.facts()
    assert sparse != before and watched.facts() is sparse
    model.offset = plain
    assert watched.facts() == before


def test_a_dict_that_changes_back_has_the_same_facts():
    model, watched = _watched()
    before = watched.facts()
    for value in (0.25, 0.5):
        model.scale = value
    model.first.train(False).train()
    weight, model.second.weight = model.second.weight, nn.Parameter(torch.zeros(4, 4))
    model.second.weight = weight
    assert watched.facts() is before
    model.second.weight = nn.Parameter(torch.zeros(4, 4))  # no longer tied
    assert watched.facts() != before
