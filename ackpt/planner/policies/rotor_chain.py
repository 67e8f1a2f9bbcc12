"""Policy ``rotor``: the optimal persistent schedule of the chain of blocks, see `rotor`.

A block is a stage. Its times are the modeled cost of its nodes, its sizes are what its forward saves for its backward,
and the gradients of later parameters are overhead of its backward. rotor's model does not know that the first forward
runs anyway, nor that the recomputed activations of a block need not all be live at once. So its schedules for every
budget, with the overhead of stages and without, are simulated, together with those of ``chen-sqrt``, ``chen-log`` and
``revolve``, which are persistent too; the cheapest one that fits is taken.
"""

from __future__ import annotations

from dataclasses import replace

from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.policies.chains.block_options import BlockStep
from ackpt.planner.policies.chains.blocks import BlockChain, fine_chain
from ackpt.planner.policies.chains.chain_walk import Walk
from ackpt.planner.policies.search.frontier import cheapest
from ackpt.planner.policies.search.recompute_costs import costs
from ackpt.planner.schedule.schedule import Schedule

from . import chen_log, chen_sqrt, revolve_chain, rotor

_SIZE_UNITS = 500  # sizes are rounded to 1/500 of everything that can be saved; the simulator decides what fits
_MOST_STAGES = 120  # more blocks than this are joined, equally many neighbors at a time


def schedule(graph, profile, limit_bytes) -> Schedule:
    return cheapest(graph, profile, limit_bytes, candidates)


def candidates(graph: JointGraph, profile) -> list[Schedule]:
    """rotor's schedules for every budget, and those of the simpler persistent policies."""
    blocks = fine_chain(graph, _MOST_STAGES)
    chain = stages(graph, blocks, profile)
    chains = [chain, replace(chain, forward_overhead=(), backward_overhead=())]
    solutions = dict.fromkeys(s.operations for chain in chains for s in rotor.frontier(chain, 2 * _SIZE_UNITS))
    schedules = [_persistent(graph, blocks, operations) for operations in solutions]
    for policy in (chen_sqrt, chen_log, revolve_chain):
        schedules += policy.candidates(graph, profile)
    return schedules


def stages(graph: JointGraph, chain: BlockChain, profile) -> rotor.Chain:
    """The blocks of `chain` as stages of rotor's model."""
    walk = Walk(graph, chain)
    cost = costs(graph, profile)
    times, sizes = [], []
    gradients = 0  # of the parameters of later blocks
    for block in reversed(chain.blocks):
        step = BlockStep(walk.analysis, block, chain.pinned, cost, profile.workspace_bytes)
        option = step.option(frozenset(s for unit in block.units for s in unit) & walk.read)
        output = sum(walk.analysis.bytes[s] for s in block.output)
        saved = option.saved_bytes + output
        times.append([sum(cost[node] for node in nodes) for nodes in (block.forward, block.backward)])
        backward_overhead = max(0, option.backward_peak - saved - output) + gradients
        sizes.append((output, saved, max(0, option.forward_peak - saved), backward_overhead))
        gradients += step.parameter_gradient_bytes
    unit = max(1, sum(saved for _, saved, _, _ in sizes) // _SIZE_UNITS)
    forward, backward = zip(*reversed(times))
    output, saved, in_forward, in_backward = zip(*([round(size / unit) for size in row] for row in reversed(sizes)))
    return rotor.Chain(forward, backward, output, saved, in_forward, in_backward)


def _persistent(graph: JointGraph, chain: BlockChain, operations) -> Schedule:
    walk = Walk(graph, chain)
    saved_whole = set()
    for (kind, stage), following in zip(operations, [*operations[1:], None]):
        if kind == rotor.FORWARD_ALL:
            saved_whole.add(stage)
            # Right before its backward a block need not be saved: the backward recomputes it piece by piece.
            if walk.in_first_forward or following != (rotor.BACKWARD, stage):
                walk.save_all(stage)
        elif kind == rotor.BACKWARD:
            walk.reverse(stage, stage)
            if stage - 1 not in saved_whole:
                walk.free_output(stage - 1)
        else:
            walk.save_output(stage)
            if kind == rotor.FORWARD_NONE:
                walk.free_output(stage - 1)
    return walk.schedule()
