"""The allocations of the root and of each block of a step, without recomputation and with per-block checkpointing.

A window is an uninterrupted run of the root or of one block, in the forward or in the backward. Models of equal blocks
are captured with a few of them: windows of blocks in the middle repeat, see `ackpt.planner.sharding.planner`. Sharded
steps have the windows of `ackpt.planner.sharding`; others have those that follow from the schedules of `ackpt.plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import ackpt
from ackpt.metering.gpus import BLOCK
from ackpt.planner.capture.joint_graph import BACKWARD, FORWARD, JointGraph
from ackpt.planner.costs.devices import Device, device
from ackpt.planner.costs.profiles import Profile, with_gpu_workspace
from ackpt.planner.schedule.schedule import Schedule, everything, lower, recomputed
from ackpt.planner.schedule.simulator import follow
from ackpt.planner.sharding.planner import Blocks
from ackpt.planner.sharding.sharding import ROOT, Group, Sharding, Walk, Window, groups_of, owners
from ackpt.planner.workloads.planned_shapes import PlanConfig, captured
from ackpt.planner.workloads.step_request import TrainingStep, training_step


@dataclass(frozen=True)
class CapturedStep:
    """A step, captured as its device runs it, and the groups of its parameters: the root's, then each block's."""

    step: TrainingStep
    graph: JointGraph
    profile: Profile
    groups: tuple[Group, ...]
    owners: list[int]
    device: Device

    @classmethod
    def of(cls, config: PlanConfig) -> CapturedStep:
        """The step of `config`, which names a device, without its optimizer."""
        assert config.device is not None
        where = device(config.device)
        step = training_step(config.step)
        graph = captured(step, replace(config, optimizer="none"), where)
        groups = groups_of(step.model)
        profile = with_gpu_workspace(graph, ackpt.profile(graph, where))
        return cls(step, graph, profile, groups, owners(graph, groups), where)

    def none(self) -> Schedule:
        """The schedule that recomputes nothing."""
        return everything(self.graph)

    def per_block(self, blocks: int | None = None) -> Schedule:
        """The schedule that saves the inputs of the first `blocks` blocks, all by default, and recomputes the rest."""
        return lower(self.graph, self.saved(len(self.groups) if blocks is None else blocks))

    def saved(self, blocks: int) -> set[int]:
        """The storages that are saved if the first `blocks` blocks are recomputed."""
        analysis, nodes = self.graph.analysis, self.graph.nodes
        saved = set(analysis.must_be_saved)
        for storage in everything(self.graph).saved:
            owner = self.owners[self.graph.storages[storage].producer]
            if owner == ROOT or owner > blocks:
                saved.add(storage)
        for node in nodes[: self.graph.boundary]:
            for source in node.inputs:
                if self.owners[source] != self.owners[node.id]:
                    saved |= set(nodes[source].storages) & analysis.savable
        return saved

    def windows(self, schedule: Schedule) -> list[Window]:
        """The windows of `schedule`; the last one belongs to the root and has the bytes that remain after the step."""
        live = follow(self.graph, schedule, self.profile.workspace_bytes)
        rows: list[Window] = []
        events: list[tuple[int, int]] = []
        key = (FORWARD, ROOT)
        for place, (event, owner) in enumerate(zip(live.events, live.owner)):
            phase = FORWARD if place < live.boundary else BACKWARD
            group = key[1] if owner is None and phase == key[0] else ROOT if owner is None else self.owners[owner]
            if (phase, group) != key:
                if phase != key[0] and key[1] != ROOT:  # the root ends the forward and begins the backward
                    rows.append(Window(*key, tuple(events)))
                    key, events = (key[0], ROOT), []
                rows.append(Window(*key, tuple(events)))
                if phase != key[0] and group != ROOT:
                    rows.append(Window(phase, ROOT, ()))
                key, events = (phase, group), []
            events.append(event)
        rows.append(Window(*key, tuple(events)))
        return [*rows, Window(BACKWARD, ROOT, ())] if key[1] != ROOT else rows

    def sharded(self, sharding: Sharding) -> list[list[Window]]:
        """The windows of one rank, without recomputation and with per-block checkpointing."""
        sharding = replace(sharding, block_bytes=BLOCK)
        blocks, workspace = self._schedules
        return [Walk(self.graph, schedule, workspace, self.groups, sharding).windows() for schedule in blocks]

    def recomputed_by_ranks(self) -> list[int]:
        """Nodes that per-block checkpointing of a sharded step recomputes: the complete forward of each block."""
        return recomputed(self.graph, self._schedules[0][1])

    @cached_property
    def _schedules(self) -> tuple[list[Schedule], Sequence[int]]:
        # As `ackpt plan --fsdp` does: without the workspace of a GPU's kernels.
        blocks = Blocks(self.graph, ackpt.profile(self.graph, self.device), self.groups)
        return [blocks.uniform(choice) for choice in blocks.eager_choices], blocks.profile.workspace_bytes
