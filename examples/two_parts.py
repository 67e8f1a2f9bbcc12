"""Train two regions of a module with their own learning rates: 100 steps of SGD.

python examples/two_parts.py
"""

import copy

import torch
from torch import nn

import ackpt
from ackpt.metering.meter import memory_format


class Net(nn.Module):
    """An encoder and a head; `checkpointed` makes a region of each."""

    def __init__(self, d=64, f=512):
        super().__init__()
        wide = nn.Linear(d, f), nn.GELU(), nn.Linear(f, d), nn.Tanh()
        self.encoder = nn.Sequential(*wide)
        head = nn.Linear(d, f), nn.GELU(), nn.Dropout(0.1), nn.Linear(f, 1)
        self.head = nn.Sequential(*head)
        self.checkpointed = False

    def forward(self, x):
        for part in (self.encoder, self.head):
            x = ackpt.checkpoint(part, x) if self.checkpointed else part(x)
        return x


def train(model, x, y, steps):
    """Train, and return the loss of every step."""
    torch.manual_seed(1)  # the dropout masks
    groups = [
        {"params": model.encoder.parameters()},
        {"params": model.head.parameters(), "lr": 0.05},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def measure_peak(model, x):
    """Return the dynamic peak of one forward and backward, in bytes."""

    def step():
        model(x).sum().backward()

    return ackpt.measure(step, resident=[model, x], repeats=0).dynamic_peak_bytes


torch.manual_seed(0)
x = torch.randn(512, 64)
y = x[:, :1].sin()
baseline = Net()
model = copy.deepcopy(baseline)
model.checkpointed = True
losses = train(baseline, x, y, 100)
assert train(model, x, y, 100) == losses
assert all(map(torch.equal, baseline.parameters(), model.parameters()))

peaks = [measure_peak(baseline, x), measure_peak(model, x)]
assert peaks[1] < peaks[0]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in 100 steps, equal with regions")
print(f"baseline {memory_format(peaks[0])}, two regions {memory_format(peaks[1])}")
