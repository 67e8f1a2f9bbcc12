"""`StepMemory`, all that an explanation knows of a step, with the activations that each source line saves; its text."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ackpt.metering.meter import memory_format
from ackpt.planner.capture.inspection.calls import CHECKPOINTS
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.capture.short_names import block_of, modules_text, pattern, short_source
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.schedule.allocations import RESIDENT, Allocation, by_kind, described, operation_of
from ackpt.planner.schedule.plan import Plan
from ackpt.planner.schedule.schedule import everything, live_before_backward, missing_for

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
        saved_nodes = [analysis.base_of[storage] for storage in storages]
        nodes = missing_for(analysis, saved_nodes, live_before_backward(analysis, saved - {*storages}))
        reasons = (analysis.not_recomputable[node] for node in nodes if node in analysis.not_recomputable)
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
                reason=next(reasons, ""),
            )
        )
    return tuple(sorted(lines, key=lambda line: -line.bytes))


def _bytes_by(lines: Iterable[SavedLine], key: Callable[[SavedLine], str]) -> dict[str, int]:
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
        return _bytes_by(self.saved, lambda line: block_of(line.module))

    @cached_property
    def by_type(self) -> dict[str, int]:
        """Bytes that the baseline saves by the class of the module, the largest first."""
        return _bytes_by(self.saved, lambda line: self.types.get(line.module, ""))


LARGEST = 12  # lines of each list
_NAMED = (*RESIDENT, "gradients")
_OWN_CHECKPOINTS = f"""left out          {CHECKPOINTS}, which the model calls; plans leave it out, too
                  what the step saves with it: ackpt.print_saved(model, batch)
"""
_UNITS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")


def text(explanation: StepMemory) -> str:
    """The full text: the peak and the live bytes at it, saved activations by line, totals, and suggestions."""
    plan, lines = explanation.plan, explanation.saved
    baseline = sum(line.bytes for line in lines)
    shown = [_OWN_CHECKPOINTS] * (CHECKPOINTS in (explanation.graph.made_for or ()))
    shown += [f"peak              {memory_format(plan.peak_bytes)}, reached at {plan.peak_node}"]
    shown += [_row(size, kind) for kind, size in explanation.at_peak.items()]
    shown += [f"{'note':<17} {explanation.views}"] * bool(explanation.views)
    shown += ["", "largest there     kind         what"]
    shown += [
        f"{memory_format(size):<17} {kind:<12} {description}" for size, kind, description in live_rows(explanation)
    ]
    has_plan = plan.recompute_flops or plan.host_bytes
    planned = f" by the baseline; this plan ({plan.policy}) saves {memory_format(plan.saved_bytes)}"
    shown += ["", f"saved for backward: {memory_format(baseline)}{planned if has_plan else ''}"]
    shown += ["bytes             to recompute  where"] if lines else []
    groups = grouped(lines)
    for group in groups[:LARGEST]:
        size = memory_format(sum(line.bytes for line in group))
        shown.append(f"{size:<17} {cost_text(group):<13} {where_text(group)}")
    if rest := groups[LARGEST:]:
        left = memory_format(sum(line.bytes for group in rest for line in group))
        places = f"{len(rest)} other place{'' if len(rest) == 1 else 's'}"
        shown.append(f"{left:<17} {'':<13} {places}: explanation.saved")
    if lines:
        shown += ["", "saved by block", *_totals(by_equal_blocks(explanation.by_block))]
        shown += ["", "saved by module type", *_totals(explanation.by_type.items())]
    shown += ["", "what would reduce the peak, each simulated on its own"]
    for suggestion in explanation.suggestions:
        cost = "" if suggestion.cost is None else f", recomputation {suggestion.cost:.1%} of the step"
        shown.append(
            f"{'-' + memory_format(suggestion.saved_bytes):<17} {suggestion.title}: peak "
            f"{memory_format(suggestion.peak_bytes)}{cost}"
        )
        shown.append(f"{'':<17} {suggestion.fix}")
    if not explanation.suggestions:
        shown.append(f"{'':<17} none of the changes that were simulated")
    shown += [f"not computed      {reason}" for reason in explanation.not_computed]
    return "\n".join(shown)


def _row(size: int, description: str) -> str:
    return f"  {memory_format(size):<15} {description}"


def _totals(sizes: Iterable[tuple[str, int]]) -> list[str]:
    sizes = list(sizes)
    rows = [_row(size, name or "the model itself") for name, size in sizes[:LARGEST]]
    if rest := [size for _, size in sizes[LARGEST:]]:
        rows.append(_row(sum(rest), f"{len(rest)} other{'' if len(rest) == 1 else 's'}"))
    return rows


def by_equal_blocks(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Blocks in words with their bytes, equal blocks as one: ``"12 x transformer.h.*: 18.0 MiB each"``."""
    groups: dict[tuple[str, int], list[str]] = {}
    for block, size in sizes.items():
        groups.setdefault((pattern(block), size), []).append(block)
    totals = [
        (modules_text(blocks) + (f": {memory_format(size)} each" if len(blocks) > 1 else ""), size * len(blocks))
        for (_, size), blocks in groups.items()
    ]
    return sorted(totals, key=lambda item: -item[1])


def grouped(lines: Iterable[SavedLine]) -> list[list[SavedLine]]:
    """Lines that are equal in equal modules, those with most bytes first."""
    groups: dict[tuple, list[SavedLine]] = {}
    for line in lines:
        key = (pattern(line.module), line.source, line.operations, line.fates, line.bytes, line.flops)
        groups.setdefault(key, []).append(line)
    return sorted(groups.values(), key=lambda group: -sum(line.bytes for line in group))


def where_text(group: list[SavedLine]) -> str:
    """Modules, operations, source line, and the fates that are not ``saved``."""
    first = group[0]
    names = ", ".join(dict.fromkeys(first.operations))
    each = f": {memory_format(first.bytes)} each" if len(group) > 1 else ""
    source = f", {short_source(first.source)}" if first.source else ""
    fates = [fate for fate in dict.fromkeys(first.fates) if fate != "saved"]
    return f"{modules_text(line.module for line in group)} ({names}){each}{source}" + "".join(f" [{f}]" for f in fates)


def cost_text(group: list[SavedLine]) -> str:
    """The cost of recomputing all lines of a group: seconds if they are known, else FLOPs."""
    if group[0].reason:
        return "cannot"
    seconds = [line.seconds for line in group if line.seconds is not None]
    if seconds:
        return f"{1e3 * sum(seconds):.3g} ms"
    flops = int(sum(line.flops for line in group))
    if not flops:
        return "no FLOPs"  # elementwise; seconds would count memory traffic
    power = min((len(str(flops)) - 1) // 3, len(_UNITS) - 1)
    return f"{flops / 1000**power:.3g} {_UNITS[power]}"


def live_rows(explanation: StepMemory) -> list[tuple[int, str, str]]:
    """(bytes, kind, description) of what is live at the peak, equal modules as one, the largest first."""
    graph = explanation.graph
    groups: dict[tuple, list[tuple[str, Allocation]]] = {}
    for block in explanation.live:
        name, key = described(graph, block), ()
        if block.kind in _NAMED:
            name = block_of(name.removeprefix("gradient of "))
        elif block.node is not None:
            node = graph.nodes[block.node]
            name, key = node.module, (operation_of(graph, node.id), node.source)
        groups.setdefault((block.kind, block.storage is None, pattern(name), *key), []).append((name, block))
    rows = []
    for (kind, *_), members in groups.items():
        first, block = members[0]
        description = described(graph, block)
        if len(members) > 1 and kind in _NAMED:
            description = modules_text(name for name, _ in members)
        elif len(members) > 1 and first and block.node is not None:
            description = description.replace(first, modules_text(name for name, _ in members), 1)
        rows.append((sum(block.bytes for _, block in members), kind, description))
    return sorted(rows, key=lambda row: -row[0])[:LARGEST]
