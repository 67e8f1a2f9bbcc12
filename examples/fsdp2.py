"""Train with FSDP2: sharded block by block, or as one unit within a budget.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py

For several machines, see book/guides/fsdp2.md.
"""

import copy

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ackpt
from ackpt.metering.meter import memory_format


class Net(nn.Module):
    """Residual blocks; returns the loss."""

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


def shard_by_block(model):
    """Shard so that at most two blocks are unsharded at a time."""
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def train(model, batches):
    """Train on batches of any size; returns local parameters and the dynamic peak."""
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
baseline = Net()
checkpointed, model = copy.deepcopy(baseline), copy.deepcopy(baseline)
unsharded = sum(parameter.nbytes for parameter in model.parameters())
torch.manual_seed(dist.get_rank())
batches = [(torch.randn(n, 64), torch.randn(n, 64)) for n in (1024, 768, 896)]

expected, baseline_peak = train(shard_by_block(baseline), batches)
ackpt.apply_activation_checkpointing(checkpointed)  # checkpoint, then shard
trained, block_peak = train(shard_by_block(checkpointed), batches)
assert all(map(torch.equal, expected, trained))

planned = ackpt.compile(model, *batches[0], budget=0.5)  # plan, then shard
trained, peak = train(fully_shard(planned), batches)
assert all(map(torch.equal, expected, trained))

# The budget, a fraction, does not include the unsharded parameters.
planned_peak = planned.plan.dynamic_peak_bytes + unsharded
assert block_peak < baseline_peak and peak <= planned_peak
if dist.get_rank() == 0:
    sizes = map(memory_format, (baseline_peak, block_peak))
    print("sharded by block: baseline {}, checkpointed {}".format(*sizes))
    sizes = map(memory_format, (planned_peak, peak))
    print("sharded as one unit: plan with parameters {}, measured {}".format(*sizes))
    print("parameters equal the baseline's to the last bit")
dist.destroy_process_group()
