"""The rules of the simulator: every allocation and free of a schedule; refuses a schedule that cannot run.

`simulator.simulate` turns this into a peak and a timeline; `simulator.step_peaks` is the fast variant without events.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import torch

from ackpt.metering.timeline import Copy, Timeline
from ackpt.planner.capture.joint_graph import FORWARD, Analysis, JointGraph

from .host_copies import Host
from .schedule import COMPUTE, FREE, OFFLOAD, PACK, PREFETCH, UNPACK, WAIT, Schedule, ScheduleError, Step

CATEGORIES = ("gradients", "activations", "recomputed", "temporaries")
_GRADIENT, _ACTIVATION, _RECOMPUTED, TEMPORARY, HOST = range(5)


def follow(graph: JointGraph, schedule: Schedule, workspace_bytes) -> Live:
    """Every allocation and free of `schedule`, in order."""
    check_same(graph, schedule.graph, "schedule")
    live = Live(graph, schedule, workspace_bytes)
    live.run_forward(schedule.forward)
    live.enter_backward(schedule.saved)
    live.run_backward(schedule.backward)
    return live


class Live:
    """The live storages and values at one moment of a schedule, and the events that led there.

    ``events``: (bytes, category) of every allocation and free, ``owner``: the node that each belongs to, and
    ``storage``: the storage that it allocates or frees, None for workspace, RNG states, packed masks and what the
    optimizer takes.
    ``boundary``: the number of events before backward. ``after``: live bytes on the device and in host memory after
    every step except frees; a node's arguments still count, its workspace does not. ``copies``: [kind of step, storage,
    event before its start, event before its wait].
    """

    def __init__(self, graph: JointGraph, schedule: Schedule, workspace_bytes):
        analysis = graph.analysis
        self.graph, self.analysis, self.workspace_bytes = graph, analysis, workspace_bytes
        self.values: set[int] = set(analysis.sources)
        self.storages: set[int] = set(analysis.resident)
        self.members: dict[int, set[int]] = {}
        self.recomputed: set[int] = set()  # storages whose current content was recomputed
        self.replayed = set(schedule.replayed)
        self.state_bytes = rng_state_bytes(graph)
        self.events: list[tuple[int, int]] = []
        self.owner: list[int | None] = []
        self.storage: list[int | None] = []
        self.after: list[tuple[int, int]] = []
        self.total = self.host_total = self.boundary = 0
        self.host = Host(analysis, schedule)
        self.copies: list[list] = []
        self.packed: set[int] = set()  # storages whose bits are live
        self._unpacks = Counter(step.id for step in (*schedule.forward, *schedule.backward) if step.kind == UNPACK)
        activations = {*schedule.saved, *schedule.offloaded, *schedule.packed, *_storages(analysis, analysis.outputs)}
        self.category = dict.fromkeys(activations, _ACTIVATION)
        self.category.update(dict.fromkeys(_storages(analysis, analysis.bw_outputs), _GRADIENT))

    def run_forward(self, steps):
        node = None
        for step in steps:
            if step.kind == COMPUTE:
                node = step.id
                if node in self.replayed:
                    self._event(self.state_bytes, _ACTIVATION, node)
                self._compute(node, False)
            else:
                self._move(step, node)
        self.host.refuse_any("forward")

    def enter_backward(self, saved):
        """Start backward: of the forward's values, it gets the base tensors of saved storages and nothing else."""
        self.boundary = len(self.events)
        if lost := set(saved) - self.storages:
            raise ScheduleError(f"storages {sorted(lost)} are to be saved, but the forward has freed them")
        self.members = {storage: {self.analysis.base_of[storage]} for storage in saved}
        self.values = {*self.analysis.sources, *(self.analysis.base_of[storage] for storage in saved)}
        self._event(self.analysis.incoming_bytes, TEMPORARY, None)
        for node_id in self.analysis.tangents:
            for storage in self.graph.nodes[node_id].storages:
                if storage not in self.storages:
                    self.storages.add(storage)
                    self._event(self.analysis.bytes[storage], TEMPORARY, node_id, storage)

    def run_backward(self, steps):
        last = {step.id: at for at, step in enumerate(steps) if step.kind == COMPUTE and step.id in self.replayed}
        node = None
        for at, step in enumerate(steps):
            if step.kind != COMPUTE:
                self._move(step, node)
                continue
            node = step.id
            replays = node in self.replayed
            if replays:  # the generator's current state is saved meanwhile
                self._event(self.state_bytes, TEMPORARY, node)
            self._compute(node, self.graph.nodes[node].phase == FORWARD)
            if replays:
                self._event(-self.state_bytes, TEMPORARY, node)
                if last[node] == at:
                    self._event(-self.state_bytes, _ACTIVATION, node)
        self.host.refuse_any("backward")
        self._event(-self.graph.scaled_loss_bytes, TEMPORARY, None)
        for size in (self.graph.optimizer_step_bytes, -self.graph.optimizer_step_bytes):
            self._event(size, TEMPORARY, None)

    def timeline(self) -> Timeline:
        live = [0]
        series: list[list[int]] = [[0] for _ in CATEGORIES]
        for size, category in self.events:
            live.append(live[-1] + (size if category != HOST else 0))
            for index, values in enumerate(series):
                values.append(values[-1] + (size if index == category else 0))
        ways = {OFFLOAD: "out", PREFETCH: "in"}
        return Timeline(
            tuple(live),
            {n: tuple(s) for n, s in zip(CATEGORIES, series) if any(s)},
            self.boundary,
            tuple(Copy(ways[kind], begin, end, self.analysis.bytes[s]) for kind, s, begin, end in self.copies),
        )

    def host_live(self) -> tuple[int, ...]:
        """Bytes in host memory at every entry of the timeline."""
        return tuple(accumulate((size if category == HOST else 0 for size, category in self.events), initial=0))

    def _compute(self, node_id: int, again: bool):
        analysis = self.analysis
        for source in analysis.reads(node_id, again):
            if source not in self.values:
                raise ScheduleError(
                    f"{self._name(node_id)} reads {self._name(source)}, which is not live: the schedule has freed it, "
                    "never computed it, or not waited for its prefetch"
                )
        born = analysis.allocated.get(node_id, frozenset())
        for storage in analysis.storages(node_id, again):
            if storage in born:
                if storage in self.storages:
                    raise ScheduleError(f"{self._name(node_id)} is computed while its result is still live")
                self.storages.add(storage)
                if again:
                    self.recomputed.add(storage)
                self._event(analysis.bytes[storage], self._category(storage), node_id, storage)
            self.members.setdefault(storage, set()).add(node_id)
        self.values.add(node_id)
        self.after.append((self.total, self.host_total))
        if workspace := self.workspace_bytes[node_id]:
            self._event(workspace, TEMPORARY, node_id)
            self._event(-workspace, TEMPORARY, node_id)

    def _move(self, step: Step, node: int | None):
        kind, storage = step
        if kind == FREE:
            self._free(storage, node)
            return
        if kind in (PACK, UNPACK):
            self._pack(storage) if kind == PACK else self._unpack(storage)
            return
        size = self.analysis.bytes[storage]
        if kind == OFFLOAD:
            if self.analysis.base_of.get(storage) not in self.values:
                raise ScheduleError(f"storage {storage} is offloaded, but it is not live")
            self.host.offload(storage)
            self._event(size, HOST, node, storage)
            self.copies.append([kind, storage, len(self.events), len(self.events)])
        elif kind == PREFETCH:
            if storage in self.storages:
                raise ScheduleError(f"storage {storage} is prefetched while it is still live")
            self.host.prefetch(storage)
            self.storages.add(storage)
            self._event(size, self._category(storage), node, storage)
            self.copies.append([kind, storage, len(self.events), len(self.events)])
        elif kind == WAIT:
            if self.host.wait(storage):
                self.members[storage] = {self.analysis.base_of[storage]}
                self.values.add(self.analysis.base_of[storage])
            next(copy for copy in reversed(self.copies) if copy[1] == storage)[3] = len(self.events)
        else:
            raise ScheduleError(f"{kind!r} is not a kind of step")
        self.after.append((self.total, self.host_total))
        if self.host.is_last(storage):
            self._event(-size, HOST, node, storage)

    def _pack(self, storage: int):
        if storage not in self.analysis.masks:
            raise ScheduleError(f"storage {storage} holds no dropout mask that can be packed")
        base = self.analysis.base_of[storage]
        if base not in self.values:
            raise ScheduleError(f"storage {storage} is packed, but it is not live")
        if storage in self.packed or not self._unpacks[storage]:
            raise ScheduleError(f"storage {storage} is packed twice, or never unpacked")
        self.packed.add(storage)
        self._event(self.analysis.masks[storage].packed_bytes, _ACTIVATION, base)
        self.after.append((self.total, self.host_total))

    def _unpack(self, storage: int):
        if storage not in self.packed or storage in self.storages:
            raise ScheduleError(f"storage {storage} is unpacked, but it is not packed or still live")
        base = self.analysis.base_of[storage]
        self.storages.add(storage)
        self.members[storage] = {base}
        self.values.add(base)
        self._event(self.analysis.bytes[storage], self._category(storage), base, storage)
        self.after.append((self.total, self.host_total))
        self._unpacks[storage] -= 1
        if not self._unpacks[storage]:
            self.packed.discard(storage)
            self._event(-self.analysis.masks[storage].packed_bytes, _ACTIVATION, base)

    def _free(self, storage: int, node: int | None):
        if storage not in self.storages:
            raise ScheduleError(f"storage {storage} is freed, but it is not live")
        self.host.refuse_moving(storage, "freed")
        self._event(-self.analysis.bytes[storage], self._category(storage), node, storage)
        self.storages.discard(storage)
        self.recomputed.discard(storage)
        self.values -= self.members.pop(storage, set())

    def _category(self, storage: int) -> int:
        return _RECOMPUTED if storage in self.recomputed else self.category.get(storage, TEMPORARY)

    def _event(self, size: int, category: int, node: int | None, storage: int | None = None):
        if size:
            if category == HOST:
                self.host_total += size
            else:
                self.total += size
            self.events.append((size, category))
            self.owner.append(node)
            self.storage.append(storage)

    def _name(self, node_id: int) -> str:
        node = self.graph.nodes[node_id]
        return f"{node.name} ({node.target}) of module {node.module or 'the model itself'!r}"


def _storages(analysis: Analysis, node_ids) -> set[int]:
    return {
        storage for node_id in node_ids if node_id is not None for storage in analysis.graph.nodes[node_id].storages
    }


def saved_bytes(graph: JointGraph, schedule: Schedule) -> int:
    """Bytes on the device between forward and backward: of saved storages and of packed masks."""
    analysis = graph.analysis
    packed = sum(analysis.masks[storage].packed_bytes for storage in schedule.packed)
    return packed + sum(analysis.bytes[storage] for storage in schedule.saved)


def rng_state_bytes(graph: JointGraph) -> int:
    """Bytes of the RNG state that the step saves for each recomputed random operation; 0 on a GPU.

    The state is in host memory, which on the CPU is the device's own.
    """
    return torch.get_rng_state().numel() if graph.on_cpu else 0


def check_same(graph: JointGraph, made_for: str, kind: str) -> None:
    """Refuse a schedule or plan, called `kind`, that was made for another graph: that of the hash `made_for`."""
    if made_for != graph.hash:
        raise ScheduleError(
            f"this {kind} was made for another graph ({made_for[:12]}, not {graph.hash[:12]}): model, shapes, dtypes "
            "or torch differ. Make a new one for this model and these arguments."
        )
