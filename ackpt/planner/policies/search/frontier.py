"""The Pareto frontier of a policy's schedules by simulated peak and cost, and the cheapest schedule within a budget.

Every budget picks from the same frontier. So a smaller budget never gives a higher peak or a lower cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from ackpt.core.progress import counted
from ackpt.planner.capture.joint_graph import JointGraph, once_per_graph
from ackpt.planner.schedule.host_copies import waiting
from ackpt.planner.schedule.schedule import Schedule, everything
from ackpt.planner.schedule.simulator import peak_of

from .recompute_costs import added_cost, costs, packing_cost

T = TypeVar("T")


class Point(NamedTuple):
    """A schedule, the cost of its recomputation, packing and waits for copies, and its simulated dynamic peak."""

    cost: float
    peak_bytes: int
    schedule: Schedule


def cheapest(graph: JointGraph, profile, limit_bytes: int | None, candidates: Callable) -> Schedule:
    """The cheapest schedule within the limit; if none fits, the one with the lowest peak.

    It is one of ``candidates(graph, profile)``, or the baseline's schedule wherever that fits.
    """
    baseline = everything(graph)
    if limit_bytes is None or peak_of(graph, baseline, profile.workspace_bytes) <= limit_bytes:
        return baseline
    points = frontier(graph, profile, candidates)
    return next((point for point in points if point.peak_bytes <= limit_bytes), points[-1]).schedule


@once_per_graph
def frontier(graph: JointGraph, profile, candidates: Callable) -> list[Point]:
    """The Pareto frontier of the baseline and ``candidates(graph, profile)``, from least cost to lowest peak."""
    return pareto(graph, profile, (everything(graph), *candidates(graph, profile)))


def pareto(graph: JointGraph, profile, schedules: Iterable[Schedule]) -> list[Point]:
    """The Pareto frontier of `schedules`, from the least cost to the lowest peak."""
    cost = costs(graph, profile)
    points = []
    different = {(one.forward, one.backward): one for one in schedules}
    for schedule in counted(different.values(), "searching: simulating schedule"):
        peak = peak_of(graph, schedule, profile.workspace_bytes)
        added = added_cost(graph, schedule, cost) + packing_cost(graph, profile, schedule)
        points.append(Point(added + waiting(profile, schedule), peak, schedule))
    return undominated(points, lambda point: point[:2])


def undominated(items: Iterable[T], values: Callable[[T], tuple]) -> list[T]:
    """The `items` that are not dominated, sorted by their values: for each, no other has only less or equal values.

    Of items with equal ``values(item)`` the first one remains.
    """
    best: list[T] = []
    for item in sorted(items, key=values):
        if not any(all(a <= b for a, b in zip(values(other), values(item))) for other in best):
            best.append(item)
    return best


def evenly_spaced(items: Sequence[T], tries: int, each: int = 1) -> Sequence[T]:
    """`items`, evenly thinned out until all of them take at most `tries`, where one takes `each`."""
    return items[:: max(1, -(-len(items) * each // tries))]
