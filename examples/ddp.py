"""DistributedDataParallel, every rank within the same budget.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py

On two machines of eight GPUs, on each of them, HOST being the name of one:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/ddp.py
"""

import copy

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ackpt
from ackpt.meter import memory_format


class Net(nn.Module):
    """Layers and the loss."""

    def __init__(self, width=64, depth=3):
        super().__init__()
        sizes = [(width, 4 * width), (4 * width, width)] * depth
        self.layers = nn.Sequential(*(layer for size in sizes for layer in (nn.Linear(*size), nn.GELU())))

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

    return ackpt.measure(step, resident=[model, *batch], warmup=0, repeats=0).dynamic_peak_bytes


dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
plain = Net()
model = copy.deepcopy(plain)
torch.manual_seed(dist.get_rank())
batches = [[(torch.randn(512, 64), torch.randn(512, 64)) for _ in range(2)] for _ in range(3)]

planned = ackpt.compile(model, *batches[0][0], budget=0.7)  # plan first, then distribute
parallel, plain = DistributedDataParallel(planned), DistributedDataParallel(plain)
train(parallel, batches)

train(plain, batches)
assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters()))
before, after = measured(plain, batches[0][0]), measured(parallel, batches[0][0])
plan = planned.plan
assert after <= plan.dynamic_peak_bytes <= 0.7 * before
peaks = [None] * dist.get_world_size()
dist.all_gather_object(peaks, (plan.dynamic_peak_bytes, after))
assert len(set(peaks)) == 1  # equal shapes, equal plans
if dist.get_rank() == 0:
    print(f"each of {len(peaks)} ranks: plain {memory_format(before)}; ", end="")
    print(f"planned {memory_format(plan.dynamic_peak_bytes)}, measured {memory_format(after)}")
    print("parameters as without a plan, to the last bit")
dist.destroy_process_group()
