"""The counters of an offload engine: bytes and copies in each direction, bytes in the store, time lost to waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

# Each observer is called with ("out" or "in", event, bytes) when a copy is submitted, with ("waited", event, 0) when
# compute waits for a copy, whose memory may be used or freed afterwards, and with ("store", engine, bytes) when the
# number of bytes that an engine has in its store changes.
observers: list[Callable[[str, Any, int], object]] = []

COUNTS = ("copies_out", "copies_in", "bytes_out", "bytes_in", "shared", "found", "just_in_time", "stalls")


class Counters:
    """The counters that ``Engine.stats`` returns; `engine` is passed on to the observers."""

    def __init__(self, engine):
        self._engine = engine
        self.stored = self.store_bytes = 0
        self._unfinished_waits: deque = deque()
        self.reset()

    def reset(self) -> None:
        """Set all counters to zero, except those of the store's present content."""
        self._unfinished_waits.clear()
        self.counts = {**dict.fromkeys(COUNTS, 0), "seconds_copying": 0.0, "seconds_stalled": 0.0}
        self._peak = self.store_bytes

    def submitted(self, direction: str, event, size: int) -> None:
        """Count a copy that was submitted, ``"out"`` or ``"in"``."""
        self.counts[f"copies_{direction}"] += 1
        self.counts[f"bytes_{direction}"] += size
        _notify(direction, event, size)

    def waited(self, wait, stall_seconds: float, event) -> None:
        """Count a wait for a copy. ``wait.seconds()`` is its duration, which a GPU knows only after the wait."""
        self._unfinished_waits.append((wait, stall_seconds, event))
        _notify("waited", event, 0)
        self._add_finished_waits()

    def store_changed(self, storages: int, size: int) -> None:
        """Add a number of storages and bytes, negative if they leave, to the content of the store."""
        self.stored += storages
        self.store_bytes += size
        self._peak = max(self._peak, self.store_bytes)
        _notify("store", self._engine, self.store_bytes)

    def as_dict(self) -> dict:
        self._add_finished_waits()
        store = {"store_bytes": self.store_bytes, "store_peak_bytes": self._peak, "stored": self.stored}
        return store | self.counts

    def _add_finished_waits(self) -> None:
        while self._unfinished_waits and self._unfinished_waits[0][0].done():
            wait, stall_seconds, copy = self._unfinished_waits.popleft()
            seconds = wait.seconds()
            if seconds > stall_seconds:
                self.counts["stalls"] += 1
                self.counts["seconds_stalled"] += seconds
            self.counts["seconds_copying"] += copy.seconds()


def _notify(*event) -> None:
    for observer in observers:
        observer(*event)
