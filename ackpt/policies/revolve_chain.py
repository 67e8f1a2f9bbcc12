"""Policy ``revolve``: binomial checkpointing of the chain of blocks, see `revolve`.

A block is a step, the tensor that it hands on is the state, and the inputs of the model are the first snapshot. The
number of snapshots is what a budget decides: of all numbers the cheapest that fits, which for equal blocks is the
largest; without a budget every state is one. Optimal for equal blocks of which one is kept in full at a time; `rotor`
weighs blocks that differ, and may keep several. Where the plain step fits, that is the plan. Numbers of snapshots that
would run a block more than `_RUNS` times on the average are not tried, and above `_ALL` not every number is.
"""

from __future__ import annotations

from ackpt.capture.joint_graph import JointGraph
from ackpt.planning.schedule import Schedule
from ackpt.policies.chains.blocks import Chain
from ackpt.policies.chains.chain_walk import Walk, steps
from ackpt.policies.search.frontier import cheapest

from . import revolve

_RUNS, _ALL = 16, 64


def schedule(graph, profile, limit_bytes) -> Schedule:
    if limit_bytes is None:
        return candidates(graph, profile)[-1]
    return cheapest(graph, profile, limit_bytes, candidates)


def candidates(graph: JointGraph, profile) -> list[Schedule]:
    """One for every number of snapshots, up to one for each state."""
    found = steps(graph)
    count = len(found.blocks)
    tried = [n for n in _growing(count) if revolve.advances(count, n) <= _RUNS * count]
    return [_binomial(graph, found, snapshots) for snapshots in tried]


def _growing(most: int) -> list[int]:
    """Whole numbers up to `most`, the small ones all, the others by steps of an eighth."""
    found = list(range(1, min(most, _ALL) + 1))
    while found[-1] < most:
        found.append(min(most, found[-1] * 9 // 8))
    return found


def _binomial(graph: JointGraph, found: Chain, snapshots: int) -> Schedule:
    walk = Walk(graph, found)
    for kind, state, *to in revolve.schedule(len(found.blocks), snapshots):
        if kind == "advance":
            walk.save_output(to[0] - 1)
        elif kind == "step":
            if walk.in_first_forward:
                walk.save_all(state - 1)
            walk.reverse(state - 1, state - 1)
            if state > 1:  # no later step starts from the state before this one
                walk.drop_output(state - 2)
    return walk.schedule()
