"""A loop of accelerate within a budget (needs `pip install "ackpt[hf]"`).

python examples/accelerate_loop.py
"""

import copy

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ackpt
from ackpt.metering.meter import memory_format

SMALL_BATCHES = 2


class Net(nn.Module):
    """Layers and the loss: the budget covers what the model computes."""

    def __init__(self, width=64, depth=4):
        super().__init__()
        self.layers = nn.Sequential()
        for _ in range(depth):
            self.layers.extend(
                [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
            )

    def forward(self, x, targets):
        return nn.functional.mse_loss(self.layers(x), targets)


def train(model, data):
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=SMALL_BATCHES
    )
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=512)
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(*batch))
            optimizer.step()
            optimizer.zero_grad()
    return accelerator, model, optimizer


def measured(accelerator, model, optimizer, batch):
    """The peak of the steps of some small batches and of the optimizer."""

    def step():
        for _ in range(SMALL_BATCHES):
            accelerator.backward(model(*batch))
        optimizer.step()
        optimizer.zero_grad()

    resident = [model, optimizer.optimizer, *batch]
    return ackpt.measure(step, resident=resident, warmup=0, repeats=0).peak_bytes


torch.manual_seed(0)
plain = Net()
model = copy.deepcopy(plain)
data = TensorDataset(torch.randn(2048, 64), torch.randn(2048, 64))
batch = [tensor[:512].clone() for tensor in data.tensors]

# The next line is the one to add.
step = ackpt.apply_budget(
    model, batch, budget="4.5MiB", optimizer="adamw", accumulation=True
)
trained, baseline = train(model, data), train(plain, data)

assert all(map(torch.equal, plain.parameters(), model.parameters()))
before, after = measured(*baseline, batch), measured(*trained, batch)
promised = step.plan.peak_bytes
assert after <= promised <= 4.5 * 2**20 < before
print(f"plain {memory_format(before)}, planned {memory_format(promised)}")
print(f"measured {memory_format(after)}")
print("parameters as without a budget, to the last bit")
