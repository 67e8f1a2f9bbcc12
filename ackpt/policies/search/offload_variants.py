"""The third fate in a front: what its schedules save, in host memory instead, as far as copies may be hidden."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from ackpt.capture.joint_graph import JointGraph
from ackpt.planning.offload_steps import offloadable, offloaded
from ackpt.planning.schedule import COMPUTE, Schedule

from .frontier import pareto

_WALKED = 1_000_000  # nodes that are walked through for a front
_SHARES = (3 / 4, 1)  # of the forward's seconds, for which the link copies


def offloads(graph: JointGraph, profile, schedules) -> list[Schedule]:
    """The front of `schedules`, evenly spaced, with as much of what each saves in host memory as may be hidden.

    Of the lowest of them also one with all of it there, whatever that costs. None where `profile` has no times of
    copies, or what runs the graph knows none.
    """
    if profile.swap_seconds is None or profile.seconds is None or not graph.replays_random:
        return []
    points = pareto(graph, profile, schedules)
    some = points[:: -(-len(points) * len(_SHARES) * len(graph.nodes) // _WALKED)]
    chosen = [(point.schedule, storages) for point in some for storages in _hidden(graph, point.schedule, profile)]
    lowest = points[-1].schedule
    return [offloaded(graph, *one, profile) for one in [*chosen, (lowest, offloadable(graph, lowest))] if one[1]]


def _hidden(graph: JointGraph, schedule: Schedule, profile) -> list[list[int]]:
    """What the link can copy meanwhile. Backward goes the other way: what forward leaves first waits longest."""
    order = sorted(offloadable(graph, schedule), key=lambda storage: (_last_use(graph, storage), storage))
    copied = [0.0, *accumulate(profile.swap_seconds[storage] for storage in order)]
    forward = sum(profile.seconds[step.id] for step in schedule.forward if step.kind == COMPUTE)
    counts = {bisect_right(copied, share * forward) - 1 for share in _SHARES}
    return [order[:count] for count in sorted(counts)]


def _last_use(graph: JointGraph, storage: int) -> int:
    one = graph.storages[storage]
    return one.producer if one.last_fw_access is None else one.last_fw_access
