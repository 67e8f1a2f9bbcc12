"""DistributedDataParallel, every rank within the same budget.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py

On several machines: see book/guides/ddp.md.
"""

import copy

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first, second in batches:
        optimizer.zero_grad()
        with model.no_sync():
            model(*first).backward()
        model(*second).backward()  # the gradients of both, averaged over the ranks
        optimizer.step()


def measured(model, batch):
    """The most bytes that one forward and backward allocate on this rank."""

    def step():
        model.zero_grad()
        model(*batch).backward()

    measurement = ackpt.measure(step, resident=[model, *batch], warmup=0, repeats=0)
    return measurement.dynamic_peak_bytes


dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
plain = Net()
model = copy.deepcopy(plain)
torch.manual_seed(dist.get_rank())
batches = [
    [tuple(torch.randn(rows, 64) for _ in ("x", "targets")) for _ in range(2)]
    for rows in (512, 384, 448)  # sizes may change, also from rank to rank
]  # of two micro batches each
batch = batches[0][0]

# First plan, then distribute. Each second micro batch runs while gradients exist.
planned = ackpt.compile(model, *batch, budget=0.7, accumulation=True)
parallel = DistributedDataParallel(planned)
train(parallel, batches)

plain = DistributedDataParallel(plain)
train(plain, batches)
for one, other in zip(plain.parameters(), model.parameters()):
    assert torch.equal(one, other)
before, after = measured(plain, batch), measured(parallel, batch)
promised = planned.plan.dynamic_peak_bytes
assert after <= promised <= 0.7 * before
peaks = [None] * dist.get_world_size()
dist.all_gather_object(peaks, (promised, after))
assert len(set(peaks)) == 1  # equal shapes, equal plans
if dist.get_rank() == 0:
    print(f"plain {memory_format(before)}, planned {memory_format(promised)}")
    print(f"measured {memory_format(after)}, on each of {len(peaks)} ranks")
    print("parameters as without a plan, to the last bit")
dist.destroy_process_group()
