"""Policy ``chen-log``: halves of halves of the chain of blocks, down to single blocks or to a chosen depth.

The recursive view of Chen et al. 2016, section 4.2 (arXiv:1604.06174), with one kept tensor a level: O(log n) memory
and O(n log n) recomputation on a chain of n equal blocks (`chen.recursive_peak`, `chen.recursive_extra_forwards`).
Without a budget the recursion goes down to single blocks. With one it stops at some depth, below which a stretch is
recomputed as a whole: of all depths the cheapest that fits. Halves are of equally many blocks, not bytes; not optimal.
"""

from __future__ import annotations

from ackpt.capture.joint_graph import JointGraph
from ackpt.planning.schedule import Schedule
from ackpt.policies.chains.blocks import Chain
from ackpt.policies.chains.chain_walk import Walk, steps
from ackpt.policies.search.frontier import cheapest


def schedule(graph, profile, limit_bytes) -> Schedule:
    if limit_bytes is None:
        return candidates(graph, profile)[-1]
    return cheapest(graph, profile, limit_bytes, candidates)


def candidates(graph: JointGraph, profile) -> list[Schedule]:
    """One for every depth, down to single blocks."""
    found = steps(graph)
    return [_recursion(graph, found, depth) for depth in range((len(found.blocks) - 1).bit_length() + 1)]


def _recursion(graph: JointGraph, found: Chain, depth: int) -> Schedule:
    walk = Walk(graph, found)

    def reverse(first: int, last: int, levels: int) -> None:
        if levels == 0 or first == last:
            for block in range(first, last + 1):
                if walk.in_first_forward:
                    walk.save_all(block)
            walk.reverse(first, last)
            return
        middle = first + (last - first - 1) // 2
        walk.save_output(middle)
        reverse(middle + 1, last, levels - 1)
        reverse(first, middle, levels - 1)

    reverse(0, len(found.blocks) - 1, depth)
    return walk.schedule()
