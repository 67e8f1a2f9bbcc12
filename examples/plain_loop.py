"""A plain training loop whose step allocates at most half of what it did.

python examples/plain_loop.py
"""

import copy

import torch
from torch import nn

import ackpt
from ackpt.metering.meter import memory_format


class Net(nn.Module):
    """Residual blocks and the loss: the budget covers what the model computes."""

    def __init__(self, width=64, depth=4, classes=16):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            wide = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()]
            self.blocks.append(nn.Sequential(*wide, nn.Linear(4 * width, width)))
        self.head = nn.Linear(width, classes)

    def forward(self, x, targets):
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), targets)


def train(model, batches):
    optimizer = torch.optim.AdamW(model.parameters())
    for x, targets in batches:
        optimizer.zero_grad()
        model(x, targets).backward()
        optimizer.step()


def measured(model, batch):
    """The most bytes that one forward and backward allocate."""

    def step():
        model.zero_grad()
        model(*batch).backward()

    measurement = ackpt.measure(step, resident=[model, *batch], warmup=0, repeats=0)
    return measurement.dynamic_peak_bytes


torch.manual_seed(0)
plain = Net()
model = copy.deepcopy(plain)
batches = [(torch.randn(1024, 64), torch.randint(16, (1024,))) for _ in range(3)]

planned = ackpt.compile(model, *batches[0], budget=0.5)  # the line to add
train(planned, batches)

train(plain, batches)
for one, other in zip(plain.parameters(), model.parameters()):
    assert torch.equal(one, other)
before, after = measured(plain, batches[0]), measured(planned, batches[0])
promised = planned.plan.dynamic_peak_bytes
assert after <= promised <= 0.5 * before
print(f"plain {memory_format(before)}, planned {memory_format(promised)}")
print(f"measured {memory_format(after)}; {planned.plan.cost:.1%} runs again")
print("parameters as without a plan, to the last bit")
