"""Why a plan recomputes what it recomputes: for each of the most expensive decisions, the step had it been kept."""

from __future__ import annotations

from collections import Counter

from ackpt.capture.analysis import facts
from ackpt.capture.joint_graph import JointGraph
from ackpt.planning.offload_steps import offloadable, offloaded
from ackpt.planning.plan import Decision
from ackpt.planning.schedule import Schedule, recomputed
from ackpt.planning.simulator import peak_of

from .refinement import keeping


def decisions(graph: JointGraph, schedule: Schedule, cost, step_cost: float, profile, count: int = 10):
    """The `count` recomputed operations that cost most, the most expensive first.

    Args:
        graph, schedule: what was decided.
        cost: of every node; ``step_cost``: of the step without recomputation, in the same unit.
        profile: with times of copies, if the schedule offloads.
    """
    known = facts(graph)
    runs = Counter(recomputed(graph, schedule))
    spent = {place: number * cost[place] for place, number in runs.items() if cost[place] and place in known.born}
    dearest = sorted(spent, key=lambda place: (-spent[place], place))[:count]
    found = []
    for place in dearest:
        node = graph.nodes[place]
        found.append(
            Decision(
                name=node.name,
                module=node.module,
                cost=spent[place] / step_cost,
                bytes=sum(known.bytes[s] for s in known.born.get(place, ()) if s in known.savable),
                runs=runs[place],
                peak_if_kept_bytes=peak_of(graph, _kept(graph, schedule, place, profile), profile.workspace_bytes),
            )
        )
    return tuple(found)


def _kept(graph: JointGraph, schedule: Schedule, place: int, profile) -> Schedule:
    """`schedule` without the runs of `place` in backward, and without what runs for their sake alone."""
    found = keeping(graph, schedule, place)
    away = set(schedule.offloaded).intersection(offloadable(graph, found))
    return offloaded(graph, found, away, profile) if away else found
