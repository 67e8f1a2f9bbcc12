"""Policy ``revolve``: binomial checkpointing of the chain of blocks, see `revolve`.

A block is a step, its output is the state after it, and the inputs of the model are the first snapshot. A budget takes
the cheapest number of snapshots that fits, which for equal blocks is the largest; without a budget every state is a
snapshot. Optimal for equal blocks if only one block at a time is saved in full. `rotor` also weighs blocks that differ,
and may save several in full. If the baseline fits, it is the plan.
"""

from __future__ import annotations

from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.policies.chains.blocks import BlockChain, fine_chain
from ackpt.planner.policies.chains.chain_walk import Walk
from ackpt.planner.policies.search.frontier import cheapest
from ackpt.planner.schedule.schedule import Schedule

from . import revolve

_MOST_RUNS = 16  # of a block on average: numbers of snapshots that need more are not tried
_ALL_TRIED = 64  # up to so many snapshots every number is tried; above, they grow by an eighth


def schedule(graph, profile, limit_bytes) -> Schedule:
    if limit_bytes is None:
        return candidates(graph, profile)[-1]
    return cheapest(graph, profile, limit_bytes, candidates)


def candidates(graph: JointGraph, profile) -> list[Schedule]:
    """One schedule for every number of snapshots, up to one for each state."""
    chain = fine_chain(graph)
    count = len(chain.blocks)
    tried = [n for n in _growing(count) if revolve.advances(count, n) <= _MOST_RUNS * count]
    return [_binomial(graph, chain, snapshots) for snapshots in tried]


def _growing(most: int) -> list[int]:
    """Whole numbers from 1 to `most`: all of the small ones, then in steps of an eighth."""
    numbers = list(range(1, min(most, _ALL_TRIED) + 1))
    while numbers[-1] < most:
        numbers.append(min(most, numbers[-1] * 9 // 8))
    return numbers


def _binomial(graph: JointGraph, chain: BlockChain, snapshots: int) -> Schedule:
    walk = Walk(graph, chain)
    for kind, state, *to in revolve.schedule(len(chain.blocks), snapshots):
        if kind == "advance":
            walk.save_output(to[0] - 1)
        elif kind == "step":
            if walk.in_first_forward:
                walk.save_all(state - 1)
            walk.reverse(state - 1, state - 1)
            if state > 1:  # no later step starts from the state before this one
                walk.free_output(state - 2)
    return walk.schedule()
