"""Offload activations in the schedules of a frontier, as far as the copies overlap with compute."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.schedule.offload_steps import offloadable, offloaded
from ackpt.planner.schedule.schedule import COMPUTE, Schedule

from .frontier import evenly_spaced, pareto

_WALKED = 1_000_000  # nodes of all schedules that are tried for one graph: small graphs get more tries
_SHARES = (3 / 4, 1)  # of the forward's seconds that the link is busy


def offloads(graph: JointGraph, profile, schedules) -> list[Schedule]:
    """Evenly spaced schedules of the frontier, with as many activations offloaded as overlap with compute.

    The one with the lowest peak also comes with all of its activations offloaded, at any cost. Empty if `profile` has
    no times of copies, or if the graph's compiler does not run copies.
    """
    if profile.swap_seconds is None or profile.seconds is None or not graph.replays_random:
        return []
    points = pareto(graph, profile, schedules)
    some = evenly_spaced(points, _WALKED, each=len(_SHARES) * len(graph.nodes))
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
    counts = {bisect_right(copied, share * forward) - 1 for share in _SHARES}
    return [order[:count] for count in sorted(counts)]


def _last_use(graph: JointGraph, storage: int) -> int:
    one = graph.storages[storage]
    return one.producer if one.last_fw_access is None else one.last_fw_access
