"""Mixed precision with a loss scaler, within a budget.

python examples/mixed_precision.py
"""

import copy

import torch
from torch import nn

import ackpt
from ackpt.metering.meter import memory_format

DEVICE, STEPS = "cpu", 4


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


def train(model, batch):
    """The scale of the loss before every step, and after the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**26)  # gradients overflow
    scales = [scaler.get_scale()]
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
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
        with torch.autocast(DEVICE, torch.float16):
            loss = model(*batch)
        loss.backward()

    measurement = ackpt.measure(step, resident=[model, *batch], warmup=0, repeats=0)
    return measurement.dynamic_peak_bytes


torch.manual_seed(0)
plain = Net().to(DEVICE)
model = copy.deepcopy(plain)
batch = torch.randn(2, 512, 64, device=DEVICE).unbind()

with torch.autocast(DEVICE, torch.float16):  # as the step will run
    planned = ackpt.compile(model, *batch, budget=0.7)
scales = train(planned, batch)

assert scales == train(plain, batch)
skipped = sum(after < before for before, after in zip(scales, scales[1:]))
assert 0 < skipped < STEPS
for one, other in zip(plain.parameters(), model.parameters()):
    assert torch.equal(one, other)
before, after = measured(plain, batch), measured(planned, batch)
promised = planned.plan.dynamic_peak_bytes
assert after <= promised <= 0.7 * before
print(f"plain {memory_format(before)}, planned {memory_format(promised)}")
print(f"measured {memory_format(after)}; {skipped} of {STEPS} steps skipped")
print("scales and parameters as without a plan, to the last bit")
