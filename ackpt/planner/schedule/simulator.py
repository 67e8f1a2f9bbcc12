"""The one simulator: the live bytes after every step of a schedule, and what the schedule costs.

`simulate` is exact and refuses schedules that cannot run. `peak_of` and `step_peaks` give the same numbers for valid
schedules, in a fraction of the time. An operation's results are allocated before its arguments are freed, and its
workspace comes from the profile. Parameters, buffers and inputs belong to the caller and never move. An offloaded
storage counts on the device until it is freed there, which is allowed only after a wait, and again from its prefetch
on. Its copy in host memory is counted separately, until the last step that names the storage.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from ackpt.metering.timeline import Copy, Timeline
from ackpt.planner.capture.joint_graph import FORWARD, JointGraph, once_per_graph
from ackpt.planner.capture.mask_bits import packed_bytes
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.schedule.schedule import (
    COMPUTE,
    FREE,
    KINDS,
    OFFLOAD,
    PACK,
    PREFETCH,
    UNPACK,
    WAIT,
    Schedule,
    ScheduleError,
    Step,
    StepArrays,
    recomputed,
    storages_of,
)

CATEGORIES = ("gradients", "activations", "recomputed", "temporaries")
_GRADIENT, _ACTIVATION, _RECOMPUTED, TEMPORARY, HOST = range(5)


def follow(graph: JointGraph, schedule: Schedule, workspace_bytes) -> "Live":
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
        self.copies: list[list] = []
        self.packed: set[int] = set()  # storages whose bits are live
        steps = (*schedule.forward, *schedule.backward)
        self._unpacks = Counter(step.id for step in steps if step.kind == UNPACK)
        self._moves = Counter(step.id for step in steps if step.kind in (OFFLOAD, PREFETCH, WAIT))
        self._offloaded: dict[int, bool] = {}  # by storage, whether its copy in host memory still exists
        self._moving: dict[int, str] = {}  # by storage, the step that started its present copy
        activations = {*schedule.saved, *schedule.offloaded, *schedule.packed, *storages_of(graph, analysis.outputs)}
        self.category = dict.fromkeys(activations, _ACTIVATION)
        self.category.update(dict.fromkeys(storages_of(graph, analysis.bw_outputs), _GRADIENT))

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
        self._refuse_moving_at_end("forward")

    def enter_backward(self, saved):
        """Start backward: of the forward's values, it gets the base tensors of saved storages and nothing else."""
        self.boundary = len(self.events)
        if lost := set(saved) - self.storages:
            raise ScheduleError(f"storages {sorted(lost)} are to be saved, but the forward has freed them")
        self.members = {storage: {self.analysis.base_of[storage]} for storage in saved}
        self.values = {*self.analysis.sources, *(self.analysis.base_of[storage] for storage in saved)}
        for size in (self.graph.outside_loss_bytes, -self.graph.outside_loss_bytes):
            self._event(size, TEMPORARY, None)
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
        self._refuse_moving_at_end("backward")
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
            if storage in self.analysis.resident or storage in self.analysis.callers:
                raise ScheduleError(f"storage {storage} belongs to the caller: it cannot be offloaded")
            if storage in self._offloaded:
                raise ScheduleError(f"storage {storage} is offloaded twice: one copy in host memory is enough")
            self._offloaded[storage] = True
            self._event(size, HOST, node, storage)
        elif kind == PREFETCH:
            if storage in self.storages:
                raise ScheduleError(f"storage {storage} is prefetched while it is still live")
            if not self._offloaded.get(storage):
                raise ScheduleError(f"storage {storage} is prefetched, but it was never offloaded")
            self._refuse_moving(storage, "prefetched")
            self.storages.add(storage)
            self._event(size, self._category(storage), node, storage)
        elif kind == WAIT:
            if storage not in self._moving:
                raise ScheduleError(f"storage {storage} is waited for, but no copy of it is in progress")
            if self._moving.pop(storage) == PREFETCH:
                self.members[storage] = {self.analysis.base_of[storage]}
                self.values.add(self.analysis.base_of[storage])
            next(copy for copy in reversed(self.copies) if copy[1] == storage)[3] = len(self.events)
        else:
            raise ScheduleError(f"{kind!r} is not a kind of step")
        if kind != WAIT:
            self._moving[storage] = kind
            self.copies.append([kind, storage, len(self.events), len(self.events)])
        self.after.append((self.total, self.host_total))
        self._moves[storage] -= 1
        if not self._moves[storage]:
            self._offloaded[storage] = False
            self._event(-size, HOST, node, storage)

    def _refuse_moving(self, storage: int, action: str):
        if storage in self._moving:
            raise ScheduleError(f"storage {storage} is {action} before the wait for its {self._moving[storage]}")

    def _refuse_moving_at_end(self, phase: str):
        if self._moving:
            raise ScheduleError(f"copies of storages {sorted(self._moving)} are in progress at the end of the {phase}")

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
        self._refuse_moving(storage, "freed")
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


def saved_bytes(graph: JointGraph, schedule: Schedule) -> int:
    """Bytes on the device between forward and backward: of saved storages and of packed masks."""
    analysis = graph.analysis
    packed = sum(analysis.masks[storage].packed_bytes for storage in schedule.packed)
    return packed + sum(analysis.bytes[storage] for storage in schedule.saved)


def rng_state_bytes(graph: JointGraph) -> int:
    """Bytes of the RNG state that is saved for each recomputed random operation, on the CPU; 0 on a GPU."""
    return torch.get_rng_state().numel() if graph.on_cpu else 0


def check_same(graph: JointGraph, made_for: str, kind: str) -> None:
    """Refuse a schedule or plan, called `kind`, that was made for another graph: that of the hash `made_for`."""
    if made_for != graph.hash:
        raise ScheduleError(
            f"this {kind} was made for another graph ({made_for[:12]}, not {graph.hash[:12]}): model, shapes, dtypes "
            "or torch differ. Make a new one for this model and these arguments."
        )


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


Sizes = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # see `sizes_of`


def peak_of(graph: JointGraph, schedule: Schedule, workspace_bytes, sizes: Sizes | None = None) -> int:
    """The dynamic peak of a valid schedule: the number that `simulate` finds, in a fraction of the time.

    `sizes`: other bytes of the graph's storages.
    """
    forward, backward, at_end = _peaks(graph, schedule, workspace_bytes, sizes)
    return int(max(forward.max(initial=0), backward.max(initial=0), at_end))


def step_peaks(graph: JointGraph, schedule: Schedule, workspace_bytes) -> tuple[list[int], list[int]]:
    """Dynamic bytes at every compute step of the forward and of the backward, and last at the optimizer's step.

    A prefetch or unpacking counts at the compute step after it, packing at the one before it. This is the fast variant
    of `simulate` for hundreds of schedules: it checks nothing and keeps no events.
    """
    forward, backward, at_end = _peaks(graph, schedule, workspace_bytes)
    return forward.tolist(), [*backward.tolist(), at_end]


def _peaks(
    graph: JointGraph, schedule: Schedule, workspace_bytes, sizes: Sizes | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """The results of `step_peaks` as arrays, and the bytes at the optimizer's step."""
    analysis = graph.analysis
    size, bits, allocated, again = sizes or own_sizes(graph)
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
    if graph.outside_loss_bytes:  # as if the last operation of the forward allocated them
        forward[-1] = max(forward[-1], total + graph.outside_loss_bytes)
    total += analysis.incoming_bytes
    total += sum(int(size[s]) for node_id in analysis.tangents for s in graph.nodes[node_id].storages)
    backward, total = _compute_peaks(
        schedule.backward_arrays, total, size, bits, again, backward_workspace, ends, state
    )
    return forward, backward, total + graph.optimizer_step_bytes - graph.scaled_loss_bytes


_COMPUTE, _FREE, _PACK, _UNPACK, _PREFETCH = map(KINDS.index, (COMPUTE, FREE, PACK, UNPACK, PREFETCH))


@once_per_graph
def own_sizes(graph: JointGraph) -> Sizes:
    """`sizes_of` the graph's own storages."""
    return sizes_of(graph, np.array(graph.analysis.bytes))


def sizes_of(graph: JointGraph, size: np.ndarray) -> Sizes:
    """The bytes of every storage, also as a packed mask, and those that every node allocates in each phase.

    In backward, a recomputed batch norm returns no running statistics.
    """
    analysis = graph.analysis
    bits = np.zeros(len(size), dtype=np.int64)
    for storage, mask in analysis.masks.items():
        bits[storage] = packed_bytes(size[storage] // mask.dtype.itemsize)
    allocated = np.bincount(_producers(graph), size, len(graph.nodes)).astype(np.int64)  # exact below 2**53
    again = allocated.copy()
    for node in analysis.batch_norms:
        again[node] = sum(size[s] for s in analysis.storages(node, again=True) if s in analysis.allocated[node])
    return size, bits, allocated, again


@once_per_graph
def _producers(graph: JointGraph) -> np.ndarray:
    return np.array([storage.producer for storage in graph.storages])


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


def copies(schedule: Schedule) -> bool:
    """Whether the schedule offloads anything: the kinds of steps after `UNPACK` copy."""
    return any((steps.kinds > _UNPACK).any() for steps in (schedule.forward_arrays, schedule.backward_arrays))


def waiting(profile, schedule: Schedule) -> float:
    """Seconds in which computation waits for copies; 0 where nothing is copied or the profile has no times."""
    times = clock(profile, schedule) if profile.swap_seconds is not None and copies(schedule) else None
    return 0.0 if times is None else times[1]


def clock(profile, schedule: Schedule) -> tuple[float, float] | None:
    """(seconds of the step, seconds of these in which computation waits for copies); None without times in the profile.

    Three streams: operations, packing included, run one after another on the first, copies to the host on the second,
    and copies back on the third, in the order in which they were started. A copy starts when computation has reached
    its step and its stream is idle.
    """
    if profile.seconds is None or (profile.swap_seconds is None and copies(schedule)):
        return None
    now = exposed = 0.0
    for kind, _, start, end in timed(profile, schedule):
        if kind == WAIT:
            exposed += end - start
        if kind in (COMPUTE, PACK, UNPACK, WAIT):
            now = end
    return now, exposed


def timed(profile, schedule: Schedule) -> Iterator[tuple[str, int, float, float]]:
    """Every step but the frees, as (kind, id, start, end) in seconds; a copy starts in its stream, perhaps later."""
    swaps = profile.swap_seconds or ()
    now = 0.0
    idle = dict.fromkeys((OFFLOAD, PREFETCH), 0.0)
    done: dict[int, float] = {}
    for kind, number in (*schedule.forward, *schedule.backward):
        if kind in idle:
            start = max(now, idle[kind])
            done[number] = idle[kind] = start + swaps[number]
            yield kind, number, start, done[number]
        elif kind == WAIT:
            start, now = now, max(now, done[number])
            yield kind, number, start, now
        elif kind in (COMPUTE, PACK, UNPACK):
            seconds = profile.seconds if kind == COMPUTE else profile.pack_seconds
            start, now = now, now + seconds[number]
            yield kind, number, start, now
