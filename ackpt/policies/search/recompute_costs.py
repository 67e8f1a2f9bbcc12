"""What a node costs: the one unit in which policies weigh one recomputation against another."""

from __future__ import annotations

from ackpt.capture.analysis import facts
from ackpt.capture.joint_graph import JointGraph
from ackpt.costs.profiles import Profile
from ackpt.planning.schedule import COMPUTE, Schedule, recomputed

_BYTES = 10  # cost of a byte that is read or written, in FLOPs: a processor that is neither fast nor slow at memory


def costs(graph: JointGraph, profile: Profile) -> list[float]:
    """Cost of every node: its seconds where the profile has them, else FLOPs and traffic weighed against each other.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.policies.search.recompute_costs import costs
        >>> graph = ackpt.trace(torch.nn.Linear(8, 2), torch.ones(4, 8))
        >>> profile = ackpt.profile(graph, "h200")
        >>> costs(graph, profile) == list(profile.seconds)
        True
    """
    known = facts(graph)
    if profile.seconds is not None:
        return list(profile.seconds)
    return [
        float(profile.flops[n] + _BYTES * (profile.bytes_in[n] + profile.bytes_out[n])) if n in known.born else 0.0
        for n in range(len(graph.nodes))
    ]


def added_cost(graph: JointGraph, schedule: Schedule, cost) -> float:
    """Of all forward nodes that run in backward."""
    return sum(cost[place] for place in recomputed(graph, schedule))


def step_cost(schedule: Schedule, cost) -> float:
    """Of all nodes that run in a step."""
    return sum(cost[step.id] for step in (*schedule.forward, *schedule.backward) if step.kind == COMPUTE)
