"""Between two plans of a front there is room: what of the lower one's recomputation can be saved without the higher
one's peak."""

from __future__ import annotations

from collections import Counter

from ..graph.facts import facts
from ..graph.joint import FORWARD, JointGraph
from ..graph.schedule import COMPUTE, Schedule, recomputed, scheduled
from ..graph.simulate import peak_of

_TRIES = 600_000  # nodes that are walked through for it: a small graph has more tries than a large one


def refined(graph: JointGraph, points, cost, workspace_bytes) -> list[Schedule]:
    """For every two neighbours of `points` a schedule below the higher one's peak, cheaper than the lower one.

    The dearest recomputations of the lower one are tried first. Neighbours without such a schedule give none.
    """
    tries = max(1, _TRIES // len(graph.nodes) // max(1, len(points)))
    born = facts(graph).born  # a view is no result that could be kept
    found = []
    for higher, lower in zip(points, points[1:]):
        schedule = lower.schedule
        runs = Counter(recomputed(graph, schedule))
        for place in sorted((p for p in runs if cost[p] and p in born), key=lambda p: (-runs[p] * cost[p], p))[:tries]:
            kept = keeping(graph, schedule, place)
            if peak_of(graph, kept, workspace_bytes) < higher.peak_bytes:
                schedule = kept
        if schedule is not lower.schedule:
            found.append(schedule)
    return found


def keeping(graph: JointGraph, schedule: Schedule, place: int) -> Schedule:
    """`schedule` without the runs of `place` in backward, and without what runs for their sake alone."""
    known = facts(graph)
    covers = {place, *(known.cover[s] for s in known.born.get(place, ()) if s in known.cover)}
    order = [step.id for step in schedule.backward if step.kind == COMPUTE and step.id not in covers]
    kept: list[int] = []
    wanted: set[int] = set()
    for node in reversed(order):
        again = graph.nodes[node].phase == FORWARD
        if again and node not in wanted:
            continue
        kept.append(node)
        wanted.discard(node)
        wanted.update(known.reads(node, again))
    return scheduled(graph, None, kept[::-1])
