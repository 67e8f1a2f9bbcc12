"""Add schedules that pack dropout masks instead of saving them whole or drawing them again.

On a CPU, drawing a mask takes as long as tens of elementwise operations, and packing it about as long as one or two. So
the search runs a second time, on a graph whose masks have one bit per element, and the schedules that it finds then
pack the masks. On a GPU, drawing is cheap, and the operation that draws a mask also computes the dropout's result. So
only masks that a schedule saves are packed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ackpt.planner.capture.joint_graph import FORWARD, JointGraph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.schedule.offload_steps import packed
from ackpt.planner.schedule.schedule import Schedule

from .frontier import evenly_spaced, pareto
from .refinement import without_runs

_SHARES = (0, 1 / 4, 1 / 2, 3 / 4, 1)  # of the masks that are packed
_NODES = 120_000  # of all schedules that are packed for one graph: small graphs get more of them
_LEAST = 4  # schedules of each frontier, whatever their size


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
    """`graph` in which `masks`, by default all, have one bit per element.

    A lower bound on its cost also holds for plans that pack masks.
    """
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
    """Variants of `schedule` that save the masks `drawn`; each packs another of the `shares` of all saved masks.

    The largest masks are packed first.
    """
    analysis, order = graph.analysis, schedule.backward_arrays.computed
    nodes = {analysis.base_of[storage] for storage in drawn}
    saving = without_runs(graph, order, {at for at, node in enumerate(order) if node in nodes})
    again = {storage for node in saving.backward_arrays.computed for storage in analysis.allocated.get(node, ())}
    masks = sorted(
        (analysis.masks.keys() & saving.saved) - again, key=lambda storage: (-graph.storages[storage].bytes, storage)
    )
    counts = dict.fromkeys(round(share * len(masks)) for share in shares)
    return [packed(graph, saving, masks[:count]) if count else saving for count in counts]
