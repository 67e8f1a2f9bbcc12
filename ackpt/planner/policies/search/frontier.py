"""The cost of a schedule, the Pareto frontier of a policy's schedules, and the choice for a budget, ties included.

A cost is seconds, or FLOPs plus weighted traffic if times are unknown. Every budget picks from the same frontier. So a
smaller budget never gives a higher peak or a lower cost. With dynamic dimensions, `ackpt.planner.step.plans` chooses
among the points of several frontiers.
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from ackpt.core.progress import counted
from ackpt.planner.capture.joint_graph import JointGraph, once_per_graph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.schedule.schedule import KINDS, PACK, UNPACK, Schedule, everything, recomputed
from ackpt.planner.schedule.simulator import peak_of, waiting

FLOPS_PER_BYTE = 10  # cost of a byte that is read or written, on a processor with an average memory bandwidth


def costs(graph: JointGraph, profile: Profile) -> list[float]:
    """The cost of every node: seconds if the profile has them, else FLOPs plus weighted memory traffic.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.policies.search.frontier import costs
        >>> graph = ackpt.trace(torch.nn.Linear(8, 2), torch.ones(4, 8))
        >>> profile = ackpt.profile(graph, "h200")
        >>> costs(graph, profile) == list(profile.seconds)
        True
    """
    analysis = graph.analysis
    if profile.seconds is not None:
        return list(profile.seconds)
    return [
        float(profile.flops[n] + FLOPS_PER_BYTE * (profile.bytes_in[n] + profile.bytes_out[n]))
        if n in analysis.allocated
        else 0.0
        for n in range(len(graph.nodes))
    ]


def added_cost(graph: JointGraph, schedule: Schedule, cost) -> float:
    """The cost of all forward nodes that run in backward."""
    return sum(map(cost.__getitem__, recomputed(graph, schedule)))


def packing_cost(graph: JointGraph, profile: Profile, schedule: Schedule) -> float:
    """The cost of packing dropout masks and of unpacking them."""
    storages = [
        storage
        for steps in (schedule.forward_arrays, schedule.backward_arrays)
        for kind in (PACK, UNPACK)
        for storage in steps.ids[steps.places[KINDS.index(kind)]].tolist()
    ]
    if not storages:
        return 0.0
    if profile.seconds is not None:
        assert profile.pack_seconds is not None  # `ackpt.plan` refuses other profiles
        return sum(profile.pack_seconds[storage] for storage in storages)
    masks = graph.analysis.masks
    return float(FLOPS_PER_BYTE * sum(graph.storages[s].bytes + masks[s].packed_bytes for s in storages))


def whole_added_cost(graph: JointGraph, profile: Profile, schedule: Schedule, cost) -> float:
    """The cost of recomputation, of packing and of waits for copies."""
    added = added_cost(graph, schedule, cost) + packing_cost(graph, profile, schedule)
    return added + waiting(profile, schedule)


def baseline_cost(graph: JointGraph, profile: Profile) -> float:
    """The cost of all nodes of the baseline's step, of which plans state shares; 1 if they cost nothing."""
    schedule, cost = everything(graph), costs(graph, profile)
    steps = schedule.forward_arrays, schedule.backward_arrays
    return sum(cost[node] for half in steps for node in half.computed) or 1.0


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


def lowest(graph: JointGraph, profile, added_share: float, candidates: Callable) -> Schedule:
    """The schedule of the frontier with the lowest peak among those that add at most this share of the baseline's cost.

    The frontier has at least one schedule that adds nothing.
    """
    whole = baseline_cost(graph, profile)
    return [point for point in frontier(graph, profile, candidates) if point.cost / whole <= added_share][-1].schedule


@once_per_graph
def frontier(graph: JointGraph, profile, candidates: Callable) -> list[Point]:
    """The Pareto frontier of the baseline and ``candidates(graph, profile)``, from least cost to lowest peak."""
    return pareto(graph, profile, (everything(graph), *candidates(graph, profile)))


def pareto(graph: JointGraph, profile, schedules: Iterable[Schedule]) -> list[Point]:
    """The Pareto frontier of `schedules`, from the least cost to the lowest peak."""
    cost, simulated = costs(graph, profile), _simulated(graph, profile)
    workspace_bytes = np.array(profile.workspace_bytes)  # which `peak_of` would make of it for every schedule
    points = []
    different = {(one.forward_arrays.key, one.backward_arrays.key): one for one in schedules}
    for key, schedule in counted(different.items(), "searching: simulating schedule"):
        if key not in simulated:
            peak = peak_of(graph, schedule, workspace_bytes)
            simulated[key] = whole_added_cost(graph, profile, schedule, cost), peak
        points.append(Point(*simulated[key], schedule))
    return undominated(points, lambda point: point[:2])


@once_per_graph
def _simulated(graph: JointGraph, profile) -> dict[tuple[bytes, bytes], tuple[float, int]]:
    """Costs and peaks of the schedules that `pareto` has simulated: a search gives it the same ones several times."""
    return {}


def undominated(items: Iterable[T], values: Callable[[T], tuple]) -> list[T]:
    """The `items` that are not dominated, sorted by their values: for each, no other has only less or equal values.

    Of items with equal ``values(item)`` the first one remains.
    """
    best: list[T] = []
    for item in sorted(items, key=values):
        # The latest ones are the most likely to dominate it.
        if not any(all(map(operator.le, values(other), values(item))) for other in reversed(best)):
            best.append(item)
    return best


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points of a frontier: without the others, the mean cost over all budgets rises least.

    Without a point, the budgets between its peak and that of the point before it pay the cost of the point after it.
    """
    left = list(points)
    while len(left) > max(2, most):
        rise = [
            (after.cost - point.cost) * math.log(before.peak_bytes / point.peak_bytes)
            for before, point, after in zip(left, left[1:], left[2:])
        ]
        del left[1 + rise.index(min(rise))]
    return left


def evenly_spaced(items: Sequence[T], tries: int, each: int = 1) -> Sequence[T]:
    """`items`, evenly thinned out until all of them take at most `tries`, where one takes `each`."""
    return items[:: max(1, -(-len(items) * each // tries))]
