"""Train a model that branches on values within a budget.

python examples/branching_models.py
"""

import copy
import random

import torch
from torch import nn

import ackpt


class SkipsAtRandom(nn.Module):
    """A residual block that a Python branch skips at random."""

    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        if self.training and random.random() < 0.2:
            return x
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, width: int = 64, layers: int = 6):
        super().__init__()
        self.blocks = nn.Sequential(*(SkipsAtRandom(width) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.head(self.blocks(x)), labels)


def train(model: nn.Module, batch, steps: int = 5) -> list[float]:
    """The losses of a few steps with fixed random seeds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    random.seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
model, batch = Model(), (torch.randn(1024, 64), torch.randint(10, (1024,)))
baseline = copy.deepcopy(model)

step = ackpt.apply_budget(model, batch, budget=0.6)
print(step.plan)  # made from the first step, which checkpoints all blocks

assert train(model, batch) == train(baseline, batch), (
    "the losses equal the baseline's to the last bit"
)
assert all(
    map(torch.equal, model.state_dict().values(), baseline.state_dict().values())
)
print(step.plan.table())
model.zero_grad()
measured = ackpt.measure(
    lambda: model(*batch).backward(), resident=(model, *batch), warmup=0, repeats=0
)
assert measured.peak_bytes <= step.plan.resident_bytes + (step.plan.limit_bytes or 0)
mib = 2**20
print(f"measured peak {measured.peak_bytes / mib:.1f} MiB")
print(f"baseline peak {(step.plan.baseline_peak_bytes or 0) / mib:.1f} MiB")
