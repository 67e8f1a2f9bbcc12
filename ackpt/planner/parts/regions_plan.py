"""`RegionsPlan`: which blocks of a model are saved and which are checkpointed; `Record`: what it is made from.

A saved block would hold its activations from the end of its forward until its backward begins, where the region
recomputes them. So the peak of a choice is the largest of the peaks between such events in the first step, without what
only regions do, each increased by the bytes that the saved blocks hold at that time.
"""

import contextlib
import os
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from ackpt.metering.meter import memory_format
from ackpt.metering.resident import storages_of
from ackpt.planner.capture.call_facts import Sizes
from ackpt.planner.schedule.plan import PlanError

from .live_bytes import RNG_STATE_BYTES, _top_hooks

SAVED, CHECKPOINTED = "saved", "checkpointed"


@dataclass(frozen=True)
class RegionsPlan:
    """The plan of a step that cannot be one graph.

    The plan is made from what the first step with gradients allocates, in which all blocks are checkpointed. Until it
    has ended, ``peak_bytes`` is the budget if that is in bytes, and all other byte counts except ``resident_bytes`` and
    ``limit_bytes`` are None.

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
        if self.baseline_peak_bytes is None or self.peak_bytes is None:
            return f"<RegionsPlan: {self._fates()}; the plan is made from the first training step>"
        return f"<RegionsPlan: peak {memory_format(self.peak_bytes)}, {self._fates()}; table() says more>"

    @property
    def dynamic_peak_bytes(self) -> int | None:
        """The peak without resident bytes; None if that is not known."""
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
        if self.baseline_peak_bytes is None or self.peak_bytes is None:
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


@dataclass(eq=False)
class Run:
    """One call of a block as a region, in the forward of the first step.

    ``number``: how many calls of the block came before in this forward. ``entry_bytes``: live when it began.
    ``held_bytes``: what its graph holds in addition to what the region saves; ``left_bytes``: what the region leaves
    allocated. ``cost``: of what its recomputation runs. ``is_over``: whether its backward has begun. ``outputs``: weak
    references to those that the graph saves.
    """

    path: str
    number: int
    entry_bytes: int
    left_bytes: int = 0
    held_bytes: int = 0
    cost: float = 0.0
    is_over: bool = False
    outputs: list[weakref.ref] = field(default_factory=list)


class Segment(NamedTuple):
    """The live bytes of a part of the first step: their ``peak``, and how it differs if the block of ``run`` is saved.

    ``shift``: added to the peak then; None if the block does not run this part then. ``change``: the bytes that the
    block then holds from the end of this part on, in addition to those before.
    """

    peak: int
    run: Run | None = None
    shift: int | None = 0
    change: int = 0


class Need(NamedTuple):
    """The bytes that blocks as regions add to the live bytes, and their peak beyond the live bytes at their start."""

    growth_bytes: int = 0
    peak_bytes: int = 0


NOTHING = Need()


@dataclass(eq=False)
class Record:
    """The live bytes of the first step.

    ``forwards``: weak references to the forwards, which live as long as their graphs. ``is_reached``: whether a
    backward has begun. ``start_bytes``: live before the step, without gradients. ``cost``: of the forward.
    """

    segments: list[Segment] = field(default_factory=list)
    forwards: list[weakref.ref[Any]] = field(default_factory=list)
    is_reached: bool = False
    start_bytes: int = 0
    cost: float = 0.0

    def holds(self, live: Any, run: Run, size: int) -> None:
        """End a segment: from now on, the block of `run` holds `size` more bytes if it is saved."""
        if size and not run.is_over:
            self.segments.append(Segment(live.segment_peak(), run, change=size))
            run.held_bytes += size

    def end(self) -> None:
        """Record nothing further."""
        for run in self._runs():
            run.is_over = True

    def forget(self, run: Run) -> None:
        """Count the segments of `run` as those of code outside of blocks."""
        self.segments = [Segment(each.peak) if each.run is run else each for each in self.segments]

    def held_bytes(self) -> dict[str, int]:
        """What each block would hold if it were saved, over all of its calls."""
        held: Counter[str] = Counter()
        for run in self._runs():
            held[run.path] += run.held_bytes
        return held

    def needs(self) -> dict[str, Need]:
        """The bytes that each block needs as a region."""
        runs = [*self._runs()]
        growth = {run.path: run.left_bytes for run in runs}
        for run, following in zip(runs, runs[1:]):
            growth[run.path] = max(growth[run.path], following.entry_bytes - run.entry_bytes)
        peaks = {run.path: 0 for run in runs}
        for peak, run, _, change in self.segments:
            if run is not None and not change:  # it runs
                peaks[run.path] = max(peaks[run.path], peak - run.entry_bytes)
        return {path: Need(growth[path], peaks[path]) for path in growth}

    def costs(self) -> dict[str, float]:
        """What it costs to recompute each block."""
        costs: dict[str, float] = {}
        for run in self._runs():
            costs[run.path] = costs.get(run.path, 0.0) + run.cost
        return costs

    def peak_bytes(self, saved: Collection[str], others: Need = NOTHING) -> int:
        """The peak of a step that saves these blocks, if `others` run as regions at any place, too."""
        most = held = left = 0
        for peak, run, shift, change in self.segments:
            if run is None or run.path not in saved:
                most = max(most, peak + held)
            else:
                if shift is not None:
                    most = max(most, peak + held + shift)
                held += change
            if run is not None:
                left = max(left, run.entry_bytes + run.left_bytes + held)
        return max(most, left + others.peak_bytes) + others.growth_bytes

    def entry_bytes(self, saved: Collection[str]) -> dict[tuple[str, int], int]:
        """The live bytes at the start of every call of a block, by path and number, if these blocks are saved."""
        entries: dict[tuple[str, int], int] = {}
        seen: set[Run] = set()
        held = 0
        for _, run, _, change in self.segments:
            if run is None:
                continue
            if run not in seen:
                seen.add(run)
                key = run.path, run.number
                entries[key] = max(entries.get(key, 0), run.entry_bytes + held)
            if run.path in saved:
                held += change
        return entries

    def chosen(self, limit: int, others: Need = NOTHING) -> set[str]:
        """The blocks to save within `limit`: the most expensive to recompute per byte first, of equal ones the last."""
        held, costs = self.held_bytes(), self.costs()
        saved = {path for path in held if held[path] <= 0}
        last_first = [path for path in reversed(held) if path not in saved]
        for path in sorted(last_first, key=lambda path: -costs[path] / held[path]):
            if self.peak_bytes({*saved, path}, others) <= limit:
                saved.add(path)
        return saved

    def calls(self) -> set[tuple[str, int]]:
        """The calls of blocks, by path and number."""
        return {(run.path, run.number) for run in self._runs()}

    def _runs(self) -> Iterable[Run]:
        return dict.fromkeys(each.run for each in self.segments if each.run is not None)


class SavedStorages:
    """The storages that autograd saves inside of a block, by their keys."""

    def __init__(self) -> None:
        self.keys: set[int] = set()
        self.outer: Any = torch.Tensor.detach  # the hook of the region

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided:
            self.keys.add(tensor.untyped_storage()._cdata)
        # The tensor itself would refer to its own graph if it is the result of the operation that saves it.
        return self.outer(tensor)


def hold_outputs(outputs, saved: SavedStorages, arguments: Any, live, record, run: Run) -> None:
    """Count the outputs that the graph of a block saves as held by it once nothing else refers to them."""
    given = {s._cdata for leaf in tree_leaves(arguments) if torch.is_tensor(leaf) for s in storages_of(leaf)}
    for key, storage in {s._cdata: s for output in outputs for s in storages_of(output)}.items():
        if key in saved.keys - given:
            freed = partial(_output_freed, live, record, run, key, storage.nbytes())
            run.outputs.append(weakref.ref(storage, freed))


def _output_freed(live, record, run: Run, key: int, size: int, _) -> None:
    live.freed(key)
    if (open_record := record()) is not None:
        open_record.holds(live, run, size)


@contextlib.contextmanager
def first_forward(live):
    """Count what a region allocates for random numbers: it reads the state of torch's generator twice."""
    yield
    with live.more(RNG_STATE_BYTES):
        pass


@contextlib.contextmanager
def recorded_run(live, record: Record, run: Run, storages: SavedStorages):
    """Record what a block costs, saves and holds at its end."""
    cost, start = live.cost, live.bytes
    storages.outer = (_top_hooks(True) or (storages.outer,))[0]
    record.segments.append(Segment(live.segment_peak(), run, None))
    with first_forward(live), torch.autograd.graph.saved_tensors_hooks(storages.pack, lambda tensor: tensor):
        yield
        run.cost, run.held_bytes = live.cost - cost, live.bytes - start
        record.segments.append(Segment(live.segment_peak(), run, run.entry_bytes - start))


def is_within(sizes: Sizes, largest: Sizes) -> bool:
    """Whether no tensor is larger than the other call's in any dimension, or in the unused bytes of its storage."""
    pairs = (
        pair
        for (size, _, unused), (most, _, most_unused) in zip(sizes, largest)
        for pair in zip((*size, unused), (*most, most_unused))
    )
    return all(size <= most for size, most in pairs)
