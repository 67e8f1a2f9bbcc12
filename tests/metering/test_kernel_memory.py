"""Losses whose scalar takes as many bytes as the model's output: predicted bytes equal measured ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.metering.prediction import predict

pytestmark = pytest.mark.usefixtures("one_thread")

LOSSES = {
    "mse_loss": lambda x, y: F.mse_loss(x, y),
    "mse_loss, sum": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y),
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "mse_loss, none": lambda x, y: F.mse_loss(x, y, reduction="none").sum(),
    "l1_loss": lambda x, y: F.l1_loss(x, y),
}


def step_of(loss, model, x, y):
    def step():
        model.zero_grad()
        loss(model(x), y).backward()

    return step


@pytest.mark.parametrize("where", ["fake", "meta"])
@pytest.mark.parametrize("name", LOSSES)
def test_predicted_as_measured(name, where):
    sizes = ((4, 4), (6, 4), (6, 4))
    model, x, y = nn.Linear(*sizes[0]), *(torch.randn(size) for size in sizes[1:])
    measured = ackpt.measure(step_of(LOSSES[name], model, x, y), "cpu", resident=(model, x, y), repeats=0)
    with FakeTensorMode() if where == "fake" else torch.device("meta"):
        model, x, y = nn.Linear(*sizes[0]), *(torch.empty(size) for size in sizes[1:])
    predicted = predict(step_of(LOSSES[name], model, x, y), resident=(model, x, y))
    # What the forward has left: the loss, and what it keeps for backward. The peak has the operations' workspaces.
    assert predicted.timeline.live[predicted.timeline.boundary] == measured.timeline.live[measured.timeline.boundary]


def test_on_a_gpu_the_scalar_takes_one_block():
    with FakeTensorMode():
        model, x, y = nn.Linear(64, 64), torch.empty(64, 64), torch.empty(64, 64)
    found = predict(step_of(F.mse_loss, model, x, y), resident=(model, x, y), device="cuda")
    # The model's output, the loss and the gradient that backward begins with.
    assert found.timeline.live[found.timeline.boundary] == 64 * 64 * 4 + 2 * 512
