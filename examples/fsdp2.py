"""FSDP2: parameters sharded block by block, or a budget for a model that is sharded as one.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py

On two machines of eight GPUs, on each of them, HOST being the name of one:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/fsdp2.py
"""

import copy

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ackpt
from ackpt.meter import memory_format


class Net(nn.Module):
    """Blocks and the loss."""

    def __init__(self, width=64, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )

    def forward(self, x, targets):
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(x, targets)


def shard(model):
    """One block's parameters are whole at a time, and those of the next, which are on their way."""
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def train(model, batch):
    """This rank's parameters after three steps, and the most bytes that one forward and backward allocate."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(*batch).backward()

    for _ in range(3):
        step()
        optimizer.step()
    peak = ackpt.measure(step, resident=batch, repeats=0).dynamic_peak_bytes
    return [parameter.to_local() for parameter in model.parameters()], peak


dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
plain = Net()
checkpointed, model = copy.deepcopy(plain), copy.deepcopy(plain)
torch.manual_seed(dist.get_rank())
batch = torch.randn(1024, 64), torch.randn(1024, 64)
whole = sum(parameter.nbytes for parameter in plain.parameters())

expected, before = train(shard(plain), batch)

ackpt.apply_activation_checkpointing(checkpointed)  # first the regions, then the shards
found, regions = train(shard(checkpointed), batch)
assert all(torch.equal(one, other) for one, other in zip(expected, found))

planned = ackpt.compile(model, *batch, budget=0.5)  # first the plan, then the shards
plan = planned.plan
found, after = train(fully_shard(planned), batch)  # one unit: all parameters are whole during the step
assert all(torch.equal(one, other) for one, other in zip(expected, found))
assert regions < before and after <= plan.dynamic_peak_bytes + whole

if dist.get_rank() == 0:
    print(f"sharded block by block: plain {memory_format(before)}, checkpointed {memory_format(regions)}")
    print(f"sharded as one: planned {memory_format(plan.dynamic_peak_bytes)}, ", end="")
    print(f"measured {memory_format(after)} with {memory_format(whole)} of whole parameters")
    print("parameters as without checkpoints and plan, to the last bit")
dist.destroy_process_group()
