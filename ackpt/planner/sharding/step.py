"""A schedule's events with those of FSDP2 between them, window by window, to the byte.

A window is an uninterrupted run of one group: the root or a block, in the forward or in the backward. FSDP2's hooks run
at its ends. Before a block's forward its parameters are gathered, while the buffer of the previous gather is still
allocated; afterwards they are freed. In the backward each block starts the gather of the next one, and after its own
backward its parameters are freed and its gradients reduced, in a buffer that is live until the next one. The root
is gathered first and reduced last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ackpt.metering.timeline import Timeline
from ackpt.planner.capture.joint_graph import BACKWARD, FORWARD, JointGraph
from ackpt.planner.schedule.schedule import Schedule
from ackpt.planner.schedule.simulator import CATEGORIES, follow

from .sharding import COMMUNICATION, GATHERED, REDUCED, UNREDUCED, Group, GroupBytes, Sharding

ROOT = 0
# An event of a window has the place of its category in this tuple.
CATEGORIES_OF_A_RANK = (UNREDUCED, *CATEGORIES[1:], REDUCED, GATHERED, COMMUNICATION)  # the first are those of `Live`
_UNREDUCED, _ACTIVATION, _RECOMPUTED, _TEMPORARY, _REDUCED, _GATHERED, _COMMUNICATION = range(len(CATEGORIES_OF_A_RANK))


class ShardingError(ValueError):
    """A step that FSDP2 would run differently from this model of it."""


@dataclass(frozen=True)
class Window:
    """Events of one group in one phase: bytes, negative if they are freed, and the number of a category."""

    phase: str
    group: int
    events: tuple[tuple[int, int], ...]

    @property
    def net(self) -> int:
        return sum(size for size, _ in self.events)

    @property
    def highest(self) -> int:
        """The largest number of bytes above those at the window's begin."""
        most = total = 0
        for size, _ in self.events:
            total += size
            most = max(most, total)
        return most


def peak_bytes(windows: Iterable[Window]) -> int:
    most = total = 0
    for window in windows:
        most = max(most, total + window.highest)
        total += window.net
    return most


def timeline(windows: Iterable[Window]) -> Timeline:
    """Live dynamic bytes of one rank after every event, by category."""
    live, series = [0], [[0] for _ in CATEGORIES_OF_A_RANK]
    boundary = None
    for window in windows:
        if window.phase == BACKWARD and boundary is None:
            boundary = len(live) - 1
        for size, category in window.events:
            live.append(live[-1] + size)
            for index, values in enumerate(series):
                values.append(values[-1] + (size if index == category else 0))
    return Timeline(tuple(live), {n: tuple(s) for n, s in zip(CATEGORIES_OF_A_RANK, series) if any(s)}, boundary)


def owners(graph: JointGraph, groups: tuple[Group, ...]) -> list[int]:
    """The number of the group in which each node runs; autograd's sums of gradients belong to the previous node's."""
    number = {group.name: index for index, group in enumerate(groups) if index != ROOT}
    owner_of, current = [], ROOT
    for node in graph.nodes:
        if node.module or node.source or node.phase == FORWARD:
            parts = node.module.split(".")
            names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
            current = next((number[name] for name in names if name in number), ROOT)
        owner_of.append(current)
    return owner_of


def step_windows(
    graph: JointGraph, schedule: Schedule, workspace_bytes, groups: tuple[Group, ...], sharding: Sharding
) -> list[Window]:
    """The windows of one rank's step, in order; the last is the root's, with the reduction and the optimizer's step.

    Raises:
        ShardingError: if a block runs twice in the forward, or again when its backward is not due.
    """
    return _Walk(graph, schedule, workspace_bytes, groups, sharding).windows()


class _Walk:
    def __init__(self, graph, schedule, workspace_bytes, groups, sharding):
        self.live = follow(graph, schedule, workspace_bytes)
        self.groups, self.owners = groups, owners(graph, groups)
        self.sizes = [GroupBytes(group, sharding) for group in groups]
        self.gradients = [_gradients(graph, group) for group in groups]
        self.closed: list[Window] = []
        self.events: list[tuple[int, int]] = []
        self.key = (FORWARD, ROOT)
        self.order: list[int] = []  # blocks as the forward runs them
        self.buffer = 0  # of the last all-gather
        self.reducing = 0  # of the last reduce-scatter

    def windows(self) -> list[Window]:
        live = self.live
        events = [(size, kind, None if owner is None else self.owners[owner]) for (size, kind), owner in _owned(live)]
        last = len(events)
        while last > live.boundary and events[last - 1][2] is None:  # the optimizer's step
            last -= 1
        self._gather(ROOT)
        for size, kind, group in events[: live.boundary]:
            self._forward_of(ROOT if group is None else group)
            self._add(size, kind)
        self._forward_of(ROOT)
        self._add(-self.buffer, _COMMUNICATION)
        if missing := [self.groups[i].name for i in range(1, len(self.groups)) if i not in self.order]:
            raise ShardingError(f"block {missing[0]} does not run in the forward: its parameters would not be gathered")
        self._open(BACKWARD, ROOT)
        begun = False
        for event, (size, kind, group) in enumerate(events[live.boundary : last], live.boundary):
            if not begun and live.owner[event] is not None and live.owner[event] not in live.analysis.tangents:
                self._start_gather(self.order[-1])
                begun = True
            self._backward_of(ROOT if group is None else group)
            self._add(size, kind)
        self._backward_of(ROOT)
        if self.order:
            raise ShardingError(f"block {self.groups[self.order[-1]].name} has no backward")
        self._reduce(ROOT)
        self._add(-self.reducing, _COMMUNICATION)
        for size, kind, _ in events[last:]:
            self._add(size, kind)
        self._open(BACKWARD, ROOT)
        return self.closed

    def _forward_of(self, group: int) -> None:
        current = self.key[1]
        if group == current:
            return
        if current != ROOT:
            self._add(-self.sizes[current].unsharded, _GATHERED)
        self._open(FORWARD, group)
        if group != ROOT:
            if group in self.order:
                raise ShardingError(
                    f"block {self.groups[group].name} runs more than once in the forward, which is not supported: "
                    "leave --fsdp out"
                )
            self.order.append(group)
            self._gather(group)

    def _backward_of(self, group: int) -> None:
        current = self.key[1]
        if group == current:
            return
        if current != ROOT:
            self._reduce(current)
        self._open(BACKWARD, group)
        if group == ROOT:
            return
        if not self.order or group != self.order[-1]:
            raise ShardingError(
                f"block {self.groups[group].name} runs in backward out of turn, when its parameters are sharded"
            )
        self.order.pop()
        sizes = self.sizes[group]
        self._add(sizes.unsharded, _GATHERED)
        self._add(-sizes.gather, _COMMUNICATION)
        if self.order:
            self._start_gather(self.order[-1])

    def _gather(self, group: int) -> None:
        """In the forward: the buffer of the gather before is freed between this one's collective and its copies."""
        sizes = self.sizes[group]
        self._start_gather(group)
        self._add(-self.buffer, _COMMUNICATION)
        self._add(sizes.unsharded, _GATHERED)
        self.buffer = sizes.gather

    def _start_gather(self, group: int) -> None:
        sizes = self.sizes[group]
        changes = (sizes.cast, sizes.gather, sizes.scratch_gather, -sizes.scratch_gather, -sizes.cast)
        for size in changes:
            self._add(size, _COMMUNICATION)

    def _reduce(self, group: int) -> None:
        """Free the parameters and reduce the gradients, of which the last one is freed at the end."""
        sizes, gradients = self.sizes[group], self.gradients[group]
        self._add(-sizes.unsharded, _GATHERED)
        if not gradients:
            return
        self._add(-self.reducing, _COMMUNICATION)
        self._add(sizes.reduce, _COMMUNICATION)
        self._add(sizes.padded, _COMMUNICATION)
        self._add(-sizes.padded, _COMMUNICATION)
        for size in gradients[:-1]:
            self._add(-size, _UNREDUCED)
        stays = _COMMUNICATION if sizes.reduced else _REDUCED
        self._add(sizes.received, stays)
        self._add(sizes.scratch_reduce, _COMMUNICATION)
        self._add(-sizes.scratch_reduce, _COMMUNICATION)
        if sizes.reduced:
            self._add(sizes.reduced, _REDUCED)
            self._add(-sizes.received, _COMMUNICATION)
        self._add(-gradients[-1], _UNREDUCED)
        self.reducing = sizes.reduce

    def _add(self, size: int, category: int) -> None:
        if size:
            self.events.append((size, category))

    def _open(self, phase: str, group: int) -> None:
        self.closed.append(Window(*self.key, tuple(self.events)))
        self.events, self.key = [], (phase, group)


def _owned(live):
    return zip(live.events, live.owner)


def _gradients(graph: JointGraph, group: Group) -> list[int]:
    """Bytes of the gradients of a group's parameters, in their order; each has its own storage."""
    analysis = graph.analysis
    node_ids = [graph.gradients[weight.name] for weight in group.weights if weight.name in graph.gradients]
    return [analysis.bytes[storage] for node_id in node_ids for storage in graph.nodes[node_id].storages]
