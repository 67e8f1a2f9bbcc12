"""Where backward reaches some outputs only: parameters that it does not reach have no gradient, as in eager."""

import itertools

import pytest
import torch
from conftest import assert_as_eager
from torch import nn

import ackpt

pytestmark = pytest.mark.usefixtures("one_thread")


class Two(nn.Module):
    """Two heads on one trunk; a third output is a view of the first, and one parameter is never used."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        h = self.trunk(x).sin()
        left = self.left(h).cos()
        return left, self.right(x).tanh(), h.detach().sum(), left * 2


STEPS = {
    "ackpt.compile": lambda model, x: ackpt.compile(model, x, differentiate="all"),
    "dynamo": lambda model, x: torch.compile(model, backend="ackpt", options={"differentiate": "all"}),
}
DIFFERENTIABLE = (0, 1, 3)
REACHED = [c for size in (1, 2, 3) for c in itertools.combinations(DIFFERENTIABLE, size)]


@pytest.mark.parametrize("name", STEPS)
def test_parameters_that_backward_does_not_reach_have_no_gradient(name):
    model, x = Two(), torch.randn(2, 4)
    torch._dynamo.reset()
    step = STEPS[name](model, x)
    for reached in REACHED:
        assert_as_eager(model, step, x, loss=lambda outputs: sum(outputs[place].sum() for place in reached))  # noqa: B023


def test_an_optimizer_skips_parameters_without_a_gradient():
    model, x = Two(), torch.randn(2, 4)
    before = model.right.weight.detach().clone()
    step = ackpt.compile(model, x, differentiate="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    step(x)[0].sum().backward()
    optimizer.step()
    assert torch.equal(model.right.weight, before)


def test_the_peak_stays_as_planned():
    model, x = Two(), torch.randn(2, 4)
    step = ackpt.compile(model, x, policy="none", differentiate="all", outputs="keep")

    def once(places):
        model.zero_grad()
        outputs = step(x)
        reached = [outputs[place] for place in places]
        torch.autograd.backward(reached, [torch.ones_like(output) for output in reached])

    def peak(places):
        return ackpt.measure(lambda: once(places), "cpu", resident=(model, x), repeats=0).dynamic_peak_bytes

    assert peak(DIFFERENTIABLE) == step.plan.dynamic_peak_bytes


def test_a_gradient_that_is_always_zero_is_zero():
    class Signed(nn.Module):
        def __init__(self):
            super().__init__()
            self.size, self.sign = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

        def forward(self, x):
            return (torch.copysign(self.size, self.sign) * x).sum()

    model, x = Signed(), torch.randn(4)
    ackpt.compile(model, x)(x).backward()
    assert model.sign.grad is not None and not model.sign.grad.any()
