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
limit = int(0.75 * before)

# A plan is for a step without gradients before it. From the second small batch on
# there are some: leave them room.
gradients = sum(parameter.nbytes for parameter in model.parameters())
resident = sum(tensor.nbytes for tensor in (*model.parameters(), *small_batches[0]))
planned = ackpt.compile(model, *small_batches[0], budget=resident + limit - gradients)

accumulate(plain, small_batches)
accumulate(planned, small_batches)
for one, other in zip(plain.parameters(), model.parameters()):
    torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
after, promised = measured(planned, small_batches), planned.plan.dynamic_peak_bytes
assert promised < after <= promised + gradients <= limit
print(f"plain {memory_format(before)}, limit {memory_format(limit)}")
print(f"measured {memory_format(after)}, with {memory_format(gradients)} of gradients")
print("gradients as without a plan, to the last bit")
