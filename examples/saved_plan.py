"""Plan once, save the plan, and train by it in another process or on another machine.

python examples/saved_plan.py plan plan.json
python examples/saved_plan.py train plan.json
"""

import sys

import torch
from torch import nn

import ackpt
from ackpt.meter import memory_format


class Net(nn.Module):
    """Layers and the loss."""

    def __init__(self, width=64, depth=3):
        super().__init__()
        sizes = [(width, 4 * width), (4 * width, width)] * depth
        self.layers = nn.Sequential(*(layer for size in sizes for layer in (nn.Linear(*size), nn.GELU())))

    def forward(self, x, targets):
        return nn.functional.mse_loss(self.layers(x), targets)


def make(path):
    """Other weights and other data make the same plan; other shapes, dtypes, devices or code do not."""
    planned = ackpt.compile(Net(), torch.randn(512, 64), torch.randn(512, 64), budget=0.7)
    planned.plan.save(path)
    print(f"planned {memory_format(planned.plan.dynamic_peak_bytes)}, saved to {path}")


def train(path):
    model, batch = Net(), (torch.randn(512, 64), torch.randn(512, 64))
    plan = ackpt.Plan.load(path)
    planned = ackpt.compile(model, *batch, plan=plan)  # nothing is searched for

    def step():
        model.zero_grad()
        planned(*batch).backward()

    measured = ackpt.measure(step, resident=[model, *batch], warmup=0, repeats=0).dynamic_peak_bytes
    assert measured <= plan.dynamic_peak_bytes
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(*batch).backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()], rtol=0, atol=0)
    print(f"planned {memory_format(plan.dynamic_peak_bytes)}, measured {memory_format(measured)}; gradients are equal")
    try:
        planned(*(tensor[:256] for tensor in batch))
    except ackpt.PlanError as error:
        print(f"half the batch: {error}")
    else:
        raise AssertionError("a plan was used for a step that it was not made for")


{"plan": make, "train": train}[sys.argv[1]](sys.argv[2])
