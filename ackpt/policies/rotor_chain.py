"""Policy ``rotor``: the optimal persistent schedule of the chain of blocks, see `rotor`.

A block is a stage: its times are the modelled cost of its nodes, its sizes what its forward leaves for its backward;
the gradients of later parameters live beside its backward. rotor's model does not know that the first forward runs
anyway, nor that what a block recomputes need not be there all at once. So its schedules for every budget, with what
stages take beside their results and without, are lowered and simulated, beside those of ``chen-sqrt``, ``chen-log`` and
``revolve``, which are persistent too, and the cheapest that really fits is taken. Sizes are counted in a `_SLOTS`-th of
what keeping everything takes, to the nearest, since the simulator decides what fits. More than `_STAGES` blocks are
joined, as many neighbours at a time as it takes.
"""

from __future__ import annotations

from dataclasses import replace

from ackpt.capture.joint_graph import JointGraph
from ackpt.planning.schedule import Schedule
from ackpt.policies.chains.block_options import Local
from ackpt.policies.chains.blocks import Chain
from ackpt.policies.chains.chain_walk import Walk, steps
from ackpt.policies.search.frontier import cheapest
from ackpt.policies.search.recompute_costs import costs

from . import chen_log, chen_sqrt, revolve_chain, rotor

_SLOTS, _STAGES = 500, 120


def schedule(graph, profile, limit_bytes) -> Schedule:
    return cheapest(graph, profile, limit_bytes, candidates)


def candidates(graph: JointGraph, profile) -> list[Schedule]:
    """Those of the model, and those of the policies that it covers."""
    found = steps(graph, _STAGES)
    chain = _stages(graph, found, profile)
    chains = [chain, replace(chain, forward_overhead=(), backward_overhead=())]
    solutions = dict.fromkeys(s.operations for chain in chains for s in rotor.front(chain, 2 * _SLOTS))
    schedules = [_persistent(graph, found, operations) for operations in solutions]
    for policy in (chen_sqrt, chen_log, revolve_chain):
        schedules += policy.candidates(graph, profile)
    return schedules


def _stages(graph: JointGraph, found: Chain, profile) -> rotor.Chain:
    walk = Walk(graph, found)
    cost = costs(graph, profile)
    times, sizes = [], []
    gradients = 0  # of the parameters of later blocks
    for block in reversed(found.blocks):
        local = Local(walk.known, block, found.pinned, cost, profile.workspace_bytes)
        option = local.option(frozenset(s for unit in block.units for s in unit) & walk.read)
        output = sum(walk.known.bytes[s] for s in block.output)
        saved = option.saved_bytes + output
        times.append([sum(cost[place] for place in places) for places in (block.forward, block.backward)])
        beside = max(0, option.backward_peak - saved - output) + gradients
        sizes.append((output, saved, max(0, option.forward_peak - saved), beside))
        gradients += local.left_bytes
    unit = max(1, sum(saved for _, saved, _, _ in sizes) // _SLOTS)
    forward, backward = zip(*reversed(times))
    output, saved, in_forward, in_backward = zip(*([round(size / unit) for size in row] for row in reversed(sizes)))
    return rotor.Chain(forward, backward, output, saved, in_forward, in_backward)


def _persistent(graph: JointGraph, found: Chain, operations) -> Schedule:
    walk = Walk(graph, found)
    saved_whole = set()
    for (kind, stage), following in zip(operations, [*operations[1:], None]):
        if kind == rotor.FORWARD_ALL:
            saved_whole.add(stage)
            # Right before its backward, a recomputed block is recomputed piece by piece by that.
            if walk.in_first_forward or following != (rotor.BACKWARD, stage):
                walk.save_all(stage)
        elif kind == rotor.BACKWARD:
            walk.reverse(stage, stage)
            if stage - 1 not in saved_whole:
                walk.drop_output(stage - 1)
        else:
            walk.save_output(stage)
            if kind == rotor.FORWARD_NONE:
                walk.drop_output(stage - 1)
    return walk.schedule()
