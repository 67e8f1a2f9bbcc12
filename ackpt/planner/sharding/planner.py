"""Plans for one rank of a model sharded by FSDP2: its memory, and the cheapest choice per block within a budget.

A model of equal blocks is captured with a few of them; the others have the same windows, see `blocks`. The first blocks
get one choice and the rest another that recomputes less, since backward reads the last blocks first. The planner
returns the cheapest such plan within the budget.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from ackpt.core.budget import dynamic_limit, readable
from ackpt.core.errors import BudgetError, did_you_mean
from ackpt.metering.gpus import MIB, gpu
from ackpt.metering.meter import memory_format
from ackpt.metering.timeline import Timeline
from ackpt.planner.costs.devices import device
from ackpt.planner.costs.profiles import profile
from ackpt.planner.workloads.device_memory import DeviceMemory, rank_memory
from ackpt.planner.workloads.named_models import training_step
from ackpt.planner.workloads.optimizers import optimizer_kind
from ackpt.planner.workloads.planned_shapes import CUDA_BLOCK, PlanConfig, captured
from ackpt.planner.workloads.step_request import StepRequest, TrainingStep

from .blocks import CAPTURED, Blocks, deep, stand_in_for
from .sharding import Group, GroupBytes, Sharding, groups_of, sharded_optimizer
from .step import ROOT, ShardingError, Window, step_windows, timeline

POLICIES = ("none", "full", "auto")
DEPTH = ("num_hidden_layers", "layers")  # names for the number of blocks in configurations


@dataclass(frozen=True)
class Communication:
    """Bytes that one rank receives in all-gathers and sends in reduce-scatters of one step, and the number of each."""

    gathers: int
    gathered_bytes: int
    reduces: int
    reduced_bytes: int


@dataclass(frozen=True)
class Run:
    """`count` consecutive blocks with the same choice.

    ``choice``: its name; ``kept_bytes``: saved inside each block, by the operations ``names``; ``flops``: of the
    recomputation in each.
    """

    count: int
    choice: str
    kept_bytes: int
    flops: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class ShardedPlan:
    """One rank's step.

    ``resident``: resident bytes by category; ``timeline``: dynamic bytes after every event; ``baseline_bytes``: dynamic
    peak without checkpointing; ``flops``: of the step; ``recompute_flops``: of recomputation; ``cost``: added
    time as a fraction of the baseline step. ``runs``: the blocks from the first to the last.
    """

    sharding: Sharding
    policy: str
    resident: dict[str, int]
    timeline: Timeline
    baseline_bytes: int
    flops: int
    recompute_flops: int
    cost: float
    runs: tuple[Run, ...]
    communication: Communication

    @property
    def resident_bytes(self) -> int:
        return sum(self.resident.values())

    @property
    def dynamic_peak_bytes(self) -> int:
        return self.timeline.peak_bytes

    @property
    def peak_bytes(self) -> int:
        return self.resident_bytes + self.dynamic_peak_bytes

    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the peak, the resident ones first."""
        return {**self.resident, **self.timeline.at(self.timeline.peak_index)}


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
        self._tables: dict[Sharding, _Table] = {}
        short = None if whole else _shortened(config, self.groups)
        self.blocks = self._blocks(short or self.step)
        if short is not None:
            try:
                deep(self.blocks.windows(self.blocks.plain, Sharding(2)), self.stands_for)
            except ShardingError:
                self.blocks = self._blocks(self.step)

    def plan(self, sharding: Sharding, budget=None, policy: str | None = None) -> ShardedPlan:
        """The plan for one of the ranks.

        Raises:
            BudgetError: if the budget is infeasible; names the smallest feasible one.
            ValueError: for a value that is not a budget, a policy that does not plan shards, and unsupported models.
        """
        policy = policy or ("none" if budget is None else "auto")
        if policy not in POLICIES:
            raise ValueError(
                f"policy {policy!r} does not plan shards{did_you_mean(policy, POLICIES)}: with --fsdp choose "
                f"{', '.join(POLICIES)}"
            )
        if self.device is not None:
            sharding = replace(sharding, block_bytes=CUDA_BLOCK)
        if sharding not in self._tables:
            self._tables[sharding] = _Table(self, sharding)
        table = self._tables[sharding]
        resident = table.resident
        baseline = table.peak(table.uniform(0))
        limit = dynamic_limit(budget, baseline, sum(resident.values()))
        row = {"none": lambda: table.uniform(0), "full": lambda: table.uniform(1), "auto": lambda: table.least(limit)}
        chosen = row[policy]()
        peak = table.peak(chosen)
        if limit is not None and peak > limit:
            raise BudgetError(_refusal(budget, policy, limit, peak, resident), peak + sum(resident.values()))
        return table.plan(chosen, policy, baseline)

    def memory(self, plan: ShardedPlan) -> DeviceMemory | None:
        """The memory of a rank on the device, with cuBLAS's workspaces and fragmentation; None without a device."""
        if self.device is None:
            return None
        shards = [size for group in self.groups for size in GroupBytes(group, plan.sharding).blocks]
        context = None if self.config.context_mib is None else self.config.context_mib * MIB
        return rank_memory(plan.timeline, plan.resident, shards, self.device, gpu(self.device.name), context)

    def _blocks(self, step: TrainingStep) -> Blocks:
        graph = captured(step, replace(self.config, optimizer="none"), self.device)
        return Blocks(graph, profile(graph, self.device), groups_of(step.model))


class _Table:
    """The windows of every choice for one number of ranks; peak, cost and plan of a row of choices, one per block."""

    def __init__(self, model: ShardedModel, sharding: Sharding):
        self.model, self.sharding, self.blocks = model, sharding, model.blocks
        self.count = model.stands_for
        kind = optimizer_kind(model.config.optimizer)
        state, step = sharded_optimizer(kind, model.groups, sharding, on_cpu=model.device is None)
        graph = replace(self.blocks.graph, optimizer_step_bytes=step)
        shards = sum(GroupBytes(group, sharding).shards for group in model.groups)
        sizes = graph.bytes()
        self.resident = {"parameters": shards, "buffers": sizes["buffer"], "inputs": sizes["input"], "optimizer": state}
        here = len(self.blocks.groups) - 1
        schedules = [self.blocks.uniform(choice) for choice in self.blocks.choices]
        workspace = self.blocks.profile.workspace_bytes
        rows = [step_windows(graph, schedule, workspace, self.blocks.groups, sharding) for schedule in schedules]
        self.rows = [row if here == self.count else deep(row, self.count) for row in rows]
        captured_whole = here == self.count
        inner = (block if captured_whole else stand_in_for(block, self.count) for block in range(1, self.count + 1))
        self.stands = [ROOT, *inner]
        self.added = [self.blocks.added(schedule) for schedule in schedules]
        self.sizes = [[(window.highest, window.net) for window in row] for row in self.rows]
        self.group = [window.group for window in self.rows[0]]

    def uniform(self, choice: int) -> tuple[int, ...]:
        return (0, *[choice] * self.count)

    def peak(self, row) -> int:
        most = total = 0
        for place, group in enumerate(self.group):
            highest, net = self.sizes[row[group]][place]
            most = max(most, total + highest)
            total += net
        return most

    def cost(self, row) -> float:
        return sum(self.added[row[block]][self.stands[block]][0] for block in range(1, self.count + 1))

    def least(self, limit: int | None) -> tuple[int, ...]:
        """The cheapest row within the limit, or if there is none the row with the lowest peak."""
        numbers = range(len(self.rows))
        rows = {self.uniform(0): None}
        for first, rest in itertools.permutations(numbers, 2):
            for length in range(1, self.count + 1):
                rows[(0, *[first] * length, *[rest] * (self.count - length))] = None
        single = [self.cost(self.uniform(number)) for number in numbers]
        # At equal cost, up to rounding, the blocks that backward reaches first save more.
        ranked = [(float(f"{self.cost(row):.12g}"), single[row[1]] < single[row[-1]], row) for row in rows]
        ranked.sort()
        for _, _, row in ranked:
            if limit is None or self.peak(row) <= limit:
                return row
        return min(ranked, key=lambda each: (self.peak(each[-1]), *each))[-1]

    def windows(self, row) -> list[Window]:
        return [self.rows[row[group]][place] for place, group in enumerate(self.group)]

    def plan(self, row, policy: str, baseline: int) -> ShardedPlan:
        flops_of = self.blocks.plain_flops()
        again = [self.added[row[block]][self.stands[block]] for block in range(1, self.count + 1)]
        base = sum(flops_of[self.stands[block]] for block in range(self.count + 1))
        sizes = self.blocks.analysis.bytes
        runs, start = [], 1
        for number, same in itertools.groupby(row[1:]):
            length, choice = len(list(same)), self.blocks.choices[number]
            stands = self.stands[start]
            saved = sum(sizes[storage] for storage in choice.kept[stands])
            names = tuple(self.blocks.names(choice, stands))
            runs.append(Run(length, choice.name, saved, self.added[number][stands][1], names))
            start += length
        return ShardedPlan(
            sharding=self.sharding,
            policy=policy,
            resident=self.resident,
            timeline=timeline(self.windows(row)),
            baseline_bytes=baseline,
            flops=base + sum(flops for _, flops in again),
            recompute_flops=sum(flops for _, flops in again),
            cost=sum(cost for cost, _ in again) / (self._plain_cost() or 1.0),
            runs=tuple(runs),
            communication=self._communication(),
        )

    def _plain_cost(self) -> float:
        cost = [0.0] * len(self.blocks.groups)
        for place, owner in enumerate(self.blocks.owners):
            cost[owner] += self.blocks.cost[place]
        return sum(cost[self.stands[block]] for block in range(self.count + 1))

    def _communication(self) -> Communication:
        """Every block is gathered twice and the root once; every group with a trained parameter is reduced once."""
        sizes = [GroupBytes(group, self.sharding) for group in self.model.groups]
        blocks = sum(size.gathered_from_others for size in sizes[1:])
        return Communication(
            gathers=2 * (len(sizes) - 1) + 1,
            gathered_bytes=2 * blocks + sizes[ROOT].gathered_from_others,
            reduces=sum(size.reduce > 0 for size in sizes),
            reduced_bytes=sum(size.reduced_to_others for size in sizes),
        )


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


def _refusal(budget, policy: str, limit: int, peak: int, resident) -> str:
    resident_bytes = sum(resident.values())
    return (
        f"policy {policy!r} cannot keep the budget {budget!r} on a rank: it leaves {memory_format(max(0, limit))} for "
        f"what the step allocates, in addition to {memory_format(resident_bytes)} of shards, buffers, inputs and "
        f"optimizer state. The smallest feasible budget of this policy is {readable(peak + resident_bytes)} "
        f"({peak + resident_bytes} bytes): shard over more ranks, or take a smaller batch"
    )
