"""Mixed precision with a loss scaler, within a budget.

python examples/mixed_precision.py
"""

import copy

import torch
from torch import nn

import ackpt
from ackpt.meter import memory_format

DEVICE, STEPS = "cpu", 4


class Net(nn.Module):
    """Layers and the loss."""

    def __init__(self, width=64, depth=3):
        super().__init__()
        sizes = [(width, 4 * width), (4 * width, width)] * depth
        self.layers = nn.Sequential(*(layer for size in sizes for layer in (nn.Linear(*size), nn.GELU())))

    def forward(self, x, targets):
        return nn.functional.mse_loss(self.layers(x), targets)


def autocast():
    return torch.autocast(DEVICE, dtype=torch.float16)


def train(model, batch):
    """The scale of the loss before every step, and after the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**26)  # so high that the first gradients overflow
    scales = [scaler.get_scale()]
    for _ in range(STEPS):
        optimizer.zero_grad()
        with autocast():
            loss = model(*batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def measured(model, batch):
    """The most bytes that one forward and backward allocate."""

    def step():
        model.zero_grad()
        with autocast():
            loss = model(*batch)
        loss.backward()

    return ackpt.measure(step, resident=[model, *batch], warmup=0, repeats=0).dynamic_peak_bytes


torch.manual_seed(0)
plain = Net().to(DEVICE)
model = copy.deepcopy(plain)
batch = torch.randn(512, 64, device=DEVICE), torch.randn(512, 64, device=DEVICE)

with autocast():  # the step is captured, and planned, in the precision in which it will run
    planned = ackpt.compile(model, *batch, budget=0.7)
scales = train(planned, batch)

assert scales == train(plain, batch)
skipped = sum(after < before for before, after in zip(scales, scales[1:]))
assert 0 < skipped < STEPS
assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters()))
before, after, plan = measured(plain, batch), measured(planned, batch), planned.plan
assert after <= plan.dynamic_peak_bytes <= 0.7 * before
print(f"plain {memory_format(before)}; planned {memory_format(plan.dynamic_peak_bytes)}, ", end="")
print(f"measured {memory_format(after)}")
print(f"{skipped} of {STEPS} steps skipped by the scaler; scales and parameters as without a plan, to the last bit")
