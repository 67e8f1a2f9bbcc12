"""Improve on the schedules of a frontier: save more activations, or evict activations at the peak.

`refined` saves some of the activations that a schedule recomputes, which gives the schedules between neighbors on a
frontier; so do the decisions of a plan. `evictions` lowers the peak. The builders of schedules recompute an activation
once and keep it until its last reader, so at the lowest peak of a frontier, some activations only wait for a later
reader: the features of a dense block, for example, or an argument of a concatenation. They are freed before the step
with the peak, and recomputed after it, one by one.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ackpt.core.progress import counted
from ackpt.planner.capture.joint_graph import BACKWARD, FORWARD, JointGraph, once_per_graph
from ackpt.planner.policies.search.frontier import Point
from ackpt.planner.schedule.offload_steps import offloadable, offloaded, packed
from ackpt.planner.schedule.plan import Decision
from ackpt.planner.schedule.schedule import Schedule, bases_of, missing_for, recomputed, scheduled, storages_of, uses_of
from ackpt.planner.schedule.simulator import own_sizes, peak_of, step_peaks

# Nodes of all schedules that are tried for one graph, which bounds the time: small graphs get more tries.
_REFINED_NODES = 600_000
_GUESSED = 20_000  # the same for trials that may not fit, for one plan
# Of the bytes between the peaks of two plans that a plan between them may use; the middle saves up to 9 % of a step.
_SHARES = (0, 1 / 2, 1)
_EVICTED_NODES = 120_000  # the same for evictions
# Places on a frontier, from least cost to lowest peak; with the last alone, plans cost up to 38 % of a step more.
_EVICTION_STARTS = (1, 1 / 2, 1 / 4, 3 / 4)
# Of the peak that an evicted activation takes; smaller ones would use up the tries (not tuned).
_LEAST_EVICTED_SHARE = 1 / 400


class Run(NamedTuple):
    """A run of the forward node `node` in backward, at `position` of its order.

    Without it the node's results, `size` bytes, would be live from compute step `start` of the whole step to `stop`,
    and the runs at the positions `views`, which rebuild their views, would be dropped too.
    """

    node: int
    position: int
    start: int
    stop: int
    size: int
    views: tuple[int, ...]


def refined(graph: JointGraph, points, cost, workspace_bytes) -> list[Schedule]:
    """Schedules between every two neighbors of `points`: below the higher peak, and cheaper than the lower plan.

    The neighbors that differ most in cost come first.
    """
    pairs = sorted(zip(points, points[1:]), key=lambda pair: (pair[0].cost - pair[1].cost, pair[1].peak_bytes))
    tries = _REFINED_NODES // len(graph.nodes)
    schedules = []
    for higher, lower in counted(pairs, "searching: between two schedules,"):
        for share in _SHARES:
            limit = lower.peak_bytes + int(share * (higher.peak_bytes - 1 - lower.peak_bytes))
            schedule, tries = with_fewer_runs(graph, lower.schedule, cost, workspace_bytes, limit, tries)
            if schedule is not lower.schedule:
                schedules.append(schedule)
    return schedules


def with_fewer_runs(
    graph: JointGraph, schedule: Schedule, cost, workspace_bytes, limit_bytes: int, tries: int
) -> tuple[Schedule, int]:
    """`schedule` without the most expensive recomputations that the limit allows to drop, and the remaining `tries`.

    First those whose results surely fit, as many at once as fit together. Then single ones that may fit, because what
    they read need not stay live.
    """
    failed: set[tuple[int, int]] = set()
    while tries > 0:
        order = schedule.backward_arrays.computed
        live, every = runs(graph, schedule, order, workspace_bytes)
        by_cost = sorted((run for run in every if cost[run.node]), key=lambda run: (-cost[run.node], run))
        sure = _fitting(by_cost, live, limit_bytes)
        unsure = [run for run in by_cost if (run.node, run.stop - run.start) not in failed]
        guesses = max(1, _GUESSED // len(graph.nodes)) - len(failed)
        trials = [sure, sure[:1]] if sure else [[run] for run in unsure[: max(0, guesses)]]
        for skipped in trials:
            tries -= 1
            positions = {position for run in skipped for position in (run.position, *run.views)}
            cheaper = without_runs(graph, order, positions)
            if peak_of(graph, cheaper, workspace_bytes) <= limit_bytes:
                schedule = cheaper
                break
            failed.update((run.node, run.stop - run.start) for run in skipped)
            if tries <= 0:
                break
        else:
            break
    return schedule, tries


def runs(graph: JointGraph, schedule: Schedule, order: list[int], workspace_bytes) -> tuple[np.ndarray, list[Run]]:
    """Dynamic bytes at every compute step, int64[steps], and the recomputations in the backward `order` of nodes."""
    forward, backward = step_peaks(graph, schedule, workspace_bytes)
    positions, starts = _last_uses(graph, schedule.forward_arrays.computed, order)
    sizes, views, recomputations = own_sizes(graph)[3].tolist(), _views(graph, order), []
    for position, start in zip(positions.tolist(), starts.tolist()):
        node, of_views, at = order[position], views[position], position + len(forward)
        if of_views is not None:
            recomputations.append(Run(node, position, at if start < 0 else start, at, sizes[node], of_views))
    return np.array([*forward, *backward]), recomputations


def _last_uses(graph: JointGraph, forward: list[int], order: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The positions in the backward `order` at which forward nodes allocate, and the last use of their results before.

    That is the latest compute step of the whole step that uses one of these storages; -1 if none does. A view allocates
    nothing, so it cannot be saved.
    """
    last = np.full(len(graph.storages), -1)
    before = uses_of(graph, forward, FORWARD)
    last[before.storages[before.allocates]] = before.positions[before.allocates]
    uses = uses_of(graph, order, BACKWARD)
    by_storage = np.argsort(uses.storages, kind="stable")
    storages, accesses = uses.storages[by_storage], uses.is_access[by_storage]
    group, width = np.cumsum(np.append(0, storages[1:] != storages[:-1])), len(order) + 1
    # Positions rise within a group, so that the latest access is the greatest: 0 stands for none.
    latest = np.maximum.accumulate(group * width + np.where(accesses, uses.positions[by_storage] + 1, 0))
    earlier = np.append(0, latest[:-1]) - group * width
    starts = np.empty(len(storages), dtype=np.int64)
    starts[by_storage] = np.where(earlier > 0, earlier - 1 + len(forward), last[storages])
    places = np.flatnonzero(uses.allocates & (np.asarray(order)[uses.positions] < graph.boundary))
    positions, first = np.unique(uses.positions[places], return_index=True)
    return positions, np.maximum.reduceat(starts[places], first) if len(places) else starts[places]


def _fitting(candidates: list[Run], live: np.ndarray, limit_bytes: int) -> list[Run]:
    """The first of `candidates`, at most one per node, whose results fit together on top of the `live` bytes."""
    live, chosen = live.copy(), {}
    for run in candidates:
        if run.node in chosen or (run.start < run.stop and live[run.start] + run.size > limit_bytes):
            continue  # decided by one step, as most are
        if live[run.start : run.stop].max(initial=0) + run.size <= limit_bytes:
            live[run.start : run.stop] += run.size
            chosen[run.node] = run
    return list(chosen.values())


def _views(graph: JointGraph, order: list[int]) -> list[tuple[int, ...] | None]:
    """For every run in `order`, the positions of the views of its results that exist without the run too.

    For the first run of a node these are the views that backward is given, else those of the run before. None if
    another view would be missing that only the operation itself can rebuild, as one of several results.
    """
    analysis, producer, boundary = graph.analysis, _rebuilt_from(graph), graph.boundary
    before: dict[int, set[int] | None] = {}
    latest: dict[int, tuple[int, dict[int, int]]] = {}
    positions: list[tuple[int, ...] | None] = [()] * len(order)

    def close(node: int) -> None:
        at, views = latest[node]
        existing = before.get(node)
        positions[at] = tuple(position for position, view in views.items() if existing is None or view in existing)
        if len(analysis.allocated[node]) > 1 and len(positions[at] or ()) < len(views):
            positions[at] = None
        before[node] = set(views.values())

    for at, node in enumerate(order):
        if node >= boundary:
            continue
        if node in analysis.allocated:
            if node in latest:
                close(node)
            latest[node] = at, {}
        elif producer.get(node) in latest:
            latest[producer[node]][1][at] = node
    for node in latest:
        close(node)
    return positions


@once_per_graph
def _rebuilt_from(graph: JointGraph) -> dict[int, int]:
    """By view that is the base tensor of a storage, the node that allocates the storage."""
    return {base: node for node in graph.analysis.allocated for base in _bases(graph, node) if base != node}


def with_saved(graph: JointGraph, schedule: Schedule, node: int, profile) -> Schedule:
    """`schedule` with the results of `node` saved, and the same storages packed and offloaded as far as possible."""
    order, bases = schedule.backward_arrays.computed, _bases(graph, node)
    saving = without_runs(graph, order, {at for at, other in enumerate(order) if other in bases})
    if masks := set(schedule.packed).intersection(saving.saved):
        saving = packed(graph, saving, masks)
    to_host = set(schedule.offloaded).intersection(offloadable(graph, saving))
    return offloaded(graph, saving, to_host, profile) if to_host else saving


def _bases(graph: JointGraph, node: int) -> set[int]:
    """`node` and the base tensors of the storages that it allocates."""
    return {node, *bases_of(graph.analysis, graph.analysis.allocated.get(node, ()))}


def without_runs(graph: JointGraph, order: list[int], skipped: Collection[int] = ()) -> Schedule:
    """The schedule whose backward is `order`, without the positions `skipped` and recomputations that nobody reads."""
    reads, boundary = graph.analysis.backward_reads, graph.boundary
    remaining: list[int] = []
    read: set[int] = set()
    for at, node in zip(range(len(order) - 1, -1, -1), reversed(order)):
        if at in skipped:
            continue
        if node < boundary:  # recomputed
            if node not in read:
                continue
            read.remove(node)
        remaining.append(node)
        read.update(reads[node])
    return scheduled(graph, None, remaining[::-1])


def decisions(graph: JointGraph, schedule: Schedule, cost, baseline_cost: float, profile, count: int = 10):
    """The `count` most expensive recomputed operations, in order; ``baseline_cost``: the cost of the baseline step."""
    analysis = graph.analysis
    runs = Counter(recomputed(graph, schedule))
    total = {node: number * cost[node] for node, number in runs.items() if cost[node] and node in analysis.allocated}
    most_expensive = sorted(total, key=lambda node: (-total[node], node))[:count]
    return tuple(
        Decision(
            name=graph.nodes[node].name,
            module=graph.nodes[node].module,
            cost=total[node] / baseline_cost,
            bytes=sum(analysis.bytes[s] for s in analysis.allocated.get(node, ()) if s in analysis.savable),
            runs=runs[node],
            peak_if_kept_bytes=peak_of(graph, with_saved(graph, schedule, node, profile), profile.workspace_bytes),
        )
        for node in most_expensive
    )


def evictions(graph: JointGraph, points: Sequence[Point], cost, workspace_bytes) -> list[Schedule]:
    """Schedules with lower peaks than some of `points`, a frontier, each with one eviction more than the one before."""
    tries = max(1, _EVICTED_NODES // len(graph.nodes) // len(_EVICTION_STARTS))
    starts = dict.fromkeys(int(share * (len(points) - 1)) for share in _EVICTION_STARTS)
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
        if producer >= graph.boundary or freed_bytes < _LEAST_EVICTED_SHARE * peak_bytes or results & fixed:
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
    live = walk.live.intersection(analysis.sources)
    live |= {n for n in walk.live if exists.issuperset(analysis.storages(n, again=n < graph.boundary))}
    return waiting, live


@once_per_graph
def _values(graph: JointGraph) -> list[frozenset[int]]:
    """By storage, the nodes whose results use it."""
    values: list[set[int]] = [set() for _ in graph.storages]
    for node in graph.nodes:
        for storage in node.storages:
            values[storage].add(node.id)
    return [frozenset(nodes) for nodes in values]
