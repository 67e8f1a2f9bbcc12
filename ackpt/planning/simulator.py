"""The one simulator: what lives after every step of a schedule, to the byte, and what the schedule costs.

Policies may approximate; this may not. A storage is born with the first value in it and dies when the schedule frees
it; an operation's results are there before its arguments are freed; what an operation takes and gives back within
itself is in the profile. Parameters, buffers and inputs are the caller's and never move. What is offloaded counts on
the device until it is freed there and from its prefetch on; its copy in host memory is counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from ackpt.capture.analysis import facts
from ackpt.capture.joint_graph import JointGraph
from ackpt.costs.profiles import Profile
from ackpt.metering.timeline import Timeline

from .host_copies import clock
from .live_bytes import check_same, follow, rng_state_bytes
from .schedule import COMPUTE, FREE, PREFETCH, Schedule, recomputed


@dataclass(frozen=True)
class Simulation:
    """What a step with one schedule takes.

    ``timeline``: live dynamic bytes after every allocation and free. ``peak_bytes``: their largest sum;
    ``resident_bytes``: parameters, buffers, inputs and optimizer state. ``peak_node``: the node at whose run it is
    reached, None in the optimizer's step. ``saved_bytes``: kept on the device for backward across the boundary.
    ``flops``: of the whole step; ``recompute_flops``: those of forward nodes that run in backward. ``seconds``: of the
    step, modelled or measured, and of these ``exposed_seconds``, in which computing stands still for copies; None where
    the profile has no times. ``host_live``: bytes of the copies in host memory, beside every entry of the
    timeline.

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
        """The most that lies in host memory at one time."""
        return max(self.host_live)

    @property
    def peak_with_host_bytes(self) -> int:
        """Most dynamic and host bytes at once, which is what a step takes on the CPU, where both are one memory."""
        return max(map(sum, zip(self.timeline.live, self.host_live)))


def simulate(graph: JointGraph, profile: Profile, schedule: Schedule) -> Simulation:
    """Follow `schedule` step by step.

    Args:
        graph: the graph the schedule was made for.
        profile: costs per node and bytes that operations take within themselves; see `ackpt.profile`.
        schedule: what runs when.

    Raises:
        ScheduleError: if schedule or profile belong to another graph, or the schedule reads what is not there, or
            computes what is.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.graph import simulate
        >>> from ackpt.planning.schedule import everything
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8)
        >>> graph = ackpt.trace(model, x)
        >>> found = simulate(graph, ackpt.profile(graph, "h200"), everything(graph))
        >>> found.resident_bytes == 4 * (8 * 8 + 8 + 4 * 8), found.seconds > 0
        (True, True)
    """
    if profile.graph:  # one made by hand need not say it
        check_same(graph, profile.graph, "profile")
    live = follow(graph, schedule, profile.workspace_bytes)
    timeline, times = live.timeline(), clock(profile, schedule)
    order = [step.id for step in (*schedule.forward, *schedule.backward) if step.kind == COMPUTE]
    return Simulation(
        timeline=timeline,
        peak_bytes=timeline.peak_bytes,
        peak_node=live.owner[timeline.peak_index - 1] if timeline.peak_index else None,
        resident_bytes=sum(live.known.bytes[s] for s in live.known.resident) + graph.optimizer_bytes,
        saved_bytes=sum(live.known.bytes[s] for s in schedule.saved),
        flops=sum(profile.flops[place] for place in order),
        recompute_flops=sum(profile.flops[place] for place in recomputed(graph, schedule)),
        seconds=None if times is None else times[0],
        exposed_seconds=None if times is None else times[1],
        host_live=live.host_live(),
    )


def peak_of(graph: JointGraph, schedule: Schedule, workspace_bytes) -> int:
    """The dynamic peak of a schedule that is known to be sound; what `simulate` finds, in a fraction of the time."""
    forward, backward = step_peaks(graph, schedule, workspace_bytes)
    return max(0, *forward, *backward)


def step_peaks(graph: JointGraph, schedule: Schedule, workspace_bytes) -> tuple[list[int], list[int]]:
    """Dynamic bytes while every compute step of the forward and of the backward runs, with what was prefetched for it.

    The last entry of the backward is that of the optimizer's step.
    """
    known = facts(graph)
    size, born, again = known.bytes, known.born_bytes, known.born_again_bytes
    state, replayed = rng_state_bytes(graph), set(schedule.replayed)
    total = most = 0
    forward, backward = [], []
    for kind, place in schedule.forward:
        if kind == FREE:
            total -= size[place]
        elif kind == COMPUTE:
            total += born[place] + (state if place in replayed else 0)
            now = total + workspace_bytes[place]
            forward.append(most if most > now else now)
            most = 0
        elif kind == PREFETCH:
            total += size[place]
            most = max(most, total)
    total += known.incoming_bytes + sum(size[s] for place in known.tangents for s in graph.nodes[place].storages)
    again_at = enumerate(schedule.backward) if replayed else ()
    last = {step.id: at for at, step in again_at if step.kind == COMPUTE and step.id in replayed}
    for at, (kind, place) in enumerate(schedule.backward):
        if kind == FREE:
            total -= size[place]
        elif kind == COMPUTE:
            total += again[place]
            now = total + workspace_bytes[place] + (state if place in replayed else 0)
            backward.append(most if most > now else now)
            if last.get(place) == at:
                total -= state
            most = 0
        elif kind == PREFETCH:
            total += size[place]
            most = max(most, total)
    return forward, [*backward, total + graph.optimizer_step_bytes]
