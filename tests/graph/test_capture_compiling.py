"""A captured step takes the ways that the plain model takes, also where a model asks whether it is compiled."""

from __future__ import annotations

import torch
from conftest import assert_equal
from torch import nn

import ackpt


class Asks(nn.Linear):
    def forward(self, x):
        return (super().forward(x) * (3 if torch.compiler.is_compiling() else 2)).square().sum()


class Looks(nn.Linear):
    """Looks at values, unless it is compiled."""

    def forward(self, x):
        if not torch.compiler.is_compiling() and not bool((x == x).all()):
            raise ValueError("not a number")
        return super().forward(x).square().sum()


def same(model, x):
    step = ackpt.compile(model, x, policy="full")
    found = []
    for run in (model, step):
        model.zero_grad()
        loss = run(x)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert_equal(*found, "loss and gradients")
    assert not torch.compiler.is_compiling()


def test_a_model_that_asks_is_captured_as_it_runs_plainly():
    torch.manual_seed(0)
    same(Asks(4, 4), torch.randn(3, 4))


def test_a_model_that_looks_at_values_unless_it_is_compiled_is_captured_so():
    torch.manual_seed(0)
    same(Looks(4, 4), torch.randn(3, 4))
