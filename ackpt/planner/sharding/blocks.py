"""The choices for each block of a sharded step, and the windows of the step for every choice.

A block is recomputed in its own backward, for which FSDP2 gathers its parameters anyway, so recomputation costs no
collective. Therefore a window depends on the choice of its own block only, and a step with any mix of choices is a row
of windows. Equal blocks have equal windows.

The choices that save everything, or recompute a complete block, are those of eager blocks, without and with
`ackpt.checkpoint`; the others are those of ``fully_shard(ackpt.compile(block, ...))``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ackpt.planner.capture.joint_graph import BACKWARD, FORWARD, JointGraph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.policies.chains.block_options import BlockStep
from ackpt.planner.policies.chains.blocks import cut_at, inner_cuts
from ackpt.planner.policies.search.frontier import costs
from ackpt.planner.schedule.schedule import (
    COMPUTE,
    Schedule,
    Step,
    everything,
    live_before_backward,
    recompute_late,
    recomputed,
    scheduled,
)

from .sharding import Group, Sharding
from .step import ROOT, ShardingError, Window, owners, step_windows

PLAIN, PER_BLOCK = "plain", "per-block"
CAPTURED = 4  # blocks that are captured of deeper models: the first, the last, and two between that must agree


@dataclass(frozen=True)
class Choice:
    """One way to treat a block. ``kept``: the storages saved inside each block; ``again``: its complete forward
    is recomputed, as by per-block checkpointing; otherwise only missing activations are, late and once."""

    name: str
    kept: tuple[frozenset[int], ...]
    again: bool = False

    @property
    def eager(self) -> bool:
        return self.again or self.name == PLAIN


class Blocks:
    """The choices for the blocks of `graph`, whose parameters are in `groups`, the root's first."""

    def __init__(self, graph: JointGraph, profile: Profile, groups: tuple[Group, ...]):
        self.graph, self.profile, self.groups = graph, profile, groups
        self.analysis, self.owners = graph.analysis, owners(graph, groups)
        self.cost = costs(graph, profile)
        self.plain = everything(graph)
        self.forward: list[list[int]] = [[] for _ in groups]
        for node in graph.nodes[: graph.boundary]:
            reruns = node.id not in self.analysis.sources and node.id not in self.analysis.not_recomputable
            if reruns and (node.is_random or node.id not in self.analysis.effects):
                self.forward[self.owners[node.id]].append(node.id)

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """Saving all, per-block checkpointing, and choices between these if the blocks form a chain."""
        return (*self.eager_choices, *self._between())

    @cached_property
    def eager_choices(self) -> tuple[Choice, Choice]:
        """Saving all, and per-block checkpointing."""
        nothing = tuple(frozenset() for _ in self.groups)
        return Choice(PLAIN, self._saved_plainly), Choice(PER_BLOCK, nothing, again=True)

    def schedule(self, row) -> Schedule:
        """The schedule with the choice ``row[block]`` for every block; ``row[0]``, the root's, recomputes nothing."""
        saved = set(self._saved_plainly[ROOT] | self._handed)
        for block in range(1, len(self.groups)):
            saved |= row[block].kept[block]
        live = live_before_backward(self.analysis, saved)
        there = {storage for node_id in live for storage in self.graph.nodes[node_id].storages}
        order: list[int] = []
        begun = {ROOT}
        for node_id in self.analysis.needed_backward:
            block = self.owners[node_id]
            if block not in begun and row[block].again:
                again = [n for n in self.forward[block] if not self.analysis.allocated.get(n, frozenset()) & there]
                order += recompute_late(self.analysis, again, live)
            begun.add(block)
            order += recompute_late(self.analysis, [node_id], live)
        eager = [row[block].eager for block in range(len(self.groups))]
        return self._freed_as_by_autograd(scheduled(self.graph, None, order), [True, *eager[1:]])

    def uniform(self, choice: Choice) -> Schedule:
        return self.schedule([choice] * len(self.groups))

    def _freed_as_by_autograd(self, schedule: Schedule, eager) -> Schedule:
        """`schedule`; eager blocks free the tensors of an autograd function after the last of its operations."""
        nodes, fx = self.graph.nodes, self.analysis.fx
        steps: list[Step] = []
        late: list[Step] = []
        current, owner, born = None, ROOT, set()
        for step in schedule.backward:
            if step.kind == COMPUTE:
                node = nodes[step.id]
                of_model = node.phase == BACKWARD and (node.module or node.source) and eager[self.owners[node.id]]
                function = fx[node.id].meta.get("seq_nr") if of_model else None
                is_view = (
                    node.phase == FORWARD and node.id not in self.analysis.allocated and self.owners[node.id] == owner
                )
                if not is_view and (function is None or function != current):
                    steps += late
                    late, current, owner, born = [], function, self.owners[node.id], set()
                born |= self.analysis.allocated.get(node.id, frozenset())
            elif current is not None and step.id not in born:
                late.append(step)
                continue
            steps.append(step)
        return replace(schedule, backward=(*steps, *late))

    def windows(self, schedule: Schedule, sharding: Sharding) -> list[Window]:
        return step_windows(self.graph, schedule, self.profile.workspace_bytes, self.groups, sharding)

    def names(self, choice: Choice, block: int) -> list[str]:
        """Module and operation of each activation that the choice saves inside a block."""
        names = []
        for storage in sorted(choice.kept[block]):
            node = self.graph.nodes[self.graph.storages[storage].producer]
            module = node.module.removeprefix(self.groups[block].name).lstrip(".")
            operation = node.target.removeprefix("aten.").split(".")[0]
            names.append(f"{module}.{operation}" if module else operation)
        return names

    def added(self, schedule: Schedule) -> list[tuple[float, int]]:
        """Cost and FLOPs of the recomputation in each group."""
        added = [(0.0, 0)] * len(self.groups)
        for node in recomputed(self.graph, schedule):
            cost, flops = added[self.owners[node]]
            added[self.owners[node]] = cost + self.cost[node], flops + self.profile.flops[node]
        return added

    def plain_flops(self) -> list[int]:
        """FLOPs of a step without checkpointing, by group."""
        totals = [0] * len(self.groups)
        for node, flops in enumerate(self.profile.flops):
            totals[self.owners[node]] += flops
        return totals

    @cached_property
    def _saved_plainly(self) -> tuple[frozenset[int], ...]:
        saved: list[set[int]] = [set() for _ in self.groups]
        for storage in self.plain.saved:
            saved[self.owners[self.graph.storages[storage].producer]].add(storage)
        return tuple(map(frozenset, saved))

    @cached_property
    def _cuts(self) -> list[int] | None:
        """The storage that each group passes to the next, the root first; None if one passes more than one tensor."""
        last: dict[int, int] = {}
        first_block = min((nodes[0] for nodes in self.forward[1:] if nodes), default=0)
        for cut in inner_cuts(self.graph):
            producer = self.graph.storages[cut].producer
            if self.owners[producer] != ROOT or producer < first_block:
                last[self.owners[producer]] = cut
        return [last[group] for group in range(len(self.groups))] if len(last) == len(self.groups) else None

    @cached_property
    def _chain(self):
        return None if self._cuts is None else cut_at(self.graph, self._cuts)

    @cached_property
    def _handed(self) -> frozenset[int]:
        """The storages that blocks pass on, or that several blocks read; every choice saves them."""
        if self._chain is not None:
            return frozenset().union(self._chain.pinned, *(block.output for block in self._chain.blocks))
        crossing: set[int] = set()
        for node in self.graph.nodes[: self.graph.boundary]:
            for source in node.inputs:
                if self.owners[source] != self.owners[node.id]:
                    crossing |= set(self.graph.nodes[source].storages) & self.analysis.savable
        return frozenset(crossing)

    def _between(self) -> list[Choice]:
        """The choices between saving all and saving nothing, the largest first; found once for equal blocks."""
        if self._chain is None:
            return []
        alike: dict[tuple, list[frozenset[int]]] = {}
        options: list[list[frozenset[int]]] = [[]]
        for block, group in zip(self._chain.blocks[1:], self.groups[1:]):
            units = [sorted(unit) for unit in block.units]
            key = (group.shapes(), tuple(tuple(self.analysis.bytes[s] for s in unit) for unit in units))
            inside = [storage for unit in units for storage in unit]
            if key not in alike:
                local = BlockStep(self.analysis, block, self._chain.pinned, self.cost, self.profile.workspace_bytes)
                ranked = sorted(local.options(), key=lambda option: (option.cost, option.saved_bytes))
                alike[key] = [frozenset(inside.index(storage) for storage in option.saved) for option in ranked]
            options.append([frozenset(inside[index] for index in indices) for indices in alike[key]])
        count = max(map(len, options))
        rows = []
        for number in range(count):
            saved = (ranked[round(number * (len(ranked) - 1) / max(1, count - 1))] for ranked in options[1:])
            rows.append(Choice(f"option {number}", (frozenset(), *saved)))
        return rows


def stand_in_for(block: int, blocks: int) -> int:
    """The captured block with the same windows as `block` of `blocks`: the first, the last, or one between."""
    return 1 if block == 1 else CAPTURED if block == blocks else CAPTURED // 2


def deep(row: list[Window], blocks: int) -> list[Window]:
    """The windows of a step with `blocks` blocks, from those of a step with `CAPTURED` blocks.

    Raises:
        ShardingError: if the two blocks in the middle differ, or the root runs between blocks.
    """
    keys = [(FORWARD, block) for block in range(CAPTURED + 1)] + [(FORWARD, ROOT), (BACKWARD, ROOT)]
    keys += [(BACKWARD, block) for block in range(CAPTURED, ROOT, -1)] + [(BACKWARD, ROOT)]
    if [(window.phase, window.group) for window in row] != keys:
        raise ShardingError("the blocks do not run one after the other")
    middle = stand_in_for(2, blocks)
    by_key = {(window.phase, window.group): window for window in row if window.group != ROOT}
    for phase in (FORWARD, BACKWARD):
        if by_key[phase, middle].events != by_key[phase, middle + 1].events:
            raise ShardingError("the blocks are not alike")

    def of(phase: str, block: int) -> Window:
        return Window(phase, block, by_key[phase, stand_in_for(block, blocks)].events)

    start, end, back, last = (window for window in row if window.group == ROOT)
    forward = [of(FORWARD, block) for block in range(1, blocks + 1)]
    backward = [of(BACKWARD, block) for block in range(blocks, 0, -1)]
    return [start, *forward, end, back, *backward, last]
