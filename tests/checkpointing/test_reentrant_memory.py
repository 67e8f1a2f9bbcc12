"""Regions save only their inputs: exact bytes after the forward and at the peak, from the allocator's events."""

import functools
import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import ackpt
from ackpt.checkpointing.sequential import segment_lengths

KIB = 1024
SIZE = 64 * KIB  # bytes of one tensor here: 16384 numbers in fp32


def vector():
    return torch.randn(SIZE // 4, requires_grad=True)


def allocations(step, leaf: torch.Tensor | None = None) -> tuple[int, int]:
    """Bytes that `step` left alive, and the most alive at once, by the allocator's own events.

    The profiler reports frees of blocks that are older than it only sometimes, so the gradient of `leaf` goes before.
    """
    step()
    if leaf is not None:
        leaf.grad = None
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    del kept
    return alive, peak


def tensors(size: int) -> int:
    """Whole tensors of this test in `size` bytes; small ones (scalars, states) do not count."""
    return size // SIZE


def chain(x, length=8):
    for _ in range(length):
        x = x.sin()
    return x


def test_bytes_alive_after_the_forward_are_the_inputs_and_the_outputs():
    x = vector()
    h = x * 2
    plain, _ = allocations(lambda: chain(h))
    checkpointed, peak = allocations(lambda: ackpt.checkpoint(chain, h))
    assert (tensors(plain), tensors(checkpointed)) == (8, 1)
    assert tensors(peak) == 8  # while it runs, the region holds what its recompute will hold
    several, _ = allocations(lambda: ackpt.checkpoint(lambda a: (chain(a), chain(a.cos()), chain(a).detach()), h))
    assert tensors(several) == 3


def test_nested_regions_hold_their_boundaries_only_in_forward_and_recompute():
    """Bisection: log2(n) levels of two halves, so a few tensors instead of 64."""

    def bisect(x, length):
        if length == 1:
            return x.sin()
        for _ in range(2):
            x = ackpt.checkpoint(functools.partial(bisect, length=length // 2), x)
        return x

    x = vector()

    def step():
        y = bisect(x, 64)
        y.backward(torch.ones_like(y))

    _, peak = allocations(step, x)
    assert tensors(peak) <= 2 * 6 + 4


@pytest.mark.parametrize("segments", [2, 4, 5, None])
def test_the_peak_of_checkpoint_sequential_follows_from_its_lengths(segments):
    x = vector()
    layers = [torch.sin] * 20

    def step():
        y = ackpt.checkpoint_sequential(layers, segments, x)
        y.backward(torch.ones_like(y))

    lengths = segment_lengths(20, segments)
    predicted = max(place + length for place, length in enumerate(lengths))
    _, peak = allocations(step, x)
    # Besides the activations: the output, its gradient, and that of one operation.
    assert predicted + 3 <= tensors(peak) <= predicted + 4
    x.grad = None
    _, plain = allocations(lambda: plain_step(x), x)
    assert tensors(peak) < tensors(plain)


def plain_step(x):
    y = chain(x, 20)
    y.backward(torch.ones_like(y))
