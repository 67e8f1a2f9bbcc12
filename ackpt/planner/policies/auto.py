"""Policy `auto`, the default: the candidate schedules, of which `search.frontier` takes the cheapest in the budget.

The options of a block are found once for all blocks of one structure. Dynamic programming over the chain of blocks
solves every amount of memory at once, and the simulator measures every solution. The frontier consists of the solutions
that no other beats in both peak and cost; a budget takes the cheapest one that fits. So a smaller budget never gives a
higher peak or a lower cost. Between its points, recomputed activations are saved; at a peak, waiting activations are
evicted. For the recursion see `chains.chain_table`, for the options of a block `chains.block_options`.

Dropout masks are packed where that is cheaper than drawing them again. On a CPU, drawing a mask takes as long as tens
of elementwise operations, and packing it about as long as one or two. So the search runs a second time, on a graph
whose masks have one bit per element, and the schedules that it finds then pack the masks. On a GPU, drawing is cheap,
and the operation that draws a mask also computes the dropout's result. So only masks that a schedule saves are packed
there. On a device with a link to the host, activations are offloaded as far as the copies overlap with compute.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate, islice

import numpy as np

from ackpt.planner.capture.joint_graph import FORWARD, JointGraph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.policies.chains.block_options import stages
from ackpt.planner.policies.chains.blocks import BlockChain, Walk, coarse_chain, long_skips
from ackpt.planner.policies.chains.chain_table import BACKWARD, ChainTable
from ackpt.planner.policies.chains.substitutes import substituted
from ackpt.planner.policies.full import segmentations
from ackpt.planner.policies.search.frontier import cheapest, costs, evenly_spaced, pareto, thinned
from ackpt.planner.policies.search.refinement import evictions, refined, without_runs
from ackpt.planner.schedule.offload_steps import offloadable, offloaded, packed
from ackpt.planner.schedule.schedule import COMPUTE, Schedule, everything, lower, scheduled
from ackpt.planner.schedule.simulator import peak_of

from . import full, mu_two, rotor

# Nodes of all segmentations that are recomputed one activation at a time: bounds the time of a search.
_SEGMENT_NODES = 40_000
_LEAST_SEGMENTATIONS = 4  # so many of them are tried on any graph (not tuned)
_LONGEST = 4  # times the baseline's backward: longer schedules cost more than a step, and long to simulate
_SLOT_STEP = 2  # every second amount of memory is tried; the others gain little
_SMALL = 800  # nodes; above, all candidates of `rotor` and `mu_two` would take most of the search's time
_MEDIUM = 5000  # nodes; above, a second search, with packed masks, would double a search of many seconds
# Of the masks that are packed; without those between none and all, plans cost up to 1 % of a step more.
_PACKED_SHARES = (0, 1 / 4, 1 / 2, 3 / 4, 1)
# Nodes of all schedules that are packed for one graph, which bounds the time: of 1,000 nodes, 100 of each frontier.
_PACKED_NODES = 600_000
_LEAST_PACKED = 4  # schedules of each frontier, whatever their size (not tuned)
_OFFLOADED_NODES = 1_000_000  # of all schedules that offload, which bounds the time: small graphs get more tries
_BUSY_SHARES = (3 / 4, 1)  # of the forward's seconds that the link is busy (not tuned)


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
    schedules = [everything(graph), full.schedule(graph, profile, None), *segments(graph)]
    for skips in {frozenset(): None, long_skips(graph): None}:
        chain = coarse_chain(graph, skips)
        schedules += chain_schedules(graph, chain, profile) + substituted(graph, chain, profile)
    if len(graph.nodes) <= _SMALL:
        schedules += rotor.candidates(graph, profile)
        schedules += mu_two.evictions(graph, replace(profile, swap_seconds=None))
    points = pareto(graph, profile, schedules)
    schedules = [point.schedule for point in points]
    cost, workspace_bytes = costs(graph, profile), np.array(profile.workspace_bytes)
    schedules += refined(graph, points, cost, workspace_bytes)
    return [*schedules, *evictions(graph, points, cost, workspace_bytes)]


def through_chain(graph: JointGraph, profile) -> list[Schedule]:
    """The baseline and the chain's solutions, which take a small part of the time of `recomputing`."""
    return [everything(graph), *chain_schedules(graph, coarse_chain(graph), profile)]


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


def chain_schedules(graph: JointGraph, chain: BlockChain, profile, partials: int | None = None) -> list[Schedule]:
    """The cheapest ways through the chain for every amount of memory.

    `partials`: how many partial savings of blocks are tried (None: all of them; 1: only to save nothing).
    """
    rows = stages(graph.analysis, chain, costs(graph, profile), profile.workspace_bytes)
    memory_bytes = peak_of(graph, everything(graph), profile.workspace_bytes)
    table = ChainTable([replace(row, partials=row.partials[:partials]) for row in rows], memory_bytes)
    schedules = []
    previous = None
    for slot in range(table.slots, -1, -_SLOT_STEP):
        if np.isinf(table.costs()[slot]):
            break
        operations = tuple(table.operations(slot))
        if operations != previous:
            walk = Walk(graph, chain)
            for operation in operations:
                if operation.kind == BACKWARD:
                    walk.reverse(operation.first, operation.first)
                else:
                    walk.save(operation.saved | chain.blocks[operation.last].output)
            schedules.append(walk.schedule())
        previous = operations
    return schedules


def packings(graph: JointGraph, profile: Profile, schedules: list[Schedule], search: Callable | None) -> list[Schedule]:
    """Schedules with packed masks, made from the frontier of `schedules` and from that of ``search(graph, profile)``.

    The search runs on the graph with one bit per element of each mask. Without `search`, schedules of the first
    frontier that draw masks again also get variants that pack these masks.

    The list is empty if the graph has no masks, the profile has no times, or the graph's compiler does not pack.
    """
    if profile.pack_seconds is None or profile.seconds is None or not graph.replays_random:
        return []
    variants = []
    tries = max(_LEAST_PACKED, _PACKED_NODES // len(graph.nodes) // (1 + len(_PACKED_SHARES)))
    drawn = _drawn(graph)
    for point in thinned(pareto(graph, profile, schedules), tries):
        variants += _with_shares(graph, point.schedule, (1,), drawn.intersection(point.schedule.saved))
        if search is None:
            variants += _with_shares(graph, point.schedule, (1,), drawn)
    if drawn and search is not None:
        tiny, its_profile = _tiny(graph, profile, drawn)
        for point in thinned(pareto(tiny, its_profile, search(tiny, its_profile)), tries):
            variants += _with_shares(graph, point.schedule, _PACKED_SHARES, drawn)
    return variants


def _drawn(graph: JointGraph) -> set[int]:
    """The masks that are the only result of the operation that draws them."""
    producers = {storage: graph.storages[storage].producer for storage in graph.analysis.masks}
    return {storage for storage, producer in producers.items() if graph.analysis.base_of[storage] == producer}


def with_packed_masks(graph: JointGraph, masks: Iterable[int] | None = None) -> JointGraph:
    """`graph` in which `masks`, by default all, have one bit per element, for the lower bound of plans that pack."""
    storages = list(graph.storages)
    for storage in graph.analysis.masks if masks is None else masks:
        storages[storage] = replace(storages[storage], bytes=graph.analysis.masks[storage].packed_bytes)
    return replace(graph, storages=tuple(storages))


def _tiny(graph: JointGraph, profile: Profile, masks: set[int]) -> tuple[JointGraph, Profile]:
    """The graph and profile for a search in which `masks` have one bit per element and are always saved.

    An operation that draws or reads a mask has the whole mask as workspace, and its recomputation unpacks the mask.
    """
    assert profile.seconds is not None and profile.pack_seconds is not None
    analysis, seconds, workspace = graph.analysis, list(profile.seconds), list(profile.workspace_bytes)
    tiny = replace(with_packed_masks(graph, masks), replays_random=False)
    for node in graph.nodes:
        for storage in masks.intersection(analysis.accessed[node.phase][node.id]):
            if node.id in analysis.allocated:
                workspace[node.id] += graph.storages[storage].bytes - tiny.storages[storage].bytes
                seconds[node.id] += profile.pack_seconds[storage] if node.phase == FORWARD else 0.0
    return tiny, replace(profile, seconds=tuple(seconds), workspace_bytes=tuple(workspace), pack_seconds=None)


def _with_shares(graph: JointGraph, schedule: Schedule, shares, drawn: set[int]) -> list[Schedule]:
    """Variants of `schedule` that save the masks `drawn`; each packs another share, the largest masks first."""
    analysis, order = graph.analysis, schedule.backward_arrays.computed
    nodes = {analysis.base_of[storage] for storage in drawn}
    saving = without_runs(graph, order, {at for at, node in enumerate(order) if node in nodes})
    again = {storage for node in saving.backward_arrays.computed for storage in analysis.allocated.get(node, ())}
    masks = sorted(
        (analysis.masks.keys() & saving.saved) - again, key=lambda storage: (-graph.storages[storage].bytes, storage)
    )
    counts = dict.fromkeys(round(share * len(masks)) for share in shares)
    return [packed(graph, saving, masks[:count]) if count else saving for count in counts]


def offloads(graph: JointGraph, profile, schedules) -> list[Schedule]:
    """Schedules of the frontier, thinned out, with as many activations offloaded as overlap with compute.

    The one with the lowest peak also comes with all of its activations offloaded, at any cost. Empty if `profile` has
    no times of copies, or if the graph's compiler does not run copies.
    """
    if profile.swap_seconds is None or profile.seconds is None or not graph.replays_random:
        return []
    points = pareto(graph, profile, schedules)
    some = thinned(points, _OFFLOADED_NODES // len(graph.nodes) // len(_BUSY_SHARES))
    chosen = [(point.schedule, storages) for point in some for storages in _overlapping(graph, point.schedule, profile)]
    lowest = points[-1].schedule
    return [offloaded(graph, *one, profile) for one in [*chosen, (lowest, offloadable(graph, lowest))] if one[1]]


def _overlapping(graph: JointGraph, schedule: Schedule, profile) -> list[list[int]]:
    """The storages that the link can copy during each share of the forward, those first that stay unused longest.

    Backward reads in the reverse order, so the first one whose last forward reader is done stays unused longest.
    """
    order = sorted(offloadable(graph, schedule), key=lambda storage: (_last_use(graph, storage), storage))
    copied = [0.0, *accumulate(profile.swap_seconds[storage] for storage in order)]
    forward = sum(profile.seconds[step.id] for step in schedule.forward if step.kind == COMPUTE)
    counts = {bisect_right(copied, share * forward) - 1 for share in _BUSY_SHARES}
    return [order[:count] for count in sorted(counts)]


def _last_use(graph: JointGraph, storage: int) -> int:
    one = graph.storages[storage]
    return one.producer if one.last_fw_access is None else one.last_fw_access
