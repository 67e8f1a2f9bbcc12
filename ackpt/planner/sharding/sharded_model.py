"""`ShardedModel`: the plans of ``ackpt plan --fsdp`` for one rank, for any number of ranks, and its memory on a GPU.

The caching allocator has a pool of blocks for each stream, so memory that one stream has freed does not serve another.
`rank_memory` loads the model and replays three steps. The optimizer's state is created in the first one, while its
gradients are live. Gradients live until the next step begins, as ``zero_grad()`` before the forward leaves them. cuBLAS
has a workspace in the threads of forward and backward. Collectives of NCCL allocate nothing here.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ackpt.core.errors import BudgetError
from ackpt.metering.gpus import BLOCK, AllocatorSettings, CachingAllocator, gpu
from ackpt.planner.costs.devices import Device, device
from ackpt.planner.costs.profiles import profile
from ackpt.planner.policies import selective
from ackpt.planner.schedule.allocations import DeviceMemory, pieces
from ackpt.planner.workloads.planned_shapes import PlanConfig, captured, in_chunks
from ackpt.planner.workloads.step_request import StepRequest, TrainingStep, optimizer_kind, training_step

from .planner import CAPTURED, SELECTIVE, Blocks, Choice, ShardedPlan, Table, check_policy, deep
from .sharding import (
    COMPUTE,
    OPTIMIZER,
    PREVIOUS,
    REDUCED_KEYS,
    ROOT,
    Group,
    GroupBytes,
    Memory,
    Sharding,
    ShardingError,
    Window,
    groups_of,
)

CHUNKS = tuple(2**power for power in range(1, 9))  # of the head
STEPS = 3  # of which the last one is observed
DEPTH = ("num_hidden_layers", "layers")  # names for the number of blocks in configurations


class ShardedModel:
    """A step, captured once, and its plans for any number of ranks.

    ``stands_for``: the number of blocks of the complete model; ``groups``: its parameters.
    """

    def __init__(self, config: PlanConfig, whole: bool = False):
        self.config = config
        self.device = None if config.device is None else device(config.device)
        self.step = training_step(config.step)
        self.groups = groups_of(self.step.model)
        self.stands_for = len(self.groups) - 1
        self._tables: dict[tuple, Table] = {}
        short = None if whole else _shortened(config, self.groups)
        self.blocks = self._blocks(short or self.step)
        if short is not None:
            try:
                deep(self.blocks.windows(self.blocks.plain, Sharding(2)), self.stands_for)
            except ShardingError:
                self.blocks = self._blocks(self.step)
        self._in_chunks = {1: self.blocks}

    def plan(self, sharding: Sharding, budget=None, policy: str | None = None) -> ShardedPlan:
        """The plan for one of the ranks; raises a BudgetError, and a ValueError for other policies.

        The number of chunks of the head, if it runs in chunks, doubles until a plan keeps the budget, and then as long
        as plans become cheaper.
        """
        policy = policy or (SELECTIVE if self.config.options else "none" if budget is None else "auto")
        check_policy(policy, SELECTIVE)
        block = 1 if self.device is None else BLOCK
        sharding = replace(sharding, block_bytes=block, holds_outputs=self.config.hold_outputs)
        chunked = self.config.chunk_head
        best, refusal = None, None
        for count in CHUNKS if chunked is True else (1, *CHUNKS) if chunked else (1,):
            table = self._table(sharding, policy, count)
            try:
                plan = table.plan(table.chosen(budget, policy), policy)
            except BudgetError as error:
                if best is not None or (refusal and (error.least_bytes or 0) >= (refusal.least_bytes or 0)):
                    break
                refusal = error
                continue
            if best is not None and plan.cost >= best.cost:
                break
            best = plan
            if count == 1:
                break
        if best is None:
            assert refusal is not None
            raise refusal
        return best

    def _table(self, sharding: Sharding, policy: str, chunks: int) -> Table:
        """The table of the step with its head in `chunks`; the choices of policy selective have one of their own."""
        key = sharding, policy == SELECTIVE, chunks
        if key not in self._tables:
            if chunks not in self._in_chunks:
                graph, _ = in_chunks(self.blocks.graph, self.device, chunks)
                self._in_chunks[chunks] = Blocks(graph, profile(graph, self.device), self.blocks.groups)
            blocks, options = self._in_chunks[chunks], {"save": "inputs", "every_n_layers": 1, **self.config.options}
            self._tables[key] = Table(
                blocks,
                self.groups,
                sharding,
                optimizer_kind(self.config.optimizer),
                on_cpu=self.device is None,
                clipping=self.config.clipping,
                selective=_selective(blocks, options["save"]) if policy == SELECTIVE else None,
                every_n_layers=options["every_n_layers"],
                baseline=self._table(sharding, policy, 1) if chunks > 1 else None,
            )
        return self._tables[key]

    def memory(self, plan: ShardedPlan) -> DeviceMemory | None:
        """The memory of a rank on the device, with cuBLAS's workspaces and fragmentation; None without a device."""
        if self.device is None:
            return None
        shards = [size for group in self.groups for size in GroupBytes(group, plan.sharding).blocks]
        settings = self.config.allocator_settings
        return rank_memory(plan.windows, plan.resident, shards, self.device, self.config.context_bytes, settings)

    def _blocks(self, step: TrainingStep) -> Blocks:
        graph = captured(step, replace(self.config, optimizer="none", clipping=False), self.device)
        return Blocks(graph, profile(graph, self.device), groups_of(step.model))


def _selective(blocks: Blocks, save: str) -> Choice:
    """Checkpointed blocks that also save the results of chosen operations, see `policies.selective`."""
    if save not in selective.SAVE:
        raise ValueError(f"save must be one of {', '.join(selective.SAVE)}, got {save!r}")
    chosen = set(range(len(blocks.groups))) - {ROOT}
    kept = selective.saved_results(blocks.graph, blocks.owners, chosen, save)
    saved = tuple(frozenset(kept.get(block, ())) for block in range(len(blocks.groups)))
    return Choice(SELECTIVE, saved, again=True, unread=True)


def _shortened(config: PlanConfig, groups: tuple[Group, ...]) -> TrainingStep | None:
    """The step of the same model with `CAPTURED` blocks; None if they differ or no field has their number."""
    if len(groups) - 1 <= CAPTURED or len({group.shapes() for group in groups[1:]}) > 1:
        return None
    for name in DEPTH:
        request: StepRequest = replace(config.step, fields={**config.step.fields, name: CAPTURED})
        try:
            step = training_step(request)
        except ValueError:
            continue
        short = groups_of(step.model)
        alike = [short[ROOT].shapes(), *(group.shapes() for group in short[1:])]
        if alike == [groups[ROOT].shapes(), *[groups[1].shapes()] * CAPTURED]:
            return step
    return None


def rank_memory(
    windows: Iterable[Window],
    resident: Mapping[str, int],
    shards: list[int],
    where: Device,
    context_bytes: int,
    settings: AllocatorSettings,
) -> DeviceMemory:
    """Peaks of the last of `STEPS` steps."""
    pools = _Pools(settings)
    for name, size in resident.items():
        if name == "parameters":
            pools.allocate(Memory(COMPUTE, (name,), tuple(shards)), size)
        elif name != "optimizer" and size:
            pools.allocate(Memory(COMPUTE, (name,)), size)
    fixed = set(pools.live)
    events = [
        (window.phase, size, memory)
        for window in windows
        for (size, _), memory in zip(window.events, window.memory, strict=True)
    ]
    held = {memory.key for _, _, memory in events if memory.key[-1] == PREVIOUS}
    state = Memory(COMPUTE, ("optimizer's state",), tuple(pieces(resident["optimizer"], shards)))
    for _ in range(STEPS):
        for key in [key for key in pools.live if key[-1] in REDUCED_KEYS]:  # zero_grad(set_to_none=True)
            pools.free(key)
        pools.peak_allocated = pools.allocated
        for phase, size, memory in events:
            if (workspace := ("workspace", phase)) not in pools.live:
                pools.allocate(Memory(COMPUTE, workspace), gpu(where.name).cublas_workspace_bytes)
                fixed.add(workspace)
            if memory.key[-1] == OPTIMIZER:
                if state.key not in pools.live:
                    pools.allocate(state, resident["optimizer"])
                memory = memory._replace(blocks=tuple(pieces(abs(size), shards)))
            if size < 0:
                pools.free(memory.key)
            elif memory.key not in pools.live:
                pools.allocate(memory, size)
        if state.key not in pools.live:
            pools.allocate(state, resident["optimizer"])
        for key in [key for key in pools.live if key not in fixed and key[-1] not in REDUCED_KEYS and key != state.key]:
            if (previous := (*key, PREVIOUS)) in held:
                pools.live[previous] = pools.live.pop(key)
            else:
                pools.free(key)
    largest = max(each.largest_free_block for each in pools.of.values())
    reserved = sum(each.reserved for each in pools.of.values())  # never returned to the device, so also the peak
    margin = where.memory_bytes - context_bytes - reserved
    return DeviceMemory(pools.peak_allocated, reserved, context_bytes, margin, largest)


class _Pools:
    """The allocators of all streams. ``live``: by key, the allocator and the blocks of what is allocated."""

    def __init__(self, settings: AllocatorSettings):
        self.of: dict[str, CachingAllocator] = defaultdict(lambda: CachingAllocator(settings))
        self.live: dict[tuple, tuple[CachingAllocator, list[int]]] = {}
        self.numbers = itertools.count()  # of blocks
        self.peak_allocated = 0

    @property
    def allocated(self) -> int:
        return sum(each.allocated for each in self.of.values())

    def allocate(self, memory: Memory, size: int) -> None:
        self.live[memory.key] = allocator, numbers = self.of[memory.stream], []
        for block in memory.blocks or (size,) * bool(size):
            numbers.append(next(self.numbers))
            allocator.allocate(numbers[-1], block)
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: tuple) -> None:
        allocator, numbers = self.live.pop(key)
        for number in numbers:
            allocator.free(number)
