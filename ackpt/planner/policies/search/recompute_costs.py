"""The cost of each node in seconds, or in FLOPs plus weighted traffic if times are unknown."""

from __future__ import annotations

from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.schedule.schedule import KINDS, PACK, UNPACK, Schedule, recomputed

FLOPS_PER_BYTE = 10  # cost of a byte that is read or written, on a processor with an average memory bandwidth


def costs(graph: JointGraph, profile: Profile) -> list[float]:
    """The cost of every node: seconds if the profile has them, else FLOPs plus weighted memory traffic.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.policies.search.recompute_costs import costs
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
    return sum(cost[node] for node in recomputed(graph, schedule))


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


def step_cost(schedule: Schedule, cost) -> float:
    """The cost of all nodes that run in a step."""
    return sum(cost[node] for steps in (schedule.forward_arrays, schedule.backward_arrays) for node in steps.computed)
