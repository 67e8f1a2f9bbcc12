"""Gradients for which torch has another formula for tensor subclasses are refused; others are those of eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ackpt

ROWS, MASK = torch.randn(6, 5), torch.tensor([True, False, True, False, False])
TARGETS, WEIGHTS = torch.rand(8, 6, 5), torch.rand(5) + 0.5
EQUAL = {
    "filled with a value": lambda h, w: (h.masked_fill(MASK, w.detach()) * ROWS).sum(),
    "a learned value where a mask is true": lambda h, w: (torch.where(MASK, w, h) * ROWS).sum(),
    "maximum": lambda h, w: (torch.maximum(h, ROWS * w) * ROWS).sum(),
    "prod without a gradient": lambda h, w: (h.detach().prod(1).sum() * w) + h.sum(),
    "bce in one precision": lambda h, w: F.binary_cross_entropy_with_logits(h, TARGETS.to(h.dtype)),
}
REFUSED = {
    "prod": (lambda h, w: h.prod() + h.sum(), "Multiply the factors"),
    "prod of a dimension": (lambda h, w: h.prod(1).sum(), "Multiply the factors"),
    "masked_fill": (lambda h, w: (h.masked_fill(MASK, w) * ROWS).sum(), "torch.where"),
    "maximum": (lambda h, w: torch.maximum(h.transpose(1, 2), ROWS.t() * w).sum(), "contiguous"),
    "minimum": (lambda h, w: torch.minimum(h.transpose(1, 2), w).sum(), "contiguous"),
    "binary_cross_entropy_with_logits": (
        lambda h, w: F.binary_cross_entropy_with_logits(h.bfloat16(), TARGETS, pos_weight=WEIGHTS),
        "Convert target and weights",
    ),
}


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.value, self.function = nn.Linear(4, 5), nn.Parameter(torch.tensor(0.3)), function

    def forward(self, x):
        return self.function(self.layer(x), self.value)


def _gradients(model, call, x):
    model.zero_grad()
    call(x).float().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("name", EQUAL)
def test_gradients_are_those_of_eager(name, policy, dtype):
    torch.manual_seed(0)
    model, x = Model(EQUAL[name]).to(dtype), torch.randn(8, 6, 4, dtype=dtype)
    own = _gradients(model, model, x)
    assert all(map(torch.equal, own, _gradients(model, ackpt.compile(model, x, policy=policy, regions=False), x)))


@pytest.mark.parametrize("name", REFUSED)
def test_gradients_with_another_formula_are_refused_or_planned_in_parts(name):
    function, advice = REFUSED[name]
    model, x = Model(function), torch.randn(8, 6, 4)
    with pytest.raises(ackpt.TraceError, match=rf"differentiates {name.split()[0]} at .*formulas.py:\d+.*{advice}"):
        ackpt.trace(model, x)
    own = _gradients(model, model, x)
    assert all(map(torch.equal, own, _gradients(model, ackpt.compile(model, x, budget="1GiB"), x)))
