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
from .joint import FORWARD, JointGraph
from .schedule import COMPUTE, Schedule, ScheduleError, recomputed

_CATEGORIES = ("gradients", "activations", "temporaries")
_GRADIENT, _ACTIVATION, _TEMPORARY = range(3)


@dataclass(frozen=True)
class Simulation:
    """What a step with one schedule takes.

    ``timeline``: live dynamic bytes after every allocation and free. ``peak_bytes``: their largest sum;
    ``resident_bytes``: parameters, buffers, inputs and optimizer state. ``peak_node``: the node at whose run it is
    reached, None in the optimizer's step. ``saved_bytes``: kept for backward across the boundary. ``flops``: of the
    whole step; ``recompute_flops``: those of forward nodes that run in backward; ``seconds``: modelled or measured run
    time of all operations, None where the profile has no times.
    """

    timeline: Timeline
    peak_bytes: int
    peak_node: int | None
    resident_bytes: int
    saved_bytes: int
    flops: int
    recompute_flops: int
    seconds: float | None


def simulate(graph: JointGraph, profile, schedule: Schedule) -> Simulation:
    """Follow `schedule` step by step.

    Args:
        graph: the graph the schedule was made for.
        profile: costs per node and bytes that operations take within themselves; see `ackpt.profile`.
        schedule: what runs when.

    Raises:
        ScheduleError: if schedule or profile belong to another graph, or the schedule reads what is not there, or
            computes what is.
    """
    if profile.graph:  # one made by hand need not say it
        check_same(graph, profile.graph, "profile")
    live = follow(graph, schedule, profile.workspace_bytes)
    timeline = live.timeline()
    order = [step.id for step in (*schedule.forward, *schedule.backward) if step.kind == COMPUTE]
    return Simulation(
        timeline=timeline,
        peak_bytes=timeline.peak_bytes,
        peak_node=live.owner[timeline.peak_index - 1] if timeline.peak_index else None,
        resident_bytes=sum(live.known.bytes[s] for s in live.known.resident) + graph.optimizer_bytes,
        saved_bytes=sum(live.known.bytes[s] for s in schedule.saved),
        flops=sum(profile.flops[place] for place in order),
        recompute_flops=sum(profile.flops[place] for place in recomputed(graph, schedule)),
        seconds=None if profile.seconds is None else sum(profile.seconds[place] for place in order),
    )


def peak_of(graph: JointGraph, schedule: Schedule, workspace_bytes) -> int:
    """The dynamic peak of a schedule that is known to be sound; what `simulate` finds, in a fraction of the time."""
    known = facts(graph)
    size, born = known.bytes, known.born
    state, replayed = rng_state_bytes(graph), set(schedule.replayed)
    total = peak = 0
    for kind, place in schedule.forward:
        if kind != COMPUTE:
            total -= size[place]
            continue
        total += sum(size[s] for s in born.get(place, ())) + (state if place in replayed else 0)
        peak = max(peak, total + workspace_bytes[place])
    total += known.incoming_bytes + sum(size[s] for place in known.tangents for s in graph.nodes[place].storages)
    last = {step.id: at for at, step in enumerate(schedule.backward) if step.kind == COMPUTE and step.id in replayed}
    for at, (kind, place) in enumerate(schedule.backward):
        if kind != COMPUTE:
            total -= size[place]
            continue
        own = born.get(place, ())
        if place < graph.boundary:
            own = known.storages(place, again=True) if own else ()
            own = [s for s in own if s in born[place]]
        total += sum(size[s] for s in own)
        peak = max(peak, total + workspace_bytes[place] + (state if place in replayed else 0))
        if last.get(place) == at:
            total -= state
    return max(peak, total + graph.optimizer_step_bytes)


def follow(graph: JointGraph, schedule: Schedule, workspace_bytes) -> Live:
    """Every allocation and free of `schedule`, in order."""
    check_same(graph, schedule.graph, "schedule")
    live = Live(graph, schedule, workspace_bytes)
    live.run_forward(schedule.forward)
    live.enter_backward(schedule.saved)
    live.run_backward(schedule.backward)
    return live


class Live:
    """Storages and values that are there while a schedule is followed; every change becomes an event.

    ``events``: (bytes, category); ``owner``: the node that each belongs to; ``boundary``: events before backward;
    ``after``: live bytes right after every compute step, its arguments not yet freed and without its workspace.
    """

    def __init__(self, graph: JointGraph, schedule: Schedule, workspace_bytes):
        known = facts(graph)
        self.graph, self.known, self.workspace_bytes = graph, known, workspace_bytes
        self.values: set[int] = set(known.given)
        self.storages: set[int] = set(known.resident)
        self.members: dict[int, set[int]] = {}
        self.recomputed: set[int] = set()  # storages whose present content was computed again
        self.replayed = set(schedule.replayed)
        self.state_bytes = rng_state_bytes(graph)
        self.events: list[tuple[int, int]] = []
        self.owner: list[int | None] = []
        self.after: list[int] = []
        self.total = self.boundary = 0
        self.category = dict.fromkeys({*schedule.saved, *_storages(known, known.outputs)}, _ACTIVATION)
        self.category.update(dict.fromkeys(_storages(known, known.bw_outputs), _GRADIENT))

    def run_forward(self, steps):
        node = None
        for step in steps:
            if step.kind == COMPUTE:
                node = step.id
                if node in self.replayed:
                    self._event(self.state_bytes, _ACTIVATION, node)
                self._compute(node, False)
            else:
                self._free(step.id, node)

    def enter_backward(self, saved):
        """Backward is given the covering value of what was saved, and nothing else of the forward."""
        self.boundary = len(self.events)
        if lost := set(saved) - self.storages:
            raise ScheduleError(f"storages {sorted(lost)} are to be saved, but the forward has freed them")
        self.members = {storage: {self.known.cover[storage]} for storage in saved}
        self.values = {*self.known.given, *(self.known.cover[storage] for storage in saved)}
        self._event(self.known.incoming_bytes, _TEMPORARY, None)
        for place in self.known.tangents:
            for storage in self.graph.nodes[place].storages:
                if storage not in self.storages:
                    self.storages.add(storage)
                    self._event(self.known.bytes[storage], _TEMPORARY, place)

    def run_backward(self, steps):
        last = {step.id: at for at, step in enumerate(steps) if step.kind == COMPUTE and step.id in self.replayed}
        node = None
        for at, step in enumerate(steps):
            if step.kind != COMPUTE:
                self._free(step.id, node)
                continue
            node = step.id
            replays = node in self.replayed
            if replays:  # the generator's present state is put aside
                self._event(self.state_bytes, _TEMPORARY, node)
            self._compute(node, self.graph.nodes[node].phase == FORWARD)
            if replays:
                self._event(-self.state_bytes, _TEMPORARY, node)
                if last[node] == at:
                    self._event(-self.state_bytes, _ACTIVATION, node)
        for size in (self.graph.optimizer_step_bytes, -self.graph.optimizer_step_bytes):
            self._event(size, _TEMPORARY, None)

    def timeline(self) -> Timeline:
        live = [0]
        series: list[list[int]] = [[0], [0], [0]]
        for size, category in self.events:
            live.append(live[-1] + size)
            for index, values in enumerate(series):
                values.append(values[-1] + (size if index == category else 0))
        return Timeline(tuple(live), {n: tuple(s) for n, s in zip(_CATEGORIES, series) if any(s)}, self.boundary)

    def _compute(self, place: int, again: bool):
        known = self.known
        for source in known.reads(place, again):
            if source not in self.values:
                raise ScheduleError(
                    f"{self._name(place)} reads {self._name(source)}, which is not there: the schedule has freed it "
                    "or never computed it"
                )
        born = known.born.get(place, frozenset())
        for storage in known.storages(place, again):
            if storage in born:
                if storage in self.storages:
                    raise ScheduleError(f"{self._name(place)} is computed while its result is still there")
                self.storages.add(storage)
                if again:
                    self.recomputed.add(storage)
                self._event(known.bytes[storage], self._category(storage), place)
            self.members.setdefault(storage, set()).add(place)
        self.values.add(place)
        self.after.append(self.total)
        if workspace := self.workspace_bytes[place]:
            self._event(workspace, _TEMPORARY, place)
            self._event(-workspace, _TEMPORARY, place)

    def _free(self, storage: int, node: int | None):
        if storage not in self.storages:
            raise ScheduleError(f"storage {storage} is freed, but it is not there")
        self._event(-self.known.bytes[storage], self._category(storage), node)
        self.storages.discard(storage)
        self.recomputed.discard(storage)
        self.values -= self.members.pop(storage, set())

    def _category(self, storage: int) -> int:
        return _TEMPORARY if storage in self.recomputed else self.category.get(storage, _TEMPORARY)

    def _event(self, size: int, category: int, node: int | None):
        if size:
            self.total += size
            self.events.append((size, category))
            self.owner.append(node)

    def _name(self, place: int) -> str:
        node = self.graph.nodes[place]
        return f"{node.name} ({node.target}) of module {node.module or 'the model itself'!r}"


def _storages(known: Facts, places) -> set[int]:
    return {storage for place in places if place is not None for storage in known.graph.nodes[place].storages}


def rng_state_bytes(graph: JointGraph) -> int:
    """Bytes, on the graph's device, of the state that a random operation's second run starts from.

    It lies in host memory, so that a step on a GPU has none.
    """
    return torch.get_rng_state().numel() if graph.on_cpu else 0


def check_same(graph: JointGraph, found: str, what: str) -> None:
    """Refuse a schedule or plan that was made for another graph."""
    if found != graph.hash:
        raise ScheduleError(
            f"this {what} was made for another graph ({found[:12]}, not {graph.hash[:12]}): model, shapes, dtypes or "
            "torch differ. Make it anew for this model and these arguments."
        )
