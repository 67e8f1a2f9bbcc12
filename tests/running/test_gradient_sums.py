"""A planned step returns one gradient per parameter; eager adds those of single uses, in another order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ackpt


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, 16) / 4)

    def forward(self, x):
        return torch.tanh(torch.tanh(x @ self.table.T) @ self.table) @ self.table.T


def _difference(model, backward, context):
    """The largest difference of the gradients between the model and its plan, relative to the largest gradient."""
    x, found = torch.randn(64, 16), []
    with context():
        step = ackpt.compile(model, x, policy="full", differentiate="all")
    for call in (model, model, step):
        model.zero_grad()
        with context():
            loss = backward(call, x)
        loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, found[0], found[1]))
    return max(((own - planned).abs().max() / own.abs().max()).item() for own, planned in zip(found[0], found[2]))


def _with_penalty(call, x):
    return call(x).square().mean() + 0.1 * sum(parameter.square().sum() for parameter in call.parameters())


def _twice(call, x):
    return (call(x).float() * call(2 * x).float()).mean()


def _no_autocast():
    return torch.autocast("cpu", enabled=False)


def _autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("backward", [_with_penalty, _twice])
def test_sums_outside_of_the_step_differ_by_one_rounding_of_float32(backward):
    torch.manual_seed(0)
    assert _difference(Tied(), backward, _no_autocast) < 5e-7


@pytest.mark.parametrize("backward", [_with_penalty, _twice])
def test_weights_with_one_use_are_equal(backward):
    torch.manual_seed(0)
    assert _difference(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)), backward, _no_autocast) == 0


def test_two_runs_under_one_autocast_differ_by_one_rounding_of_its_precision():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    assert 0 < _difference(model, _twice, _autocast) < 2**-7
    assert _difference(model, lambda call, x: call(x).float().mean(), _autocast) == 0
