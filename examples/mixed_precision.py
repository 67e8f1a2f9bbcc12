"""Train in mixed precision with a loss scaler, within a budget.

python examples/mixed_precision.py
"""

import copy

import torch
from torch import nn

import ackpt
from ackpt.metering.meter import memory_format

DEVICE, STEPS = "cpu", 4


class Net(nn.Module):
    """A network that returns its loss."""

    def __init__(self, width=64, depth=3):
        super().__init__()
        self.layers = nn.Sequential()
        for _ in range(depth):
            self.layers.extend([nn.Linear(width, 4 * width), nn.GELU()])
            self.layers.extend([nn.Linear(4 * width, width), nn.GELU()])

    def forward(self, x, targets):
        return nn.functional.mse_loss(self.layers(x), targets)


def train(model, batch):
    """The loss scale before every step and after the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**26)  # gradients overflow
    scales = [scaler.get_scale()]
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = scaler.scale(model(*batch))  # mse_loss's result is large
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def measure_peak(model, batch):
    """The dynamic peak of one forward and backward, in bytes."""

    def step():
        model.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = model(*batch)
        loss.backward()

    measurement = ackpt.measure(step, resident=[model, *batch], warmup=0, repeats=0)
    return measurement.dynamic_peak_bytes


torch.manual_seed(0)
baseline = Net().to(DEVICE)
model = copy.deepcopy(baseline)
batch = torch.randn(2, 512, 64, device=DEVICE).unbind()

with torch.autocast(DEVICE, torch.float16):  # as the step will run
    planned = ackpt.compile(model, *batch, budget=0.7)
scales = train(planned, batch)

assert scales == train(baseline, batch)
skipped = sum(after < before for before, after in zip(scales, scales[1:]))
assert 0 < skipped < STEPS
assert all(map(torch.equal, baseline.parameters(), model.parameters()))
baseline_peak, peak = measure_peak(baseline, batch), measure_peak(planned, batch)
planned_peak = planned.plan.dynamic_peak_bytes
assert peak <= planned_peak <= 0.7 * baseline_peak
print(f"baseline {memory_format(baseline_peak)}, plan {memory_format(planned_peak)}")
print(f"measured {memory_format(peak)}; {skipped} of {STEPS} steps skipped")
print("scales and parameters equal the baseline's to the last bit")
