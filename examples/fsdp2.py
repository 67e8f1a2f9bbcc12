"""Train with FSDP2, within a budget on every rank.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py

For several machines, see book/guides/fsdp2.md.
"""

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


def sharded() -> nn.Module:
    """Return a new model, sharded so that at most two blocks are gathered at a time."""
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def train(model, batches):
    """Train on batches of any size; return local parameters and a step's peak."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        model(*batch).backward()

    for batch in batches:
        step(batch)
        optimizer.step()
    optimizer.zero_grad()
    resident = model, *batches[0]
    peaks = [  # gloo's threads may free buffers late, so take the smallest peak
        ackpt.measure(
            lambda: step(batches[0]), resident=resident, warmup=0, repeats=0
        ).peak_bytes
        for _ in range(20)
    ]
    return [parameter.to_local() for parameter in model.parameters()], min(peaks)


dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(dist.get_rank())
batches = [(torch.randn(n, 64), torch.randn(n, 64)) for n in (1024, 768, 896)]

expected, baseline_peak = train(sharded(), batches)
model = sharded()
step = ackpt.apply_budget(model, batches[0], budget=0.5)
plan = step.plan
trained, peak = train(model, batches)
assert all(map(torch.equal, expected, trained))
assert peak <= plan.peak_bytes < baseline_peak
if dist.get_rank() == 0:
    sizes = map(memory_format, (baseline_peak, plan.peak_bytes, peak))
    print("baseline {}, planned {}, measured {}".format(*sizes))
    print("parameters equal the baseline's to the last bit")
dist.destroy_process_group()
