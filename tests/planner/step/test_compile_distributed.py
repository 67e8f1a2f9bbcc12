"""Planned steps under DistributedDataParallel and fully_shard: two gloo processes, bit-equal to the same without."""

import contextlib
import copy

import pytest
import torch
from conftest import model_of, raises
from processes import in_processes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ackpt


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Tanh()) for _ in range(2))
        )
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return self.blocks(x)


OPTIONS = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "fully_shard": None,
}


def trained(model, options, rank, accumulate):
    """Gradients of three steps, then parameters and buffers; of shards, the local ones."""
    if options is None:
        parallel, no_sync = fully_shard(model), without_reducing
    else:
        parallel, no_sync = DistributedDataParallel(model, **options), DistributedDataParallel.no_sync
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        if accumulate:
            with no_sync(parallel):
                parallel(torch.randn(3, 4)).sin().sum().backward()
        parallel(torch.randn(3, 4)).sin().sum().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    found += [value.clone() for value in model.state_dict().values()]
    return [value.to_local() if isinstance(value, DTensor) else value for value in found]


@contextlib.contextmanager
def without_reducing(sharded):
    sharded.set_requires_gradient_sync(False)
    yield
    sharded.set_requires_gradient_sync(True)


def by_torch_compile(model, x, plans, **options):
    """The gradients of one step of `model`, compiled by the backend within DistributedDataParallel."""
    torch._dynamo.reset()
    model.compile(backend="ackpt", options={"policy": "full", "on_plan": plans.append, **options})
    DistributedDataParallel(model)(x).sin().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def buckets():
    """Where Dynamo would cut the model into one graph per bucket, it is planned as a whole."""
    torch.manual_seed(0)
    model = model_of(
        lambda self, x: self.layers(x),
        layers=nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 2)),
    )
    x, plans = torch.randn(3, 512), []
    found = by_torch_compile(copy.deepcopy(model), x, plans)
    assert len(plans) == 1
    DistributedDataParallel(model)(x).sin().sum().backward()
    assert all(torch.equal(one.grad, other) for one, other in zip(model.parameters(), found))
    return "equal"


class WithLoss(Net):
    def forward(self, x):
        hidden = self.blocks(x)
        return {"loss": hidden.sin().sum(), "hidden": hidden}


def loss_and_more():
    """DistributedDataParallel hands all outputs through one node of autograd, if it looks for unused parameters."""
    torch.manual_seed(0)
    model, x = WithLoss(), torch.randn(3, 4)
    step = ackpt.compile(copy.deepcopy(model), x, policy="full")
    found = []
    for one in (model, step):
        torch.manual_seed(1)
        parallel = DistributedDataParallel(one, find_unused_parameters=True)
        parallel(x)["loss"].backward()
        found.append([parameter.grad for parameter in one.blocks.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found))
    raises(RuntimeError, "an output other than the loss", lambda: parallel(x)["hidden"].sum().backward())
    return "equal"


ROWS = (30, 40, 21), (40, 33, 52)  # of the batches of each rank


def several_sizes(options, budget, rank):
    """Batches of other sizes at every step and on every rank; with a large budget, the model itself runs."""
    torch.manual_seed(0)
    eager = Net()
    model = copy.deepcopy(eager)
    step = ackpt.compile(model, torch.randn(ROWS[rank][0], 4), budget=budget)
    results = []
    for each in (eager, step):
        parallel = fully_shard(each) if options is None else DistributedDataParallel(each, **options)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for rows in ROWS[rank]:
            optimizer.zero_grad()
            parallel(torch.randn(rows, 4)).sin().sum().backward()
            optimizer.step()
        values = each.state_dict().values()
        results.append([value.to_local() if isinstance(value, DTensor) else value.clone() for value in values])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert [event.kind for event in step.history] == ["capture", "dynamic capture", "plan"]
    return "equal"


def scenario(name, rank, folder):
    if name[0] == "several sizes":
        return several_sizes(OPTIONS[name[1]], name[2], rank)
    if isinstance(name, str):
        return {"torch.compile": buckets, "loss and more": loss_and_more}[name]()
    options, policy, accumulate = name
    torch.manual_seed(0)
    eager = Net()
    if not (OPTIONS[options] or {}).get("find_unused_parameters"):
        eager.unused = None
    model = copy.deepcopy(eager)
    if policy == "in place":
        step, call = ackpt.apply_budget(model, (torch.randn(3, 4),), policy="full"), model
    else:
        step = call = ackpt.compile(model, torch.randn(3, 4), policy=policy)
    expected = trained(eager, OPTIONS[options], rank, accumulate)
    found = trained(call, OPTIONS[options], rank, accumulate)
    assert len(found) == len(expected)
    assert [event.kind for event in step.history] == ["capture"]
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
    return "equal"


NAMES = [(options, policy, False) for options in OPTIONS for policy in ("none", "full")]
NAMES += [
    ("plain", "in place", False),
    ("plain", "full", True),
    ("bucket views", "full", True),
    ("fully_shard", "full", True),
    "torch.compile",
    "loss and more",
    *(("several sizes", options, budget) for options in ("unused", "fully_shard") for budget in (0.9, "10MB")),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return in_processes(scenario, NAMES, tmp_path_factory.mktemp("planned"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_gradients_are_those_of_eager(results, name, rank):
    assert results[rank][name] == "equal"
