"""`Record`: what the first step allocated, from which the peak of every choice of saved blocks follows.

The first step checkpoints all blocks. A saved block would hold its activations from the end of its forward until its
backward begins, where the region recomputes them. So the peak of a choice is the largest of the peaks between two such
events, without recomputations of saved blocks, each increased by the bytes that the saved blocks hold at that time.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ackpt.metering.resident import storages_of

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
        given = {s._cdata for leaf in tree_leaves(arguments) if torch.is_tensor(leaf) for s in storages_of(leaf)}
        storages = {s._cdata: s for output in outputs for s in storages_of(output) if s._cdata not in given}
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
        held: dict[str, int] = defaultdict(int)
        for run in self._runs():
            held[run.path] += run.held_bytes
        return held

    def costs(self) -> dict[str, float]:
        """What it costs to recompute each block."""
        costs: dict[str, float] = defaultdict(float)
        for run in self._runs():
            costs[run.path] += run.cost
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
        """The blocks to save within `limit`: the most expensive to recompute per byte first, of equal ones the last.

        Example:
            >>> first, second = (Run(path, 0, 0, held_bytes=100, cost=1.0) for path in ("first", "second"))
            >>> events = [(50, first, HELD), (60, second, HELD), (90, second, BEGINS), (190, second, RECOMPUTED)]
            >>> record = Record([*events, (160, second, ENDS), (150, first, BEGINS), (250, first, ENDS)])
            >>> [sorted(record.chosen(limit)) for limit in (250, 289, 290)]
            [['second'], ['second'], ['first', 'second']]
        """
        held, costs = self.held_bytes(), self.costs()
        saved = {path for path in held if held[path] <= 0}
        places = {path: place for place, path in enumerate(held)}
        left = sorted(held.keys() - saved, key=lambda path: (-costs[path] / held[path], -places[path]))
        for path in left:
            if self.peak_bytes({*saved, path}) <= limit:
                saved.add(path)
        return saved

    def _runs(self) -> Iterator[Run]:
        return (run for _, run, event in self.segments if run is not None and event == HELD)


class SavedStorages:
    """The storages that autograd saves inside of a block, by their keys, and how many of them are of numbers."""

    def __init__(self) -> None:
        self.keys: set[int] = set()
        self.numbers = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided:
            self.numbers += tensor.dim() == 0 and tensor.dtype is torch.float64
            self.keys.add(tensor.untyped_storage()._cdata)
        # The tensor itself would refer to its own graph if it is the result of the operation that saves it.
        return tensor.detach()
