"""Policy `chen-log`: split the chain of blocks recursively in half (Chen et al. 2016, arXiv:1604.06174, section 4.2).

On a chain of n equal blocks it needs O(log n) memory and O(n log n) recomputation (`chen.recursive_peak`,
`chen.recursive_extra_forwards`). Without a budget the recursion goes down to single blocks. With a budget it stops at
the cheapest depth that fits; below that depth, consecutive blocks are recomputed together. Halves have the same number
of blocks, not the same bytes, so the plan is not optimal.
"""

from __future__ import annotations

from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.policies.chains.blocks import BlockChain, Walk, fine_chain
from ackpt.planner.policies.search.frontier import cheapest
from ackpt.planner.schedule.schedule import Schedule


def schedule(graph, profile, limit_bytes) -> Schedule:
    if limit_bytes is None:
        return candidates(graph, profile)[-1]
    return cheapest(graph, profile, limit_bytes, candidates)


def candidates(graph: JointGraph, profile) -> list[Schedule]:
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
