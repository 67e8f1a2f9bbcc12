"""Random operations of a captured step draw what eager draws, whatever the order in which memory lies."""

import random

import numpy as np
import pytest
import torch
from conftest import assert_as_eager, model_of, raises
from torch import nn
from torch.nn import functional as F

import ackpt

DRAWS = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "dropout in place": lambda h: F.dropout(h, 0.3, inplace=True),
    "dropout of everything": lambda h: F.dropout(h, 1.0, inplace=True),
    "dropout of nothing": lambda h: F.dropout(h, 0.0),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.3, True),
    "bernoulli": lambda h: h.bernoulli_(0.3),
    "bernoulli by a tensor": lambda h: h.bernoulli_(torch.full((3, 4, 2), 0.4)),
    "uniform": lambda h: h.uniform_(1, 2),
    "normal": lambda h: h.normal_(3, 2),
    "integers": lambda h: h.random_(2, 5),
    "exponential": lambda h: h.exponential_(2.0),
    "every second": lambda h: h[:, ::2].uniform_() + 1,
    "out of place": lambda h: h * torch.rand_like(h) + torch.bernoulli(h.sigmoid()),
}


class Draws(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.weight, self.draw = nn.Parameter(torch.randn(2, 3, 4)), draw

    def forward(self):
        return self.draw(F.leaky_relu(self.weight).movedim(0, -1)) + self.weight.sum()


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("draw", DRAWS)
def test_draws_are_those_of_eager(draw, policy):
    model = Draws(DRAWS[draw])
    step = ackpt.compile(model, policy=policy, differentiate="all")
    assert_as_eager(model, step, loss=lambda output: output.square().sum())


def test_dropout_is_one_random_operation():
    graph = ackpt.trace(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.ones(2, 4))
    assert [node.target for node in graph.nodes if node.is_random] == ["ackpt_graph.dropout_noise.default"]


def _mask(x):
    return (torch.rand(x.shape) > 0.5).float()


@torch.library.custom_op("ackpt_tests::masked", mutates_args=())
def masked(x: torch.Tensor) -> torch.Tensor:
    return x * _mask(x)


@torch.library.custom_op("ackpt_tests::mask_", mutates_args={"x"})
def mask_(x: torch.Tensor) -> None:
    x.mul_(_mask(x))


@torch.library.custom_op("ackpt_tests::masked_by_python", mutates_args=())
def masked_by_python(x: torch.Tensor) -> torch.Tensor:
    return x * random.randrange(1, 3)


class Own:
    def __init__(self):
        self.generator = torch.Generator()

    def mask(self, x):
        return torch.empty_like(x).bernoulli_(0.5, generator=self.generator)


_own, _numpy = Own(), np.random.default_rng()
masked_by_its_own = torch.library.custom_op(
    "ackpt_tests::masked_by_its_own", lambda x: _own.mask(x) * x, mutates_args=(), schema="(Tensor x) -> Tensor"
)
masked_by_numpy = torch.library.custom_op(
    "ackpt_tests::masked_by_numpy",
    lambda x: x * int(_numpy.integers(1, 3)),
    mutates_args=(),
    schema="(Tensor x) -> Tensor",
)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(output)


def _gradient(ctx, gradient):
    return gradient * (ctx.saved_tensors[0] != 0)


mask_.register_fake(lambda x: None)
for operation in (masked, masked_by_python, masked_by_its_own, masked_by_numpy):
    operation.register_fake(torch.empty_like)
    operation.register_autograd(_gradient, setup_context=_setup)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        mask_(y)
        ctx.save_for_backward(y)
        return y

    backward = staticmethod(_gradient)


def with_custom(function):
    def forward(self, x):
        self.function(x)  # nothing reads it, but it draws
        return x + self.second(self.function(torch.relu(self.first(x))))

    return model_of(forward, first=nn.Linear(16, 32), second=nn.Linear(32, 16), function=function)


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("function", [masked, InPlace.apply])
def test_custom_operations_with_undeclared_draws_are_bit_equal(function, policy):
    model, x = nn.Sequential(*[with_custom(function) for _ in range(4)]), torch.randn(64, 16)
    step = ackpt.compile(model, x, policy=policy)
    assert bool(step.plan.schedule.replayed) == (policy == "full")
    assert_as_eager(model, step, x)


@pytest.mark.parametrize("operation", [masked_by_python, masked_by_its_own, masked_by_numpy])
def test_a_custom_operation_that_draws_from_another_generator_is_not_recomputed(operation):
    model, x = nn.Sequential(*[with_custom(operation) for _ in range(4)]), torch.randn(64, 16)
    step = ackpt.compile(model, x, policy="full", regions=False)
    raises(ackpt.CheckpointError, f"{operation._name}.default draws random numbers, but not from", lambda: step(x))
