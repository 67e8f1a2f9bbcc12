"""Helpers of the offload tests: contexts that offload every tensor, and checks that the engine is empty afterwards."""

import contextlib
import functools

import torch
from conftest import plain_call, seed
from torch import nn

import ackpt

MODES = ["sync", "async"]
SIDE = 32
SIZE = SIDE * SIDE * 4  # bytes of one square matrix here


@functools.cache
def offload(mode="sync", store="host", **options):
    """One object per choice: regions of one forward must share it. Takes every tensor unless told otherwise."""
    return ackpt.offload_saved_tensors(mode, store, **{"min_bytes": 0, "keep_last": 0, **options})


def fresh(*args, **options):
    """The same object, with the counts of its engine at 0."""
    chosen = offload(*args, **options)
    chosen.engine.reset_stats()
    return chosen


def region(mode="sync", **options):
    """``checkpoint`` with offload, called like the function itself."""
    return functools.partial(checkpointed, offload(mode, **options))


def checkpointed(chosen, function, *args, **kwargs):
    return ackpt.checkpoint(function, *args, offload=chosen, **kwargs)


def matrix(scale=1.0):
    return torch.linspace(-scale, scale, SIDE * SIDE).reshape(SIDE, SIDE).clone()


def block():
    return nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.BatchNorm1d(SIDE), nn.Dropout(0.2), nn.Linear(SIDE, SIDE))


def blocks(length=4):
    seed()
    return nn.Sequential(*(block() for _ in range(length)))


def gradients(*holders) -> list:
    """Gradients of modules' parameters and of tensors, taken away from them."""
    taken = []
    for holder in holders:
        for leaf in holder.parameters() if isinstance(holder, nn.Module) else [holder]:
            taken.append(leaf.grad)
            leaf.grad = None
    return taken


def counts(engine, *names) -> dict:
    stats = engine.stats()
    return {name: stats[name] for name in names}


def assert_empty(engine) -> None:
    assert counts(engine, "store_bytes", "stored") == {"store_bytes": 0, "stored": 0}


def plain():
    """``(context, call)`` without offload."""
    return contextlib.nullcontext, plain_call


def offloaded(mode, **options):
    """``(context, call)``: saved tensors are offloaded in the context, inputs by the call."""
    return (lambda: offload(mode, **options)), region(mode, **options)
