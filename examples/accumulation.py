"""Gradients of several small batches in one optimizer step, within a limit.

python examples/accumulation.py
"""

import copy

import torch
from torch import nn

import ackpt
from ackpt.metering.meter import memory_format


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


def accumulate(model, small_batches):
    model.zero_grad()
    for batch in small_batches:
        (model(*batch) / len(small_batches)).backward()


def measured(model, small_batches):
    """The most bytes that this allocates, gradients among them."""
    resident = [model, *(tensor for batch in small_batches for tensor in batch)]

    def step():
        accumulate(model, small_batches)

    measurement = ackpt.measure(step, resident=resident, warmup=0, repeats=0)
    return measurement.dynamic_peak_bytes


torch.manual_seed(0)
plain = Net()
model = copy.deepcopy(plain)
small_batches = [(torch.randn(512, 64), torch.randn(512, 64)) for _ in range(3)]
before = measured(plain, small_batches)
resident = sum(tensor.nbytes for tensor in (*model.parameters(), *small_batches[0]))
limit = resident + int(0.75 * before)

# From the second small batch on there are gradients: the plan counts them.
planned = ackpt.compile(model, *small_batches[0], budget=limit, accumulation=True)

accumulate(plain, small_batches)
accumulate(planned, small_batches)
for one, other in zip(plain.parameters(), model.parameters()):
    torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
after, plan = measured(planned, small_batches), planned.plan
assert after <= plan.peak_bytes - resident and plan.peak_bytes <= limit
print(f"plain {memory_format(before)}, limit {memory_format(limit - resident)}")
print(f"measured {memory_format(after)}, with the accumulated gradients")
print("gradients as without a plan, to the last bit")
