"""The lowest peak within 10 % of the time, for those who do not know their budget.

python examples/slowdown.py
"""

import copy

import torch
from torch import nn

import ackpt
from ackpt.metering.meter import memory_format


class Classifier(nn.Module):
    """Residual layers that return their loss."""

    def __init__(self, width=128, depth=8):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x, targets):
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x), targets)


torch.manual_seed(0)
baseline = Classifier()
model = copy.deepcopy(baseline)
batch = torch.randn(512, 128), torch.randint(10, (512,))

step = ackpt.apply_budget(model, batch, slowdown="10%")  # the line to add


def train():
    model.zero_grad()
    model(*batch).backward()


measured = ackpt.measure(train, resident=[model, *batch], warmup=1, repeats=0)
baseline(*batch).backward()
for expected, found in zip(baseline.parameters(), model.parameters()):
    assert expected.grad is not None and found.grad is not None
    assert torch.equal(expected.grad, found.grad)
assert measured.peak_bytes == step.plan.peak_bytes and step.plan.cost <= 0.1
before, after = step.plan.baseline_peak_bytes, measured.peak_bytes
print(f"peak {memory_format(after)} instead of {memory_format(before)}")
print(f"modeled time: {step.plan.cost:.1%} more")
