"""A planned step returns one gradient per parameter; eager adds those of single uses, in another order."""

import pytest
import torch
from conftest import model_of
from torch import nn

import ackpt


def tied():
    return model_of(
        lambda self, x: torch.tanh(torch.tanh(x @ self.table.T) @ self.table) @ self.table.T,
        table=nn.Parameter(torch.randn(32, 16) / 4),
    )


def _difference(model, backward, is_low=False):
    """The largest difference of the gradients between the model and its plan, relative to the largest gradient.

    Also the plan's note.
    """
    x, found = torch.randn(64, 16), []
    with torch.autocast("cpu", torch.bfloat16, enabled=is_low):
        step = ackpt.compile(model, x, policy="full", differentiate="all")
    for call in (model, model, step):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_low):
            loss = backward(call, x)
        loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, found[0], found[1]))
    pairs = zip(found[0], found[2])
    return max(((own - planned).abs().max() / own.abs().max()).item() for own, planned in pairs), step.plan.note


def _with_penalty(call, x):
    return call(x).square().mean() + 0.1 * sum(parameter.square().sum() for parameter in call.parameters())


def _twice(call, x):
    return (call(x).float() * call(2 * x).float()).mean()


@pytest.mark.parametrize("backward", [_with_penalty, _twice])
def test_sums_outside_of_the_step_differ_by_one_rounding_of_float32(backward):
    difference, note = _difference(tied(), backward)
    assert 0 < difference < 5e-7
    assert note == (
        "gradients of table are sums over several uses in the step: if one backward reaches them by another call or "
        "from outside of the step, too, they may differ from eager's by one rounding of float32"
    )


@pytest.mark.parametrize("backward", [_with_penalty, _twice])
def test_weights_with_one_use_are_equal(backward):
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    assert _difference(model, backward) == (0, None)


def test_the_note_counts_the_weights_of_a_loop():
    model = model_of(lambda self, x: self.cell(x, self.cell(x, x)).sum(), cell=nn.GRUCell(8, 8))
    step = ackpt.compile(model, torch.randn(4, 8))
    said = "gradients of cell.weight_ih, cell.weight_hh, cell.bias_ih and 1 more are sums over several uses in the step"
    assert step.plan.note.startswith(said)


def test_two_runs_under_one_autocast_differ_by_one_rounding_of_its_precision():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    difference, note = _difference(model, _twice, is_low=True)
    assert 0 < difference < 2**-7
    assert note.startswith("eager casts a weight once under one torch.autocast") and note.endswith("bfloat16 on cpu")
    assert _difference(model, lambda call, x: call(x).float().mean(), is_low=True) == (0, note)
