"""Gradients for which torch has another formula for tensor subclasses are those of eager to the last bit."""

import pytest
import torch
from conftest import assert_as_eager, assert_equal, left_by
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ackpt
from ackpt.planner.capture.patches import python_kernels  # noqa: F401 - defines the operation

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


def _check(function, policy, dtype=torch.float32):
    torch.manual_seed(0)
    model, x = Model(function).to(dtype), torch.randn(8, 6, 4, dtype=dtype)
    assert_as_eager(model, ackpt.compile(model, x, policy=policy, regions=False), x)


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_are_bit_equal(name, policy):
    _check(FORMULAS[name], policy)


@pytest.mark.parametrize("name", MIXED)
def test_formulas_are_bit_equal_in_mixed_precision(name):
    _check(MIXED[name], "full", torch.bfloat16)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*FORMULAS, *MIXED])
def test_formulas_are_bit_equal_while_measuring(name):
    """A dispatch mode excludes autograd from the operations that run below it."""
    dtype = torch.bfloat16 if name in MIXED else torch.float32
    model, x = Model({**FORMULAS, **MIXED}[name]).to(dtype), torch.randn(8, 6, 4, dtype=dtype)
    step = ackpt.compile(model, x, policy="none", regions=False)

    own = left_by(model, model, x)
    left_by(model, step, x)
    flops = ackpt.count_flops(lambda: left_by(model, model, x))
    assert ackpt.count_flops(lambda: left_by(model, step, x)) == flops > 0
    assert ackpt.measure(lambda: left_by(model, step, x), resident=(model, x), repeats=0).flops == flops
    with _Mode():
        assert_equal(own, left_by(model, step, x), "below a mode")
        with _Mode():
            assert_equal(own, left_by(model, step, x), "below two")


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_gradient_operation_runs_below_dispatch_modes(dtype):
    x, gradient = torch.randn(3, 4, dtype=dtype), torch.randn(3, dtype=dtype)
    leaf = x.clone().requires_grad_()
    leaf.prod(1).backward(gradient)

    def run():
        return torch.ops.ackpt_graph.gradient(gradient, "aten.prod.dim_int(t[0], 1)", [x], 0)

    with torch.no_grad():
        without_grad = run()
        with _Mode():
            below_mode = run()
    with _Mode():
        with_grad = run()
    for found in (run(), without_grad, below_mode, with_grad):
        assert torch.equal(found, leaf.grad)
        assert not found.requires_grad


def test_the_baseline_counts_no_more_than_eager_allocates_for_a_gradient():
    def forward(h, w):
        return torch.maximum(h.transpose(0, 1), h.sin().transpose(0, 1)).sum() * w

    model, x = Model(forward), torch.randn(32, 16, 4)
    eager = ackpt.measure(lambda: model(x).backward(), resident=[model, x])
    plan = ackpt.compile(model, x, policy="none", regions=False).plan
    assert plan.baseline_dynamic_peak_bytes <= eager.dynamic_peak_bytes
