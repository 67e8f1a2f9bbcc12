"""Arguments and results of regions: any nesting of tensors, outputs of every kind."""

import collections
import dataclasses
import enum
import types
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Case, assert_same_step, run_step, tensors_in
from torch import nn

import ackpt


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Box:
    value: Any
    note: str = "kept"
    made: list = dataclasses.field(default_factory=list, init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    other: Any = None

    def __post_init__(self):
        if isinstance(self.value, torch.Tensor) and self.value.dim() == 0:
            raise ValueError("__post_init__ must not run again on something else")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    value: Any


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """Both a dict and a dataclass, as the outputs of some libraries are."""

    first: Any = None
    second: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Names(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.label = "a dict with an attribute"


class Row(list):
    label = "a list subclass"


def leaf(*shape, grad=True):
    return torch.randn(shape or (2, 3), requires_grad=grad)


def values(*args, **kwargs):
    """Products of all tensors in the arguments, so that the gradient of each depends on the others."""
    product = torch.ones(())
    for place, tensor in enumerate(tensors_in([args, kwargs])):
        if tensor.is_floating_point():
            product = product * (tensor + place).sin()
    return product


ARGUMENTS = {
    "keyword": lambda a, b: ((), {"a": a, "b": b}),
    "the same tensor twice": lambda a, b: ((a, a, b, a), {"again": b}),
    "dict": lambda a, b: (({"a": a, "b": {"deep": b, "none": None}},), {}),
    "list": lambda a, b: (([a, 3, [b, "text"]],), {}),
    "named tuple": lambda a, b: ((Pair(a, Pair(b, 1)),), {}),
    "dataclass": lambda a, b: ((Box(Box([a, {"b": b}])),), {}),
    "dataclass with slots": lambda a, b: ((Slotted(Slotted((a, b))),), {}),
    "dict and dataclass": lambda a, b: ((Output(a, b),), {}),
    "default dict": lambda a, b: ((collections.defaultdict(list, {"a": [a, b]}),), {}),
    "dict subclass": lambda a, b: ((Names(a=a, b=b),), {}),
    "list subclass": lambda a, b: ((Row([a, b]),), {}),
    "deque": lambda a, b: ((), {"a": a, "deque": collections.deque([1, 2]), "b": b}),
    "plain object": lambda a, b: ((types.SimpleNamespace(a=a, deep=types.SimpleNamespace(b=b)),), {}),
    "not tensors": lambda a, b: ((a, None, 3, 2.5, "text", True, torch.int8, a.shape, enum.Enum), {"b": b, "n": None}),
    "integers among them": lambda a, b: ((a, torch.arange(3), torch.tensor(True), b), {"index": torch.tensor([1])}),
    "keywords named as checkpoint's own": lambda a, b: ((a,), {"function": b, "self": 1, "args": 2, "kwargs": 3}),
}


@pytest.mark.parametrize("arrange", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_of_every_kind_are_bit_equal(arrange):
    def build():
        a, b = leaf() * 1.5, leaf()
        a.retain_grad()
        args, kwargs = arrange(a, b)
        return Case(values, args, kwargs, also=[a, b])

    step = assert_same_step(build)
    assert step.requires_grad == [True]
    assert sum(grad is not None for grad in step.grads) >= 1


OUTPUTS = {
    "nothing": lambda x: None,
    "a number": lambda x: 3,
    "a list with other things": lambda x: [x.sin(), None, 3, "text", x.cos()],
    "nested": lambda x: {"a": [x.sin(), (x.cos(), {"b": x.exp()})], "n": None},
    "named tuple": lambda x: Pair(x.sin(), None),
    "dataclass": lambda x: Box(x.sin()),
    "dict and dataclass": lambda x: Output(x.sin(), [x.cos()]),
    "dict subclass": lambda x: Names(a=x.sin()),
    "some without grad": lambda x: (x.sin(), torch.arange(3), x > 0, torch.zeros(2)),
    "detached": lambda x: (x.sin(), x.cos().detach()),
    "output and its detached self": lambda x: (lambda y: (y, y.detach()))(x.sin()),
    "views of one another": lambda x: (lambda y: (y, y[0], y.t(), y.view(-1)[1:3]))(x.sin()),
    "unbound": lambda x: x.sin().unbind(0),
    "a view of the input": lambda x: x[:, 1:],
    "the input itself": lambda x: x,
    "the input among others": lambda x: (x.sin(), x, {"x": x}),
    "complex": lambda x: torch.view_as_complex(torch.stack([x.sin(), x.cos()], -1)),
    "other dtype": lambda x: (x.sin().double(), x.cos().bfloat16()),
}


@pytest.mark.parametrize("function", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("history", [False, True], ids=["leaf", "history"])
def test_outputs_of_every_kind_are_bit_equal(function, history):
    def build():
        x = leaf()
        return Case(function, (x * 1.5 if history else x,), also=x)

    assert_same_step(build)
    plain = run_step(build, lambda function, *args: Box(function(*args)))
    result = ackpt.checkpoint(function, leaf())
    assert type(result) is type(function(leaf()))
    assert len(plain.outputs) == len(tensors_in(result))


def test_containers_keep_their_other_objects():
    x = leaf()
    output = ackpt.checkpoint(lambda x: Names(a=x.sin(), n=[1]), x)
    assert output.label == "a dict with an attribute" and output["n"] == [1]
    filled = ackpt.checkpoint(lambda x: collections.defaultdict(list, a=x.sin()), x)
    assert filled["new"] == []
    model_output = ackpt.checkpoint(lambda x: Output(x.sin(), None), x)
    assert model_output["first"] is model_output.first and model_output.second is None
    assert ackpt.checkpoint(lambda box: (box.note, box.made), Box(x)) == ("kept", [])


def test_a_returned_input_tensor_is_the_same_object():
    x, weight, index = leaf(), nn.Parameter(torch.ones(2, 3)), torch.arange(3)
    h = x * 2
    out = ackpt.checkpoint(lambda h, i: (h * weight, h, i, weight, {"x": x}), h, index)
    assert out[1] is h and out[2] is index and out[3] is weight and out[4]["x"] is x
    same = ackpt.checkpoint(lambda x: (lambda y: (y, y))(x.sin()), x)
    assert same[0] is same[1]


KINDS = {
    "scalar": lambda: torch.tensor(1.5, requires_grad=True),
    "complex": lambda: torch.randn(2, 3, dtype=torch.cfloat, requires_grad=True),
    "conjugate": lambda: torch.randn(2, 3, dtype=torch.cfloat, requires_grad=True).conj(),
    "transposed": lambda: torch.randn(3, 2, requires_grad=True).t(),
    "expanded": lambda: torch.randn(1, 3, requires_grad=True).expand(4, 3),
    "channels last": lambda: torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last).requires_grad_(),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_tensors_of_every_kind_are_bit_equal(kind):
    def build():
        x = kind()
        return Case(lambda x: (x * x, x * 2, (x.detach().real > 0)), (x,), also=x if x.is_leaf else x._base)

    assert_same_step(build)


class Tagged(torch.Tensor):
    """A subclass that carries itself through every operation."""


def test_tensor_subclasses():
    def build():
        x = torch.randn(2, 3).as_subclass(Tagged).requires_grad_()
        return Case(lambda x: (x.sin(), x.detach().cos()), (x,))

    assert_same_step(build, loss=lambda out: out[0].sum().as_subclass(torch.Tensor))
    out = ackpt.checkpoint(lambda x: (type(x), x.sin()), torch.randn(2, 3).as_subclass(Tagged).requires_grad_())
    assert out[0] is Tagged and type(out[1]) is Tagged
