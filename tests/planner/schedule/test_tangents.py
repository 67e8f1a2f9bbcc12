"""Gradients that come in for outputs that are views: what the caller gives, and what torch makes of it."""

import pytest
import torch
from conftest import assert_as_eager, model_of, raises
from torch import nn

import ackpt
from ackpt import plan
from ackpt.graph import PlannedStep
from ackpt.planner.request import Request
from ackpt.planner.schedule.simulator import peak_of

pytestmark = pytest.mark.usefixtures("one_thread")


def make_model(view):
    """Outputs are views of two values of shape (3, 4): the product and its sine."""

    def forward(self, x):
        product = x @ self.weight
        return self.view(product, product.sin())

    return model_of(forward, weight=nn.Parameter(torch.randn(4, 4)), view=view)


# name -> (outputs, bytes of the tangents, bytes of gradients that torch copies into them)
CASES = {
    "whole": (lambda h, s: s, 48, 0),
    "rows": (lambda h, s: s[1:], 32, 0),
    "turned rows": (lambda h, s: s[1:].t(), 32, 0),
    "an element": (lambda h, s: s[0, 1], 4, 0),
    "part of a row": (lambda h, s: s[:1, 1:], 12, 0),
    "columns": (lambda h, s: s[:, ::2], 44, 24),  # 11 floats from the first to the last, 6 of them
    "turned columns": (lambda h, s: s[:, 1:].t(), 44, 36),
    "a column": (lambda h, s: s[:, 1], 36, 12),
    "expanded": (lambda h, s: s[:, :1].expand(3, 5), 60, 0),
    "all columns": (lambda h, s: s.unbind(1), 4 * 36, 4 * 12),
    "of two values": (lambda h, s: (h[:, ::2], s[0]), 44 + 16, 24),
}


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("name", CASES)
def test_incoming_gradients_have_memory_of_their_own(name, policy):
    view, tangents, copied = CASES[name]
    model, x = make_model(view), torch.randn(3, 4)
    graphs = []

    def planner(graph):
        graphs.append(graph)
        return plan(graph, policy=policy)

    step = PlannedStep(model, Request(planner=planner, differentiate="all"))
    step.prepare(x)
    (graph,) = graphs
    analysis = graph.analysis
    assert sum(analysis.bytes[s] for place in analysis.tangents for s in graph.nodes[place].storages) == tangents
    assert analysis.incoming_bytes == copied

    def once(step):
        model.zero_grad()
        outputs = step(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    once(model)
    expected = model.weight.grad
    once(step)
    assert torch.equal(model.weight.grad, expected)
    measured = ackpt.measure(lambda: once(step), "cpu", resident=(model, x), repeats=0)
    assert measured.dynamic_peak_bytes == step.plan.dynamic_peak_bytes
    assert peak_of(graph, step.plan.schedule, [0] * len(graph.nodes)) == step.plan.dynamic_peak_bytes


class ChannelsLast(nn.Module):
    def __init__(self, returned):
        super().__init__()
        self.first, self.second, self.returned = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 1), returned
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.returned(self.second(self.first(x).sin()))


def test_gradients_in_another_order_than_the_planned_one_are_refused():
    """Torch would copy them: memory that the plan does not count, and sums that round another way."""
    x, target = torch.randn(2, 3, 8, 8), torch.randn(2, 16, 8, 8)
    step = ackpt.compile(ChannelsLast(lambda y: y), x, policy="none")
    raises(RuntimeError, "contiguous", lambda: nn.functional.mse_loss(step(x), target).backward())
    step(x).backward(target.contiguous(memory_format=torch.channels_last))
    step(x).sum().backward()  # expanded


def test_contiguous_outputs_take_contiguous_gradients():
    x, target = torch.randn(2, 3, 8, 8), torch.randn(2, 16, 8, 8)
    model = ChannelsLast(lambda y: y.contiguous())
    assert_as_eager(model, ackpt.compile(model, x, policy="none"), x, loss=lambda y: nn.functional.mse_loss(y, target))
