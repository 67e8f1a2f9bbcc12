"""Plans for one rank of a model sharded by FSDP2: its memory, and the cheapest choice per block within a budget.

A block is recomputed in its own backward, for which FSDP2 gathers its parameters anyway, so recomputation costs no
collective: a window depends on the choice of its own block only, and a step is a row of windows. A model of equal
blocks is captured with a few of them, as equal blocks have equal windows. The first blocks get one choice and the rest
another that recomputes less, since backward reads the last blocks first; the cheapest such plan is returned.

The choices that save everything, or recompute a complete block, are those of eager blocks, without and with
`ackpt.checkpoint`; the others are those of ``fully_shard(ackpt.compile(block, ...))``.
"""

import itertools
from dataclasses import dataclass, field, replace
from functools import cached_property

from ackpt.core.budget import dynamic_limit, readable
from ackpt.core.errors import BudgetError, did_you_mean
from ackpt.metering.meter import memory_format
from ackpt.metering.timeline import Timeline
from ackpt.planner.capture.joint_graph import BACKWARD, FORWARD, JointGraph
from ackpt.planner.choose import cannot_keep
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.policies.chains.block_options import options_of_blocks
from ackpt.planner.policies.chains.blocks import BlockChain, cut_at, inner_cuts
from ackpt.planner.policies.search.frontier import costs
from ackpt.planner.schedule.schedule import (
    COMPUTE,
    Schedule,
    Step,
    everything,
    live_before_backward,
    missing_for,
    recompute_late,
    recomputed,
    scheduled,
)

from .sharding import (
    ROOT,
    Group,
    GroupBytes,
    Sharding,
    ShardingError,
    Walk,
    Window,
    owners,
    sharded_optimizer,
    timeline,
    with_last_kept,
)

PLAIN, PER_BLOCK = "plain", "per-block"
CAPTURED = 4  # blocks that are captured of deeper models: the first, the last, and two between that must agree


@dataclass(frozen=True)
class Choice:
    """One way to treat a block. ``kept``: the storages saved inside each block; ``again``: all that its backward reads
    is recomputed before it, as by per-block checkpointing; otherwise only missing activations are, late and once.
    ``unread``: those of ``kept`` that nothing reads in backward are saved as well, as torch's selective checkpointing
    does."""

    name: str
    kept: tuple[frozenset[int], ...]
    again: bool = False
    unread: bool = False

    @property
    def eager(self) -> bool:
        return self.again or self.name == PLAIN


class Blocks:
    """The choices for the blocks of `graph`, whose parameters are in `groups`, the root's first.

    ``has_regions``: whether a block of which nothing is saved is a region of eager code; otherwise it is planned.
    """

    def __init__(self, graph: JointGraph, profile: Profile, groups: tuple[Group, ...], has_regions: bool = True):
        self.has_regions = has_regions
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
        """Saving all, per-block checkpointing, and choices between these if the blocks form a chain.

        The latter save less and less; they are found once for equal blocks.
        """
        if self._chain is None:
            return self.eager_choices
        options = options_of_blocks(self.graph, self._chain, tuple(self.cost), tuple(self.profile.workspace_bytes))
        ranked = [sorted(each, key=lambda option: (option.cost, option.saved_bytes)) for each in options]
        ranked = ranked[1 : len(self.groups)]
        count = max(map(len, ranked))
        between = []
        for number in range(count):
            saved = (of_block[round(number * (len(of_block) - 1) / max(1, count - 1))].saved for of_block in ranked)
            between.append(Choice(f"option {number}", (frozenset(), *saved)))
        return (*self.eager_choices, *between)

    @cached_property
    def eager_choices(self) -> tuple[Choice, Choice]:
        """Saving all, and per-block checkpointing."""
        nothing = tuple(frozenset() for _ in self.groups)
        return Choice(PLAIN, self._saved_plainly), Choice(PER_BLOCK, nothing, again=self.has_regions)

    def schedule(self, row) -> Schedule:
        """The schedule with the choice ``row[block]`` for every block; ``row[0]``, the root's, recomputes nothing."""
        saved = set(self._saved_plainly[ROOT] | self._handed)
        for block in range(1, len(self.groups)):
            saved |= row[block].kept[block]
        live = live_before_backward(self.analysis, saved)
        live_storages = {storage for node_id in live for storage in self.graph.nodes[node_id].storages}
        order: list[int] = []
        begun = {ROOT}
        for node_id in self.analysis.needed_backward:
            block = self.owners[node_id]
            if block not in begun and row[block].again:
                readers = [n for n in self.analysis.needed_backward if self.owners[n] == block]
                needed = set(missing_for(self.analysis, readers, live))
                again = [n for n in self.forward[block] if n in needed or self.graph.nodes[n].is_random]
                again = [n for n in again if not self.analysis.allocated.get(n, frozenset()) & live_storages]
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
        return Walk(self.graph, schedule, self.profile.workspace_bytes, self.groups, sharding).windows()

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

    def by_group(self, values) -> list:
        """The sums of `values` by node, such as FLOPs, for each group."""
        totals = [0] * len(self.groups)
        for owner, value in zip(self.owners, values):
            totals[owner] += value
        return totals

    @cached_property
    def _saved_plainly(self) -> tuple[frozenset[int], ...]:
        saved: list[set[int]] = [set() for _ in self.groups]
        for storage in self.plain.saved:
            saved[self.owners[self.graph.storages[storage].producer]].add(storage)
        return tuple(map(frozenset, saved))

    @cached_property
    def _chain(self) -> BlockChain | None:
        """The chain of the groups, the root first; None if a group passes several tensors to the next."""
        last: dict[int, int] = {}
        first_block = min((nodes[0] for nodes in self.forward[1:] if nodes), default=0)
        for cut in inner_cuts(self.graph):
            producer = self.graph.storages[cut].producer
            if self.owners[producer] != ROOT or producer < first_block:
                last[self.owners[producer]] = cut
        return cut_at(self.graph, [cut for _, cut in sorted(last.items())]) if len(last) == len(self.groups) else None

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


def stand_in_for(block: int, blocks: int) -> int:
    """The captured block with the same windows as `block` of `blocks`: the first, the last, or one between."""
    return 1 if block == 1 else CAPTURED if block == blocks else CAPTURED // 2


def deep(row: list[Window], blocks: int) -> list[Window]:
    """The windows of a step with `blocks` blocks, from those with `CAPTURED` equal ones; else a ShardingError.

    Every block refers to memory of its neighbors as its stand-in does.
    """
    keys = [(FORWARD, block) for block in range(CAPTURED + 1)] + [(FORWARD, ROOT), (BACKWARD, ROOT)]
    keys += [(BACKWARD, block) for block in range(CAPTURED, ROOT, -1)] + [(BACKWARD, ROOT)]
    if [(window.phase, window.group) for window in row] != keys:
        raise ShardingError("the blocks do not run one after the other")
    middle = stand_in_for(2, blocks)
    by_key = {(window.phase, window.group): window for window in row if window.group != ROOT}
    for phase in (FORWARD, BACKWARD):
        if by_key[phase, middle].relative(middle + 1) != by_key[phase, middle + 1]:
            raise ShardingError("the blocks are not alike")

    def window(phase: str, block: int) -> Window:
        return by_key[phase, stand_in_for(block, blocks)].relative(block)

    def of_root(window: Window) -> Window:
        """With what it does to the memory of a block between the first and the last for all of these."""
        events = [*zip(window.events, window.memory)]
        one, other = ([(e, m.of(ROOT)) for e, m in events if m.key[0] == block] for block in (middle, middle + 1))
        if one != other:
            raise ShardingError("the blocks are not alike")
        stand_ins = {middle: range(2, blocks), middle + 1: (), CAPTURED: (blocks,)}
        deep = [(e, m.of(block)) for e, m in events for block in stand_ins.get(m.key[0], m.key[:1])]
        return replace(window, events=tuple(e for e, _ in deep), memory=tuple(m for _, m in deep))

    start, end, back, last = (of_root(window) if window.memory else window for window in row if window.group == ROOT)
    forward = [window(FORWARD, block) for block in range(1, blocks + 1)]
    backward = [window(BACKWARD, block) for block in range(blocks, 0, -1)]
    return [start, *forward, end, back, *backward, last]


SELECTIVE = "selective"
POLICIES = ("none", "full", "auto")


def check_policy(policy, *more: str) -> None:
    """Raise a ValueError unless `policy` is one of `POLICIES`, or of `more`."""
    if policy not in (*POLICIES, *more):
        hint = did_you_mean(policy, POLICIES) if isinstance(policy, str) else ""
        raise ValueError(
            f"policy {policy!r} does not plan shards{hint}: for a model that FSDP2 shards choose "
            f"{', '.join((*POLICIES, *more))}"
        )


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
    time as a fraction of the baseline step. ``runs``: the blocks from the first to the last. ``windows``: its events.
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
    windows: tuple[Window, ...] = field(repr=False)

    def __repr__(self) -> str:
        sizes = f"peak {memory_format(self.peak_bytes)}, {memory_format(self.resident_bytes)} of it resident"
        return f"ShardedPlan({self.policy!r}, {self.sharding.ranks} ranks, {sizes}, cost {self.cost:.1%})"

    @property
    def resident_bytes(self) -> int:
        return sum(self.resident.values())

    @property
    def baseline_peak_bytes(self) -> int:
        return self.resident_bytes + self.baseline_bytes

    @property
    def dynamic_peak_bytes(self) -> int:
        return self.timeline.peak_bytes

    @property
    def peak_bytes(self) -> int:
        return self.resident_bytes + self.dynamic_peak_bytes

    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the peak, the resident ones first."""
        return {**self.resident, **self.timeline.at(self.timeline.peak_index)}


class Table:
    """The windows of every choice for one number of ranks; peak, cost and plan of a row of choices, one per block.

    ``groups``: of the complete model, for which `blocks` stand. ``kind`` makes its optimizer from parameters;
    ``clipping``: gradients are clipped before its step. ``selective``: the choice of that policy for the blocks n, 2 n,
    ... with n ``every_n_layers``. ``baseline``: of the step with its head in one piece, if `blocks` have it in chunks.
    """

    def __init__(
        self,
        blocks: Blocks,
        groups: tuple[Group, ...],
        sharding: Sharding,
        kind,
        on_cpu: bool,
        clipping: bool = False,
        selective: Choice | None = None,
        every_n_layers: int = 1,
        baseline: "Table | None" = None,
    ):
        self.groups, self.sharding, self.blocks = with_last_kept(groups, sharding), sharding, blocks
        self.count = len(groups) - 1
        self.choices = blocks.choices if selective is None else (*blocks.eager_choices, selective)
        self.every_n_layers = every_n_layers
        state, step = sharded_optimizer(kind, groups, sharding, on_cpu, clipping)
        graph = replace(blocks.graph, optimizer_step_bytes=step)
        every = [GroupBytes(group, sharding) for group in groups]
        shards = sum(each.shards for each in every)
        self.gradients = sum(each.reduced or each.received for each in every)
        sizes = blocks.graph.bytes()
        self.resident = {"parameters": shards, "buffers": sizes["buffer"], "inputs": sizes["input"], "optimizer": state}
        captured_whole = len(self.blocks.groups) - 1 == self.count
        schedules = [self.blocks.uniform(choice) for choice in self.choices]
        unread = [frozenset().union(*choice.kept) if choice.unread else frozenset() for choice in self.choices]
        workspace = blocks.profile.workspace_bytes
        rows = [
            Walk(graph, schedule, workspace, blocks.groups, sharding, kept).windows()
            for schedule, kept in zip(schedules, unread)
        ]
        self.rows = [row if captured_whole else deep(row, self.count) for row in rows]
        inner = (block if captured_whole else stand_in_for(block, self.count) for block in range(1, self.count + 1))
        self.stands = [ROOT, *inner]
        self.added = [self.blocks.added(schedule) for schedule in schedules]
        self.sizes = [[(window.highest, window.net) for window in row] for row in self.rows]
        self.group = [window.group for window in self.rows[0]]
        flops_of, cost_of = map(blocks.by_group, (blocks.profile.flops, blocks.cost))
        self.own = tuple(sum(of_group[stands] for stands in self.stands) for of_group in (flops_of, cost_of))
        self.baseline = baseline or self
        self.baseline_bytes = self.baseline.peak(self.uniform(0))

    def uniform(self, choice: int) -> tuple[int, ...]:
        return (0, *[choice] * self.count)

    def peak(self, row) -> int:
        most = total = 0
        for position, group in enumerate(self.group):
            highest, net = self.sizes[row[group]][position]
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

    def chosen(self, budget, policy: str) -> tuple[int, ...]:
        """The row that a policy chooses; BudgetError if it exceeds the budget."""
        resident = sum(self.resident.values())
        limit = dynamic_limit(budget, self.baseline_bytes, resident)
        if policy == SELECTIVE:  # as torchtitan: the blocks n, 2 n, ... are checkpointed
            row = (0, *(2 * (block % self.every_n_layers == 0) for block in range(1, self.count + 1)))
        else:
            row = self.least(limit) if policy == "auto" else self.uniform(POLICIES.index(policy))
        peak = self.peak(row)
        if limit is not None and peak > limit:
            parts, least = ("shards", "buffers", "inputs", "optimizer state"), peak + resident
            raise BudgetError(
                f"on a rank, policy {policy!r} {cannot_keep(budget, limit, resident, parts)}The smallest feasible "
                f"budget of this policy is {readable(least)} ({least} bytes): shard over more ranks, or take a smaller "
                "batch",
                least,
                budget,
            )
        return row

    def plan(self, row, policy: str) -> ShardedPlan:
        again = [self.added[row[block]][self.stands[block]] for block in range(1, self.count + 1)]
        (flops, cost), (_, base_cost) = self.own, self.baseline.own
        sizes = self.blocks.analysis.bytes
        runs, start = [], 1
        for number, same in itertools.groupby(row[1:]):
            length, choice = len(list(same)), self.choices[number]
            stands = self.stands[start]
            saved = sum(sizes[storage] for storage in choice.kept[stands])
            names = tuple(self.blocks.names(choice, stands))
            runs.append(Run(length, choice.name, saved, self.added[number][stands][1], names))
            start += length
        windows = tuple(self.rows[row[group]][position] for position, group in enumerate(self.group))
        every = [GroupBytes(group, self.sharding) for group in self.groups]
        times = [1 if group.kept else 2 for group in self.groups]  # that a group is gathered
        communication = Communication(
            gathers=sum(times),
            gathered_bytes=sum(number * each.gathered_from_others for number, each in zip(times, every)),
            reduces=sum(each.reduce > 0 for each in every),  # of groups with trained parameters
            reduced_bytes=sum(each.reduced_to_others for each in every),
        )
        return ShardedPlan(
            sharding=self.sharding,
            policy=policy,
            resident=self.resident,
            timeline=timeline(windows),
            windows=windows,
            baseline_bytes=self.baseline_bytes,
            flops=flops + sum(flops for _, flops in again),
            recompute_flops=sum(flops for _, flops in again),
            cost=(cost - base_cost + sum(cost for cost, _ in again)) / (base_cost or 1.0),
            runs=tuple(runs),
            communication=communication,
        )
