"""What an offload engine has done: bytes and copies each way, the store's size, how long computing stood still."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

# Called as observer("out" or "in", event, bytes) when a copy is submitted, ("held", event, 0) where its memory may be
# used or freed from then on, ("store", engine, bytes) with the bytes that the engine has in the store now.
observers: list[Callable[[str, Any, int], object]] = []

COUNTS = ("copies_out", "copies_in", "bytes_out", "bytes_in", "shared", "found", "just_in_time", "stalls")


class Tally:
    """The counters behind ``Engine.stats``; `engine` is what observers are told."""

    def __init__(self, engine):
        self._engine = engine
        self.stored = self.store_bytes = 0
        self._timing: deque = deque()
        self.reset()

    def reset(self) -> None:
        """Set everything to zero but what is in the store."""
        self._timing.clear()
        self.counts = {**dict.fromkeys(COUNTS, 0), "seconds_copying": 0.0, "seconds_stalled": 0.0}
        self._peak = self.store_bytes

    def submitted(self, way: str, event, size: int) -> None:
        """A copy is on its way, ``"out"`` or ``"in"``."""
        self.counts[f"copies_{way}"] += 1
        self.counts[f"bytes_{way}"] += size
        _tell(way, event, size)

    def held(self, waited, stall_seconds: float, event) -> None:
        """Computing was made to wait for a copy; `waited` knows for how long, on a GPU only later."""
        self._timing.append((waited, stall_seconds, event))
        _tell("held", event, 0)
        self._clock()

    def store_changed(self, storages: int, size: int) -> None:
        """So many storages and bytes more in the store, or less."""
        self.stored += storages
        self.store_bytes += size
        self._peak = max(self._peak, self.store_bytes)
        _tell("store", self._engine, self.store_bytes)

    def as_dict(self) -> dict:
        self._clock()
        store = {"store_bytes": self.store_bytes, "store_peak_bytes": self._peak, "stored": self.stored}
        return store | self.counts

    def _clock(self) -> None:
        while self._timing and self._timing[0][0].done():
            waited, stall_seconds, copy = self._timing.popleft()
            seconds = waited.seconds()
            if seconds > stall_seconds:
                self.counts["stalls"] += 1
                self.counts["seconds_stalled"] += seconds
            self.counts["seconds_copying"] += copy.seconds()


def _tell(*what) -> None:
    for observer in observers:
        observer(*what)
