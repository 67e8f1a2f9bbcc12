"""Offload under DistributedDataParallel and fully_shard: two gloo processes, bit-equal to training without offload."""

import contextlib
import copy

import pytest
import torch
from processes import in_processes, shard
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ackpt

DIM, TOKENS, LAYERS = 64, 320, 4  # one input of a layer is 80 KiB: above the default of min_bytes


def checkpointed(offload):
    """Make every layer a region; return the context for the forward and the engine."""

    def wrap(made):
        ackpt.apply_activation_checkpointing(made, [str(place) for place in range(LAYERS)], offload=offload)
        return made

    return wrap, contextlib.nullcontext(), ackpt.offloading.saved_tensors.resolve(offload)


def saved(mode):
    offload = ackpt.offload_saved_tensors(mode)
    return lambda made: made, offload, offload


WAYS = {
    "checkpoint, sync": lambda folder: checkpointed("sync"),
    "checkpoint, async": lambda folder: checkpointed("async"),
    "checkpoint, async, disk": lambda folder: checkpointed(
        ackpt.offload_saved_tensors("async", "disk", folder=folder, keep_last=0)
    ),
    "saved tensors, sync": lambda folder: saved("sync"),
    "saved tensors, async": lambda folder: saved("async"),
}
SCENARIOS = {
    f"{name}, {way}": (distribute, way)
    for name, distribute in {"ddp": DistributedDataParallel, "fully_shard": shard}.items()
    for way in WAYS
}


def train_on_rank(made, around, rank):
    """Losses and gradients of every step, and the parameters at the end: the local part of each."""
    found = []
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    torch.manual_seed(10 + rank)
    for _ in range(3):
        optimizer.zero_grad()
        with around:
            loss = made(torch.randn(TOKENS, DIM)).square().mean()
        loss.backward()
        found += [loss, *(parameter.grad for parameter in made.parameters())]
        optimizer.step()
    found += [parameter.detach() for parameter in made.parameters()]
    return [(value.to_local() if hasattr(value, "to_local") else value).clone() for value in found]


def compare(name, rank, folder):
    """Descriptions of all differences; empty if there are none."""
    distribute, way = SCENARIOS[name]
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)) for _ in range(LAYERS)]
    reference = nn.Sequential(*layers)
    other = copy.deepcopy(reference)
    plain = train_on_rank(distribute(reference), contextlib.nullcontext(), rank)
    wrap, around, offload = WAYS[way](folder)
    offload.engine.reset_stats()
    made = train_on_rank(distribute(wrap(other)), around, rank)
    stats = offload.engine.stats()
    wrong = [f"{place} differs" for place, (one, two) in enumerate(zip(plain, made)) if not torch.equal(one, two)]
    if len(plain) != len(made) or not any(gradient.abs().sum() > 0 for gradient in plain):
        wrong.append("other tensors have gradients")
    if stats["copies_out"] < 3 * (LAYERS - 2) or stats["copies_in"] == 0:
        wrong.append(f"hardly anything was offloaded: {stats}")
    if (stats["store_bytes"], stats["stored"]) != (0, 0):
        wrong.append(f"the store is not empty: {stats}")
    return wrong


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return in_processes(compare, SCENARIOS, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_bit_equal_to_the_same_without_offload_and_the_store_is_empty(results, name):
    for rank in range(2):
        assert results[rank][name] == [], f"rank {rank}"
