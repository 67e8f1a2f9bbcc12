"""Pack dropout masks in the schedules of a frontier, where drawing them again costs more.

On a CPU, drawing a mask takes as long as tens of elementwise operations, and packing it about as long as one or two. So
the search for schedules counts a recomputed mask as packed, and its schedules then pack what they recompute.
"""

from __future__ import annotations

from dataclasses import replace

from ackpt.capture.joint_graph import JointGraph
from ackpt.costs.profiles import Profile
from ackpt.planning.offload_steps import packed
from ackpt.planning.schedule import Schedule

from .refinement import without_runs


def as_packed(graph: JointGraph, profile: Profile) -> Profile:
    """`profile` with the times of drawing masks replaced by those of packing and unpacking them, if these are shorter.

    It is `profile` itself for a graph without masks, without times, or if the graph's compiler does not pack.
    """
    if profile.pack_seconds is None or profile.seconds is None or not graph.replays_random:
        return profile
    seconds = list(profile.seconds)
    for storage in graph.analysis.masks:
        draw = graph.analysis.base_of[storage]
        seconds[draw] = min(seconds[draw], 2 * profile.pack_seconds[storage])
    return replace(profile, seconds=tuple(seconds))


def packings(graph: JointGraph, schedules: list[Schedule]) -> list[Schedule]:
    """By schedule, one that packs the masks that it draws again, and one that also packs those that it saves."""
    variants = []
    for schedule in schedules:
        masks, saved = graph.analysis.masks, set(schedule.saved)
        bases = {graph.analysis.base_of[storage] for storage in masks}
        order = schedule.backward_arrays.computed
        drawn = {at for at, node in enumerate(order) if node in bases and node in graph.analysis.allocated}
        saving = without_runs(graph, order, drawn) if drawn else schedule
        every = masks.keys() & saving.saved
        variants += [packed(graph, saving, some) for some in (every - saved, every) if some]
    return list(dict.fromkeys(variants))
