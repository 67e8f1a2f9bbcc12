"""The one simulator: the live bytes after every step of a schedule, and what the schedule costs.

`simulate` is exact and refuses schedules that cannot run; `live_bytes` does its accounting. `peak_of` and `step_peaks`
are its fast variant for valid schedules: the same numbers without events, tested against it. A storage is allocated by
the first operation that writes to it and lives until the schedule frees it; an operation's results are allocated before
its arguments are freed, and its workspace comes from the profile. Parameters, buffers and inputs belong to the caller
and never move. An offloaded storage counts on the device until it is freed there, and again from its prefetch on; its
copy in host memory is counted separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ackpt.metering.timeline import Timeline
from ackpt.planner.capture.joint_graph import JointGraph, once_per_graph
from ackpt.planner.costs.profiles import Profile

from .host_copies import clock
from .live_bytes import check_same, follow, rng_state_bytes, saved_bytes
from .schedule import COMPUTE, FREE, KINDS, PACK, PREFETCH, UNPACK, Schedule, StepArrays, recomputed


@dataclass(frozen=True)
class Simulation:
    """The memory and cost of a step with one schedule.

    ``timeline``: live dynamic bytes after every allocation and free. ``peak_bytes``: their maximum;
    ``resident_bytes``: parameters, buffers, inputs, optimizer state, accumulated gradients. ``peak_node``: the node
    that runs at the peak, None in the optimizer's step. ``saved_bytes``: saved on the device for backward. ``flops``:
    of the whole step; ``recompute_flops``: of forward nodes that run in backward. ``seconds``: of the step, modeled or
    measured; ``exposed_seconds``: the part in which compute waits for copies; both None if the profile has no times.
    ``host_live``: bytes of the copies in host memory at every entry of the timeline.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.graph import lower, simulate
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> found = simulate(graph, ackpt.profile(graph), lower(graph, ()))
        >>> found.saved_bytes, found.flops, found.recompute_flops
        (0, 1728, 512)
        >>> found.peak_bytes == max(found.timeline.live), found.seconds
        (True, None)
    """

    timeline: Timeline
    peak_bytes: int
    peak_node: int | None
    resident_bytes: int
    saved_bytes: int
    flops: int
    recompute_flops: int
    seconds: float | None
    exposed_seconds: float | None = None
    host_live: tuple[int, ...] = (0,)

    @property
    def host_bytes(self) -> int:
        """The most bytes in host memory at one time."""
        return max(self.host_live)

    @property
    def peak_with_host_bytes(self) -> int:
        """The peak of dynamic and host bytes together, which is the peak on the CPU, where both are one memory."""
        return max(map(sum, zip(self.timeline.live, self.host_live)))


def simulate(graph: JointGraph, profile: Profile, schedule: Schedule) -> Simulation:
    """The memory and cost of `schedule`, followed step by step.

    Args:
        graph: the graph the schedule was made for.
        profile: costs and workspace per node; see `ackpt.profile`.
        schedule: the order of all steps.

    Raises:
        ScheduleError: if schedule or profile belong to another graph, or the schedule reads a value that is not live,
            or computes one that is.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.graph import simulate
        >>> from ackpt.planner.schedule.schedule import everything
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8)
        >>> graph = ackpt.trace(model, x)
        >>> found = simulate(graph, ackpt.profile(graph, "h200"), everything(graph))
        >>> found.resident_bytes == 4 * (8 * 8 + 8 + 4 * 8), found.seconds > 0
        (True, True)
    """
    if profile.graph:  # empty in profiles made by hand
        check_same(graph, profile.graph, "profile")
    live = follow(graph, schedule, profile.workspace_bytes)
    timeline, times = live.timeline(), clock(profile, schedule)
    order = (*schedule.forward_arrays.computed, *schedule.backward_arrays.computed)
    return Simulation(
        timeline=timeline,
        peak_bytes=timeline.peak_bytes,
        peak_node=live.owner[timeline.peak_index - 1] if timeline.peak_index else None,
        resident_bytes=graph.resident_bytes,
        saved_bytes=saved_bytes(graph, schedule),
        flops=sum(profile.flops[node_id] for node_id in order),
        recompute_flops=sum(profile.flops[node_id] for node_id in recomputed(graph, schedule)),
        seconds=None if times is None else times[0],
        exposed_seconds=None if times is None else times[1],
        host_live=live.host_live(),
    )


def peak_of(graph: JointGraph, schedule: Schedule, workspace_bytes) -> int:
    """The dynamic peak of a valid schedule: the number that `simulate` finds, in a fraction of the time."""
    forward, backward, at_end = _peaks(graph, schedule, workspace_bytes)
    return int(max(forward.max(initial=0), backward.max(initial=0), at_end))


def step_peaks(graph: JointGraph, schedule: Schedule, workspace_bytes) -> tuple[list[int], list[int]]:
    """Dynamic bytes at every compute step of the forward and of the backward.

    A prefetch or unpacking counts at the compute step after it, packing at the one before it.
    The last entry of the backward is the optimizer's step. This is the fast variant of `simulate`, which policies call
    for hundreds of schedules: it checks nothing and keeps no events. ``tests/planner/schedule`` compares the two.
    """
    forward, backward, at_end = _peaks(graph, schedule, workspace_bytes)
    return forward.tolist(), [*backward.tolist(), at_end]


def _peaks(graph: JointGraph, schedule: Schedule, workspace_bytes) -> tuple[np.ndarray, np.ndarray, int]:
    """The results of `step_peaks` as arrays, and the bytes at the optimizer's step."""
    analysis = graph.analysis
    size, bits, allocated, again = _sizes(graph)
    workspace = backward_workspace = np.asarray(workspace_bytes)
    ends: Sequence[int] = ()  # places of steps of backward after which a state is freed
    state = 0
    if schedule.replayed and (state := rng_state_bytes(graph)):
        # The forward saves the RNG state of every node that runs again in backward. There the present state is put
        # aside during each run, and the saved one is dropped after the last.
        replayed = list(schedule.replayed)
        allocated, backward_workspace = allocated.copy(), workspace.copy()
        allocated[replayed] += state
        backward_workspace[replayed] += state
        ends = schedule.last_replays
    forward, total = _compute_peaks(schedule.forward_arrays, 0, size, bits, allocated, workspace)
    total += analysis.incoming_bytes
    total += sum(analysis.bytes[s] for node_id in analysis.tangents for s in graph.nodes[node_id].storages)
    backward, total = _compute_peaks(
        schedule.backward_arrays, total, size, bits, again, backward_workspace, ends, state
    )
    return forward, backward, total + graph.optimizer_step_bytes - graph.scaled_loss_bytes


_COMPUTE, _FREE, _PACK, _UNPACK, _PREFETCH = map(KINDS.index, (COMPUTE, FREE, PACK, UNPACK, PREFETCH))


@once_per_graph
def _sizes(graph: JointGraph) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The bytes of every storage, also as a packed mask, and those that every node allocates in each phase."""
    analysis = graph.analysis
    bits = np.zeros(len(analysis.bytes), dtype=np.int64)
    for storage, mask in analysis.masks.items():
        bits[storage] = mask.packed_bytes
    return np.array(analysis.bytes), bits, np.array(analysis.allocated_bytes), np.array(analysis.recomputed_bytes)


def _compute_peaks(
    steps: StepArrays, total: int, size, bits, allocated, workspace, ends: Sequence[int] = (), state: int = 0
) -> tuple[np.ndarray, int]:
    """The bytes at every compute step when `total` bytes are allocated before, and the bytes allocated after.

    `state`: bytes that are freed after each of the steps at `ends`.
    """
    ids = steps.ids
    computes, frees, packs, unpacks, prefetches = map(
        steps.places.__getitem__, (_COMPUTE, _FREE, _PACK, _UNPACK, _PREFETCH)
    )
    computed = ids[computes]
    changes = np.zeros(len(ids) + 1, dtype=np.int64)
    changes[computes] = allocated[computed]
    changes[frees] = -size[ids[frees]]
    changes[prefetches] = size[ids[prefetches]]
    changes[packs] = bits[ids[packs]]
    changes[unpacks] = size[ids[unpacks]]
    if len(unpacks):
        last = dict(zip(ids[unpacks].tolist(), unpacks.tolist()))
        np.subtract.at(changes, np.array([*last.values()]) + 1, bits[[*last]])
    changes[0] += total
    for at in ends:
        changes[at + 1] -= state
    live = changes.cumsum()  # after every step, and at the end
    peaks = live[computes] + workspace[computed]
    for places in (prefetches, unpacks):
        if len(places):
            following = np.searchsorted(computes, places)
            counts = following < len(computes)
            np.maximum.at(peaks, following[counts], live[places[counts]])
    if len(packs):
        np.maximum.at(peaks, np.searchsorted(computes, packs) - 1, live[packs])
    return peaks, int(live[-1])
