"""`RegionsPlan`: which blocks of a model are saved and which are checkpointed; `Record`: what it is made from.

The first step checkpoints all blocks. A saved block would hold its activations from the end of its forward until its
backward begins, where the region recomputes them. So the peak of a choice is the largest of the peaks between two such
events, without recomputations of saved blocks, each increased by the bytes that the saved blocks hold at that time.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from ackpt.metering.meter import memory_format
from ackpt.metering.resident import storages_of
from ackpt.planner.schedule.plan import PlanError

SAVED, CHECKPOINTED = "saved", "checkpointed"


@dataclass(frozen=True)
class RegionsPlan:
    """The plan of a step that cannot be one graph.

    Until the first step with gradients has ended, all byte counts except ``resident_bytes`` are None: the plan is made
    from what that step allocates, in which all blocks are checkpointed.

    ``fates``: by the paths of blocks, ``"saved"`` (runs as it is) or ``"checkpointed"`` (saves its inputs, recomputes
    everything). ``reasons``: why blocks that cannot be checkpointed are saved. ``resident_bytes``: parameters, buffers,
    inputs and optimizer state. ``peak_bytes``: an upper bound on the peak, resident bytes included, of steps that need
    no more memory than the first one; on a CPU, what it leaves allocated is added when the next step begins.
    ``least_peak_bytes``: that with all blocks checkpointed, the smallest feasible budget; ``baseline_peak_bytes``: that
    with all blocks saved. ``limit_bytes``: the bound on dynamic bytes
    that follows from the budget, None without one. A fraction is relative to the baseline's dynamic peak. No step
    exceeds the limit without an error. ``saved_bytes``: what the saved blocks hold for backward. ``cost``: of
    recomputation, as a fraction of the baseline step, in FLOPs and traffic weighed against each other; backward counts
    as twice the forward. ``note``: why the model is not one graph. ``made_for``: the call, in words.

    Example:
        >>> import torch, ackpt
        >>> class Positive(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x if x.sum() > 0 else -x
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        >>> model = torch.nn.Sequential(block(), Positive(), block(), block())
        >>> step = ackpt.compile(model, torch.ones(64, 8), budget=0.8)
        >>> set(step.plan.fates.values()), step.plan.peak_bytes
        ({'checkpointed'}, None)
        >>> step(torch.ones(64, 8)).sum().backward()
        >>> step.plan.fates["0"], step.plan.fates["3"], step.plan.dynamic_peak_bytes <= step.plan.limit_bytes
        ('checkpointed', 'saved', True)
    """

    policy = "regions"

    fates: Mapping[str, str]
    reasons: Mapping[str, str]
    resident_bytes: int
    note: str
    made_for: Mapping[str, str] = field(compare=False)
    limit_bytes: int | None = None
    peak_bytes: int | None = None
    least_peak_bytes: int | None = None
    baseline_peak_bytes: int | None = None
    saved_bytes: int | None = None
    cost: float | None = None

    def __repr__(self) -> str:
        if self.peak_bytes is None:
            return f"<RegionsPlan: {self._fates()}; the plan is made from the first training step>"
        return f"<RegionsPlan: peak {memory_format(self.peak_bytes)}, {self._fates()}; table() says more>"

    @property
    def dynamic_peak_bytes(self) -> int | None:
        """The peak without resident bytes; None before the first step."""
        return None if self.peak_bytes is None else self.peak_bytes - self.resident_bytes

    @property
    def baseline_dynamic_peak_bytes(self) -> int | None:
        """The dynamic peak of the step with all blocks saved; None before the first step."""
        return None if self.baseline_peak_bytes is None else self.baseline_peak_bytes - self.resident_bytes

    def save(self, path: str | os.PathLike[str]) -> NoReturn:
        """Not possible.

        Raises:
            PlanError: always, before anything is written.
        """
        raise PlanError(
            f"a plan in parts cannot be saved to {os.fspath(path)!r}: it is made in every run from what the first step "
            "allocates. Give the budget in every run instead."
        )

    def table(self) -> str:
        """Peak, cost, and how each block runs, as aligned text."""
        lines = ["policy            regions: made from the first training step, checked in every step"]
        if self.peak_bytes is None:
            lines.append("peak              not known before the first step, which checkpoints all blocks")
        else:
            baseline, peak = self.baseline_dynamic_peak_bytes, self.dynamic_peak_bytes or 0
            relative = "" if not baseline else f" = {peak / baseline:.3f} of the baseline's"
            resident = memory_format(self.resident_bytes)
            lines.append(f"peak              {memory_format(self.peak_bytes)}, {resident} of it resident")
            lines.append(f"dynamic peak      {memory_format(peak)}{relative} (all blocks saved, from the first step)")
            lines.append(f"saved             {memory_format(self.saved_bytes or 0)} by the saved blocks")
            lines.append(f"cost              {self.cost or 0.0:.1%} of the step")
        if self.limit_bytes is not None:
            lines.append(
                f"limit             {memory_format(self.limit_bytes)} of dynamic memory; a step above it raises"
            )
        lines += [f"not one graph     {self.note}", f"blocks            {self._fates()}"]
        reasons = {path: f": {reason}" for path, reason in self.reasons.items()}
        return "\n".join([*lines, *(f"  {fate:<15} {at}{reasons.get(at, '')}" for at, fate in self.fates.items())])

    def _fates(self) -> str:
        counts = Counter(self.fates.values())
        return f"{counts[SAVED]} blocks saved and {counts[CHECKPOINTED]} checkpointed"


# How a segment of the first step ends: in the call of a block that the segment names.
HELD, BEGINS, RECOMPUTED, ENDS = "forward ends", "backward begins", "recomputation ends", "backward ends"


@dataclass(eq=False)
class Run:
    """One call of a block as a region, in the forward of the first step.

    ``number``: how many calls of the block came before in this forward. ``entry_bytes``: live when it began.
    ``held_bytes``: what its graph held. ``outputs``: the results that the graph saves, with their bytes, which count as
    held if nothing else refers to them; ``dropped_bytes``: of the other results. ``cost``: of its operations.
    """

    path: str
    number: int
    entry_bytes: int
    held_bytes: int = 0
    cost: float = 0.0
    dropped_bytes: int = 0
    outputs: list[tuple[weakref.ref, int]] = field(default_factory=list)
    is_over: bool = False

    def add_outputs(self, outputs: Iterable[torch.Tensor], saved: SavedStorages, arguments: Any) -> None:
        """Note the results, except those that are arguments."""
        of_arguments = {s._cdata for leaf in tree_leaves(arguments) if torch.is_tensor(leaf) for s in storages_of(leaf)}
        storages = {s._cdata: s for output in outputs for s in storages_of(output) if s._cdata not in of_arguments}
        self.outputs = [(weakref.ref(s), s.nbytes()) for key, s in storages.items() if key in saved.keys]
        self.dropped_bytes = sum(s.nbytes() for key, s in storages.items() if key not in saved.keys)

    def backward_begins(self) -> None:
        """Add the results that have been freed by now, because the block was checkpointed."""
        self.is_over = True
        outputs, self.outputs = self.outputs, []
        self.held_bytes += sum(size for storage, size in outputs if storage() is None)


@dataclass(eq=False)
class Record:
    """The live bytes of the first step.

    ``segments``: the peak of each, then the call of a block and how it ends the segment; None for the last segment.
    ``forwards``: weak references to the forwards, which live as long as their graphs. ``is_reached``: whether a
    backward has begun. ``start_bytes``: live before the step, without gradients. ``cost``: of the forward.
    """

    segments: list[tuple[int, Run | None, str]] = field(default_factory=list)
    forwards: list[weakref.ref[Any]] = field(default_factory=list)
    is_reached: bool = False
    start_bytes: int = 0
    cost: float = 0.0

    def held_bytes(self) -> dict[str, int]:
        """What each block would hold if it were saved, over all of its calls."""
        held: Counter[str] = Counter()
        for run in self._runs():
            held[run.path] += run.held_bytes
        return held

    def costs(self) -> dict[str, float]:
        """What it costs to recompute each block."""
        costs: dict[str, float] = {}
        for run in self._runs():
            costs[run.path] = costs.get(run.path, 0.0) + run.cost
        return costs

    def peak_bytes(self, saved: Collection[str]) -> int:
        """The peak of a step that saves these blocks."""
        most = held = 0
        for peak, run, event in self.segments:
            if run is None or run.path not in saved:
                most = max(most, peak + held)
            elif event != RECOMPUTED:
                most = max(most, peak + held - (run.dropped_bytes if event == ENDS else 0))
                held += {HELD: run.held_bytes, BEGINS: -run.held_bytes}.get(event, 0)
        return most

    def entry_bytes(self, saved: Collection[str]) -> dict[tuple[str, int], int]:
        """The live bytes at the start of every call of a block, by path and number, if these blocks are saved."""
        entries: dict[tuple[str, int], int] = {}
        held = 0
        for _, run, event in self.segments:
            if run is not None and event == HELD:
                key = run.path, run.number
                entries[key] = max(entries.get(key, 0), run.entry_bytes + held)
            if run is not None and run.path in saved:
                held += {HELD: run.held_bytes, BEGINS: -run.held_bytes}.get(event, 0)
        return entries

    def chosen(self, limit: int) -> set[str]:
        """The blocks to save within `limit`: the most expensive to recompute per byte first, of equal ones the last."""
        held, costs = self.held_bytes(), self.costs()
        saved = {path for path in held if held[path] <= 0}
        last_first = [path for path in reversed(held) if path not in saved]
        for path in sorted(last_first, key=lambda path: -costs[path] / held[path]):
            if self.peak_bytes({*saved, path}) <= limit:
                saved.add(path)
        return saved

    def _runs(self) -> Iterator[Run]:
        return (run for _, run, event in self.segments if run is not None and event == HELD)


class SavedStorages:
    """The storages that autograd saves inside of a block, by their keys."""

    def __init__(self) -> None:
        self.keys: set[int] = set()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided:
            self.keys.add(tensor.untyped_storage()._cdata)
        # The tensor itself would refer to its own graph if it is the result of the operation that saves it.
        return tensor.detach()
