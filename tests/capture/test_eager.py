"""A model is captured as eager computes it, whatever torch's settings are outside."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config

import ackpt


class Permuted(nn.Module):
    """The memory of its output runs in another order than the output's dimensions; its backward sums over both."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(7, 31, 5)), nn.Parameter(torch.zeros(()))

    def forward(self):
        return (self.weight * 2).movedim(0, -1) + self.bias


@pytest.mark.parametrize("as_outputs", [False, True])  # the defaults of torch 2.11 and of later ones
def test_incoming_gradients_keep_their_strides(as_outputs):
    """Contiguous copies of them are summed in another order, and the last bit differs."""
    torch.manual_seed(0)
    model, gradients = Permuted(), []
    with functorch_config.patch(guess_tangent_strides_as_outputs=as_outputs):
        step = ackpt.compile(model, policy="none", differentiate="all")
        for call in (model, step):
            model.bias.grad = None
            call().sin().sum().backward()
            gradients.append(model.bias.grad)
    assert torch.equal(*gradients)
