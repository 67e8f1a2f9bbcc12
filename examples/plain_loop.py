"""A plain training loop with half of the baseline's dynamic peak.

python examples/plain_loop.py
"""

import copy

import torch
from torch import nn

import ackpt
from ackpt.metering.meter import memory_format


class Net(nn.Module):
    """A network that returns its loss, so that the budget covers the loss as well."""

    def __init__(self, width=64, depth=4, classes=16):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            wide = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()]
            self.blocks.append(nn.Sequential(*wide, nn.Linear(4 * width, width)))
        self.head = nn.Linear(width, classes)

    def forward(self, x, targets):
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), targets)


def train(model, batches):
    optimizer = torch.optim.AdamW(model.parameters())
    for x, targets in batches:
        optimizer.zero_grad()
        model(x, targets).backward()
        optimizer.step()


def measure_peak(model, batch):
    """The dynamic peak of one forward and backward, in bytes."""

    def step():
        model.zero_grad()
        model(*batch).backward()

    measurement = ackpt.measure(step, resident=[model, *batch], warmup=0, repeats=0)
    return measurement.dynamic_peak_bytes


torch.manual_seed(0)
baseline = Net()
model = copy.deepcopy(baseline)
batches = [(torch.randn(1024, 64), torch.randint(16, (1024,))) for _ in range(3)]

planned = ackpt.compile(model, *batches[0], budget=0.5)  # the line to add
train(planned, batches)

train(baseline, batches)
assert all(map(torch.equal, baseline.parameters(), model.parameters()))
baseline_peak = measure_peak(baseline, batches[0])
peak = measure_peak(planned, batches[0])
planned_peak = planned.plan.dynamic_peak_bytes
assert peak <= planned_peak <= 0.5 * baseline_peak
print(f"baseline {memory_format(baseline_peak)}, plan {memory_format(planned_peak)}")
print(f"measured {memory_format(peak)}, cost {planned.plan.cost:.1%} of the step")
print("parameters equal the baseline's to the last bit")
