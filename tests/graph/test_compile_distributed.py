"""Planned steps under DistributedDataParallel: two gloo processes, bit-equal to the same without a plan."""

from __future__ import annotations

import copy

import pytest
import torch
from processes import in_two_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ackpt


class Net(nn.Module):
    """Blocks with a batch norm and a dropout, and a layer that nothing calls."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Tanh()) for _ in range(3))
        )
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return self.blocks(x)


OPTIONS = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def trained(model, options, rank, accumulate):
    """Gradients of three steps, then parameters and buffers."""
    parallel = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        if accumulate:
            with parallel.no_sync():
                parallel(torch.randn(3, 4)).sin().sum().backward()
        parallel(torch.randn(3, 4)).sin().sum().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return [*found, *(value.clone() for value in model.state_dict().values())]


def scenario(name, rank, folder):
    options, policy, accumulate = name
    torch.manual_seed(0)
    eager = Net()
    if not OPTIONS[options].get("find_unused_parameters"):
        eager.unused = None
    model = copy.deepcopy(eager)
    step = ackpt.compile(model, torch.randn(3, 4), policy=policy)
    expected = trained(eager, OPTIONS[options], rank, accumulate)
    found = trained(step, OPTIONS[options], rank, accumulate)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
    return "equal"


NAMES = [(options, policy, False) for options in OPTIONS for policy in ("none", "full")]
NAMES += [("plain", "full", True), ("bucket views", "full", True)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return in_two_processes(scenario, NAMES, tmp_path_factory.mktemp("planned"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_gradients_are_those_of_eager(results, name, rank):
    assert results[rank][name] == "equal"
