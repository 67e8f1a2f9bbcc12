"""Audit a model's own checkpointing: is it right, and what does it save?

python examples/audit.py
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ackpt


class Net(nn.Module):
    """Blocks that torch checkpoints; dropout needs `preserve_rng_state`."""

    def __init__(self, preserve_rng_state, width=64, depth=4, classes=16):
        super().__init__()
        self.options = {
            "use_reentrant": False,
            "preserve_rng_state": preserve_rng_state,
        }
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            wide = [
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Dropout(0.1),
            ]
            self.blocks.append(nn.Sequential(*wide, nn.Linear(4 * width, width)))
        self.head = nn.Linear(width, classes)

    def forward(self, x, targets):
        for block in self.blocks:
            x = x + checkpoint(block, x, **self.options)
        return nn.functional.cross_entropy(self.head(x), targets)


torch.manual_seed(0)
batch = torch.randn(1024, 64), torch.randint(16, (1024,))

wrong = ackpt.audit(Net(preserve_rng_state=False), batch)  # the line to add
print(wrong)
assert [finding.kind for finding in wrong.findings] == ["random"]

model = Net(preserve_rng_state=True)
optimizer = torch.optim.AdamW(model.parameters())


def step():
    optimizer.zero_grad()
    model(*batch).backward()
    optimizer.step()


audit = ackpt.audit(step, resident=[model, optimizer])  # or a step of your own loop
assert audit.ok and audit.differences == {}
print(audit)
