"""Policy ``chen-sqrt``: segments of the chain of blocks; their ends are kept, their insides are computed again.

Chen et al. 2016 (arXiv:1604.06174). Without a budget section 4.1: sqrt(n) segments of equally many blocks. With one
algorithm 3: go through the chain in order and keep a single-tensor cut point whenever the bytes since the last one
exceed a threshold; of all thresholds the cheapest that fits. A segment is recomputed once, when backward reaches it,
and the last one is kept. O(sqrt n) memory on a chain of n equal blocks (`chen.sqrt_counts`); not optimal, and on a
graph without cut points there is nothing to choose.
"""

from __future__ import annotations

from ackpt.capture.joint_graph import JointGraph
from ackpt.planning.schedule import Schedule, everything, lower
from ackpt.policies.chains.chain_walk import steps
from ackpt.policies.search.frontier import cheapest

from . import chen
from .full import segmentations


def schedule(graph, profile, limit_bytes) -> Schedule:
    if limit_bytes is None:
        return lower(graph, _equal_segments(graph))
    return cheapest(graph, profile, limit_bytes, candidates)


def candidates(graph: JointGraph, profile) -> list[Schedule]:
    """One for every threshold, and the equal segments."""
    return [lower(graph, saved) for saved in (*segmentations(graph), _equal_segments(graph))]


def _equal_segments(graph: JointGraph) -> frozenset[int]:
    """What sqrt(n) segments of equally many blocks keep: their ends, and all of the last."""
    found = steps(graph)
    length, longer = divmod(len(found.blocks), chen.sqrt_counts(len(found.blocks)).segments)
    ends = _ends(len(found.blocks), length, longer)
    last = found.blocks[ends[-2] + 1 :] if len(ends) > 1 else found.blocks
    inside = {s for block in last for unit in (*block.units, block.output) for s in unit}
    kept = {s for end in ends[:-1] for s in found.blocks[end].output}
    return frozenset(kept | found.pinned | inside & set(everything(graph).saved))


def _ends(blocks: int, length: int, longer: int) -> list[int]:
    """The last block of each segment; the first `longer` segments have one more than `length`."""
    ends = [-1]
    while ends[-1] + 1 < blocks:
        ends.append(ends[-1] + length + (len(ends) <= longer))
    return ends[1:]
