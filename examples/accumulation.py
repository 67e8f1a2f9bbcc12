"""Accumulate the gradients of several micro-batches within a budget.

python examples/accumulation.py
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
            self.layers.extend([nn.Linear(width, 4 * width), nn.GELU()])
            self.layers.extend([nn.Linear(4 * width, width), nn.GELU()])

    def forward(self, x, targets):
        return nn.functional.mse_loss(self.layers(x), targets)


def accumulate(model, micro_batches):
    model.zero_grad()
    for batch in micro_batches:
        (model(*batch) / len(micro_batches)).backward()


def measure_peak(model, micro_batches):
    """The dynamic peak of all micro-batches in bytes, including the gradients."""
    resident = [model, *(tensor for batch in micro_batches for tensor in batch)]

    def step():
        accumulate(model, micro_batches)

    measurement = ackpt.measure(step, resident=resident, warmup=0, repeats=0)
    return measurement.dynamic_peak_bytes


torch.manual_seed(0)
baseline = Net()
model = copy.deepcopy(baseline)
micro_batches = [(torch.randn(512, 64), torch.randn(512, 64)) for _ in range(3)]
baseline_peak = measure_peak(baseline, micro_batches)
resident = sum(tensor.nbytes for tensor in (*model.parameters(), *micro_batches[0]))
budget = resident + int(0.75 * baseline_peak)

# From the second micro-batch on, the plan counts the accumulated gradients.
planned = ackpt.compile(model, *micro_batches[0], budget=budget, accumulation=True)

accumulate(baseline, micro_batches)
accumulate(planned, micro_batches)
for expected, actual in zip(baseline.parameters(), model.parameters()):
    torch.testing.assert_close(actual.grad, expected.grad, rtol=0, atol=0)
peak, planned_peak = measure_peak(planned, micro_batches), planned.plan.peak_bytes
assert resident + peak <= planned_peak <= budget
budget_left = memory_format(budget - resident)
print(f"baseline {memory_format(baseline_peak)}, budget {budget_left}")
print(f"measured {memory_format(peak)}, including the accumulated gradients")
print("gradients equal the baseline's to the last bit")
