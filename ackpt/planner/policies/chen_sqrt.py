"""Policy `chen-sqrt`: save the boundaries of segments and recompute their interiors.

From Chen et al. 2016 (arXiv:1604.06174). Without a budget, section 4.1: sqrt(n) segments of equally many blocks. With a
budget, algorithm 3: go through the chain and save a single-tensor cut point whenever the bytes since the last one
exceed a threshold; the cheapest threshold that fits is taken. A segment is recomputed once, when backward reaches it,
and the last one is saved. O(sqrt n) memory on a chain of n equal blocks (`chen.sqrt_counts`). The plan is not optimal,
and a graph without cut points leaves nothing to choose.
"""

from __future__ import annotations

from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.policies.chains.blocks import fine_chain
from ackpt.planner.policies.search.frontier import cheapest
from ackpt.planner.schedule.schedule import Schedule, everything, lower

from . import chen
from .full import segmentations


def schedule(graph, profile, limit_bytes) -> Schedule:
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
    length, longer = divmod(len(blocks), chen.sqrt_counts(len(blocks)).segments)
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
