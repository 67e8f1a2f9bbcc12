"""Tensors that are changed in place keep eager's strides, so that what reads them rounds as in eager mode."""

import pytest
import torch
from conftest import assert_as_eager, measured_step, model_of
from torch import nn

import ackpt

pytestmark = pytest.mark.usefixtures("one_thread")


class Cell(nn.Module):
    """A recurrent cell, whose C++ changes parts of a split tensor in place."""

    def __init__(self, cell, width):
        super().__init__()
        self.first, self.cell = nn.Linear(width, width), cell(width, width)

    def forward(self, x):
        state = self.cell(self.first(x))
        return sum(part.square().mean() for part in (state if isinstance(state, tuple) else (state,)))


def layer(width):
    return model_of(lambda self, x: self.layer(x)[0].square().mean(), layer=nn.GRU(width, width, batch_first=True))


def one_pixel():
    """An image of one pixel, changed in place: channels last in eager mode, which the next layers read."""

    def forward(self, x):
        x = self.norm(self.first(x))
        x = nn.functional.interpolate(torch.relu_(x), size=(2, 2), mode="nearest")
        return self.last(x.add_(1.0)).square().mean()

    return model_of(
        forward, first=nn.Conv2d(8, 32, 1), norm=nn.GroupNorm(4, 32), last=nn.Conv2d(32, 32, 3, padding=1, bias=False)
    )


MODELS = {
    **{f"GRU cell, {width}": lambda width=width: (Cell(nn.GRUCell, width), (7, width)) for width in (8, 16, 20, 33)},
    "LSTM cell": lambda: (Cell(nn.LSTMCell, 20), (7, 20)),
    "GRU, 20": lambda: (layer(20), (3, 5, 20)),
    "one pixel": lambda: (one_pixel(), (2, 1, 1, 8)),
}


def build(name):
    torch.manual_seed(0)
    model, shape = MODELS[name]()
    x = torch.randn(shape)
    return model, x.permute(0, 3, 1, 2) if name == "one pixel" else x


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_step_is_the_model_bit_for_bit(name, policy):
    model, x = build(name)
    assert_as_eager(model, ackpt.compile(model, x, policy=policy), x)


@pytest.mark.parametrize("name", ["GRU cell, 20", "one pixel"])
def test_one_capture_serves_other_sizes(name):
    model, x = build(name)
    step = ackpt.compile(model, x, policy="full")
    for other in (torch.cat([x, x, x]), torch.cat([x, x])):
        assert_as_eager(model, step, other)


@pytest.mark.parametrize("name", ["GRU cell, 20", "one pixel"])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_the_measured_peak_is_the_planned_one(name, policy):
    model, x = build(name)
    step = ackpt.compile(model, x, policy=policy)
    assert measured_step(model, step, x).dynamic_peak_bytes == step.plan.dynamic_peak_bytes


def test_widths_of_whole_vector_loops_are_not_copied():
    for width, copies in ((20, True), (32, False)):
        graph = ackpt.trace(Cell(nn.GRUCell, width), torch.randn(7, width))
        assert any("with_strides" in node.target for node in graph.nodes) == copies
