"""Train with Lightning within a budget (needs `pip install lightning`).

python examples/lightning_loop.py
"""

import copy
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ackpt
from ackpt.metering.meter import memory_format

warnings.filterwarnings("ignore", module="lightning")
QUIET = ("logger", "enable_progress_bar", "enable_model_summary")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = [(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
        self.layers = nn.Sequential(*(layer for block in blocks for layer in block))

    def forward(self, x, targets):
        return nn.functional.mse_loss(self.layers(x), targets)


class Training(lightning.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, index):
        return self.net(*batch)

    def validation_step(self, batch, index):
        self.log("loss", self.net(*batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def train(net, data):
    """The validation loss after one epoch."""
    options = {"max_epochs": 1, "accumulate_grad_batches": 2, "accelerator": "cpu"}
    options["enable_checkpointing"] = False
    trainer = lightning.Trainer(**options, **dict.fromkeys(QUIET, False))
    trainer.fit(Training(net), DataLoader(data, 512), DataLoader(data, 512))
    return trainer.callback_metrics["loss"]


def measure_peak(net, batch):
    """The peak of two accumulated micro-batches, in bytes."""

    def step():
        net.zero_grad()
        for _ in range(2):
            net(*batch).backward()

    return ackpt.measure(step, resident=[net, *batch], warmup=0, repeats=0).peak_bytes


torch.manual_seed(0)
baseline = Net()
net = copy.deepcopy(baseline)
data = TensorDataset(torch.randn(2048, 64), torch.randn(2048, 64))
batch = [tensor[:512].clone() for tensor in data.tensors]

# Add this line to your script.
step = ackpt.apply_budget(net, batch, budget="4MiB", accumulation=True)
assert torch.equal(train(net, data), train(baseline, data))
assert all(map(torch.equal, baseline.parameters(), net.parameters()))
baseline_peak, peak = measure_peak(baseline, batch), measure_peak(net, batch)
planned_peak = step.plan.peak_bytes
assert peak <= planned_peak <= 4 * 2**20 < baseline_peak
print(f"baseline {memory_format(baseline_peak)}, plan {memory_format(planned_peak)}")
print(f"measured {memory_format(peak)}")
print("parameters equal the baseline's to the last bit")
