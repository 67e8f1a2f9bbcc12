"""Matrix products of inputs with any strides run the kernels of eager, in a capture and in a region under a mode."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_as_eager
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ackpt

INPUTS = {
    "selected": lambda x: x.view(2, 3, 2, 16)[:, :, 1],
    "every second": lambda x: x[:, ::2],
    "shifted": lambda x: x[:, 1:],
    "transposed": lambda x: x.transpose(0, 1),
    "expanded": lambda x: x[:, :1].expand(2, 6, 16),
    "one of three": lambda x: torch.cat([x, x, x], -1).unflatten(-1, (3, 16)).unbind(2)[1],
    "batch of one": lambda x: x[:1, 1:],
    "length of one": lambda x: x[:, 1:2],
    "size of one, shifted": lambda x: x[:, 1:].unsqueeze(1),
}
PRODUCTS = {
    "linear": lambda m, x: F.linear(x, m.weight, m.bias),
    "matmul": lambda m, x: x @ m.weight.mT[None],
    "matrix first": lambda m, x: m.weight @ x.mT,
    "vector first": lambda m, x: m.bias[:16] @ x.mT,
    "einsum": lambda m, x: torch.einsum("...d,kd->...k", x, m.weight),
}


class Model(nn.Module):
    def __init__(self, inputs, product, frozen):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 24).requires_grad_(not frozen)
        self.inputs, self.product = inputs, product

    def forward(self, x):
        return self.product(self.second, self.inputs(self.first(x)))


def kernels(step, x) -> list[str]:
    step(x).square().mean().backward()  # the first call of a planned step captures
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(x).square().mean().backward()
    return sorted(e.name for e in profile.events() if e.name in ("aten::mm", "aten::bmm", "aten::mv", "aten::addmm"))


@pytest.mark.parametrize(("product", "frozen"), [("linear", False), *((product, True) for product in PRODUCTS)])
def test_a_capture_runs_the_kernels_of_eager(product, frozen, one_thread):
    for name, inputs in INPUTS.items():
        model, x = Model(inputs, PRODUCTS[product], frozen), torch.randn(2, 6, 16)
        step = ackpt.compile(model, x, policy="none")
        assert kernels(model, x) == kernels(step, x), name
        assert_as_eager(model, step, x)


@pytest.mark.parametrize("counted", ["forward", "backward", "both"])
def test_a_region_recomputes_under_a_mode_that_its_forward_did_not_have(counted):
    model, x = Model(INPUTS["selected"], PRODUCTS["linear"], frozen=True), torch.randn(2, 6, 16)
    model(x).square().mean().backward()
    expected = [p.grad for p in model.first.parameters()]
    for _ in range(5):  # the first are recorded, the later ones compared by their graphs
        model.zero_grad()
        with FlopCounterMode(display=False) if counted != "backward" else contextlib.nullcontext():
            loss = ackpt.checkpoint(model, x).square().mean()
        with FlopCounterMode(display=False) if counted != "forward" else contextlib.nullcontext():
            loss.backward()
        assert all(map(torch.equal, expected, [p.grad for p in model.first.parameters()]))
