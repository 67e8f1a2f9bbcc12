"""Random operations of a captured step draw what eager draws, whatever the order in which memory lies."""

from __future__ import annotations

import pytest
import torch
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
    results = []
    for call in (model, ackpt.compile(model, policy=policy, differentiate="all")):
        model.weight.grad = None
        torch.manual_seed(1)
        output = call()
        output.square().sum().backward()
        results.append((output.detach(), model.weight.grad, torch.get_rng_state()))
    assert all(map(torch.equal, *results))


def test_dropout_is_one_random_operation():
    graph = ackpt.trace(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.ones(2, 4))
    assert [node.target for node in graph.nodes if node.is_random] == ["ackpt_graph.dropout_noise.default"]
