"""Train with accelerate within a budget (needs `pip install ".[hf]"`).

python examples/accelerate_loop.py
"""

import copy

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ackpt
from ackpt.metering.meter import memory_format

MICRO_BATCHES = 2


class Net(nn.Module):
    """A network that returns its loss, so that the budget covers the loss as well."""

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
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=MICRO_BATCHES
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


def measure_peak(accelerator, model, optimizer, batch):
    """The peak of one optimizer step with its micro-batches, in bytes."""

    def step():
        for _ in range(MICRO_BATCHES):
            accelerator.backward(model(*batch))
        optimizer.step()
        optimizer.zero_grad()

    resident = [model, optimizer.optimizer, *batch]
    return ackpt.measure(step, resident=resident, warmup=0, repeats=0).peak_bytes


torch.manual_seed(0)
baseline = Net()
model = copy.deepcopy(baseline)
data = TensorDataset(torch.randn(2048, 64), torch.randn(2048, 64))
batch = [tensor[:512].clone() for tensor in data.tensors]

# Add this call to your script.
step = ackpt.apply_budget(
    model, batch, budget="4.5MiB", optimizer="adamw", accumulation=True
)
trained, expected = train(model, data), train(baseline, data)

assert all(map(torch.equal, baseline.parameters(), model.parameters()))
baseline_peak, peak = measure_peak(*expected, batch), measure_peak(*trained, batch)
planned_peak = step.plan.peak_bytes
assert peak <= planned_peak <= 4.5 * 2**20 < baseline_peak
print(f"baseline {memory_format(baseline_peak)}, plan {memory_format(planned_peak)}")
print(f"measured {memory_format(peak)}")
print("parameters equal the baseline's to the last bit")
