"""Policy `auto`, the default: the candidate schedules, of which `search.frontier` takes the cheapest in the budget.

The options of a block are found once for all blocks of one structure. Dynamic programming over the chain of blocks
solves every amount of memory at once, and the simulator measures every solution. The frontier consists of the solutions
that no other beats in both peak and cost; a budget takes the cheapest one that fits. So a smaller budget never gives a
higher peak or a lower cost. Between its points, recomputed activations are saved; at a peak, waiting activations are
evicted. Dropout masks are packed where that is cheaper than drawing them again. On a device with a link to the host,
activations are offloaded if their copies overlap with compute. For the recursion see `chains.chain_table`, for the
options of a block `chains.block_options`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.policies.chains.block_options import stages
from ackpt.planner.policies.chains.blocks import BlockChain, Walk, coarse_chain, long_skips
from ackpt.planner.policies.chains.chain_table import BACKWARD, ChainTable
from ackpt.planner.policies.chains.substitutes import substituted
from ackpt.planner.policies.search.evictions import evictions
from ackpt.planner.policies.search.frontier import cheapest, costs, evenly_spaced, pareto
from ackpt.planner.policies.search.refinement import refined
from ackpt.planner.policies.search.variants import offloads, packings
from ackpt.planner.schedule.schedule import Schedule, everything, lower, scheduled
from ackpt.planner.schedule.simulator import peak_of

from . import full, mu_two, rotor
from .full import segmentations

# Nodes of all segmentations that are recomputed one activation at a time: bounds the time of a search.
_SEGMENT_NODES = 40_000
_LEAST_SEGMENTATIONS = 4  # so many of them are tried on any graph (not tuned)
_LONGEST = 4  # times the baseline's backward: longer schedules cost more than a step, and long to simulate
_SLOT_STEP = 2  # every second amount of memory is tried; the others gain little
_SMALL = 800  # nodes; above, all candidates of `rotor` and `mu_two` would take most of the search's time
_MEDIUM = 5000  # nodes; above, a second search, with packed masks, would double a search of many seconds


def schedule(graph, profile, limit_bytes) -> Schedule:
    return cheapest(graph, profile, limit_bytes, candidates)


def candidates(graph: JointGraph, profile) -> list[Schedule]:
    """The schedules of `recomputing`, those that pack dropout masks, and those that offload."""
    schedules = recomputing(graph, profile)
    search = recomputing if len(graph.nodes) <= _SMALL else through_chain if len(graph.nodes) <= _MEDIUM else None
    packing = packings(graph, profile, schedules, search)
    offloading = offloads(graph, profile, schedules)
    if packing:
        offloading += offloads(graph, profile, packing)
    if offloading and len(graph.nodes) <= _SMALL:
        offloading += mu_two.evictions(graph, profile)
    return [*schedules, *packing, *offloading]


def recomputing(graph: JointGraph, profile) -> list[Schedule]:
    """The chain's solutions for every amount of memory, those of simpler policies, and what improves on both."""
    cost, baseline = costs(graph, profile), everything(graph)
    schedules = [baseline, full.schedule(graph, profile, None), *segments(graph)]
    memory_bytes = peak_of(graph, baseline, profile.workspace_bytes)
    for skips in {frozenset(): None, long_skips(graph): None}:
        chain = coarse_chain(graph, skips)
        schedules += chain_schedules(graph, chain, profile, cost, memory_bytes)
        schedules += substituted(graph, chain, profile, cost)
    if len(graph.nodes) <= _SMALL:
        schedules += rotor.candidates(graph, profile)
        schedules += mu_two.evictions(graph, replace(profile, swap_seconds=None))
    points = pareto(graph, profile, schedules)
    schedules = [point.schedule for point in points]
    workspace_bytes = np.array(profile.workspace_bytes)
    schedules += refined(graph, points, cost, workspace_bytes)
    return [*schedules, *evictions(graph, points, cost, workspace_bytes)]


def through_chain(graph: JointGraph, profile) -> list[Schedule]:
    """The baseline and the chain's solutions, which take a small part of the time of `recomputing`."""
    baseline = everything(graph)
    memory_bytes = peak_of(graph, baseline, profile.workspace_bytes)
    chain = coarse_chain(graph, frozenset())
    return [baseline, *chain_schedules(graph, chain, profile, costs(graph, profile), memory_bytes)]


def segments(graph: JointGraph) -> list[Schedule]:
    """Chen's segments, recomputed as a whole, and some of them one activation at a time."""
    segmented = segmentations(graph)
    some = evenly_spaced(segmented, max(_LEAST_SEGMENTATIONS, _SEGMENT_NODES // len(graph.nodes)))
    longest = _LONGEST * len(everything(graph).backward)
    orders = (list(islice(mu_two.order_for_each_reader(graph.analysis, saved), longest + 1)) for saved in some)
    one_by_one = (scheduled(graph, None, order) for order in orders if len(order) <= longest)
    return [
        *(lower(graph, saved) for saved in segmented),
        *(schedule for schedule in one_by_one if len(schedule.backward) <= longest),
    ]


def chain_schedules(
    graph: JointGraph, chain: BlockChain, profile, cost, memory_bytes: int, partials: int | None = None
) -> list[Schedule]:
    """The cheapest ways through the chain for every amount of memory.

    `partials`: how many partial savings of blocks are tried (None: all of them; 1: only to save nothing).
    """
    rows = stages(graph.analysis, chain, cost, profile.workspace_bytes)
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


def _walked(graph: JointGraph, chain: BlockChain, operations) -> Schedule:
    """The schedule of the operations of a chain table."""
    walk = Walk(graph, chain)
    for operation in operations:
        if operation.kind == BACKWARD:
            walk.reverse(operation.first, operation.first)
        else:
            walk.save(operation.saved | chain.blocks[operation.last].output)
    return walk.schedule()
