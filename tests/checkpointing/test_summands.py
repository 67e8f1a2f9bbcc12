"""Tensors that several regions share: their gradients are summed in the baseline's order."""

import copy

import pytest
import torch
from conftest import assert_equal, bit_equal, left_by, model_of
from torch import nn

import ackpt
from ackpt.checkpointing.region import MOST_USES


class Block(nn.Module):
    """Uses each of its two inputs three times."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, shared):
        return x + self.a(x).tanh() + self.b(shared).tanh() * self.c(shared) + shared * x


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("seed", range(5))
def test_shared_tensors_and_skip_connections(seed, autocast):
    def forward(self, x, condition):
        shared, hidden = self.embed(condition), [x]
        for block in self.blocks:
            hidden.append(block(hidden[-1], shared))
        return (hidden[1] * hidden[-1] * shared * hidden[2]).sum()

    torch.manual_seed(seed)
    model = model_of(forward, embed=nn.Linear(16, 16), blocks=nn.ModuleList(Block() for _ in range(4)))
    args = (torch.randn(8, 16), torch.randn(8, 16))
    regions = copy.deepcopy(model)
    assert len(ackpt.apply_activation_checkpointing(regions)) == 4
    assert_equal(*(left_by(each, each, *args, autocast=autocast) for each in (model, regions)), "step")


@pytest.mark.parametrize("seed", range(5))
@bit_equal
def test_a_shared_weight_inside_and_outside(call, seed):
    torch.manual_seed(seed)
    layer, x = nn.Linear(16, 16), torch.randn(8, 16)

    def region(x):
        return layer(layer(x).tanh()).tanh()

    (layer(call(region, call(region, layer(x)))) * torch.linspace(1, 2, 16)).sum().backward()
    return [parameter.grad for parameter in layer.parameters()]


def test_gradients_of_more_uses_than_are_kept_apart():
    def region(x):
        return sum((x * number).sin() for number in range(1, MOST_USES + 3))

    x = torch.randn(8, dtype=torch.float64, requires_grad=True)
    (ackpt.checkpoint(region, x).sum() + x.cos().sum()).backward()
    found, x.grad = x.grad, None
    (region(x).sum() + x.cos().sum()).backward()
    torch.testing.assert_close(found, x.grad)


class Remembers(nn.Module):
    """Keeps an activation with its graph; uses its input twice."""

    def __init__(self):
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.ones(4096)), None

    def forward(self, x):
        self.last = torch.tanh(x * self.weight)
        return x + self.last.sin()


def test_a_tensor_remembered_by_a_module_keeps_no_gradients():
    model, x = nn.Sequential(Remembers(), Remembers(), Remembers()), torch.randn(4096)
    ackpt.apply_activation_checkpointing(model, Remembers)

    def steps():
        for _ in range(3):
            model.zero_grad()
            model(x).sum().backward()

    left = ackpt.measure(steps, resident=(model, x), repeats=0, warmup=0).timeline.live[-1]
    assert left == x.nbytes * (3 + 3 + 2)  # gradients, remembered tensors, and the inputs of all regions but the first
