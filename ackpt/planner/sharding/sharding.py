"""A schedule's events with those of FSDP2 between them: shards, gathered parameters, buffers of collectives.

``fully_shard`` on every block and then on the model makes one group of parameters of each block and one, the root, of
the rest. A *window* is an uninterrupted run of one group in the forward or in the backward, with FSDP2's hooks at its
ends: parameters are gathered before it, while the buffer of the previous gather is still allocated, and freed after it.
In the backward each block starts the gather of the next one, and its gradients are reduced after its own backward, in a
buffer that is live until the next one. The root is gathered first and reduced last.

Source: ``torch/distributed/fsdp/_fully_shard`` of torch 2.13, ``_fsdp_param_group.py`` and ``_fsdp_collectives.py``.
"""

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from ackpt.checkpointing.wrapping import repeated_blocks
from ackpt.metering.resident import rounded
from ackpt.metering.timeline import Timeline
from ackpt.planner.capture.joint_graph import BACKWARD, FORWARD, JointGraph
from ackpt.planner.capture.optimizer_state import optimizer_bytes, unwrapped
from ackpt.planner.schedule.schedule import Schedule
from ackpt.planner.schedule.simulator import CATEGORIES, follow

COMMUNICATION = "collectives"
GATHERED, REDUCED, UNREDUCED = "gathered parameters", "gradients", "unreduced gradients"


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded.

    ``ranks``: the number of processes. ``parameters``: dtype of the shards, of their gradients and of the optimizer's
    state; None is that of the model, in which parameters are gathered and the step computes. ``reduction``: dtype in
    which gradients are reduced; None is that of the model. ``block_bytes``: the allocator rounds up to multiples of it.
    ``gloo``: count the copies of the CPU's collectives; NCCL makes none. ``replicas``: of the shards, in a mesh with a
    second dimension, over which the reduced gradients are summed (HSDP). ``version``: of torch, whose FSDP2 runs.
    ``keeps_last``: the last block's parameters stay gathered after the forward. ``holds_outputs``: the training loop
    refers to the model's outputs until the next forward has returned.
    """

    ranks: int
    parameters: torch.dtype | None = None
    reduction: torch.dtype | None = None
    block_bytes: int = 1
    gloo: bool = False
    replicas: int = 1
    version: tuple[int, int] = (2, 13)
    keeps_last: bool = False
    holds_outputs: bool = False

    def __str__(self) -> str:
        return f"{self.replicas}x{self.ranks}" if self.replicas > 1 else str(self.ranks)


@dataclass(frozen=True)
class Weight:
    """One parameter: its name in the model, shape and dtype, and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool = True

    def rows(self, ranks: int) -> int:
        """Rows of each rank's shard; the last ranks' are padded."""
        return -(-self.shape[0] // ranks)

    def sharded(self, ranks: int) -> int:
        """Elements of a shard."""
        return self.rows(ranks) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered and reduced together: those of the module `name`, ``""`` for the root.

    ``kept``: whether they stay gathered after the forward, as the root's do unless it was sharded otherwise.
    ``ahead``: the numbers of the groups whose gathers this one's forward starts.
    """

    name: str
    weights: tuple[Weight, ...]
    kept: bool = False
    ahead: tuple[int, ...] = ()

    def shapes(self) -> tuple:
        """Shapes and dtypes of the parameters; groups in which they are equal need the same memory."""
        return tuple((weight.shape, weight.dtype, weight.trained) for weight in self.weights)


class GroupBytes:
    """Bytes that FSDP2 allocates for one group, on one rank.

    ``blocks``: of its parameters; ``shards``: their sum, which is resident. ``cast``: its shards in the model's dtype,
    0 if they have it. ``gather``: the buffer of an all-gather, ``unsharded``: the parameters that are copied out of it,
    each a block in ``copies``; ``casts`` are the blocks of ``cast``.
    ``reduce``: the buffer of a reduce-scatter, ``received``: what that returns, ``reduced``: the shards of the
    gradients, 0 if these are what it returns. ``scratch_gather``, ``scratch_reduce``, ``padded``: copies on the CPU.
    """

    def __init__(self, group: Group, sharding: Sharding):
        n = sharding.ranks

        def block(size: int) -> int:
            return rounded(size, sharding.block_bytes)

        shard_dtypes = [sharding.parameters or weight.dtype for weight in group.weights]
        trained = [weight for weight in group.weights if weight.trained]
        numbers = [weight.sharded(n) for weight in group.weights]
        computed = [weight.dtype.itemsize * size for weight, size in zip(group.weights, numbers)]
        casts = [size for size, weight, dtype in zip(computed, group.weights, shard_dtypes) if weight.dtype != dtype]
        returned = sum((sharding.reduction or weight.dtype).itemsize * weight.sharded(n) for weight in trained)
        wanted = sum((sharding.parameters or weight.dtype).itemsize * weight.sharded(n) for weight in trained)
        same = all((sharding.reduction or w.dtype) == (sharding.parameters or w.dtype) for w in trained)
        self.blocks = [block(dtype.itemsize * size) for dtype, size in zip(shard_dtypes, numbers)]
        self.shards = sum(self.blocks)
        # Torch: one cast for each parameter before 2.6, and one for all of them since (`_get_param_all_gather_inputs`).
        self.casts = [block(size) for size in (casts if sharding.version < (2, 6) else [sum(casts)])]
        self.cast = sum(self.casts)
        self.gather = block(n * sum(computed))
        self.copies = [block(n * size) for size in computed]
        self.unsharded = sum(self.copies)
        self.reduce = block(n * returned)
        self.received = block(returned)
        self.reduced = 0 if same else block(wanted)
        self.scratch_gather = self.gather if sharding.gloo else 0
        self.scratch_reduce = self.reduce if sharding.gloo and n > 1 else 0
        # Torch: one rank gathers nothing; it copies its parameters, which casts them one by one (`wait_for_unshard`).
        self.casts_of_one = sum(sorted(map(block, casts))[-2:]) if n == 1 else 0
        if n == 1:
            self.cast = self.gather = self.scratch_gather = 0
        uneven = (weight for weight in trained if weight.shape[0] % n)
        self.padded = sum(weight.dtype.itemsize * n * weight.sharded(n) for weight in uneven) if sharding.gloo else 0
        # What goes over the links, from or to each rank; the sum of both ways is twice that.
        self.gathered_from_others = (n - 1) * sum(computed)
        self.reduced_to_others = (n - 1) * returned


def groups_of(model: nn.Module) -> tuple[Group, ...]:
    """The root's group, then that of each repeated block, in order; ValueError for what FSDP cannot shard."""
    if not (blocks := repeated_blocks(model)):
        raise ValueError(
            f"--fsdp: {type(model).__name__} has no blocks to shard one by one, which are modules of one "
            "class in an nn.ModuleList or nn.Sequential, with submodules; leave --fsdp out"
        )
    owner: dict[int, str] = {}
    weights: dict[str, list[Weight]] = {name: [] for name in ("", *blocks)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((block for block in blocks if name.startswith(f"{block}.")), "")
        if id(parameter) in owner:
            if owner[id(parameter)] != block:
                one, other = (shared_by or "the model" for shared_by in (block, owner[id(parameter)]))
                raise ValueError(
                    f"--fsdp: parameter {name} is shared by {one} and {other}, which are sharded apart; FSDP refuses "
                    "that, too"
                )
            continue
        owner[id(parameter)] = block
        if not parameter.dim():
            raise ValueError(
                f"--fsdp: parameter {name} is a single number, which FSDP cannot shard: give it a dimension"
            )
        weights[block].append(Weight(name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad))
    return tuple(Group(name, tuple(group_weights), kept=not name) for name, group_weights in weights.items())


def with_last_kept(groups: tuple[Group, ...], sharding: Sharding) -> tuple[Group, ...]:
    """`groups`, of which the last one stays gathered after the forward if `sharding` says so."""
    return (*groups[:-1], replace(groups[-1], kept=True)) if sharding.keeps_last else groups


def optimizer_like(optimizer: torch.optim.Optimizer) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """A function that makes optimizers of other parameters with the class and the options of this one."""
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}

    def kind(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        other = copy.copy(unwrapped(optimizer))
        other.param_groups, other.state = [{**options, "params": parameters}], defaultdict(dict)
        return other

    return kind


def sharded_optimizer(
    kind, groups: tuple[Group, ...], sharding: Sharding, on_cpu: bool, clipping: bool = False
) -> tuple[int, int]:
    """Bytes of one rank's state of an optimizer of the class `kind`, and the most that its step allocates.

    `clipping`: the gradients' norm is clipped before.
    """
    if kind is None:
        return 0, 0

    def shard_of(weight: Weight) -> nn.Parameter:
        shape, dtype = (weight.rows(sharding.ranks), *weight.shape[1:]), sharding.parameters or weight.dtype
        return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), weight.trained)

    def optimizer_of(some: tuple[Group, ...]) -> tuple[int, int]:
        return optimizer_bytes(kind([shard_of(weight) for group in some for weight in group.weights]), on_cpu, clipping)

    blocks = len(groups) - 1
    if blocks < 4 or len({group.shapes() for group in groups[1:]}) > 1:
        return optimizer_of(groups)
    two, three = optimizer_of(groups[:3]), optimizer_of(groups[:4])
    return two[0] + (blocks - 2) * (three[0] - two[0]), two[1] + (blocks - 2) * (three[1] - two[1])


ROOT = 0
# An event of a window has the place of its category in this tuple.
CATEGORIES_OF_A_RANK = (UNREDUCED, *CATEGORIES[1:], REDUCED, GATHERED, COMMUNICATION)  # the first are those of `Live`
_UNREDUCED, _ACTIVATION, _RECOMPUTED, _TEMPORARY, _REDUCED, _GATHERED, _COMMUNICATION = range(len(CATEGORIES_OF_A_RANK))


class ShardingError(ValueError):
    """A step that FSDP2 would run differently from this model of it."""


# The streams in whose pools FSDP2's tensors lie; that of the all-gather allocates nothing.
COMPUTE, COPY_IN, REDUCE_SCATTER, ALL_REDUCE = "compute", "all-gather copy-in", "reduce-scatter", "all-reduce"
# Last entries of keys: reduced gradients, outputs of the step before, and what the optimizer's step takes.
REDUCED_KEYS, PREVIOUS, OPTIMIZER = ("received", "reduced"), "previous", "optimizer"


class Memory(NamedTuple):
    """What an event allocates or frees: in the pool of a stream, with a key, in blocks of these sizes (none: in one).

    The first entry of the key is the number of the group that allocates it.
    """

    stream: str
    key: tuple
    blocks: tuple[int, ...] = ()

    def of(self, group: int) -> "Memory":
        return self._replace(key=(group, *self.key[1:]))


@dataclass(frozen=True)
class Window:
    """Events of one group in one phase: bytes, negative if they are freed, and the number of a category.

    ``memory``: of each event, if it is known.
    """

    phase: str
    group: int
    events: tuple[tuple[int, int], ...]
    memory: tuple[Memory, ...] = ()

    def relative(self, to: int) -> "Window":
        """The same window of block `to`, whose memory belongs to groups as far from it as from this one."""
        groups = (each.key[0] and each.key[0] - self.group + to for each in self.memory)  # 0 is the root
        return replace(self, group=to, memory=tuple(each.of(group) for each, group in zip(self.memory, groups)))

    @property
    def net(self) -> int:
        return sum(size for size, _ in self.events)

    @property
    def highest(self) -> int:
        """The largest number of bytes above those at the window's begin."""
        return max(accumulate((size for size, _ in self.events), initial=0))


def timeline(windows: Sequence[Window]) -> Timeline:
    """Live dynamic bytes of one rank after every event, by category."""
    events = [event for window in windows for event in window.events]
    series = {}
    for index, name in enumerate(CATEGORIES_OF_A_RANK):
        sizes = (size if category == index else 0 for size, category in events)
        series[name] = tuple(accumulate(sizes, initial=0))
    live = tuple(accumulate((size for size, _ in events), initial=0))
    boundary = sum(len(window.events) for window in windows if window.phase == FORWARD)
    return Timeline(live, {name: sizes for name, sizes in series.items() if any(sizes)}, boundary)


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


class Walk:
    """One rank's step with `schedule`; its `windows`, in order, or a ShardingError if FSDP2 would run it differently.

    `unread`: storages of the forward that a block keeps until the end of its backward, even if nothing reads them.
    """

    def __init__(
        self, graph: JointGraph, schedule: Schedule, workspace_bytes, groups, sharding: Sharding, unread=frozenset()
    ):
        self.live = follow(graph, schedule, workspace_bytes)
        self.graph, self.groups, self.owners = graph, with_last_kept(groups, sharding), owners(graph, groups)
        self.sharding, self.unread = sharding, unread
        self.sizes = [GroupBytes(group, sharding) for group in groups]
        self.gradients = [_gradients(graph, group) for group in groups]
        self.kept_unread: list[list[int]] = [[] for _ in groups]
        self.closed: list[Window] = []
        self.events: list[tuple[int, int]] = []
        self.memory: list[Memory] = []
        self.key = (FORWARD, ROOT)
        self.order: list[int] = []  # blocks as the forward runs them
        self.started: set[int] = set()  # groups that the forward of another one gathers
        self.gathered: int | None = None  # the group whose gather's buffer is live in the forward
        self.reducing: int | None = None  # the group whose reduce-scatter's input is live
        # Torch: since 2.6 a group refers to its all-reduce's buffer until the backward ends (`_all_reduce_state`).
        self.all_reduced: list[int] = []
        self.allocated: dict[tuple, tuple[int, int, str]] = {}  # by key: bytes, category, stream
        self.open: Counter = Counter()
        counts: Counter = Counter()
        self.numbers: list[tuple[int, int]] = []  # of each storage: its group, and its number there, as in equal blocks
        for storage in graph.storages:
            group = self.owners[storage.producer]
            self.numbers.append((group, counts[group]))
            counts[group] += 1

    def windows(self) -> list[Window]:
        live = self.live
        owner = [None if node is None else self.owners[node] for node in live.owner]
        last = len(live.events)
        while last > live.boundary and owner[last - 1] is None:  # the optimizer's step
            last -= 1
        outputs = sorted({s for node in self.graph.outputs for s in self.graph.nodes[node].storages})
        outputs = [s for s in outputs if self.sharding.holds_outputs and s not in live.analysis.resident]
        for storage in outputs:
            self._add(live.analysis.bytes[storage], _ACTIVATION, (*self.numbers[storage], PREVIOUS))
        self._gather(ROOT)
        for event, group in enumerate(owner[: live.boundary]):
            self._forward_of(group or ROOT)
            self._event(event, group)
        self._forward_of(ROOT)
        for storage in outputs:
            self._free(*self.numbers[storage], PREVIOUS)
        if not self.groups[ROOT].kept:
            self._free(ROOT, "gathered")
        self._free(self.gathered, "gather")
        if missing := [self.groups[i].name for i in range(1, len(self.groups)) if i not in self.order]:
            raise ShardingError(f"block {missing[0]} does not run in the forward: its parameters would not be gathered")
        self._open(BACKWARD, ROOT)
        begun = False
        for event, group in enumerate(owner[live.boundary : last], live.boundary):
            if not begun and group is not None and live.owner[event] not in live.analysis.tangents:
                if not self.groups[ROOT].kept:
                    self._start_gather(ROOT)
                    self._end_gather(ROOT)
                self._prefetch()
                begun = True
            self._backward_of(group or ROOT)
            self._event(event, group)
        self._backward_of(ROOT)
        if self.order:
            raise ShardingError(f"block {self.groups[self.order[-1]].name} has no backward")
        self._reduce(ROOT)
        self._free(self.reducing, "reduce")
        for group in self.all_reduced:
            self._free(group, "received")
        for size, category in live.events[last:]:
            self._add(size, category, (ROOT, OPTIMIZER))
        self._open(BACKWARD, ROOT)
        return self.closed

    def _event(self, number: int, group: int | None) -> None:
        """An event of the schedule, but what a block keeps unread is freed at the end of its backward."""
        (size, category), storage = self.live.events[number], self.live.storage[number]
        if storage is not None:
            if size < 0 and storage in self.unread and number < self.live.boundary:
                self.kept_unread[self.numbers[storage][0]].append(storage)
                return
            self._add(size, category, self.numbers[storage])
            return
        # Workspace, the state of a generator, or what the optimizer takes: freed in the order opposite to allocation.
        key = (ROOT if group is None else group, "of an operation", abs(size))
        self.open[key] -= size < 0
        self._add(size, category, (*key, self.open[key]))
        self.open[key] += size > 0

    def _forward_of(self, group: int) -> None:
        current = self.key[1]
        if group == current:
            return
        if current != ROOT and not self.groups[current].kept:
            self._free(current, "gathered")
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
            for storage in self.kept_unread[current]:
                self._add(-self.live.analysis.bytes[storage], _ACTIVATION, self.numbers[storage])
            self._reduce(current)
        self._open(BACKWARD, group)
        if group == ROOT:
            return
        if not self.order or group != self.order[-1]:
            raise ShardingError(
                f"block {self.groups[group].name} runs in backward out of turn, when its parameters are sharded"
            )
        self.order.pop()
        if not self.groups[group].kept:
            self._end_gather(group)
        self._prefetch()

    def _prefetch(self) -> None:
        """In the backward: start to gather the block that runs next."""
        if self.order and not self.groups[self.order[-1]].kept:
            self._start_gather(self.order[-1])

    def _end_gather(self, group: int) -> None:
        self._copy_out(group)
        self._free(group, "gather")

    def _copy_out(self, group: int) -> None:
        sizes = self.sizes[group]
        self._add(sizes.unsharded, _GATHERED, (group, "gathered"), blocks=tuple(sizes.copies))
        self._for_a_moment(sizes.casts_of_one, group)

    def _gather(self, group: int) -> None:
        """In the forward: the buffer of the gather before is freed between this one's collective and its copies."""
        if group not in self.started:
            self._start_gather(group)
        self._free(self.gathered, "gather")
        self._copy_out(group)
        self.gathered = group
        for other in self.groups[group].ahead:
            if other not in self.started:
                self._start_gather(other)
                self.started.add(other)

    def _start_gather(self, group: int) -> None:
        sizes = self.sizes[group]
        self._add(sizes.cast, _COMMUNICATION, (group, "cast"), COPY_IN, tuple(sizes.casts))
        self._add(sizes.gather, _COMMUNICATION, (group, "gather"), COPY_IN)
        self._for_a_moment(sizes.scratch_gather, group)
        self._free(group, "cast")

    def _reduce(self, group: int) -> None:
        """Free the parameters and reduce the gradients, of which the last one is freed at the end."""
        sizes, gradients = self.sizes[group], self.gradients[group]
        self._free(group, "gathered")
        if not gradients:
            return
        # Torch: before 2.5 the input of a reduce-scatter was of its stream, and freed as soon as it was enqueued.
        is_old = self.sharding.version < (2, 5)
        self._free(self.reducing, "reduce")
        self._add(sizes.reduce, _COMMUNICATION, (group, "reduce"), REDUCE_SCATTER if is_old else COMPUTE)
        self._for_a_moment(sizes.padded, group)
        for storage in gradients[:-1]:
            self._free(*self.numbers[storage])
        self._add(sizes.received, _COMMUNICATION if sizes.reduced else _REDUCED, (group, "received"), REDUCE_SCATTER)
        self._for_a_moment(sizes.scratch_reduce, group)
        if sizes.reduced:
            is_replicated = self.sharding.replicas > 1
            self._add(sizes.reduced, _REDUCED, (group, "reduced"), ALL_REDUCE if is_replicated else REDUCE_SCATTER)
            if is_replicated and self.sharding.version >= (2, 6):
                self.all_reduced.append(group)
            else:
                self._free(group, "received")
        self._free(*self.numbers[gradients[-1]])
        self.reducing = group
        if is_old:
            self._free(group, "reduce")

    def _for_a_moment(self, size: int, group: int) -> None:
        """A copy that a collective of the CPU makes."""
        self._add(size, _COMMUNICATION, (group, "copy"))
        self._free(group, "copy")

    def _add(self, size: int, category: int, key: tuple, stream: str = COMPUTE, blocks: tuple[int, ...] = ()) -> None:
        if size > 0:
            self.allocated[key] = size, category, stream
        if size:
            self.events.append((size, category))
            self.memory.append(Memory(stream, key, blocks))

    def _free(self, *key) -> None:
        """Free what was allocated with this key, if anything was."""
        size, category, stream = self.allocated.pop(key, (0, 0, ""))
        self._add(-size, category, key, stream)

    def _open(self, phase: str, group: int) -> None:
        self.closed.append(Window(*self.key, tuple(self.events), tuple(self.memory)))
        self.events, self.memory, self.key = [], [], (phase, group)


def _gradients(graph: JointGraph, group: Group) -> list[int]:
    """The storages of the gradients of a group's parameters, in their order; each has its own."""
    node_ids = [graph.gradients[weight.name] for weight in group.weights if weight.name in graph.gradients]
    return [storage for node_id in node_ids for storage in graph.nodes[node_id].storages]
