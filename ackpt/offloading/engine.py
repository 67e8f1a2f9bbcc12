"""The offload engine: which storage is where, when it is copied, and when its memory may be freed.

The unit is the *storage*: views of one storage share one copy in the store and one reload. A storage that autograd
saves goes through these states: it *stays* on the device while it is among the newest (backward needs those first);
it is *leaving* while it is copied, its memory kept; it is *away*; it is *arriving* or back. What is on the way at one
time, in either direction, is bounded in bytes.

The same code runs over every transport.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from typing import Any

import torch

from ackpt.autograd_state import version
from ackpt.errors import OffloadError

from .counters import Tally, observers
from .saved_storages import Forward, Stored, alive, root_of
from .store import Folder, Pool, host_memory, no_memory, pinned_memory
from .transport import ShapeTransport, Transport, has_no_data, transport_for

__all__ = ["Engine", "Lane", "observers"]


class Lane:
    """One device's way to the store: its transport and its pool of buffers; `is_lost` where a fork has cut it off."""

    def __init__(self, transport: Transport, pool: Pool):
        self.transport: Transport = transport
        self.pool: Pool = pool
        self.is_lost: bool = False


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    """In the child: no thread holds a lock any more, and files are still shared with the parent."""
    for engine in _engines:
        engine._lock = threading.RLock()
        if engine._folder is not None:
            for lane in engine._lanes.values():
                lane.is_lost = True
            engine._lanes, engine._known = {}, {}
            engine._folder.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Engine:
    """Moves storages between devices and one store; shared by everything that names the same store.

    Example:
        >>> import torch, ackpt
        >>> x = torch.ones(1024, 1024, requires_grad=True)
        >>> with ackpt.offload_saved_tensors(keep_last=0) as engine:
        ...     loss = (x * 2).square().sum()
        >>> engine.stats()["store_bytes"]
        4194304
        >>> loss.backward()
        >>> engine.stats()["store_bytes"]
        0
    """

    def __init__(self, store: str, folder: str | None = None, max_pinned_bytes: int | None = None):
        self._max_pinned_bytes = max_pinned_bytes
        self._folder = Folder(folder) if store == "disk" else None
        self._lanes: dict[tuple[torch.device, bool], Lane] = {}
        self._known: dict[int, list[weakref.ref[Stored]]] = {}
        self._lock = threading.RLock()
        self.returned: deque[tuple[Any, ...]] = deque()
        self._tally = Tally(self)
        _engines.add(self)

    def put(self, tensor: torch.Tensor, forward: Forward, begin: int, size: int) -> tuple[Stored, tuple[int, int]]:
        """Take bytes `begin` to `begin + size` of a tensor's storage, and their place in the order of the forward.

        What was taken already is shared.
        """
        with self._lock:
            self._settle_returned()
            stored = self._find(tensor, begin, size)
            if stored is None:
                stored = Stored(self, self._lane(tensor), forward, tensor, begin, size)
                self._known.setdefault(stored.key, []).append(weakref.ref(stored))
            else:
                self._tally.counts["shared"] += 1
            place = forward.saved(stored)
            try:
                while len(forward.staying) > forward.keep_last:
                    if (oldest := forward.staying.popleft()()) is not None:
                        self._leave(oldest)
                self._bound_leaving(forward, forward.lookahead)
            except BaseException:
                forward.over = True  # what is left of it must not trouble the next
                raise
            return stored, place

    def fetch(
        self, stored: Stored, forward: Forward, place: tuple[int, int] | None
    ) -> tuple[torch.UntypedStorage, int]:
        """``(storage, its first byte)`` on the device, ready for the current stream.

        What was saved before `place` is started on its way. Without a place, `bring_ahead` will be called later, and
        until then nothing but these bytes is on the device: what is on its way out is freed.
        """
        with self._lock:
            self._settle_returned()
            forward.over = True
            found = stored.here()
            if stored.refused:
                raise OffloadError(
                    f"a tensor saved for backward was {stored.refused}, so its gradient would be wrong. Change a clone "
                    "instead, or run backward before the change."
                )
            if found is None:
                self._tally.counts["just_in_time"] += 1
                found = self._load(stored), stored.begin
            else:
                self._tally.counts["found"] += 1
            if stored.back is not None:
                self._arrive(stored)
            elif stored.is_back(found[0]):
                stored.lane.transport.hold(stored.loaded, found[0])
            if stored.alias is not None and stored.left is not None:
                self._release(stored)
            if place is None:
                self._bound_leaving(forward, 0)
            else:
                self._bring_ahead(forward, place, stored)
            return found

    def bring_ahead(self, forward: Forward, place: tuple[int, int]) -> None:
        """Start what was saved before `place` on its way back, as far as the lookahead allows."""
        with self._lock:
            self._settle_returned()
            self._bring_ahead(forward, place)

    def stats(self) -> dict[str, int | float]:
        """Counters since the last ``reset_stats``, and what is in the store now.

        ``store_bytes``, ``store_peak_bytes``, ``stored``: bytes and storages in the store. ``pool_*``: buffers that
        were reused (hits) or allocated (misses), all their bytes, and those that could not be pinned (pageable).
        ``copies_*``, ``bytes_*``: each way. ``shared``: saved tensors whose storage was there already. ``found`` and
        ``just_in_time``: reloads that were on the device when asked for, and those that had to begin then.
        ``stalls``: how often computing stood still for a copy, ``seconds_stalled`` for how long, ``seconds_copying``
        how long the copies took; a GPU's are complete once it is synchronized.
        """
        with self._lock:
            self._settle_returned()
            pools = [lane.pool for lane in self._lanes.values()]
            return self._tally.as_dict() | {
                "pool_hits": sum(pool.hits for pool in pools),
                "pool_misses": sum(pool.misses for pool in pools),
                "pool_bytes": sum(pool.bytes for pool in pools),
                "pageable_bytes": sum(pool.fallback_bytes for pool in pools),
            }

    def reset_stats(self) -> None:
        """Set the counters to zero; what is in the store stays."""
        with self._lock:
            self._settle_returned()
            self._tally.reset()
            for lane in self._lanes.values():
                lane.pool.hits = lane.pool.misses = 0

    def release_buffers(self) -> None:
        """Give the memory or disk space of all buffers that are not in use back to the system."""
        with self._lock:
            self._settle_returned()
            for lane in self._lanes.values():
                lane.pool.clear()
            if self._folder is not None:
                self._folder.clear()

    def _find(self, tensor: torch.Tensor, begin: int, size: int) -> Stored | None:
        """The `Stored` that has these bytes already; versions can be compared between views of one root only."""
        key = tensor.untyped_storage()._cdata
        mark, root = version(tensor), root_of(tensor)
        known = []
        found = None
        for reference in self._known.get(key, ()):
            stored = reference()
            if stored is not None and stored.storage() is not None:  # an address may have a new storage by now
                known.append(reference)
                same = stored.mark == mark and stored.root() is root
                if same and stored.begin <= begin and begin + size <= stored.begin + stored.size:
                    found = stored
        if known:
            self._known[key] = known
        else:
            self._known.pop(key, None)
        return found

    def _lane(self, tensor) -> Lane:
        key = tensor.device, has_no_data(tensor)
        if key not in self._lanes:
            self._lanes[key] = self._new_lane(*key)
        return self._lanes[key]

    def _new_lane(self, device, without_data) -> Lane:
        if without_data:
            return Lane(ShapeTransport(device), Pool(no_memory))
        transport = transport_for(device)
        if self._folder is not None:
            return Lane(transport, Pool(self._folder.allocate))
        allocate = pinned_memory if device.type == "cuda" else host_memory
        return Lane(transport, Pool(allocate, host_memory, self._max_pinned_bytes))

    def _leave(self, stored: Stored) -> None:
        """Begin the copy to the store."""
        if stored.alias is None or stored.left is not None:
            return
        stored.check(stored.alias)
        lane = stored.lane
        buffer = lane.pool.take(stored.size)
        source = stored.alias.untyped_storage()
        try:
            stored.left = lane.transport.copy_out(
                source, stored.begin, buffer.bytes, stored.size, buffer.after, stored.owner
            )
        except BaseException:
            lane.pool.give(buffer, buffer.after)
            raise
        stored.buffer = buffer
        self._tally.store_changed(1, stored.size)
        self._tally.submitted("out", stored.left, stored.size)
        stored.forward.leaving.append(weakref.ref(stored))

    def _bound_leaving(self, forward: Forward, allowed: int) -> None:
        """Free the oldest sources until those on the way out are no more than `allowed` bytes."""
        on_the_way = [stored for stored in alive(forward.leaving) if stored.alias is not None]
        total = sum(stored.size for stored in on_the_way)
        while total > allowed:
            oldest = on_the_way.pop(0)
            total -= oldest.size
            self._release(oldest)
        forward.leaving = [weakref.ref(stored) for stored in on_the_way]

    def _release(self, stored: Stored) -> None:
        """Let go of the source: the copy to the store is complete for whoever computes from here on."""
        assert stored.alias is not None
        self._hold(stored.lane, stored.left)
        stored.check(stored.alias)
        stored.alias = None

    def _load(self, stored: Stored):
        """Begin the copy back to the device; returns the storage there."""
        transport = stored.lane.transport
        assert stored.buffer is not None
        if stored.lane.is_lost:
            raise OffloadError(
                "a tensor was offloaded to disk before this process was forked off, and its parent may have written "
                "over it. Run backward before the fork, or offload to host memory."
            )
        back = transport.allocate(stored.size)
        stored.loaded = transport.copy_in(stored.buffer.bytes, back, stored.size, stored.copies())
        stored.back, stored.arriving = back, True
        self._tally.submitted("in", stored.loaded, stored.size)
        return back

    def _arrive(self, stored: Stored) -> None:
        """What was loaded may be used, and lives as long as somebody does."""
        assert stored.back is not None
        if stored.arriving:
            self._hold(stored.lane, stored.loaded, stored.back)
            stored.arriving = False
        else:  # whoever came first has waited, on another stream perhaps
            stored.lane.transport.hold(stored.loaded, stored.back)
        stored.back_reference = weakref.ref(stored.back)
        stored.back = None

    def _bring_ahead(self, forward: Forward, place: tuple[int, int], held: Stored | None = None) -> None:
        wanted = forward.next(place, forward.lookahead, held)
        for other in alive(forward.ahead):  # asked for in another order than expected
            if other.back is not None and other not in wanted:
                self._arrive(other)
        for earlier in wanted:
            if earlier.alias is not None or earlier.back is not None:
                continue
            elif earlier.back_reference is not None and (storage := earlier.back_reference()) is not None:
                earlier.back = storage  # so that it outlives those who use it now
            elif earlier.here() is None:
                self._load(earlier)
        forward.ahead = [weakref.ref(earlier) for earlier in wanted]

    def _hold(self, lane, event, used=None) -> None:
        waited = lane.transport.hold(event, used)
        self._tally.held(waited, lane.transport.stall_seconds, event)

    def _settle_returned(self) -> None:
        """Take care of what the graphs have let go of since."""
        while self.returned:
            lane, key, size, alias, back, left, loaded, buffer = self.returned.popleft()
            for memory, event in ((alias, left), (back, loaded)):
                if memory is not None:
                    with contextlib.suppress(OffloadError):
                        self._hold(lane, event)
            if buffer is not None:
                self._tally.store_changed(-1, -size)
                lane.pool.give(buffer, [event for event in (left, loaded) if event is not None])
            known = [reference for reference in self._known.pop(key, ()) if reference() is not None]
            if known:
                self._known[key] = known
