"""Lower the peak of a schedule: free an activation before the step with the peak, and recompute it after that step.

The builders of schedules recompute an activation once and keep it until its last reader. At the lowest peak of a
frontier, some activations only wait for a later reader: the features of a dense block, for example, or an argument of a
concatenation. They are evicted one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ackpt.core.progress import counted
from ackpt.planner.capture.joint_graph import BACKWARD, JointGraph, once_per_graph
from ackpt.planner.schedule.schedule import Schedule, missing_for, storages_of
from ackpt.planner.schedule.simulator import step_peaks

from .frontier import Point
from .refinement import without_runs

# Nodes of all schedules that are tried for one graph, which bounds the time: small graphs get more tries.
_WALKED = 120_000
# Places on a frontier, from least cost to lowest peak; with the last alone, plans cost up to 38 % of a step more.
_STARTS = (1, 1 / 2, 1 / 4, 3 / 4)
_LEAST_SHARE = 1 / 400  # of the peak that an evicted activation takes; smaller ones would use up the tries (not tuned)


def evictions(graph: JointGraph, points: Sequence[Point], cost, workspace_bytes) -> list[Schedule]:
    """Schedules with lower peaks than some of `points`, a frontier, each with one eviction more than the one before."""
    tries = max(1, _WALKED // len(graph.nodes) // len(_STARTS))
    starts = dict.fromkeys(int(share * (len(points) - 1)) for share in _STARTS)
    schedules = []
    for start in counted(starts, "searching: evicting at the peak,"):
        schedules += descent(graph, points[start].schedule, cost, workspace_bytes, tries)
    return schedules


def descent(graph: JointGraph, schedule: Schedule, cost, workspace_bytes, tries: int) -> list[Schedule]:
    """Schedules with a lower and lower peak, made from `schedule` by evictions; at most `tries` are tried."""
    schedules = []
    rank, at = _rank(graph, schedule, workspace_bytes)
    is_lower = True
    while is_lower:
        is_lower = False
        for evicted in _evicted(graph, schedule, cost, at, rank[0]):
            if not tries:
                return schedules
            tries -= 1
            lower, lower_at = _rank(graph, evicted, workspace_bytes)
            if is_lower := lower < rank:
                schedule, rank, at = evicted, lower, lower_at
                schedules.append(schedule)
                break
    return schedules


def _rank(graph: JointGraph, schedule: Schedule, workspace_bytes) -> tuple[tuple[int, int], int]:
    """The peak of `schedule`, in how many steps it is reached, and the first of them: its position in the backward.

    The position is -1 in the forward.
    """
    forward, backward = step_peaks(graph, schedule, workspace_bytes)
    peak = max(*forward, *backward)
    position = -1 if peak in forward else backward.index(peak)
    return (peak, forward.count(peak) + backward.count(peak)), position


def _evicted(graph: JointGraph, schedule: Schedule, cost, position: int, peak_bytes: int) -> Iterator[Schedule]:
    """`schedule` without one of the activations that wait at a position; the cheapest per byte comes first."""
    order = schedule.backward_arrays.computed
    if position >= len(order):  # the optimizer's step
        return
    analysis, storages = graph.analysis, graph.storages
    waiting, live = _waiting(graph, schedule, order, position)
    accessed = analysis.accessed[BACKWARD][order[position]] if position >= 0 else ()
    fixed = analysis.callers | analysis.must_be_saved
    choices = []
    for producer in sorted({storages[s].producer for s in waiting.difference(accessed, fixed)}):
        results = analysis.allocated[producer]
        freed_bytes = sum(analysis.bytes[s] for s in results & waiting)
        if producer >= graph.boundary or freed_bytes < _LEAST_SHARE * peak_bytes or results & fixed:
            continue
        remaining = live.difference(*(_values(graph)[s] for s in results))
        bases = [analysis.base_of[s] for s in results & waiting]
        again = missing_for(analysis, bases, remaining)
        if analysis.not_recomputable.keys().isdisjoint(again):
            choices.append((sum(cost[node] for node in again) / freed_bytes, producer, remaining))
    for _, _, remaining in sorted(choices, key=lambda choice: choice[:2]):
        walk = _Walk(graph, order[: position + 1], remaining)
        for node in order[position + 1 :]:
            walk.run(node)
        if analysis.not_recomputable.keys().isdisjoint(walk.order):
            yield without_runs(graph, walk.order)


class _Walk:
    """An order of nodes, and the values that are `live` after it; what a node misses is recomputed before it."""

    def __init__(self, graph: JointGraph, order: list[int], live: set[int]):
        self.graph, self.order, self.live = graph, order, set(live)

    def run(self, node: int) -> None:
        """Run `node`. All results of an operation are new whenever it runs."""
        analysis, live = self.graph.analysis, self.live
        allocated = analysis.allocated.get(node)
        if node in live and not allocated:  # a view that has been rebuilt already
            return
        while not live.issuperset(analysis.backward_reads[node]):
            for again in missing_for(analysis, analysis.backward_reads[node], live):
                self.run(again)
        if allocated and node < self.graph.boundary:
            live.difference_update(*(_values(self.graph)[s] for s in allocated))
        self.order.append(node)
        live.add(node)


def _waiting(graph: JointGraph, schedule: Schedule, order: list[int], position: int) -> tuple[set[int], set[int]]:
    """The storages that the nodes after a position read without allocating them, and the values live after it."""
    analysis = graph.analysis
    waiting: set[int] = set()
    allocated: set[int] = set()
    for node in order[position + 1 :]:
        allocated |= analysis.allocated.get(node, frozenset())
        waiting.update(s for s in analysis.accessed[BACKWARD][node] if s not in allocated)
    walk = _Walk(graph, [], set(analysis.sources))
    outputs = storages_of(graph, analysis.outputs) & analysis.savable
    walk.live.update(analysis.base_of[s] for s in outputs.union(schedule.saved))
    for node in order[: position + 1]:
        walk.run(node)
    exists = waiting | analysis.callers | analysis.must_be_saved | analysis.resident
    is_source = set(analysis.sources)
    live = {node for node in walk.live if node in is_source or exists.issuperset(_storages(graph, node))}
    return waiting, live


def _storages(graph: JointGraph, node: int) -> tuple[int, ...]:
    return graph.analysis.storages(node, again=node < graph.boundary)


@once_per_graph
def _values(graph: JointGraph) -> list[frozenset[int]]:
    """By storage, the nodes whose results use it."""
    values: list[set[int]] = [set() for _ in graph.storages]
    for node in graph.nodes:
        for storage in node.storages:
            values[storage].add(node.id)
    return [frozenset(nodes) for nodes in values]
