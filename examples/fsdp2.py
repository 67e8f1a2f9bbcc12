"""FSDP2: sharded block by block, or as one and within a budget.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py

On several machines: see book/guides/fsdp2.md.
"""

import copy

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ackpt
from ackpt.metering.meter import memory_format


class Net(nn.Module):
    """Blocks and the loss."""

    def __init__(self, width=64, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            wide = nn.Linear(width, 4 * width), nn.GELU()
            self.blocks.append(nn.Sequential(*wide, nn.Linear(4 * width, width)))

    def forward(self, x, targets):
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(x, targets)


def shard(model):
    """Parameters are whole for one block at a time, and for the next one."""
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def train(model, batches):
    """A step for each: this rank's parameters, and the first one's peak in bytes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        model(*batch).backward()

    for batch in batches:
        step(batch)
        optimizer.step()
    peak = ackpt.measure(
        lambda: step(batches[0]), resident=batches[0], warmup=0, repeats=0
    ).dynamic_peak_bytes
    return [parameter.to_local() for parameter in model.parameters()], peak


dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
plain = Net()
checkpointed, model = copy.deepcopy(plain), copy.deepcopy(plain)
whole = sum(parameter.nbytes for parameter in plain.parameters())
torch.manual_seed(dist.get_rank())
batches = [
    tuple(torch.randn(rows, 64) for _ in ("x", "targets"))
    for rows in (1024, 768, 896)  # sizes may change
]

expected, before = train(shard(plain), batches)
ackpt.apply_activation_checkpointing(checkpointed)  # first the regions, then the shards
found, regions = train(shard(checkpointed), batches)
assert all(torch.equal(one, other) for one, other in zip(expected, found))

planned = ackpt.compile(model, *batches[0], budget=0.5)  # plan, then shard
found, after = train(fully_shard(planned), batches)  # parameters are whole
assert all(torch.equal(one, other) for one, other in zip(expected, found))

promised = planned.plan.dynamic_peak_bytes
assert regions < before and after <= promised + whole
if dist.get_rank() == 0:
    print(f"blocks: plain {memory_format(before)}, regions {memory_format(regions)}")
    print(f"as one: planned {memory_format(promised)}, beside {memory_format(whole)}")
    print(f"measured {memory_format(after)}; parameters are equal to the last bit")
dist.destroy_process_group()
