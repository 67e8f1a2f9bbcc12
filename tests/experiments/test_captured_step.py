"""One capture runs several plans: bit-equal to eager, with the peak of each plan."""

import pytest
import torch
from conftest import assert_as_eager, measured_step, raises
from planned_models import Mean
from torch import nn

import ackpt
from experiments.steps.captured_step import CapturedStep

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")


def model(blocks: int = 3) -> nn.Module:
    layers = [(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Dropout(0.2)) for _ in range(blocks)]
    return nn.Sequential(*(layer for block in layers for layer in block), Mean())


@pytest.mark.parametrize("autocast", [False, True])
def test_every_plan_has_its_peak_and_the_gradients_of_eager(autocast):
    net, x = model(), torch.randn(64, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        captured = CapturedStep(net, x)
    plans = [ackpt.plan(captured.graph, budget) for budget in (None, 0.8, 0.6)]
    assert len({plan.dynamic_peak_bytes for plan in plans}) == 3
    for plan in plans:
        step = captured.planned(plan)  # not under the autocast of the capture
        assert_as_eager(net, step, x, autocast=autocast)
        measured = measured_step(net, step, x, autocast=autocast)
        assert autocast or measured.dynamic_peak_bytes == plan.dynamic_peak_bytes


def test_a_plan_of_another_model_is_refused():
    captured = CapturedStep(model(), torch.randn(64, 8))
    plan = ackpt.plan(ackpt.trace(model(blocks=1), torch.randn(64, 8)))
    raises(ackpt.PlanError, "another graph", lambda: captured.planned(plan))
