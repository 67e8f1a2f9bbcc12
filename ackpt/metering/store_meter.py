"""What offload does during a step: the copies, for the timeline, and the highest number of bytes in the store."""

from __future__ import annotations

import contextlib

from ackpt.offloading import counters


class StoreWatch:
    """Hands ``("copy", number, way, bytes)`` and ``("held", number)`` to `note`; knows the store's peak in bytes."""

    def __init__(self, note):
        self._note = note
        self._numbers: dict[int, int] = {}
        self._events: list = []  # alive, so that no other gets the same id
        self._live: dict = {}
        self.peak_bytes = 0

    def __call__(self, what, source, size):
        if what == "store":
            self._live[source] = size
            self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        elif what == "held":
            if id(source) in self._numbers:
                self._note(("held", self._numbers[id(source)]))
        else:
            self._numbers[id(source)] = len(self._events)
            self._events.append(source)
            self._note(("copy", len(self._events) - 1, what, size))


@contextlib.contextmanager
def store_watched(note):
    """Inside, `note` is called with the actions of the offload engines; yields the `StoreWatch`."""
    watch = StoreWatch(note)
    counters.observers.append(watch)
    try:
        yield watch
    finally:
        counters.observers.remove(watch)
