"""List the most expensive recomputations of a plan, and the peak if each result were saved instead."""

from __future__ import annotations

from collections import Counter

from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.schedule.offload_steps import offloadable, offloaded, packed
from ackpt.planner.schedule.plan import Decision
from ackpt.planner.schedule.schedule import Schedule, recomputed
from ackpt.planner.schedule.simulator import peak_of

from .refinement import with_saved


def decisions(graph: JointGraph, schedule: Schedule, cost, step_cost: float, profile, count: int = 10):
    """The `count` recomputed operations that cost most, the most expensive first.

    Args:
        graph, schedule: the plan.
        cost: of every node; ``step_cost``: of the baseline step, in the same unit.
        profile: with times of copies, if the schedule offloads.
    """
    analysis = graph.analysis
    runs = Counter(recomputed(graph, schedule))
    total = {node: number * cost[node] for node, number in runs.items() if cost[node] and node in analysis.allocated}
    most_expensive = sorted(total, key=lambda node: (-total[node], node))[:count]
    return tuple(
        Decision(
            name=graph.nodes[node].name,
            module=graph.nodes[node].module,
            cost=total[node] / step_cost,
            bytes=sum(analysis.bytes[s] for s in analysis.allocated.get(node, ()) if s in analysis.savable),
            runs=runs[node],
            peak_if_kept_bytes=peak_of(graph, _with_saved(graph, schedule, node, profile), profile.workspace_bytes),
        )
        for node in most_expensive
    )


def _with_saved(graph: JointGraph, schedule: Schedule, node: int, profile) -> Schedule:
    """`schedule` with the results of `node` saved, and the same storages packed and offloaded as far as possible."""
    saving = with_saved(graph, schedule, node)
    if masks := set(schedule.packed).intersection(saving.saved):
        saving = packed(graph, saving, masks)
    to_host = set(schedule.offloaded).intersection(offloadable(graph, saving))
    return offloaded(graph, saving, to_host, profile) if to_host else saving
