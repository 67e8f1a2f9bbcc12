"""Gradients for which torch has another formula for tensor subclasses are those of eager to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ackpt

ROWS, MASK = torch.randn(6, 5), torch.tensor([True, False, True, False, False])
TARGETS, WEIGHTS = torch.rand(8, 6, 5), torch.rand(5) + 0.5


def with_zeros(h):
    return torch.where(torch.arange(5) == 2, 0.0, h)


FORMULAS = {
    "prod": lambda h, w: h.prod() + h.sum(),
    "prod of a dimension": lambda h, w: h.prod(1).sum(),
    "prod that keeps a dimension": lambda h, w: (h.prod(-1, keepdim=True) * h).sum(),
    "prod with zeros": lambda h, w: with_zeros(h).prod(2).sum() + with_zeros(h).prod(),
    "prod of transposed": lambda h, w: (h.transpose(1, 2).prod(0) * w).sum(),
    "filled with a learned value": lambda h, w: (h.masked_fill(MASK, w) * ROWS).sum(),
    "filled with a value": lambda h, w: (h.masked_fill(MASK, w.detach()) * ROWS).sum(),
    "maximum": lambda h, w: (torch.maximum(h.transpose(1, 2), ROWS.t() * w) * ROWS.t()).sum(),
    "minimum": lambda h, w: (torch.minimum(h.transpose(1, 2), w) * ROWS.t()).sum(),
    "maximum of broadcast": lambda h, w: (
        torch.maximum(h.transpose(0, 2), ROWS.t()[..., None] * w) * h[:, :1].transpose(0, 2)
    ).sum(),
    "minimum of a sum": lambda h, w: (torch.minimum(h.transpose(1, 2), h.sum(0).t()) * ROWS.t()).sum(),
}
MIXED = {
    "bce": lambda h, w: F.binary_cross_entropy_with_logits(h, TARGETS),
    "bce in one precision": lambda h, w: F.binary_cross_entropy_with_logits(h, TARGETS.to(h.dtype)),
    "bce of sums": lambda h, w: F.binary_cross_entropy_with_logits(h, TARGETS, WEIGHTS, reduction="sum"),
    "bce with weights": lambda h, w: F.binary_cross_entropy_with_logits(h, TARGETS, pos_weight=WEIGHTS),
}


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.value, self.function = nn.Linear(4, 5), nn.Parameter(torch.tensor(0.3)), function

    def forward(self, x):
        return self.function(self.layer(x), self.value)


def _gradients(function, policy, dtype=torch.float32):
    torch.manual_seed(0)
    model, x, found = Model(function).to(dtype), torch.randn(8, 6, 4, dtype=dtype), []
    for call in (model, ackpt.compile(model, x, policy=policy, regions=False)):
        model.zero_grad()
        call(x).float().backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    return found


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name, policy):
    own, planned = _gradients(FORMULAS[name], policy)
    assert all(map(torch.equal, own, planned))


@pytest.mark.parametrize("name", MIXED)
def test_formulas_in_mixed_precision(name):
    own, planned = _gradients(MIXED[name], "full", torch.bfloat16)
    assert all(map(torch.equal, own, planned))
