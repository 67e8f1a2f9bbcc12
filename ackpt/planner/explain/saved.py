"""The activations that each module and source line saves, and `StepMemory`, all that an explanation knows of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ackpt.planner.capture.joint_graph import Analysis, JointGraph
from ackpt.planner.capture.places import block_of
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.schedule.allocations import Allocation, by_kind, operation_of
from ackpt.planner.schedule.plan import Plan
from ackpt.planner.schedule.schedule import everything

from .suggestions import Suggestion


@dataclass(frozen=True)
class SavedLine:
    """The activations that one source line of one module saves for backward in the baseline.

    ``nodes``: the names of the nodes; ``operations``: the operation of each; ``fates``: its fate in the plan.
    ``bytes``: of all, ``saved_bytes``: of those that the plan saves. ``flops`` and ``seconds``: to recompute them from
    the other saved activations, parameters and inputs; ``seconds`` is None without a device. ``reason``: why they
    cannot be recomputed; "" if they can.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> (line,) = ackpt.explain(model, torch.ones(4, 8)).saved
        >>> line.module, line.operations, line.bytes, line.flops
        ('1', ('tanh',), 128, 512)
    """

    module: str
    source: str
    nodes: tuple[str, ...]
    operations: tuple[str, ...]
    fates: tuple[str, ...]
    bytes: int
    saved_bytes: int
    flops: int
    seconds: float | None
    reason: str = ""


def saved_lines(graph: JointGraph, profile: Profile, plan: Plan) -> tuple[SavedLine, ...]:
    """The lines of the baseline's saved activations, those with most bytes first."""
    analysis = graph.analysis
    baseline = everything(graph)
    saved = set(baseline.saved)
    saved_by_plan = set(plan.schedule.saved)
    storages_by_line: dict[tuple[str, str], list[int]] = {}
    for storage in sorted(saved, key=analysis.base_of.__getitem__):
        node = graph.nodes[analysis.base_of[storage]]
        storages_by_line.setdefault((node.module, node.source), []).append(storage)
    lines = []
    for (module, source), storages in storages_by_line.items():
        nodes, blocked = _recomputation(analysis, storages, saved)
        saved_nodes = [analysis.base_of[storage] for storage in storages]
        names = [graph.nodes[node].name for node in saved_nodes]
        lines.append(
            SavedLine(
                module=module,
                source=source,
                nodes=tuple(names),
                operations=tuple(operation_of(graph, node) for node in saved_nodes),
                fates=tuple(plan.fates[name] for name in names),
                bytes=sum(analysis.bytes[s] for s in storages),
                saved_bytes=sum(analysis.bytes[s] for s in storages if s in saved_by_plan),
                flops=sum(profile.flops[node] for node in nodes),
                seconds=None if profile.seconds is None else sum(profile.seconds[node] for node in nodes),
                reason=blocked,
            )
        )
    return tuple(sorted(lines, key=lambda line: -line.bytes))


def _recomputation(analysis: Analysis, storages: list[int], saved: set[int]) -> tuple[set[int], str]:
    """The nodes that compute `storages` from the other saved ones, and why they cannot be recomputed, or ""."""
    given = (saved - set(storages)) | analysis.resident
    nodes: set[int] = set()
    todo = [analysis.base_of[storage] for storage in storages]
    while todo:
        node = todo.pop()
        if node in nodes or node in analysis.sources or given.intersection(analysis.storages(node, again=True)):
            continue
        nodes.add(node)
        todo += analysis.recompute_reads(node)
    reasons = (analysis.not_recomputable[node] for node in sorted(nodes) if node in analysis.not_recomputable)
    return nodes, next(reasons, "")


def _totals(lines: Iterable[SavedLine], key: Callable[[SavedLine], str]) -> dict[str, int]:
    """Bytes by the `key` of a line, the largest first."""
    sizes: dict[str, int] = {}
    for line in lines:
        sizes[key(line)] = sizes.get(key(line), 0) + line.bytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, repr=False)
class StepMemory:
    """Where the memory of a planned step goes: the data of an `Explanation`, for the functions that render it."""

    graph: JointGraph
    profile: Profile
    plan: Plan
    saved: tuple[SavedLine, ...]
    allocations: tuple[Allocation, ...]
    suggestions: tuple[Suggestion, ...]
    not_computed: tuple[str, ...]
    types: Mapping[str, str]
    views: str = ""

    @cached_property
    def live(self) -> tuple[Allocation, ...]:
        """The allocations that are live at the peak, the largest first."""
        index = self.plan.timeline.peak_index
        return tuple(sorted((a for a in self.allocations if a.is_live(index)), key=lambda a: -a.bytes))

    @cached_property
    def at_peak(self) -> dict[str, int]:
        """Bytes at the peak by kind, such as ``gradients``, ``saved``, ``recomputed`` and ``temporaries``.

        They add up to ``plan.peak_bytes``.
        """
        return by_kind(self.live)

    @cached_property
    def by_block(self) -> dict[str, int]:
        """Bytes that the baseline saves by block, such as ``transformer.h.11``, the largest first."""
        return _totals(self.saved, lambda line: block_of(line.module))

    @cached_property
    def by_type(self) -> dict[str, int]:
        """Bytes that the baseline saves by the class of the module, the largest first."""
        return _totals(self.saved, lambda line: self.types.get(line.module, ""))
