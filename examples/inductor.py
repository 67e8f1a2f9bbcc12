"""A budget behind torch.compile, with Inductor's fused kernels (needs a C++ compiler).

python examples/inductor.py
"""

import copy

import torch
from torch import nn

import ackpt
from ackpt.metering.meter import memory_format


class Net(nn.Module):
    """Layers and the loss."""

    def __init__(self, width=64, depth=3):
        super().__init__()
        self.layers = nn.Sequential()
        for _ in range(depth):
            self.layers.extend(
                [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
            )

    def forward(self, x, targets):
        return nn.functional.mse_loss(self.layers(x), targets)


def measured(model, batch):
    """The most bytes that one forward and backward allocate."""

    def step():
        model.zero_grad()
        model(*batch).backward()

    step()  # compiles
    measurement = ackpt.measure(step, resident=[model, *batch], warmup=0, repeats=0)
    return measurement.dynamic_peak_bytes


torch.manual_seed(0)
plain = Net()
model = copy.deepcopy(plain)
batch = torch.randn(1024, 64), torch.randn(1024, 64)

plans = []
options = {"budget": 0.7, "compiler": "inductor", "on_plan": plans.append}
compiled = torch.compile(model, backend="ackpt", options=options)  # the line to add

before, after = measured(plain, batch), measured(compiled, batch)
(plan,) = plans  # one graph, one plan
for one, other in zip(plain.parameters(), model.parameters()):
    torch.testing.assert_close(one.grad, other.grad)  # fused kernels round differently
promised = plan.dynamic_peak_bytes
assert after <= promised <= 0.7 * plan.baseline_dynamic_peak_bytes
print(f"plain {memory_format(before)}, planned {memory_format(promised)}")
print(f"measured {memory_format(after)}")
print("gradients as without a plan, but for the last bits")
