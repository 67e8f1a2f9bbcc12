"""Add plans between two neighbors on a frontier: save what the lower one recomputes, as the higher peak allows."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from ackpt.capture.analysis import facts
from ackpt.capture.joint_graph import BACKWARD, FORWARD, JointGraph
from ackpt.planning.schedule import COMPUTE, Schedule, scheduled
from ackpt.planning.simulator import peak_of, step_peaks

_WALKED = 600_000  # nodes that are walked through for a front: a small graph has more tries than a large one
_GUESSED = 20_000  # the same for what might fit into one plan
_SHARES = (0, 1 / 2, 1)  # of the room between two plans that a plan may take


class Run(NamedTuple):
    """A forward node that runs in backward, at `place` of its order.

    Without the run its results, `size` bytes, would live on from compute step `start` of the whole step to `stop`, and
    the runs at the places `views`, of views of them, would go, too.
    """

    node: int
    place: int
    start: int
    stop: int
    size: int
    views: tuple[int, ...]


def refined(graph: JointGraph, points, cost, workspace_bytes) -> list[Schedule]:
    """For every two neighbours of `points` schedules below the higher one's peak, cheaper than the lower one.

    The neighbours that are furthest apart in cost come first. Neighbours without such schedules give none.
    """
    pairs = sorted(zip(points, points[1:]), key=lambda pair: (pair[0].cost - pair[1].cost, pair[1].peak_bytes))
    left = _WALKED // len(graph.nodes)
    found = []
    for higher, lower in pairs:
        for share in _SHARES:
            limit = lower.peak_bytes + int(share * (higher.peak_bytes - 1 - lower.peak_bytes))
            schedule, left = spared(graph, lower.schedule, cost, workspace_bytes, limit, left)
            if schedule is not lower.schedule:
                found.append(schedule)
    return found


def spared(
    graph: JointGraph, schedule: Schedule, cost, workspace_bytes, limit_bytes: int, tries: int
) -> tuple[Schedule, int]:
    """`schedule` without the dearest runs in backward that there is room to do without, and how many `tries` are left.

    Those that surely fit come first, as many at once as fit beside each other; then those whose own reads might make
    the room.
    """
    failed: set[tuple[int, int]] = set()
    while tries > 0:
        order = [step.id for step in schedule.backward if step.kind == COMPUTE]
        live, found = runs(graph, schedule, order, workspace_bytes)
        found = sorted((run for run in found if cost[run.node]), key=lambda run: (-cost[run.node], run))
        sure = _together(found, live, limit_bytes)
        unsure = [run for run in found if (run.node, run.stop - run.start) not in failed]
        guesses = max(1, _GUESSED // len(graph.nodes)) - len(failed)
        trials = [sure, sure[:1]] if sure else [[run] for run in unsure[: max(0, guesses)]]
        for skipped in trials:
            tries -= 1
            less = without_runs(graph, order, {place for run in skipped for place in (run.place, *run.views)})
            if peak_of(graph, less, workspace_bytes) <= limit_bytes:
                schedule = less
                break
            failed.update((run.node, run.stop - run.start) for run in skipped)
            if tries <= 0:
                break
        else:
            break
    return schedule, tries


def runs(graph: JointGraph, schedule: Schedule, order: list[int], workspace_bytes) -> tuple[np.ndarray, list[Run]]:
    """Dynamic bytes at every compute step, int64[steps], and what runs again in backward, whose nodes are `order`."""
    known = facts(graph)
    forward, backward = step_peaks(graph, schedule, workspace_bytes)
    places = (step.id for step in schedule.forward if step.kind == COMPUTE)
    last = {s: place for place, node in enumerate(places) for s in known.born.get(node, ())}
    touched, found = known.touched[BACKWARD], []
    for place, (node, views) in enumerate(zip(order, _views(graph, order)), len(forward)):
        born = known.born.get(node)
        # A view is no result that could be kept.
        if born and graph.nodes[node].phase == FORWARD and views is not None:
            size = sum(known.bytes[s] for s in known.storages(node, again=True) if s in born)
            start = max((last[s] for s in born if s in last), default=place)
            found.append(Run(node, place - len(forward), start, place, size, views))
        last.update(dict.fromkeys(touched[node], place))
    return np.array([*forward, *backward]), found


def _together(found: list[Run], live: np.ndarray, limit_bytes: int) -> list[Run]:
    """What of `found`, from the first on and one run of a node, can be kept beside what lives anyway."""
    live, chosen = live.copy(), {}
    for run in found:
        if run.node not in chosen and live[run.start : run.stop].max(initial=0) + run.size <= limit_bytes:
            live[run.start : run.stop] += run.size
            chosen[run.node] = run
    return list(chosen.values())


def _views(graph: JointGraph, order: list[int]) -> list[tuple[int, ...] | None]:
    """For every run of a forward node, places in `order` of the views of its results that are there without the run:
    those that backward is given if it is the first, else those of the run before. None where one would be missing
    that only the operation itself can give again, as one of several results.
    """
    known = facts(graph)
    base = {cover: node for node in known.born for cover in _covers(graph, node) if cover != node}
    before: dict[int, set[int] | None] = {}
    latest: dict[int, tuple[int, dict[int, int]]] = {}
    found: list[tuple[int, ...] | None] = [()] * len(order)

    def close(node: int) -> None:
        at, views = latest[node]
        there = before.get(node)
        found[at] = tuple(place for place, view in views.items() if there is None or view in there)
        if len(known.born[node]) > 1 and len(found[at] or ()) < len(views):
            found[at] = None
        before[node] = set(views.values())

    for at, node in enumerate(order):
        if graph.nodes[node].phase != FORWARD:
            continue
        if node in known.born:
            if node in latest:
                close(node)
            latest[node] = at, {}
        elif base.get(node) in latest:
            latest[base[node]][1][at] = node
    for node in latest:
        close(node)
    return found


def keeping(graph: JointGraph, schedule: Schedule, node: int) -> Schedule:
    """`schedule` with what `node` gives saved: without any of its runs in backward."""
    order = [step.id for step in schedule.backward if step.kind == COMPUTE]
    covers = _covers(graph, node)
    return without_runs(graph, order, {at for at, other in enumerate(order) if other in covers})


def _covers(graph: JointGraph, node: int) -> set[int]:
    known = facts(graph)
    return {node, *(known.cover[s] for s in known.born.get(node, ()) if s in known.cover)}


def without_runs(graph: JointGraph, order: list[int], skipped: Collection[int] = ()) -> Schedule:
    """The schedule whose backward is `order` without the positions `skipped` and without recomputations nobody reads.

    `order`: node ids of the backward; `skipped`: positions in it.
    """
    known = facts(graph)
    kept: list[int] = []
    wanted: set[int] = set()
    for at in range(len(order) - 1, -1, -1):
        node = order[at]
        again = graph.nodes[node].phase == FORWARD
        if at in skipped or (again and node not in wanted):
            continue
        kept.append(node)
        wanted.discard(node)
        wanted.update(known.reads(node, again))
    return scheduled(graph, None, kept[::-1])
