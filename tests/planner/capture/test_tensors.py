"""Which tensors a step can be captured with: plain ones, on meta or not; subclasses are refused before planning."""

import pytest
import torch
from conftest import raises
from small_models import build
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

import ackpt
from ackpt.graph import TraceError

X = torch.ones(3, 4)


class Sub(torch.Tensor):
    """Keeps its type through every operation."""


class Tagged(torch.Tensor):
    """Carries an attribute, as MONAI's MetaTensor does."""

    tag = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Tagged):
            result.tag = next(value.tag for value in args if isinstance(value, Tagged))
        return result


class OwnParameter(nn.Parameter):
    """A parameter like any other."""


class Holds(nn.Module):
    def __init__(self, register, value):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        register(self, "held", value)

    def forward(self, x, *others, **named):
        return self.linear(x) * self.held


def refused(match, model, *args, **kwargs):
    for call in (ackpt.compile, ackpt.trace):
        with pytest.raises(TraceError, match=match):
            call(model, *args, **kwargs)


@pytest.mark.parametrize("kind", [Sub, Tagged])
def test_arguments_of_a_subclass_are_refused_by_name(kind):
    model, value = Holds(setattr, torch.ones(4)), X.as_subclass(kind)
    refused(f"argument 0 is .*{kind.__name__}.*as_subclass", model, value)
    refused(f"argument mask .*{kind.__name__}", model, X, mask=value)
    refused(f"argument 1.1. .*{kind.__name__}", model, X, [X, value])


@pytest.mark.parametrize("kind", [Sub, Tagged])
def test_tensor_subclasses_held_by_the_model_are_refused_by_name(kind):
    value = torch.ones(4).as_subclass(kind)
    refused("buffer 'held'.*as_subclass", Holds(nn.Module.register_buffer, value), X)
    refused("parameter 'held'.*as_subclass", Holds(nn.Module.register_parameter, nn.Parameter(value)), X)
    refused("test_tensors.py.*as_subclass", Holds(setattr, value), X)


def test_a_wrapper_of_tensors_is_refused_by_name():
    refused("argument 0 is .*TwoTensor", Holds(setattr, torch.ones(4)), TwoTensor(X, X.clone()))


def test_a_later_call_with_a_subclass_is_refused_and_the_next_plain_one_runs():
    step = ackpt.compile(Holds(setattr, torch.ones(4)), X)
    expected = step(X)
    raises(TraceError, "argument 0 .*Tagged", lambda: step(X.as_subclass(Tagged)))
    assert torch.equal(step(X), expected)


def test_parameters_and_buffers_of_torchs_own_types_are_plain():
    for register, value in [
        (nn.Module.register_parameter, OwnParameter(torch.ones(4))),
        (setattr, nn.Buffer(torch.ones(4))),
    ]:
        model = Holds(register, value)
        assert torch.equal(ackpt.compile(model, X)(X), model(X))
    with FakeTensorMode():
        assert ackpt.trace(Holds(setattr, nn.Buffer(torch.ones(4))), torch.ones(3, 4)).nodes


@pytest.mark.parametrize("name", ["resnet", "bert"])
def test_trace_and_compile_plan_a_model_on_meta_alike(name):
    model, args, kwargs = build(name)
    args, kwargs = tree_map_only(torch.Tensor, lambda value: value.to("meta"), (args, kwargs))
    graph = ackpt.trace(model.to("meta"), *args, **kwargs)
    assert not graph.has_data
    assert ackpt.plan(graph, budget="100%") == ackpt.compile(model, *args, budget="100%", **kwargs).plan


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_recurrent_layers_on_meta_are_captured_as_on_the_cpu(kind):
    def traced(device):
        return ackpt.trace(getattr(nn, kind)(8, 8, 2, device=device), torch.zeros(5, 2, 8, device=device))

    assert traced("meta").hash == traced("cpu").hash
