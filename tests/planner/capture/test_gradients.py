"""Gradients that autograd would copy when it keeps them: the graph copies them, and the plan counts them."""

import pytest
import torch
from torch import nn

import ackpt
from ackpt import plan
from ackpt.graph import PlannedStep
from ackpt.planner.request import Request

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    """Parameters of which two have strides of their own, and a forward that is given as a function."""

    def __init__(self, forward):
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.tied, self.bias = self.weight, nn.Parameter(torch.randn(4))
        self.turned = nn.Parameter(torch.randn(4, 2, 3).permute(2, 0, 1))  # (3, 4, 2)
        self.gaps = nn.Parameter(torch.randn(4, 8)[:, ::2])
        self.call = forward

    def forward(self, x):
        return self.call(self, x)


# name -> (forward, how many gradients are copied)
CASES = {
    "sum": (lambda m, x: m.weight.sum(), 1),
    "of one element": (lambda m, x: m.bias[:1].sum() * 2, 0),
    "broadcast": (lambda m, x: (x * m.bias + m.weight.sum(0).mean()).sin(), 1),
    "tied": (lambda m, x: (m.tied + 1).sum() * 2, 1),
    "the incoming gradient": (lambda m, x: x + m.bias, 1),
    "the incoming gradient for two leaves": (lambda m, x: m.weight + m.other, 2),
    "one gradient for two leaves": (lambda m, x: (m.weight + m.other).sin(), 1),
    "one gradient for two leaves, turned": (lambda m, x: (m.weight + m.other.t()).sin(), 1),
    "other strides": (lambda m, x: (m.turned.contiguous() * 2).sin(), 1),
    "one value for all, other strides": (lambda m, x: m.turned.sum(), 1),
    "of a leaf with gaps, turned": (lambda m, x: (m.gaps.t().contiguous() * 2).sin(), 1),
    "of a leaf with gaps": (lambda m, x: (m.gaps * 2).contiguous().sin(), 0),
    "nobody else's": (lambda m, x: (x @ m.weight).sin() * m.bias, 0),
    "a view of the incoming gradient": (lambda m, x: (m.bias * 1).view(2, 2), 0),
    "views of one gradient": (lambda m, x: torch.cat([m.weight, m.other]), 0),
    "two that die with their copies": (
        lambda m, x: m.weight.t().contiguous().sin() + m.other.t().contiguous().cos(),
        2,
    ),
}


def backward(step, leaves, x):
    """One backward with gradients of one, from no gradient; what it leaves in the leaves."""
    for leaf in leaves:
        leaf.grad = None
    output = step(x)
    output.backward(torch.ones_like(output))
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("name", CASES)
def test_copies_made_by_autograd_are_in_the_graph_and_in_the_peak(name):
    forward, expected = CASES[name]
    model, x = Model(forward), torch.randn(3, 4, requires_grad=True)
    graphs = []

    def planner(graph):
        graphs.append(graph)
        return plan(graph, policy="none")

    step = PlannedStep(model, Request(planner=planner, differentiate="all"))
    step.prepare(x)
    (graph,) = graphs
    copies = [n for n in graph.nodes if n.target == "aten.clone.default" and n.phase == "backward"]
    assert len(copies) == expected

    leaves = [*model.parameters(), x]
    for mine, its in zip(backward(step, leaves, x), backward(model, leaves, x)):
        assert (mine is None) == (its is None)
        assert mine is None or (torch.equal(mine, its) and mine.stride() == its.stride())
    measured = ackpt.measure(lambda: [backward(step, leaves, x)], "cpu", resident=(model, x), repeats=0)
    assert measured.dynamic_peak_bytes == step.plan.dynamic_peak_bytes
