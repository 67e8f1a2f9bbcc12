"""Add schedules to a frontier that pack dropout masks, and schedules that offload activations.

On a CPU, drawing a mask takes as long as tens of elementwise operations, and packing it about as long as one or two. So
the search runs a second time, on a graph whose masks have one bit per element, and the schedules that it finds then
pack the masks. On a GPU, drawing is cheap, and the operation that draws a mask also computes the dropout's result. So
only masks that a schedule saves are packed there. Activations are offloaded as far as the copies overlap with compute.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate

from ackpt.planner.capture.joint_graph import FORWARD, JointGraph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.policies.search.frontier import evenly_spaced, pareto
from ackpt.planner.policies.search.refinement import without_runs
from ackpt.planner.schedule.offload_steps import offloadable, offloaded, packed
from ackpt.planner.schedule.schedule import COMPUTE, Schedule

# Of the masks that are packed; without those between none and all, plans cost up to 1 % of a step more.
_SHARES = (0, 1 / 4, 1 / 2, 3 / 4, 1)
_NODES = 120_000  # of all schedules that are packed for one graph, which bounds the time: small graphs get more of them
_LEAST = 4  # schedules of each frontier, whatever their size (not tuned)
_OFFLOADED_NODES = 1_000_000  # of all schedules that offload, which bounds the time: small graphs get more tries
_BUSY_SHARES = (3 / 4, 1)  # of the forward's seconds that the link is busy (not tuned)


def packings(graph: JointGraph, profile: Profile, schedules: list[Schedule], search: Callable | None) -> list[Schedule]:
    """Schedules with packed masks, made from the frontier of `schedules` and from that of ``search(graph, profile)``.

    The search runs on the graph with one bit per element of each mask. Without `search`, schedules of the first
    frontier that draw masks again also get variants that pack these masks.

    The list is empty if the graph has no masks, the profile has no times, or the graph's compiler does not pack.
    """
    if profile.pack_seconds is None or profile.seconds is None or not graph.replays_random:
        return []
    variants = []
    tries = max(_LEAST, _NODES // len(graph.nodes) // (1 + len(_SHARES)))
    drawn = _drawn(graph)
    for point in evenly_spaced(pareto(graph, profile, schedules), tries):
        variants += _with_shares(graph, point.schedule, (1,), drawn.intersection(point.schedule.saved))
        if search is None:
            variants += _with_shares(graph, point.schedule, (1,), drawn)
    if drawn and search is not None:
        tiny, costs = _tiny(graph, profile, drawn)
        for point in evenly_spaced(pareto(tiny, costs, search(tiny, costs)), tries):
            variants += _with_shares(graph, point.schedule, _SHARES, drawn)
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
    """Evenly spaced schedules of the frontier, with as many activations offloaded as overlap with compute.

    The one with the lowest peak also comes with all of its activations offloaded, at any cost. Empty if `profile` has
    no times of copies, or if the graph's compiler does not run copies.
    """
    if profile.swap_seconds is None or profile.seconds is None or not graph.replays_random:
        return []
    points = pareto(graph, profile, schedules)
    some = evenly_spaced(points, _OFFLOADED_NODES, each=len(_BUSY_SHARES) * len(graph.nodes))
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
