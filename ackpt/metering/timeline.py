"""``Timeline``: live bytes by category after every allocation and free. `experiments.reports.plots` draws it.

The CPU's allocator, the caching allocator and the prediction from shapes report the same kinds of actions in order:
allocations, frees, and the start of backward. This module assigns a category to every block, for all three.
`store_watched` reports the copies of offload and the recomputations.
"""

from __future__ import annotations

import bisect
import contextlib
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from unittest import mock

import torch.utils.checkpoint

from ackpt.core import autograd_state
from ackpt.offloading import engine

#: The categories of live bytes. ``recomputed``: by regions, by plans, and by torch's non-reentrant checkpoint.
CATEGORIES = ("parameters", "buffers", "inputs", "optimizer", "gradients", "activations", "recomputed", "temporaries")


class MeterError(ValueError):
    """A step cannot be measured or predicted as requested.

    Example:
        >>> import ackpt
        >>> try:
        ...     ackpt.measure(lambda: None, "meta")
        ... except ackpt.MeterError:
        ...     print("use predict() for shapes")
        use predict() for shapes
    """


@dataclass(frozen=True)
class Copy:
    """A copy of offloaded bytes, ``"out"`` to the store or ``"in"`` back.

    It was submitted after event number `begin`, and compute waited for it after event number `end`. The order of events
    does not tell when it ran in between.

    Example:
        >>> from ackpt.metering.timeline import Copy
        >>> Copy("out", begin=3, end=7, bytes=4096).way
        'out'
    """

    way: str
    begin: int
    end: int
    bytes: int


@dataclass(frozen=True)
class Timeline:
    """Live dynamic bytes after every allocation and free of a step: ``live[0]`` before it, ``live[i]`` after event i.

    ``categories[name][i]`` splits ``live[i]``. ``boundary`` is the number of events before backward, so that
    ``live[boundary]`` are the live bytes after the forward; ``None`` if the step ran no backward. ``copies`` are those
    of offload, in the order of their submission.

    Example:
        >>> from ackpt.metering.timeline import Timeline
        >>> activations, temporaries = (0, 64, 64, 64, 0), (0, 0, 32, 0, 0)
        >>> live = tuple(map(sum, zip(activations, temporaries)))
        >>> step = Timeline(live, {"activations": activations, "temporaries": temporaries}, boundary=2)
        >>> step.peak_bytes, step.peak_index, step.at(2)
        (96, 2, {'activations': 64, 'temporaries': 32})
    """

    live: tuple[int, ...]
    categories: dict[str, tuple[int, ...]]
    boundary: int | None
    copies: tuple[Copy, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return max(self.live)

    @property
    def peak_index(self) -> int:
        return self.live.index(self.peak_bytes)

    def at(self, index: int) -> dict[str, int]:
        """Bytes by category after event `index`."""
        return {name: series[index] for name, series in self.categories.items()}

    def thinned(self, points: int) -> Timeline:
        """A timeline of about `points` events, for a plot or a record, with the same peak, boundary and ends."""
        last = len(self.live) - 1
        selected = {0, last, self.peak_index} | ({self.boundary} if self.boundary is not None else set())
        width = max(1, -(-(last + 1) // max(1, points)))
        for start in range(0, last + 1, width):
            selected.add(max(range(start, min(start + width, last + 1)), key=self.live.__getitem__))
        order = sorted(selected)
        return Timeline(
            tuple(self.live[i] for i in order),
            {name: tuple(series[i] for i in order) for name, series in self.categories.items()},
            None if self.boundary is None else order.index(self.boundary),
            tuple(
                Copy(copy.way, bisect.bisect_left(order, copy.begin), bisect.bisect_left(order, copy.end), copy.bytes)
                for copy in self.copies
            ),
        )

    def to_json(self) -> dict[str, Any]:
        data = {"boundary": self.boundary, "categories": {name: list(s) for name, s in self.categories.items()}}
        if self.copies:
            data["copies"] = [[copy.way, copy.begin, copy.end, copy.bytes] for copy in self.copies]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Timeline:
        categories = {name: tuple(series) for name, series in data["categories"].items()}
        copies = tuple(Copy(*copy) for copy in data.get("copies", ()))
        return cls(tuple(map(sum, zip(*categories.values()))), categories, data["boundary"], copies)


def build_timeline(actions, before=None, after=None) -> Timeline:
    """Build a Timeline from an allocator's actions in order.

    Actions are tuples: ``("alloc", key, bytes)``, ``("free", key)``, ``("mark", key, category)`` for the present block
    with this key, ``("backward",)`` at the start of backward, ``("copy", number, way, bytes)`` when offload submits a
    copy and ``("waited", number)`` when compute waits for it, ``("recompute",)`` and ``("recomputed",)`` around what is
    recomputed (`ackpt.core.autograd_state.observers`). `before` maps keys of blocks that exist before the step
    to ``(category, bytes)``; `after` maps keys of blocks that exist after the step to their category.

    A block has one category. Blocks without a mark are activations if they were allocated in the forward and are live
    when backward begins, recomputed if they were allocated in a recomputation and are live when it ends, else
    temporaries. Frees of unknown keys are ignored.
    """
    blocks = []  # [bytes, event of allocation, event of free, category]
    by_key = {}
    for key, (category, size) in (before or {}).items():
        blocks.append([size, 0, None, category])
        by_key[key] = blocks[-1]
    live = [sum(block[0] for block in blocks)]
    boundary = None
    submitted: dict[int, list] = {}
    new: list[Any] = []  # keys that were allocated since the last recomputation began or ended

    def free(key, event):
        block = by_key.pop(key)
        block[2] = event
        return block[0]

    for kind, *rest in actions:
        if kind == "alloc":
            key, size = rest
            event = len(live)
            # A free can go unreported, for example one in another thread.
            lost = free(key, event) if key in by_key else 0
            live.append(live[-1] + size - lost)
            blocks.append([size, event, None, None])
            by_key[key] = blocks[-1]
            new.append(key)
        elif kind == "free" and rest[0] in by_key:
            live.append(live[-1] - free(rest[0], len(live)))
        elif kind == "mark" and rest[0] in by_key:
            by_key[rest[0]][3] = rest[1]
        elif kind in ("recompute", "recomputed"):
            for key in new if kind == "recomputed" else ():
                if key in by_key and by_key[key][3] is None:
                    by_key[key][3] = "recomputed"
            new.clear()
        elif kind == "backward" and boundary is None:
            boundary = len(live) - 1
        elif kind == "copy":
            number, way, size = rest
            submitted[number] = [way, len(live) - 1, None, size]
        elif kind == "waited" and submitted[rest[0]][2] is None:
            submitted[rest[0]][2] = len(live) - 1
    for key, category in (after or {}).items():
        if key in by_key:
            by_key[key][3] = category

    changes = {name: [0] * len(live) for name in CATEGORIES}
    for size, allocated, freed, category in blocks:
        if category is None:
            is_saved = boundary is not None and allocated <= boundary and (freed is None or freed > boundary)
            category = "activations" if is_saved else "temporaries"
        changes[category][allocated] += size
        if freed is not None:
            changes[category][freed] -= size
    return Timeline(
        tuple(live),
        {name: tuple(accumulate(series)) for name, series in changes.items() if any(series)},
        boundary,
        tuple(
            Copy(way, begin, len(live) - 1 if end is None else end, size)
            for way, begin, end, size in submitted.values()
        ),
    )


class StoreWatch:
    """Calls `note` with ``("copy", number, way, bytes)`` and ``("waited", number)``; tracks the store's peak bytes."""

    def __init__(self, note):
        self._note = note
        self._numbers: dict[Any, int] = {}  # by event
        self._live: dict = {}
        self.peak_bytes = 0

    def __call__(self, kind, source, size):
        if kind == "store":
            self._live[source] = size
            self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        elif kind == "waited":
            if source in self._numbers:
                self._note(("waited", self._numbers[source]))
        else:
            number = self._numbers[source] = len(self._numbers)
            self._note(("copy", number, kind, size))


@contextlib.contextmanager
def store_watched(note):
    """A context, of a `StoreWatch`, in which `note` gets the actions of all offload engines and recomputations."""
    watch = StoreWatch(note)
    engine.observers.append(watch)
    autograd_state.observers.append(note)
    try:
        with _recomputations_of_torch():
            yield watch
    finally:
        engine.observers.remove(watch)
        autograd_state.observers.remove(note)


@contextlib.contextmanager
def _recomputations_of_torch():
    """A context in which torch's non-reentrant checkpoint tells the observers when it recomputes.

    Torch has no public hook for it. It enters a context of its own, for the saved tensors of the recomputation.
    """
    context = torch.utils.checkpoint._recomputation_hook

    class Reporting(context):
        def __enter__(self):
            autograd_state.recomputation_begins()
            return super().__enter__()

        def __exit__(self, *args):
            autograd_state.recomputation_ends()
            return super().__exit__(*args)

    # A measured step can plan, and with it predict, so that `context` already is such a class: both report to all.
    replaced = context if context.__name__ == Reporting.__name__ else Reporting
    with mock.patch.object(torch.utils.checkpoint, "_recomputation_hook", replaced):
        yield
