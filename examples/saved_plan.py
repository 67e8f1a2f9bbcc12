"""Plan once, save the plan, and train by it in another process or on another machine.

python examples/saved_plan.py plan plan.json
python examples/saved_plan.py train plan.json
"""

import sys

import torch
from torch import nn

import ackpt
from ackpt.metering.meter import memory_format


class Net(nn.Module):
    """Layers and the loss."""

    def __init__(self, width=64, depth=3):
        super().__init__()
        self.layers = nn.Sequential()
        for _ in range(depth):
            self.layers.extend([nn.Linear(width, 4 * width), nn.GELU()])
            self.layers.extend([nn.Linear(4 * width, width), nn.GELU()])

    def forward(self, x, targets):
        return nn.functional.mse_loss(self.layers(x), targets)


def make(path):
    """Weights and data may be others; shapes, dtypes, devices and code may not."""
    x, targets = torch.randn(2, 512, 64).unbind()
    planned = ackpt.compile(Net(), x, targets, budget=0.7)
    planned.plan.save(path)
    print(f"planned {memory_format(planned.plan.dynamic_peak_bytes)}, saved to {path}")


def train(path):
    model, batch = Net(), torch.randn(2, 512, 64).unbind()
    plan = ackpt.Plan.load(path)
    planned = ackpt.compile(model, *batch, plan=plan)  # nothing is searched for

    def step():
        model.zero_grad()
        planned(*batch).backward()

    measured = ackpt.measure(step, resident=[model, *batch], warmup=0, repeats=0)
    assert measured.dynamic_peak_bytes <= plan.dynamic_peak_bytes
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(*batch).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    print(f"measured {memory_format(measured.dynamic_peak_bytes)}; gradients are equal")
    try:
        planned(*(tensor[:256] for tensor in batch))
    except ackpt.PlanError as error:
        print(f"half the batch: {error}")
    else:
        raise AssertionError("a plan was used for a step that it was not made for")


if len(sys.argv) != 3 or sys.argv[1] not in ("plan", "train"):
    sys.exit(__doc__)
{"plan": make, "train": train}[sys.argv[1]](sys.argv[2])
