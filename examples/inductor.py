"""Compile a planned step with Inductor (needs a C++ compiler).

python examples/inductor.py
"""

import copy

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
            self.layers.extend(
                [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
            )

    def forward(self, x, targets):
        return nn.functional.mse_loss(self.layers(x), targets)


def measure_peak(model, batch):
    """The dynamic peak of one forward and backward, in bytes."""

    def step():
        model.zero_grad()
        model(*batch).backward()

    step()  # compiles
    measurement = ackpt.measure(step, resident=[model, *batch], warmup=0, repeats=0)
    return measurement.dynamic_peak_bytes


torch.manual_seed(0)
baseline = Net()
model = copy.deepcopy(baseline)
batch = torch.randn(1024, 64), torch.randn(1024, 64)

plans = []
options = {"budget": 0.7, "compiler": "inductor", "on_plan": plans.append}
compiled = torch.compile(model, backend="ackpt", options=options)  # the line to add

baseline_peak, peak = measure_peak(baseline, batch), measure_peak(compiled, batch)
(plan,) = plans  # one graph has one plan
for expected, actual in zip(baseline.parameters(), model.parameters()):
    # Fused kernels round differently.
    torch.testing.assert_close(actual.grad, expected.grad)
planned_peak = plan.dynamic_peak_bytes
assert peak <= planned_peak <= 0.7 * plan.baseline_dynamic_peak_bytes
print(f"baseline {memory_format(baseline_peak)}, plan {memory_format(planned_peak)}")
print(f"measured {memory_format(peak)}")
print("gradients equal the baseline's except in the last bits")
