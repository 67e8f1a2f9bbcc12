"""The default: the cheapest plan within the budget, from a front of plans that is computed once per graph.

Each block's choices are solved once for all blocks of one structure, the chain is solved by dynamic programming for
every amount of memory, and every solution is lowered and simulated. What no other solution beats in both peak and cost
is the front; a budget takes from it the cheapest plan that fits. So a lower budget never gives a higher peak, and
never a lower cost. Where the device has a link to the host, what copies may hide behind computing is offloaded instead.
Recursion and options: see `chain` and `options`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ackpt.capture.analysis import facts
from ackpt.capture.joint_graph import JointGraph
from ackpt.planning.schedule import Schedule, everything, lower
from ackpt.planning.simulator import peak_of
from ackpt.policies.chains.block_stages import stages
from ackpt.policies.chains.blocks import Chain, chain
from ackpt.policies.chains.chain_table import BACKWARD, ChainTable
from ackpt.policies.chains.chain_walk import Walk
from ackpt.policies.chains.long_skips import long_skips
from ackpt.policies.chains.substitutes import standing_in
from ackpt.policies.search.frontier import cheapest, pareto
from ackpt.policies.search.offload_variants import offloads
from ackpt.policies.search.recompute_costs import costs
from ackpt.policies.search.refinement import refined

from . import full, mu_two, rotor_chain
from .full import segmentations

_ALONE = 40_000  # nodes of graphs whose segments are looked at value for value: for a large graph fewer segments
_LONGEST = 4  # times the plain backward: longer ones cost more than a step, and long to look at
_SLOT_STEP = 2  # every second amount of memory is tried; the others gain little
_SMALL = 800  # nodes of a graph for which there is time for every candidate of `rotor` and `mu_two`, too


def schedule(graph, profile, limit_bytes) -> Schedule:
    return cheapest(graph, profile, limit_bytes, candidates)


def candidates(graph: JointGraph, profile) -> list[Schedule]:
    """Solutions of the chain for every amount of memory, what the simpler policies find, and what lies between."""
    cost, plain = costs(graph, profile), everything(graph)
    found = [plain, full.schedule(graph, profile, None), *segments(graph)]
    memory_bytes = peak_of(graph, plain, profile.workspace_bytes)
    for beside in {frozenset(): None, long_skips(graph): None}:
        blocks = chain(graph, beside)
        found += chain_schedules(graph, blocks, profile, cost, memory_bytes)
        found += standing_in(graph, blocks, profile, cost)
    small = len(graph.nodes) <= _SMALL
    if small:
        found += rotor_chain.candidates(graph, profile)
        found += mu_two.evictions(graph, replace(profile, swap_seconds=None))
    points = pareto(graph, profile, found)
    found = [*(point.schedule for point in points), *refined(graph, points, cost, profile.workspace_bytes)]
    away = offloads(graph, profile, found)
    return [*found, *away, *(mu_two.evictions(graph, profile) if away and small else ())]


def segments(graph: JointGraph) -> list[Schedule]:
    """Segments run again as a whole, and value by value."""
    found = segmentations(graph)
    some = found[:: -(-len(found) // max(4, _ALONE // len(graph.nodes)))] if found else []
    alone = (mu_two.each_for_itself(facts(graph), saved) for saved in some)
    longest = _LONGEST * len(everything(graph).backward)
    return [
        *(lower(graph, saved) for saved in found),
        *(schedule for schedule in alone if len(schedule.backward) <= longest),
    ]


def chain_schedules(
    graph: JointGraph, chain: Chain, profile, cost, memory_bytes: int, partials: int | None = None
) -> list[Schedule]:
    """The cheapest ways through the chain for every amount of memory.

    `partials`: how many partial savings of blocks are tried (None: all of them; 1: only to save nothing).
    """
    rows = stages(facts(graph), chain, cost, profile.workspace_bytes)
    table = ChainTable([replace(row, partials=row.partials[:partials]) for row in rows], memory_bytes)
    schedules = []
    previous = None
    for slot in range(table.slots, -1, -_SLOT_STEP):
        if np.isinf(table.costs()[slot]):
            break
        operations = tuple(table.operations(slot))
        if operations != previous:
            schedules.append(_walked(graph, chain, operations))
        previous = operations
    return schedules


def _walked(graph: JointGraph, chain: Chain, operations) -> Schedule:
    """The schedule of the operations of the chain table."""
    walk = Walk(graph, chain)
    for operation in operations:
        if operation.kind == BACKWARD:
            walk.reverse(operation.first, operation.first)
        else:
            walk.save(operation.saved | chain.blocks[operation.last].output)
    return walk.schedule()
