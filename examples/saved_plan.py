"""Plan once, save the plan, and train with it in another process.

python examples/saved_plan.py plan plan.json
python examples/saved_plan.py train plan.json
"""

import sys

import torch
from torch import nn

import ackpt
from ackpt.metering.meter import memory_format


class Net(nn.Module):
    """A network that returns its loss."""

    def __init__(self, width=64, depth=3):
        super().__init__()
        self.layers = nn.Sequential()
        for _ in range(depth):
            self.layers.extend([nn.Linear(width, 4 * width), nn.GELU()])
            self.layers.extend([nn.Linear(4 * width, width), nn.GELU()])

    def forward(self, x, targets):
        return (self.layers(x) - targets).square().mean()


def batch_of(size):
    return torch.randn(size, 64), torch.randn(size, 64)


def make_plan(path):
    """The plan serves other weights, data and sizes, but no other dtypes or code."""
    planned = ackpt.compile(Net(), *batch_of(512), budget=0.7)
    planned.plan.save(path)
    print(f"planned {memory_format(planned.plan.dynamic_peak_bytes)}, saved to {path}")


def train(path):
    model, plan = Net(), ackpt.Plan.load(path)
    planned = ackpt.compile(model, *batch_of(512), plan=plan)  # no search
    for size in (512, 100):  # also a smaller last batch
        check(model, planned, batch_of(size))
    try:
        planned(*batch_of(2048))
    except ackpt.BudgetError as error:
        print(f"four times the batch: {error}")
    else:
        raise AssertionError("a step ran although it exceeds the budget of the plan")


def check(model, planned, batch):
    """Check that the step keeps the planned peak and has the baseline's gradients."""
    planned.prepare(*batch)

    def step():
        model.zero_grad()
        planned(*batch).backward()

    measured = ackpt.measure(step, resident=[model, *batch], warmup=0, repeats=0)
    assert measured.dynamic_peak_bytes <= planned.plan.dynamic_peak_bytes
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(*batch).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
    peak = memory_format(measured.dynamic_peak_bytes)
    print(f"{len(batch[0])} rows: measured {peak}; gradients equal the baseline's")


if len(sys.argv) != 3 or sys.argv[1] not in ("plan", "train"):
    sys.exit(__doc__)
{"plan": make_plan, "train": train}[sys.argv[1]](sys.argv[2])
