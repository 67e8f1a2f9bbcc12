"""The one simulator: what lives after every step of a schedule, to the byte, and what the schedule costs.

Policies may approximate; this may not. A storage is born with the first value in it and dies when the schedule frees
it; an operation's results are there before its arguments are freed; what an operation takes and gives back within
itself is in the profile. Parameters, buffers and inputs are the caller's and never move.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..timeline import Timeline
from .facts import Facts, facts
from .joint import BACKWARD, FORWARD, JointGraph
from .schedule import COMPUTE, Schedule, ScheduleError

_CATEGORIES = ("gradients", "activations", "temporaries")
_GRADIENT, _ACTIVATION, _TEMPORARY = range(3)


@dataclass(frozen=True)
class Simulation:
    """What a step with one schedule takes.

    ``timeline``: live dynamic bytes after every allocation and free. ``peak_bytes``: their largest sum;
    ``resident_bytes``: parameters, buffers, inputs and optimizer state. ``peak_node``: the node at whose run it is
    reached. ``flops``: of the whole step; ``recompute_flops``: those of forward nodes that run in backward;
    ``seconds``: modelled run time, None where the profile has no times.
    """

    timeline: Timeline
    peak_bytes: int
    peak_node: int | None
    resident_bytes: int
    saved_bytes: int
    flops: int
    recompute_flops: int
    seconds: float | None


class _Live:
    """Storages and values that are there; every change becomes an event."""

    def __init__(self, known: Facts, schedule: Schedule):
        self.known = known
        self.values: set[int] = set(known.given)
        self.storages: set[int] = set(known.resident)
        self.events: list[tuple[int, int]] = []  # bytes, category
        self.owner: list[int | None] = []  # the node that an event belongs to
        self.members: dict[int, set[int]] = {}
        gradients = {s for p in known.bw_outputs if p is not None for s in known.graph.nodes[p].storages}
        outputs = {s for p in known.outputs if p is not None for s in known.graph.nodes[p].storages}
        self.category = {s: _ACTIVATION for s in {*schedule.saved, *outputs}}
        self.category.update({s: _GRADIENT for s in gradients})

    def event(self, size: int, category: int, node: int | None):
        if size:
            self.events.append((size, category))
            self.owner.append(node)

    def compute(self, place: int, again: bool, workspace: int):
        known = self.known
        graph = known.graph
        for source in known.reads(place, again):
            if source not in self.values:
                raise ScheduleError(
                    f"{_named(graph, place)} reads {_named(graph, source)}, which is not there: the schedule has freed "
                    "it or never computed it"
                )
        born = known.born.get(place, frozenset())
        for storage in known.storages(place, again):
            if storage in born:
                if storage in self.storages:
                    raise ScheduleError(f"{_named(graph, place)} is computed while its result is still there")
                self.storages.add(storage)
                self.event(known.bytes[storage], self._category(storage, again), place)
            self.members.setdefault(storage, set()).add(place)
        if workspace:
            self.event(workspace, _TEMPORARY, place)
            self.event(-workspace, _TEMPORARY, place)
        self.values.add(place)

    def free(self, storage: int, again: bool, node: int | None):
        if storage not in self.storages:
            raise ScheduleError(f"storage {storage} is freed, but it is not there")
        self.storages.discard(storage)
        self.values -= self.members.pop(storage, set())
        self.event(-self.known.bytes[storage], self._category(storage, again), node)

    def _category(self, storage: int, again: bool) -> int:
        category = self.category.get(storage, _TEMPORARY)
        return _TEMPORARY if again and category == _ACTIVATION else category


def simulate(graph: JointGraph, profile, schedule: Schedule) -> Simulation:
    """Follow `schedule` step by step.

    Args:
        graph: the graph the schedule was made for.
        profile: costs per node and bytes that operations take within themselves; see `ackpt.profile`.
        schedule: what runs when.

    Raises:
        ScheduleError: if the schedule belongs to another graph, reads what is not there, or computes what is.
    """
    check_same(graph, schedule.graph, "schedule")
    known = facts(graph)
    live = _Live(known, schedule)
    state = rng_state_bytes(graph)
    counts: list[int] = []
    again_born: set[int] = set()
    replayed = set(schedule.replayed)
    node = None
    for step in schedule.forward:
        if step.kind == COMPUTE:
            node = step.id
            counts.append(node)
            if node in replayed:
                live.event(state, _ACTIVATION, node)
            live.compute(node, False, profile.workspace_bytes[node])
        else:
            live.free(step.id, False, node)
    boundary = len(live.events)
    saved = set(schedule.saved)
    if lost := saved - live.storages:
        raise ScheduleError(f"storages {sorted(lost)} are to be saved, but the forward has freed them")
    # Backward is given the covering value of what was saved, and nothing else of the forward.
    live.values = {*known.given, *(known.cover[s] for s in saved)}
    live.members = {s: {known.cover[s]} for s in saved}
    for place in known.tangents:
        for storage in graph.nodes[place].storages:
            live.storages.add(storage)
            live.event(known.bytes[storage], _TEMPORARY, place)
    recomputed = 0
    last_replay = {step.id: at for at, step in enumerate(schedule.backward) if step.kind == COMPUTE and step.id in replayed}
    for at, step in enumerate(schedule.backward):
        if step.kind == COMPUTE:
            node = step.id
            counts.append(node)
            again = graph.nodes[node].phase == FORWARD
            if again:
                recomputed += profile.flops[node]
                again_born |= known.born.get(node, frozenset())
            if node in replayed:
                live.event(state, _TEMPORARY, node)  # the generator's own state is put aside
            live.compute(node, again, profile.workspace_bytes[node])
            if node in replayed:
                live.event(-state, _TEMPORARY, node)
                if last_replay[node] == at:
                    live.event(-state, _ACTIVATION, node)
        else:
            live.free(step.id, step.id in again_born, node)
            again_born.discard(step.id)
    timeline = _timeline(live.events, boundary)
    peak = timeline.peak_bytes
    seconds = profile.seconds
    return Simulation(
        timeline=timeline,
        peak_bytes=peak,
        peak_node=live.owner[timeline.peak_index - 1] if timeline.peak_index else None,
        resident_bytes=sum(known.bytes[s] for s in known.resident),
        saved_bytes=sum(known.bytes[s] for s in saved),
        flops=sum(profile.flops[place] for place in counts),
        recompute_flops=recomputed,
        seconds=None if seconds is None else sum(seconds[place] for place in counts),
    )


def _timeline(events, boundary) -> Timeline:
    live = [0]
    series = [[0], [0], [0]]
    for size, category in events:
        live.append(live[-1] + size)
        for index, values in enumerate(series):
            values.append(values[-1] + (size if index == category else 0))
    return Timeline(tuple(live), {n: tuple(s) for n, s in zip(_CATEGORIES, series) if any(s)}, boundary)


def rng_state_bytes(graph: JointGraph) -> int:
    """Bytes of the state that a random operation's second run starts from; it lies in host memory."""
    on_host = all(
        value.device.type == "cpu"
        for node in graph.module.graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor)
    )
    return torch.get_rng_state().numel() if on_host else 0


def check_same(graph: JointGraph, found: str, what: str) -> None:
    """Refuse a schedule or plan that was made for another graph."""
    if found != graph.hash:
        raise ScheduleError(
            f"this {what} was made for another graph ({found[:12]}, not {graph.hash[:12]}): model, shapes, dtypes or "
            "torch differ. Make it anew for this model and these arguments."
        )


def _named(graph: JointGraph, place: int) -> str:
    node = graph.nodes[place]
    return f"{node.name} ({node.target}) of module {node.module or 'the model itself'!r}"
