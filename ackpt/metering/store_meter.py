"""Observe offload during a step: its copies, for the timeline, and the peak number of bytes in the store."""

from __future__ import annotations

import contextlib

from ackpt.offloading import counters


class StoreWatch:
    """Calls `note` with ``("copy", number, way, bytes)`` and ``("waited", number)``; tracks the store's peak bytes."""

    def __init__(self, note):
        self._note = note
        self._numbers: dict[int, int] = {}
        self._events: list = []  # kept alive, so that ids are unique
        self._live: dict = {}
        self.peak_bytes = 0

    def __call__(self, kind, source, size):
        if kind == "store":
            self._live[source] = size
            self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        elif kind == "waited":
            if id(source) in self._numbers:
                self._note(("waited", self._numbers[id(source)]))
        else:
            self._numbers[id(source)] = len(self._events)
            self._events.append(source)
            self._note(("copy", len(self._events) - 1, kind, size))


@contextlib.contextmanager
def store_watched(note):
    """A context in which `note` is called with the actions of all offload engines; yields the `StoreWatch`."""
    watch = StoreWatch(note)
    counters.observers.append(watch)
    try:
        yield watch
    finally:
        counters.observers.remove(watch)
