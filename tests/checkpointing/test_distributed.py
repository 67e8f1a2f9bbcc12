"""Regions under DistributedDataParallel and fully_shard: two gloo processes, bit-equal to training without regions."""

import copy

import pytest
import torch
from processes import in_processes, shard
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ackpt


def plain_call(function, *args):
    return function(*args)


class Model(nn.Module):
    """Blocks, each called through `call`; `unused` parameters get no gradient; block 1 can run twice."""

    def __init__(self, repeats=1, unused=False, closure=False):
        super().__init__()
        layers = [[nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)] for _ in range(3)]
        self.blocks = nn.ModuleList(nn.Sequential(*block) for block in layers)
        self.unused = nn.Linear(4, 4) if unused else None
        self.repeats, self.closure, self.call = repeats, closure, plain_call

    def forward(self, x):
        for place, block in enumerate(self.blocks):
            for _ in range(self.repeats if place == 1 else 1):
                x = self.call((lambda x, block=block: block(x)) if self.closure else block, x)
        return x.tanh()


def shared_weight():
    model = Model()
    model.blocks[2][0].weight = model.blocks[0][0].weight
    return model


def frozen_first():
    model = Model()
    model.blocks[0].requires_grad_(False)
    return model


def by_call(model):
    model.call = ackpt.checkpoint
    return model


def by_wrapping(model):
    ackpt.apply_activation_checkpointing(model, ["blocks.0", "blocks.1", "blocks.2"])
    return model


def data_parallel(**options):
    return lambda model: DistributedDataParallel(model, **options)


def shard_flat(model, use_orig_params=True):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    options = {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential}), "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, use_orig_params=use_orig_params, **options)


def by_class(model):
    ackpt.apply_activation_checkpointing(model, nn.Sequential)
    return model


def same(model):
    return model


def inside(wrap):
    return lambda model: wrap(model.module) and model


# How the model is made, what is done to it before it is distributed, how it is, and what is done to it afterwards.
SCENARIOS = {
    "ddp": (Model, by_wrapping, data_parallel(), same),
    "ddp, by call": (Model, by_call, data_parallel(), same),
    "ddp, closures": (lambda: Model(closure=True), by_call, data_parallel(), same),
    "ddp, wrapped after": (Model, same, data_parallel(), inside(by_wrapping)),
    "static graph": (Model, by_wrapping, data_parallel(static_graph=True), same),
    "static graph, by call": (Model, by_call, data_parallel(static_graph=True), same),
    "unused parameters": (lambda: Model(unused=True), by_wrapping, data_parallel(find_unused_parameters=True), same),
    "unused, static graph": (lambda: Model(unused=True), by_call, data_parallel(static_graph=True), same),
    "none unused but looked for": (Model, by_wrapping, data_parallel(find_unused_parameters=True), same),
    "shared weight": (shared_weight, by_wrapping, data_parallel(), same),
    "shared weight, static graph": (shared_weight, by_wrapping, data_parallel(static_graph=True), same),
    "shared weight, looked for": (shared_weight, by_call, data_parallel(find_unused_parameters=True), same),
    "one block in two regions": (lambda: Model(repeats=2), by_call, data_parallel(broadcast_buffers=False), same),
    "one block twice, static graph": (lambda: Model(repeats=2), by_wrapping, data_parallel(static_graph=True), same),
    "frozen block": (frozen_first, by_wrapping, data_parallel(), same),
    "small buckets": (Model, by_wrapping, data_parallel(bucket_cap_mb=1e-5, gradient_as_bucket_view=True), same),
    "fully_shard, wrapped before": (Model, by_wrapping, shard, same),
    "fully_shard, wrapped after": (Model, same, shard, by_wrapping),
    "fully_shard, by call": (Model, same, shard, by_call),
    "FullyShardedDataParallel, wrapped before": (Model, by_wrapping, shard_flat, same),
    "FullyShardedDataParallel, flat": (Model, by_wrapping, lambda model: shard_flat(model, False), same),
    "FullyShardedDataParallel, wrapped after": (Model, same, shard_flat, by_class),
    "fully_shard, closures": (lambda: Model(closure=True), same, shard, by_call),
}


def train_on_rank(model, rank):
    """Losses, gradients of every step, and the state at the end: the local part of each."""
    made = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(10 + rank)
    for step in range(3):
        optimizer.zero_grad()
        if isinstance(model, DistributedDataParallel) and step > 0:  # gradients accumulate before they are reduced
            with model.no_sync():
                model(torch.randn(5, 4)).sum().backward()
        loss = model(torch.randn(5, 4)).pow(2).sum()
        loss.backward()
        made += [(f"loss {step}", loss), *((f"gradient {step} {name}", p.grad) for name, p in model.named_parameters())]
        optimizer.step()
    made += [*model.named_parameters(), *model.named_buffers()]
    there = [(name, value) for name, value in made if value is not None]
    return [(name, value.to_local() if hasattr(value, "to_local") else value) for name, value in there]


def compare(make, before, distribute, after, rank):
    """Names of what differs from the same training without regions."""
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    recomputed = []
    for each in (reference, model):
        each.blocks[2][2].register_forward_hook(lambda *_: recomputed.append(ackpt.is_recomputing()))
    plain = train_on_rank(distribute(reference), rank)
    assert recomputed == [False] * len(recomputed)
    recomputed.clear()
    checkpointed = train_on_rank(after(distribute(before(model))), rank)
    assert recomputed == [False, True] * (len(recomputed) // 2) and len(recomputed) >= 6
    if [name for name, _ in plain] != [name for name, _ in checkpointed]:
        return ["other tensors have gradients"]
    return [name for (name, one), (_, other) in zip(plain, checkpointed) if not torch.equal(one, other)]


def scenario(name, rank, folder):
    return compare(*SCENARIOS[name], rank)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return in_processes(scenario, SCENARIOS, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_bit_equal_to_the_same_without_regions(results, name):
    for rank in range(2):
        assert results[rank][name] == [], f"rank {rank}"
