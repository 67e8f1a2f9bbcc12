"""mu-TWO step by step: the attributes of intermediates, how every choice changes them, and the printed pseudocode.

Purandare et al., mu-TWO, MLSys 2023; the policy is `ackpt.planner.policies.mu_two`. Each function whose name begins
with ``printed`` reproduces one error of the paper's pseudocode, so that its effect can be measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.policies.mu_two import Intermediate, State, intermediates, schedules_of, states
from ackpt.planner.policies.search.frontier import costs
from ackpt.planner.schedule.schedule import COMPUTE, everything
from ackpt.planner.schedule.simulator import peak_of, step_peaks, timed


def name_of(graph: JointGraph, intermediate: Intermediate) -> str:
    """The name of the node that computes the intermediate."""
    return graph.nodes[intermediate.rank].name


def intermediates_of(graph: JointGraph, profile) -> list[Intermediate]:
    """The intermediates of the baseline, in the order of the forward, before any choice."""
    swaps = None if profile.seconds is None else profile.swap_seconds
    return list(intermediates(graph.analysis, everything(graph), costs(graph, profile), swaps).values())


def inactive_intervals(graph: JointGraph, profile) -> dict:
    """When the baseline reads each intermediate, in seconds from the start of the step.

    ``compute``: [f or b, start, end] of every operation. ``activations``: of each intermediate that backward does not
    read at once its ``name``, ``bytes``, ``first`` (it is computed), ``leaves`` (its last use in forward ends),
    ``needed`` (its first use in backward begins), ``last`` (its last use ends), and the seconds of a ``copy`` in one
    direction and to ``recompute`` it.
    """
    steps = [each for each in timed(profile, everything(graph)) if each[0] == COMPUTE]
    at = {node: (start, end) for _, node, start, end in steps}
    work = [["f" if node < graph.boundary else "b", start, end] for _, node, start, end in steps if end > start]
    shown = [
        {
            "name": name_of(graph, i),
            "bytes": i.memory_size,
            "first": at[i.rank][0],
            "leaves": at[i.last_fw_access][1],
            "needed": at[i.first_bw_access][0],
            "last": at[i.last_bw_access][1],
            "copy": i.swap_time,
            "recompute": i.total_recomp_time,
        }
        for i in intermediates_of(graph, profile)
    ]
    return {"compute": work, "activations": [each for each in shown if each["needed"] > each["leaves"]]}


@dataclass(frozen=True)
class Choice:
    """One choice of algorithm B, and its effects.

    ``chosen``: name, None before the first choice; ``total_recomp_time``: of every intermediate that is neither dropped
    nor swapped, by name, after the choice; ``recomp_time``: of those that are dropped; ``saved_bytes``: saved on the
    device for backward. Dynamic peaks: ``printed_bytes`` as the printed algorithm G estimates them, ``once_bytes`` and
    ``each_bytes`` simulated: the former with every recomputation shared, the latter with each intermediate recomputed
    for itself.
    """

    chosen: str | None
    is_swap: bool
    total_recomp_time: dict[str, float]
    recomp_time: dict[str, float]
    saved_bytes: int
    printed_bytes: int
    once_bytes: int
    each_bytes: int


def choices(graph: JointGraph, profile, at_most: int | None = None) -> list[Choice]:
    """The choices of algorithm B, beginning with the state before the first, to its end or for `at_most` choices."""
    result: list[Choice] = []
    every: list[Intermediate] = []
    for state in states(graph, profile):
        every = every or list(state.kept)
        result.append(_choice(graph, profile, state, every))
        if at_most is not None and len(result) > at_most:
            break
    return result


def _choice(graph: JointGraph, profile, state: State, every: list[Intermediate]) -> Choice:
    bytes_of = graph.analysis.bytes
    schedules = schedules_of(graph, profile, state)
    once, each = (peak_of(graph, schedule, profile.workspace_bytes) for schedule in schedules)
    here = [i for i in state.kept if i not in state.swaps]
    return Choice(
        chosen=None if state.chosen is None else name_of(graph, state.chosen),
        is_swap=state.is_swap,
        total_recomp_time={name_of(graph, i): i.total_recomp_time for i in here},
        recomp_time={name_of(graph, i): i.recomp_time for i in every if i not in state.kept},
        saved_bytes=sum(bytes_of[storage] for i in here for storage in i.storages),
        printed_bytes=printed_peak(graph, profile, every, here),
        once_bytes=once,
        each_bytes=each,
    )


def printed_peak(graph: JointGraph, profile, every: list[Intermediate], kept: list[Intermediate]) -> int:
    """The dynamic peak by algorithm G as printed: never lower than the baseline's.

    Intermediates that are not in `kept` are not live from their last access in the forward to its end. But backward
    begins with all of `every`, and recomputed or swapped-in intermediates are added to that and deleted once. The
    estimate ignores that recomputing them needs other operations and other live storages.
    """
    plain = everything(graph)
    orders = [[step.id for step in steps if step.kind == "compute"] for steps in (plain.forward, plain.backward)]
    peaks = step_peaks(graph, plain, profile.workspace_bytes)
    there = {storage for i in kept for storage in i.storages}
    away = [graph.storages[s] for i in every for s in i.storages if s not in there]
    most = 0
    for order, live in zip(orders, peaks):
        for node, size in zip(order, live):
            for storage in away:
                first, last = storage.first_bw_access, storage.last_bw_access
                if first is None or last is None:
                    continue
                if node < graph.boundary:
                    begins = storage.producer if storage.last_fw_access is None else storage.last_fw_access
                    size -= storage.bytes if node > begins else 0
                else:
                    size += storage.bytes if node >= first else 0
            most = max(most, size)
    return most


def printed_overhead(wanted: Intermediate, run_time, boundary: int) -> float:
    """Seconds by algorithm C as printed: negative if the last operation takes longer than the rest of the copy."""
    assert wanted.swap_time is not None
    left = wanted.swap_time
    for node in range(wanted.first_bw_access - 1, boundary - 1, -1):
        if left <= 0:
            break
        left -= run_time[node]
    return left


def along_paths(every: list[Intermediate], wanted: Intermediate) -> float:
    """recomp_time of `wanted` with all others dropped, if sources are lists: an ancestor counts once for every path.

    `every` comes from `intermediates_of`, before any choice.
    """
    seconds: dict[int, float] = {}
    for each in sorted(every, key=lambda i: i.rank):
        seconds[each.rank] = each.recomp_time + sum(seconds[source] for source in each.recomp_srcs)
    return seconds[wanted.rank]
