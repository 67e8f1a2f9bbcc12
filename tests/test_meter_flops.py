"""FLOPs are whole numbers that a hand can count."""

import contextlib
import io

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ackpt
from ackpt.meter import count_flops

N, D = 32, 64


@pytest.fixture
def mlp():
    return torch.nn.Sequential(*(torch.nn.Linear(D, D) for _ in range(4))), torch.randn(N, D)


def test_recompute_is_one_more_forward(mlp):
    model, x = mlp
    x.requires_grad_()
    forward = 4 * 2 * N * D * D
    assert count_flops(lambda: model(x)) == forward
    assert count_flops(lambda: model(x).sum().backward()) == 3 * forward
    assert count_flops(lambda: torch_checkpoint(model, x, use_reentrant=True).sum().backward()) == 4 * forward
    # This variant stops as soon as it has what was saved: the last layer's output is not.
    again = count_flops(lambda: torch_checkpoint(model, x, use_reentrant=False).sum().backward())
    assert again == 4 * forward - forward // 4
    assert count_flops(lambda: ackpt.checkpoint(model, x).sum().backward()) == 4 * forward


def test_cpu_flash_attention():
    batch, heads, length, dim = 2, 3, 16, 8
    q, k, v = (torch.randn(batch, heads, length, dim, requires_grad=True) for _ in range(3))
    products = 2 * batch * heads * length * length * dim
    assert count_flops(lambda: F.scaled_dot_product_attention(q, k, v)) == 2 * products
    # Backward forms the scores again, then the gradients of scores, v, q and k.
    assert count_flops(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward()) == 7 * products


def test_checkpointed_parameters_without_input_gradient():
    layer = torch.nn.Linear(D, D)
    x = torch.randn(N, D)
    assert count_flops(lambda: ackpt.checkpoint(layer, x).sum().backward()) == 3 * 2 * N * D * D


def test_prints_nothing(mlp):
    model, x = mlp
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        count_flops(lambda: model(x))
    assert out.getvalue() == ""
