"""A schedule: the order in which a step computes, frees and copies. The set of saved storages follows from it.

Two schedules that save the same storages can have different peaks, depending on when they recompute. Planning makes
thousands of them, so `frees` and `unpacked_at_once` are its innermost loop: one pass of numpy over an order of nodes.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ackpt.planner.capture.joint_graph import BACKWARD, FORWARD, Analysis, JointGraph, once_per_graph

COMPUTE, FREE = "compute", "free"
PACK, UNPACK = "pack", "unpack"
OFFLOAD, PREFETCH, WAIT = "offload", "prefetch", "wait"
KINDS = COMPUTE, FREE, PACK, UNPACK, OFFLOAD, PREFETCH, WAIT


class ScheduleError(ValueError):
    """A schedule that cannot run: it reads a value that is not live, or recomputes an operation that must run once.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.graph import scheduled
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> found = scheduled(graph, forward=[], backward=range(graph.boundary + 1, len(graph.nodes)))
        >>> try:
        ...     ackpt.graph.simulate(graph, ackpt.profile(graph), found)
        ... except ackpt.ScheduleError:
        ...     print("backward reads what the forward did not compute")
        backward reads what the forward did not compute
    """


class Step(NamedTuple):
    """One step of a schedule: ``compute`` the node `id`, or do one of the following to the storage `id`.

    ``free`` releases it on the device. ``pack`` stores a dropout mask with one bit per element, in addition to the mask
    itself until that is freed. ``unpack`` allocates the mask again; the last one of a mask frees its bits. ``offload``
    starts its copy to the host; it stays on the device until it is freed. ``prefetch`` allocates it on the device and
    starts its copy back. ``wait`` blocks until the copy is complete; only then may an offloaded storage be freed, or a
    prefetched one be read.

    Example:
        >>> from ackpt.graph import Step
        >>> Step("compute", 7)
        Step(kind='compute', id=7)
    """

    kind: str
    id: int


class StepArrays(NamedTuple):
    """Steps as arrays: the kind of every step, an index of `KINDS`, its id, and the places of the steps of a kind."""

    kinds: np.ndarray
    ids: np.ndarray
    places: tuple[np.ndarray, ...]

    @property
    def computed(self) -> list[int]:
        """The nodes of the compute steps, in order."""
        return self.ids[self.places[KINDS.index(COMPUTE)]].tolist()

    @property
    def key(self) -> bytes:
        """A digest of the steps, which is faster to compare than the steps."""
        return hashlib.sha256(self.kinds.tobytes() + self.ids.tobytes()).digest()


def _arrays(steps) -> StepArrays:
    kinds, ids = zip(*steps) if steps else ((), ())
    numbers = {kind: number for number, kind in enumerate(KINDS)}
    kinds = np.fromiter(map(numbers.__getitem__, kinds), np.int8, len(steps))
    places = tuple(np.flatnonzero(kinds == number).astype(np.int32) for number in range(len(KINDS)))
    return StepArrays(kinds, np.fromiter(ids, np.int32, len(steps)), places)


@dataclass(frozen=True)
class Schedule:
    """The steps of the forward and of the backward of the graph with the hash `graph`.

    A forward node among the backward's steps is a recomputation; a node may be computed several times. ``saved``:
    storages on the device between forward and backward; ``replayed``: random nodes that are recomputed, with the RNG
    state that their first run started from.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.graph import lower
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> nothing = lower(graph, ())
        >>> again = [step.id for step in nothing.backward if step.kind == "compute" and step.id < graph.boundary]
        >>> nothing.saved, "aten.tanh.default" in [graph.nodes[node_id].target for node_id in again]
        ((), True)
    """

    graph: str
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    saved: tuple[int, ...]
    replayed: tuple[int, ...]

    @functools.cached_property
    def forward_arrays(self) -> StepArrays:
        """The forward's steps as arrays."""
        return _arrays(self.forward)

    @functools.cached_property
    def backward_arrays(self) -> StepArrays:
        """The backward's steps as arrays."""
        return _arrays(self.backward)

    @functools.cached_property
    def last_replays(self) -> tuple[int, ...]:
        """The places in the backward of the last runs of the random nodes that are recomputed."""
        if not self.replayed:
            return ()
        computes = self.backward_arrays.places[KINDS.index(COMPUTE)]
        ids = self.backward_arrays.ids[computes]
        runs = np.flatnonzero(np.isin(ids, list(self.replayed)))
        return tuple(dict(zip(ids[runs].tolist(), computes[runs].tolist())).values())

    @functools.cached_property
    def offloaded(self) -> tuple[int, ...]:
        """Storages in host memory between forward and backward."""
        return self._in_both(OFFLOAD, PREFETCH)

    @functools.cached_property
    def packed(self) -> tuple[int, ...]:
        """Storages of dropout masks that are saved with one bit per element between forward and backward."""
        return self._in_both(PACK, UNPACK)

    def _in_both(self, leaves: str, comes_back: str) -> tuple[int, ...]:
        left = {step.id for step in self.forward if step.kind == leaves}
        return tuple(sorted(left & {step.id for step in self.backward if step.kind == comes_back}))


def scheduled(graph: JointGraph, forward: Iterable[int] | None, backward: Iterable[int]) -> Schedule:
    """The schedule that computes the nodes `forward` and then `backward`, and frees every storage as early as possible.

    If `forward` is None, it consists of the nodes that the outputs, the effects and `backward` need.

    Raises:
        ScheduleError: if `backward` recomputes a node that cannot be recomputed.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.graph import lower, scheduled
        >>> graph = ackpt.trace(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8))
        >>> found = lower(graph, ())
        >>> forward, backward = (
        ...     [step.id for step in steps if step.kind == "compute"] for steps in (found.forward, found.backward)
        ... )
        >>> scheduled(graph, forward, backward) == found
        True
    """
    analysis = graph.analysis
    backward = unpacked_at_once(graph, list(backward))
    not_recomputable = analysis.not_recomputable
    if not not_recomputable.keys().isdisjoint(backward):
        node_id = next(node_id for node_id in backward if node_id in not_recomputable)
        node = graph.nodes[node_id]
        raise ScheduleError(
            f"{node.name} ({node.target}) of module {node.module or 'the model itself'!r} cannot be recomputed: "
            f"{not_recomputable[node_id]}. Its storage must be saved."
        )
    bw, needed = _with_frees(graph, backward, analysis.live_to_end, BACKWARD)
    saved = tuple(sorted(needed - analysis.resident - {s for t in analysis.tangents for s in graph.nodes[t].storages}))
    forward = needed_forward(analysis, saved) if forward is None else list(forward)
    fw, _ = _with_frees(graph, forward, analysis.live_to_end | analysis.dropped | set(saved), FORWARD)
    unsaved = np.array(sorted(analysis.dropped - set(saved)), dtype=np.int64)
    fw = np.concatenate([fw, unsaved + len(graph.nodes)])
    random = analysis.random_forward.intersection(backward)
    schedule = Schedule(graph.hash, _steps(graph, fw), _steps(graph, bw), saved, tuple(sorted(random)))
    # The properties would make the same arrays from the steps, which takes longer.
    schedule.__dict__.update(forward_arrays=_numbered_arrays(graph, fw), backward_arrays=_numbered_arrays(graph, bw))
    return schedule


def lower(graph: JointGraph, saved: Iterable[int]) -> Schedule:
    """The schedule that saves the storages `saved` and recomputes everything else that backward reads, once and late.

    All results of one operation have the same fate: if one of them is saved, so are the others that backward reads,
    because recomputing any of them would allocate the saved one a second time. Every other activation is recomputed
    right before its first use and freed right after its last. Views are rebuilt. What backward does not need is not
    recomputed.

    Raises:
        ScheduleError: if a storage that cannot be recomputed is not in `saved`.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.graph import lower, simulate
        >>> from ackpt.planner.schedule.schedule import everything
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> profile = ackpt.profile(graph)
        >>> [simulate(graph, profile, lower(graph, saved)).recompute_flops for saved in ((), everything(graph).saved)]
        [512, 0]
    """
    analysis = graph.analysis
    # The caller holds the outputs anyway.
    saved = {*saved, *(storages_of(graph, analysis.outputs) - analysis.dropped)}
    return scheduled(
        graph, None, recompute_late(analysis, analysis.needed_backward, live_before_backward(analysis, saved))
    )


@once_per_graph
def everything(graph: JointGraph) -> Schedule:
    """The schedule of the baseline: it saves all activations that backward reads.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.graph import simulate
        >>> from ackpt.planner.schedule.schedule import everything
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> plain = simulate(graph, ackpt.profile(graph), everything(graph))
        >>> plain.saved_bytes, plain.recompute_flops
        (128, 0)
    """
    return lower(graph, graph.analysis.savable)


def recomputed(graph: JointGraph, schedule: Schedule) -> list[int]:
    """The forward nodes that run in backward, in order, each as often as it runs."""
    arrays = schedule.backward_arrays
    computed = arrays.ids[arrays.places[KINDS.index(COMPUTE)]]
    return computed[computed < graph.boundary].tolist()


def live_before_backward(analysis: Analysis, saved) -> set[int]:
    """Nodes whose values are live when backward begins if the storages `saved`, and their siblings, are saved."""
    live = set(analysis.sources)
    for producer in {analysis.graph.storages[storage].producer for storage in saved}:
        live |= bases_of(analysis, analysis.allocated[producer])
    return live


def bases_of(analysis: Analysis, storages: Iterable[int]) -> set[int]:
    """The base tensors of `storages`, as node ids."""
    return {analysis.base_of[storage] for storage in storages if storage in analysis.base_of}


def storages_of(graph: JointGraph, node_ids: Iterable[int | None]) -> set[int]:
    """The storages that the results of nodes use; None counts as no node."""
    return {storage for node_id in node_ids if node_id is not None for storage in graph.nodes[node_id].storages}


def recompute_late(analysis: Analysis, nodes: Iterable[int], live: set[int]) -> list[int]:
    """The order in which `nodes` run, each missing activation recomputed before its first reader; `live` grows."""
    order: list[int] = []
    reads, has_all = analysis.backward_reads, live.issuperset
    for reader in nodes:  # the innermost loop of a search
        if reader in live:
            continue
        if has_all(reads[reader]):
            order.append(reader)
            live.add(reader)
        else:
            runs = missing_for(analysis, (reader,), live)
            order += runs
            live.update(runs)
    return order


def missing(analysis: Analysis, node_id: int, live) -> list[int]:
    """`node_id` and the nodes that have to run before it, in order, if the values in `live` are live."""
    if node_id in live:
        return []
    if live.issuperset(analysis.backward_reads[node_id]):
        return [node_id]
    return missing_for(analysis, (node_id,), live)


def missing_for(analysis: Analysis, node_ids, live) -> list[int]:
    """`node_ids` and the nodes that have to run before them, in order, if the values in `live` are live."""
    reads = analysis.backward_reads
    needed = set()
    todo = list(node_ids)
    while todo:
        node = todo.pop()
        if node not in live and node not in needed:
            needed.add(node)
            todo += reads[node]
    return sorted(needed)


def needed_forward(analysis: Analysis, saved) -> list[int]:
    """Forward nodes that the outputs, the `saved` storages and the effects depend on, in order."""
    roots = [base for storage in saved if (base := analysis.base_of[storage]) not in analysis.always_computed]
    if not roots:
        return list(analysis.always_computed)
    others: set[int] = set()
    seen = {*analysis.always_computed, *analysis.sources}
    while roots:
        node = roots.pop()
        if node not in seen:
            seen.add(node)
            others.add(node)
            roots += analysis.graph.nodes[node].inputs
    return sorted([*analysis.always_computed, *others])


def _with_frees(graph: JointGraph, order, never_freed, phase: str) -> tuple[np.ndarray, set[int]]:
    """The steps of `order` with every free as early as possible, and the storages that must be live before it.

    A step is a number: that of its node, or that of the storage it frees plus the number of nodes.
    """
    last_uses = frees(graph, order, phase)
    is_freed = np.ones(len(graph.storages), dtype=bool)
    is_freed[list(never_freed)] = False
    is_freed = is_freed[last_uses.storages]
    positions, storages = last_uses.positions[is_freed], last_uses.storages[is_freed]
    before = np.cumsum(np.bincount(positions, minlength=len(order)))  # frees up to every position
    is_compute = np.zeros(len(order) + len(positions), dtype=bool)
    is_compute[np.arange(len(order)) + np.concatenate([[0], before[:-1]])[: len(order)]] = True
    numbers = np.empty(len(is_compute), dtype=np.int64)
    numbers[is_compute] = order
    numbers[~is_compute] = storages.astype(np.int64) + len(graph.nodes)
    return numbers, set(last_uses.needed.tolist())


def _steps(graph: JointGraph, numbers: np.ndarray) -> tuple[Step, ...]:
    return tuple(_all_steps(len(graph.nodes), len(graph.storages))[numbers].tolist())


def _numbered_arrays(graph: JointGraph, numbers: np.ndarray) -> StepArrays:
    is_free = numbers >= len(graph.nodes)
    kinds = np.where(is_free, KINDS.index(FREE), KINDS.index(COMPUTE)).astype(np.int8)
    places = dict.fromkeys(KINDS, np.empty(0, dtype=np.int32))
    places[COMPUTE], places[FREE] = (np.flatnonzero(each).astype(np.int32) for each in (~is_free, is_free))
    return StepArrays(kinds, (numbers - is_free * len(graph.nodes)).astype(np.int32), tuple(places.values()))


@functools.cache
def _all_steps(nodes: int, storages: int) -> np.ndarray:
    """The compute steps of so many nodes, then the frees of so many storages; planning shares these objects."""
    steps = np.empty(nodes + storages, dtype=object)
    for number in range(len(steps)):
        steps[number] = Step(COMPUTE, number) if number < nodes else Step(FREE, number - nodes)
    return steps


def to_json(schedule: Schedule) -> dict[str, Any]:
    """Plain data, from which `from_json` makes an equal schedule."""
    return {
        "graph": schedule.graph,
        "forward": _packed(schedule.forward),
        "backward": _packed(schedule.backward),
        "saved": list(schedule.saved),
        "replayed": list(schedule.replayed),
    }


def from_json(data: Mapping[str, Any]) -> Schedule:
    """The schedule that `to_json` wrote; KeyError, TypeError or ValueError if the data are not complete."""
    forward, backward = (
        tuple([_step(tuple(entry) if isinstance(entry, list) else entry) for entry in data[part]])
        for part in ("forward", "backward")
    )
    return Schedule(data["graph"], forward, backward, tuple(data["saved"]), tuple(data["replayed"]))


@functools.cache  # schedules of a graph share these objects
def _step(packed) -> Step:
    if isinstance(packed, tuple):
        return Step(*packed)
    return Step(COMPUTE, packed) if packed >= 0 else Step(FREE, -1 - packed)


def digest(data: Mapping[str, Any]) -> str:
    """SHA-256 of the data of a file without its own entry ``"digest"``."""
    entries = {key: value for key, value in data.items() if key != "digest"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _packed(steps) -> list:
    """A compute step as its node's id, a free as -1 - the storage's, another as [kind, storage]."""
    numbers = {COMPUTE: lambda step: step.id, FREE: lambda step: -1 - step.id}
    return [numbers.get(step.kind, list)(step) for step in steps]


class Frees(NamedTuple):
    """``storages[i]`` is last used by the node at ``positions[i]`` of the order, before the order allocates it again.

    Both in the order in which schedules free. ``needed``: the storages that must be live before the order begins.
    """

    positions: np.ndarray
    storages: np.ndarray
    needed: np.ndarray


class Uses(NamedTuple):
    """Entries for every storage that every node of an order uses.

    ``positions``: of the node in the order, rising; ``storages``. ``is_access``: whether the node reads or writes the
    storage, otherwise it only allocates it; ``results``: whether its result lies there; ``allocates``.
    """

    positions: np.ndarray
    storages: np.ndarray
    is_access: np.ndarray
    results: np.ndarray
    allocates: np.ndarray


def uses_of(graph: JointGraph, order, phase: str) -> Uses:
    """The storages that the nodes `order` use when they run in the forward or in the backward."""
    start, count, columns = _table(graph, phase)
    order = np.asarray(order, dtype=np.int64)
    count = count[order]
    positions = np.repeat(np.arange(len(order)), count)
    entries = np.arange(len(positions)) + np.repeat(start[order] - (np.cumsum(count) - count), count)
    return Uses(positions, *(column[entries] for column in columns))


def frees(graph: JointGraph, order, phase: str) -> Frees:
    """The last uses of all storages when the nodes `order` run in the forward or in the backward, one by one."""
    uses = uses_of(graph, order, phase)
    by_storage = np.argsort(uses.storages, kind="stable")  # in linear time, since storages are numbers of two bytes
    grouped, allocates = uses.storages[by_storage], uses.allocates[by_storage]
    changes = np.ones(len(grouped) + 1, dtype=bool)  # where another storage begins
    np.not_equal(grouped[1:], grouped[:-1], out=changes[1:-1])
    is_last = np.empty(len(grouped), dtype=bool)
    is_last[by_storage] = changes[1:] | np.append(allocates[1:], True)
    is_last &= uses.is_access
    return Frees(uses.positions[is_last], uses.storages[is_last], grouped[changes[:-1] & ~allocates])


def unpacked_at_once(graph: JointGraph, order: list[int]) -> list[int]:
    """`order` with every result of an operation that has several taken right after the operation has run.

    The tuple of results holds all of them until the last is taken: a batch norm's output until backward reads the mean.
    """
    nodes = np.asarray(order, dtype=np.int64)
    operations = _operations(graph)[nodes]
    places = np.flatnonzero(operations >= 0)  # of the operations with several results, and of what is taken from them
    operations = operations[places]
    # Every group begins with a run of its operation.
    group, groups = operations * len(nodes), np.argsort(operations, kind="stable")
    runs = np.where(nodes[places] == operations, group + places, -1)
    runs[groups] = np.maximum.accumulate(runs[groups])
    moved = np.arange(len(nodes))
    moved[places] = runs - group
    rank = moved * len(graph.nodes) + nodes  # what is taken from one run: by node
    return order if (np.diff(rank) >= 0).all() else nodes[np.argsort(rank, kind="stable")].tolist()


@once_per_graph
def _operations(graph: JointGraph) -> np.ndarray:
    """By node: the operation with several results that it is or whose result it takes, else -1."""
    operations = np.full(len(graph.nodes), -1, dtype=np.int64)
    for node, operation in graph.analysis.taken_from.items():
        operations[[node, operation]] = operation
    return operations


@once_per_graph
def _table(graph: JointGraph, phase: str):
    """The entries of all nodes: by node, where they start and how many they are; and the columns of `Uses`."""
    analysis: Analysis = graph.analysis
    rows = []
    for node, accessed in enumerate(analysis.accessed[phase]):
        allocated = analysis.allocated.get(node, frozenset())
        results = analysis.storages(node, again=phase == BACKWARD and graph.nodes[node].phase == FORWARD)
        # A schedule frees in falling order of storages.
        storages = sorted(allocated.union(accessed), reverse=True)
        rows.append([(s, s in accessed, s in results, s in allocated) for s in storages])
    count = np.array([len(row) for row in rows], dtype=np.int64)
    entries = np.array([entry for row in rows for entry in row], dtype=np.int64).reshape(-1, 4)
    storages = entries[:, 0].astype(np.uint16 if len(graph.storages) <= 2**16 else np.int64)
    return np.cumsum(count) - count, count, (storages, *(entries[:, 1:] == 1).T.copy())
