"""`ShardedModel`: the plans of ``ackpt plan --fsdp`` for one rank, for any number of ranks."""

from __future__ import annotations

from dataclasses import replace

from ackpt.metering.gpus import BLOCK, MIB, gpu
from ackpt.planner.costs.devices import device
from ackpt.planner.costs.profiles import profile
from ackpt.planner.workloads.device_memory import DeviceMemory, rank_memory
from ackpt.planner.workloads.planned_shapes import PlanConfig, captured
from ackpt.planner.workloads.step_request import StepRequest, TrainingStep, optimizer_kind, training_step

from .planner import CAPTURED, Blocks, ShardedPlan, Table, check_policy, deep
from .sharding import ROOT, Group, GroupBytes, Sharding, ShardingError, groups_of

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
        self._tables: dict[Sharding, Table] = {}
        short = None if whole else _shortened(config, self.groups)
        self.blocks = self._blocks(short or self.step)
        if short is not None:
            try:
                deep(self.blocks.windows(self.blocks.plain, Sharding(2)), self.stands_for)
            except ShardingError:
                self.blocks = self._blocks(self.step)

    def plan(self, sharding: Sharding, budget=None, policy: str | None = None) -> ShardedPlan:
        """The plan for one of the ranks; raises a BudgetError, and a ValueError for other policies."""
        policy = policy or ("none" if budget is None else "auto")
        check_policy(policy)
        if self.device is not None:
            sharding = replace(sharding, block_bytes=BLOCK)
        if sharding not in self._tables:
            kind = optimizer_kind(self.config.optimizer)
            self._tables[sharding] = Table(self.blocks, self.groups, sharding, kind, self.device is None)
        table = self._tables[sharding]
        return table.plan(table.chosen(budget, policy), policy)

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
