"""The front of a policy's schedules: what each takes by the simulator and costs, and the cheapest within a budget.

Whatever the budget, its schedule comes from the same front: a lower one never has a higher peak, nor less cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ackpt.capture.analysis import once_per_graph
from ackpt.capture.joint_graph import JointGraph
from ackpt.planning.host_copies import waiting
from ackpt.planning.schedule import Schedule, everything
from ackpt.planning.simulator import peak_of

from .recompute_costs import added_cost, costs


class Point(NamedTuple):
    """A schedule with the cost of what it runs again and waits for, and its simulated dynamic peak."""

    cost: float
    peak_bytes: int
    schedule: Schedule


def cheapest(graph: JointGraph, profile, limit_bytes: int | None, candidates: Callable) -> Schedule:
    """The schedule that recomputes least within the limit; if none fits, that of the lowest peak.

    One of ``candidates(graph, profile)``, or, wherever it fits, the plain step.
    """
    plain = everything(graph)
    if limit_bytes is None or peak_of(graph, plain, profile.workspace_bytes) <= limit_bytes:
        return plain
    points = front(graph, profile, candidates)
    return next((point for point in points if point.peak_bytes <= limit_bytes), points[-1]).schedule


@once_per_graph
def front(graph: JointGraph, profile, candidates: Callable) -> list[Point]:
    """From the least cost to the lowest peak, those that no other beats in both."""
    return pareto(graph, profile, (everything(graph), *candidates(graph, profile)))


def pareto(graph: JointGraph, profile, schedules) -> list[Point]:
    """From the least cost to the lowest peak, those of `schedules` that no other beats in both."""
    cost = costs(graph, profile)
    points = []
    for schedule in {(one.forward, one.backward): one for one in schedules}.values():
        peak = peak_of(graph, schedule, profile.workspace_bytes)
        points.append(Point(added_cost(graph, schedule, cost) + waiting(profile, schedule), peak, schedule))
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: point[:2]):
        if not kept or point.peak_bytes < kept[-1].peak_bytes:
            kept.append(point)
    return kept
