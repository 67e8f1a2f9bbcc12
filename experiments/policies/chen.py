"""Policies `chen_sqrt` and `chen_log`, of Chen et al. 2016 (arXiv:1604.06174).

`chen_sqrt` saves the boundaries of segments and recomputes their interiors. Without a budget, section 4.1: sqrt(n)
segments of equally many blocks, O(sqrt n) memory for less than one extra forward. With a budget, algorithm 3: save a
single-tensor cut point whenever the bytes since the last one exceed a threshold; the cheapest threshold that fits is
taken. The last segment is saved. It is not optimal: segments that get shorter towards the end need sqrt(2 n)
(`ackpt.checkpointing.sequential.segment_lengths`), and `revolve` recomputes least for every number of saved states.

`chen_log`, section 4.2, splits the chain of blocks recursively in half. On a chain of n equal blocks it needs O(log n)
memory and O(n log n) recomputation (`recursive_peak`, `recursive_extra_forwards`). Without a budget the recursion goes
down to single blocks. With a budget it stops at the cheapest depth that fits; below that depth, consecutive blocks are
recomputed together. Halves have the same number of blocks, not the same bytes, so the plan is not optimal.

The functions of plain numbers, such as `sqrt_counts`, count outputs of equal layers, one unit each. A layer's backward
reads its input and its output; the chain's input belongs to the caller, and gradients are not counted.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.policies.chains.blocks import BlockChain, Walk, fine_chain
from ackpt.planner.policies.full import segmentations
from ackpt.planner.policies.search.frontier import cheapest
from ackpt.planner.schedule.schedule import Schedule, everything, lower


class Counts(NamedTuple):
    """``boundaries``: outputs saved between segments; ``extra_forwards``: layers recomputed; ``peak``: live outputs.

    Example:
        >>> sqrt_counts(100).peak
        19
    """

    segments: int
    boundaries: int
    extra_forwards: int
    peak: int


def sqrt_counts(n: int) -> Counts:
    """The counts for `n` layers in floor(sqrt n) segments whose lengths differ by at most one, the longer ones first.

    The last segment is not recomputed, nor is the last layer of the others, whose output is a boundary. Code that
    recomputes whole segments, such as ``torch.utils.checkpoint``, runs ``extra_forwards + boundaries`` layers.

    Example:
        >>> sqrt_counts(16)
        Counts(segments=4, boundaries=3, extra_forwards=9, peak=7)
    """
    _check(n)
    segments = isqrt(n)
    length, boundaries = n // segments, segments - 1
    return Counts(segments, boundaries, n - length - boundaries, boundaries + length)


def recursive_peak(n: int) -> int:
    """The peak number of live outputs if one output splits `n` layers into halves, and so on down to single layers.

    Example:
        >>> [recursive_peak(n) for n in (1, 3, 7, 1023)]
        [1, 2, 3, 10]
    """
    _check(n)
    return n.bit_length()


def recursive_extra_forwards(n: int) -> int:
    """Layers recomputed by the recursion of `recursive_peak`: every half runs once for each half that contains it.

    Example:
        >>> [recursive_extra_forwards(n) for n in (1, 3, 7, 1023)]
        [0, 1, 5, 4097]
    """
    _check(n)
    return _evaluations(n) - n


def _evaluations(n: int) -> int:
    if n <= 1:
        return n
    before = (n - 1) // 2
    return before + 1 + _evaluations(before) + _evaluations(n - before - 1)


def _check(n) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"a chain has a whole number of layers, at least 1; got {n!r}")


def chen_sqrt(graph, profile, limit_bytes) -> Schedule:
    """Saves the ends of segments, and the last segment.

    Example:
        >>> import torch, ackpt
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)]
        >>> graph = ackpt.trace(torch.nn.Sequential(*layers), torch.ones(4, 8))
        >>> ackpt.plan(graph, policy=chen_sqrt).recompute_flops > 0
        True
    """
    if limit_bytes is None:
        return lower(graph, _equal_segments(graph))
    return cheapest(graph, profile, limit_bytes, candidates)


def candidates(graph: JointGraph, profile) -> list[Schedule]:
    """One schedule for every threshold, and the equal segments."""
    return [lower(graph, saved) for saved in (*segmentations(graph), _equal_segments(graph))]


def _equal_segments(graph: JointGraph) -> frozenset[int]:
    """The storages that sqrt(n) segments of equally many blocks save: their ends, and the whole last segment."""
    chain = fine_chain(graph)
    blocks = chain.blocks
    length, longer = divmod(len(blocks), sqrt_counts(len(blocks)).segments)
    ends = _ends(len(blocks), length, longer)
    last = blocks[ends[-2] + 1 :] if len(ends) > 1 else blocks
    in_last = {s for block in last for unit in (*block.units, block.output) for s in unit}
    at_ends = {s for end in ends[:-1] for s in blocks[end].output}
    return frozenset(at_ends | chain.pinned | in_last & set(everything(graph).saved))


def _ends(blocks: int, length: int, longer: int) -> list[int]:
    """The last block of each segment; the first `longer` segments have one block more than `length`."""
    ends = [-1]
    while ends[-1] + 1 < blocks:
        ends.append(ends[-1] + length + (len(ends) <= longer))
    return ends[1:]


def chen_log(graph, profile, limit_bytes) -> Schedule:
    """Saves the middle of the chain, then those of its halves, and so on.

    Example:
        >>> import torch, ackpt
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)]
        >>> graph = ackpt.trace(torch.nn.Sequential(*layers), torch.ones(4, 8))
        >>> ackpt.plan(graph, policy=chen_log).recompute_flops > 0
        True
    """
    if limit_bytes is None:
        return halvings(graph, profile)[-1]
    return cheapest(graph, profile, limit_bytes, halvings)


def halvings(graph: JointGraph, profile) -> list[Schedule]:
    """One schedule for every depth, down to single blocks."""
    chain = fine_chain(graph)
    return [_halved(graph, chain, depth) for depth in range((len(chain.blocks) - 1).bit_length() + 1)]


def _halved(graph: JointGraph, chain: BlockChain, depth: int) -> Schedule:
    walk = Walk(graph, chain)

    def reverse(first: int, last: int, depth: int) -> None:
        if depth == 0 or first == last:
            for block in range(first, last + 1):
                if walk.in_first_forward:
                    walk.save_all(block)
            walk.reverse(first, last)
            return
        middle = first + (last - first - 1) // 2
        walk.save_output(middle)
        reverse(middle + 1, last, depth - 1)
        reverse(first, middle, depth - 1)

    reverse(0, len(chain.blocks) - 1, depth)
    return walk.schedule()
