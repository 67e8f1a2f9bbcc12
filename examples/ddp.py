"""Train with DistributedDataParallel, with the same budget on every rank.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py

For several machines, see book/guides/ddp.md.
"""

import copy

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first, second in batches:
        optimizer.zero_grad()
        with model.no_sync():
            model(*first).backward()
        model(*second).backward()  # averages the gradients over all ranks
        optimizer.step()


def measure_peak(model, batch):
    """The dynamic peak of one forward and backward on this rank, in bytes."""

    def step():
        model.zero_grad()
        model(*batch).backward()

    measurement = ackpt.measure(step, resident=[model, *batch], warmup=0, repeats=0)
    return measurement.dynamic_peak_bytes


dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
baseline = Net()
model = copy.deepcopy(baseline)
torch.manual_seed(dist.get_rank())
batches = [
    [tuple(torch.randn(rows, 64) for _ in ("x", "targets")) for _ in range(2)]
    for rows in (512, 384, 448)  # sizes may differ between steps and ranks
]  # each step has two micro-batches
batch = batches[0][0]

# Plan first, then distribute. The second micro-batch accumulates gradients.
planned = ackpt.compile(model, *batch, budget=0.7, accumulation=True)
parallel = DistributedDataParallel(planned)
train(parallel, batches)

baseline = DistributedDataParallel(baseline)
train(baseline, batches)
assert all(map(torch.equal, baseline.parameters(), model.parameters()))
baseline_peak, peak = measure_peak(baseline, batch), measure_peak(parallel, batch)
planned_peak = planned.plan.dynamic_peak_bytes
assert peak <= planned_peak <= 0.7 * baseline_peak
peaks = [None] * dist.get_world_size()
dist.all_gather_object(peaks, (planned_peak, peak))
assert len(set(peaks)) == 1  # equal shapes give equal plans
if dist.get_rank() == 0:
    sizes = map(memory_format, (baseline_peak, planned_peak, peak))
    print("baseline {}, plan {}, measured {} on every rank".format(*sizes))
    print("parameters equal the baseline's to the last bit")
dist.destroy_process_group()
