"""The offload engine: decides when a saved storage is copied to the store and back, and when its memory is freed.

The unit is the *storage*: views of one storage share one copy in the store and one reload. A saved storage is on the
device while it is among the newest, which backward reads first. Then it is being copied out, with its memory still
allocated, then in the store alone, then being copied in, and on the device again. The bytes being copied at one time
are bounded in each direction. The same code runs over every transport.

An `OffloadedStorage` is owned by the tensors that autograd saved, so it is freed with the graph that needs it, whether
a backward, an exception or a dropped loss ends that graph. A `ForwardState` refers to its storages weakly.
"""

import contextlib
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ackpt.core.autograd_state import version
from ackpt.core.errors import OffloadError

from .store import Buffer, Folder, Pool, Slabs, host_memory, no_memory, pinned_memory
from .transport import Transport, transport_for

__all__ = ["Engine", "observers"]

# Each observer is called with ("out" or "in", event, bytes) when a copy is submitted, with ("waited", event, 0) when
# compute waits for a copy, whose memory may be used or freed afterwards, and with ("store", engine, bytes) when the
# number of bytes that an engine has in its store changes.
observers: list[Callable[[str, Any, int], object]] = []

_COUNTS = ("copies_out", "copies_in", "bytes_out", "bytes_in", "shared", "found", "just_in_time", "stalls")

_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


def _after_fork() -> None:
    """Replace the locks in a forked child, and give up files, which the child still shares with its parent."""
    for engine in _engines:
        engine._lock = threading.RLock()
        if engine._folder is not None:
            for device_store in engine._device_stores.values():
                device_store.is_lost = True
            engine._device_stores, engine._storages = {}, {}
            engine._folder.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass(eq=False)
class DeviceStore:
    """The transport and the buffer pool of one device. `is_lost`: a fork has cut this process off from the buffers."""

    transport: Transport
    pool: Pool
    is_lost: bool = False


class ForwardState:
    """The storages saved in one forward, in order, and which of them are being copied out or prefetched."""

    def __init__(self, keep_last: int, lookahead: int | None, of_regions: bool):
        self.keep_last: int = keep_last
        self._of_regions = of_regions
        self._lookahead = lookahead
        self._saved_by_node: list[list[weakref.ref[OffloadedStorage]]] = []  # one list per node of the graph
        self._node = -1  # sequence number of the last node in that list
        self.newest: deque[weakref.ref[OffloadedStorage]] = deque()  # not copied yet
        self.copying_out: list[weakref.ref[OffloadedStorage]] = []
        self.prefetched: list[weakref.ref[OffloadedStorage]] = []
        self.largest: int = 0
        self.is_over: bool = False  # backward has begun, or the forward has failed

    @property
    def lookahead(self) -> int:
        """Bytes that running copies in one direction may occupy; by default those of the largest storage or region."""
        return self.largest if self._lookahead is None else self._lookahead

    def record(self, stored: "OffloadedStorage") -> tuple[int, int]:
        """Record that `stored` was saved, perhaps again; return the position of this save: (node, count in node)."""
        reference = weakref.ref(stored)
        if reference in self.newest:
            self.newest.remove(reference)
        if stored.copy_out is None:
            self.newest.append(reference)
        if (node := torch.autograd._get_sequence_nr()) != self._node:
            self._node = node
            self._saved_by_node.append([])
        self._saved_by_node[-1].append(reference)
        together = dict.fromkeys(live(self._saved_by_node[-1])) if self._of_regions else [stored]
        self.largest = max(self.largest, sum(other.size for other in together))
        return len(self._saved_by_node) - 1, len(self._saved_by_node[-1])

    def next_in_backward(
        self, position: tuple[int, int], allowed: int, free: "OffloadedStorage | None" = None
    ) -> "list[OffloadedStorage]":
        """The storages that backward is expected to read after `position`, up to `allowed` bytes besides `free`."""
        node, count = position
        upcoming: list[OffloadedStorage] = []
        expected = itertools.chain(self._saved_by_node[node][count:], *self._saved_by_node[:node][::-1])
        for stored in live(expected):
            if stored not in upcoming:
                allowed -= stored.size if stored is not free else 0
                if allowed < 0:
                    break
                upcoming.append(stored)
        return upcoming

    def is_empty(self) -> bool:
        return not any(live(itertools.chain(*self._saved_by_node)))


class OffloadedStorage:
    """One storage, or a range of its bytes: on its device, being copied, or in the store."""

    def __init__(
        self,
        returned: deque[tuple[Any, ...]],
        device_store: DeviceStore,
        forward: ForwardState,
        tensor: torch.Tensor,
        begin: int,
        size: int,
    ):
        self.returned: deque[tuple[Any, ...]] = returned
        self.device_store: DeviceStore = device_store
        self.forward: ForwardState = forward
        self.begin: int = begin
        self.size: int = size
        self.version: int = version(tensor)
        # Shares the storage and the version counter, but has no autograd history.
        self.alias: torch.Tensor | None = tensor.detach()
        self.stream: Any = device_store.transport.current()  # the stream that the memory belongs to
        self.root: weakref.ref[torch.Tensor] = weakref.ref(root_of(tensor))
        self.original: weakref.ref[torch.Tensor] = weakref.ref(tensor)
        storage = tensor.untyped_storage()
        self.storage_id: int = storage._cdata
        self.storage: weakref.ref[torch.UntypedStorage] = weakref.ref(storage)
        self.buffer: Buffer | None = None
        self.copy_out: Any = None  # the event of the copy to the store
        self.copy_in: Any = None  # the event of the last copy back
        self.copy_in_pending: bool = False  # nothing has waited for it yet
        self.reloaded: torch.UntypedStorage | None = None  # on the device, not yet handed to autograd
        self.reloaded_reference: weakref.ref[torch.UntypedStorage] | None = None  # once it is
        self.refusal: str | None = None

    def on_device(self) -> tuple[torch.UntypedStorage, int] | None:
        """``(storage, number of its first byte)`` if the bytes are on the device, else None."""
        if self.alias is not None:
            self.check_version(self.alias)
            return self.alias.untyped_storage(), 0
        storage = self.handed_over() if self.reloaded is None else self.reloaded
        if storage is not None:
            return storage, self.begin
        original, storage = self.original(), self.storage()
        if (
            original is not None
            and storage is not None
            and storage is original.untyped_storage()
            and version(original) == self.version
        ):
            return storage, 0
        return None

    def handed_over(self) -> torch.UntypedStorage | None:
        """The result of the last copy back, if autograd got it and still has it."""
        return None if self.reloaded_reference is None else self.reloaded_reference()

    def check_version(self, tensor: torch.Tensor) -> None:
        """Refuse the storage from now on if `tensor` was modified since it was saved."""
        if version(tensor) != self.version:
            self.refusal = "modified in place after it was saved for backward, before its copy was complete"

    def __del__(self) -> None:
        # Runs in any thread, at any point of a program: only queue the memory that a copy may still read or write.
        alias = self.alias if self.copy_out is not None else None
        reloaded = self.reloaded if self.copy_in_pending else None
        self.returned.append(
            (self.device_store, self.storage_id, self.size, alias, reloaded, self.copy_out, self.copy_in, self.buffer)
        )


def root_of(tensor: torch.Tensor) -> torch.Tensor:
    """The base tensor of a view, or the tensor itself; only views of one base are sure to share a version counter."""
    return tensor if tensor._base is None else tensor._base


def live(references: Iterable[weakref.ref[OffloadedStorage]]) -> Iterator[OffloadedStorage]:
    """The referents of weak references that still exist."""
    return (stored for reference in references if (stored := reference()) is not None)


class Engine:
    """Copies storages between devices and one store; shared by all contexts and regions that name the same store.

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
        self._device_stores: dict[tuple[torch.device, bool], DeviceStore] = {}
        self._storages: dict[int, list[weakref.ref[OffloadedStorage]]] = {}  # by the storage's `_cdata`
        self._lock = threading.RLock()
        self.returned: deque[tuple[Any, ...]] = deque()  # what graphs have released, filled by `OffloadedStorage`
        self._stored = self._store_bytes = 0
        self._unfinished_waits: deque[tuple[Any, ...]] = deque()  # a wait, the longest that is no stall, and the copy
        self._reset_counts()
        _engines.add(self)

    def put(
        self, tensor: torch.Tensor, forward: ForwardState, begin: int, size: int
    ) -> tuple[OffloadedStorage, tuple[int, int]]:
        """Take over `size` bytes of a tensor's storage from `begin` on, or share them; return (storage, position)."""
        with self._lock:
            self._recycle_returned()
            stored = self._find(tensor, begin, size)
            if stored is None:
                device_store = self._device_store(tensor)
                stored = OffloadedStorage(self.returned, device_store, forward, tensor, begin, size)
                self._storages.setdefault(stored.storage_id, []).append(weakref.ref(stored))
            else:
                self._counts["shared"] += 1
            position = forward.record(stored)
            try:
                while len(forward.newest) > forward.keep_last:
                    if (oldest := forward.newest.popleft()()) is not None:
                        self._copy_out(oldest)
                self._bound_copies_out(forward, forward.lookahead)
            except BaseException:
                forward.is_over = True  # so that the next forward of regions does not continue this one
                raise
            return stored, position

    def fetch(
        self, stored: OffloadedStorage, forward: ForwardState, position: tuple[int, int] | None
    ) -> tuple[torch.UntypedStorage, int]:
        """``(storage, number of its first byte)`` on the device, ready for the current stream.

        Also prefetches what was saved before `position`, unless it is None: then the caller calls `prefetch` later.
        """
        with self._lock:
            self._recycle_returned()
            forward.is_over = True
            location = stored.on_device()
            if stored.refusal:
                raise OffloadError(
                    f"a tensor saved for backward was {stored.refusal}, so its gradient would be wrong. Change a clone "
                    "instead, or run backward before the change."
                )
            if location is None:
                self._counts["just_in_time"] += 1
                location = self._copy_in(stored), stored.begin
            else:
                self._counts["found"] += 1
            if stored.reloaded is not None:
                self._hand_over(stored)
            elif stored.handed_over() is location[0]:
                stored.device_store.transport.wait_event(stored.copy_in, location[0])
            if stored.alias is not None and stored.copy_out is not None:
                self._free_source(stored)
            if position is None:
                self._bound_copies_out(forward, 0)
            else:
                self.prefetch(forward, position, stored)
            return location

    def prefetch(
        self, forward: ForwardState, position: tuple[int, int], current: OffloadedStorage | None = None
    ) -> None:
        """Start copies back of what was saved before `position`, as many as the lookahead allows besides `current`."""
        with self._lock:
            self._recycle_returned()
            upcoming = forward.next_in_backward(position, forward.lookahead, current)
            for other in live(forward.prefetched):  # backward reads in another order than expected
                if other.reloaded is not None and other not in upcoming:
                    self._hand_over(other)
            for stored in upcoming:
                if stored.alias is not None or stored.reloaded is not None:
                    continue
                elif (storage := stored.handed_over()) is not None:
                    stored.reloaded = storage  # so that it outlives its present owners
                elif stored.on_device() is None:
                    self._copy_in(stored)
            forward.prefetched = [weakref.ref(stored) for stored in upcoming]

    def stats(self) -> dict[str, int | float]:
        """The counters since the last ``reset_stats``, and the present content of the store.

        ``store_bytes``, ``store_peak_bytes``, ``stored``: bytes and storages in the store. ``pool_hits`` and
        ``pool_misses``: buffers reused and allocated; ``pool_bytes``: bytes of the memory that contains all buffers,
        with pinned blocks as torch rounds them; ``pageable_bytes``: of those that could not be pinned. ``copies_*``,
        ``bytes_*``: in each direction. ``shared``: saved tensors whose storage the engine already had. ``found``: saved
        tensors that were on the device when backward read them; ``just_in_time``: those whose copy back started only
        then. ``stalls``: how often compute waited for a copy. ``seconds_stalled``, ``seconds_copying``: duration of
        these waits and of the copies, in seconds; on a GPU they are complete once it is synchronized.
        """
        with self._lock:
            self._recycle_returned()
            pools = [device_store.pool for device_store in self._device_stores.values()]
            self._add_finished_waits()
            return {
                "store_bytes": self._store_bytes,
                "store_peak_bytes": self._peak,
                "stored": self._stored,
                **self._counts,
                "pool_hits": sum(pool.hits for pool in pools),
                "pool_misses": sum(pool.misses for pool in pools),
                "pool_bytes": sum(pool.allocated_bytes for pool in pools),
                "pageable_bytes": sum(pool.fallback_bytes for pool in pools),
            }

    def reset_stats(self) -> None:
        """Set the counters to zero. The content of the store does not change."""
        with self._lock:
            self._recycle_returned()
            self._reset_counts()
            for device_store in self._device_stores.values():
                device_store.pool.hits = device_store.pool.misses = 0

    def release_buffers(self) -> None:
        """Return the memory or disk space of all unused buffers to the system."""
        with self._lock:
            self._recycle_returned()
            for device_store in self._device_stores.values():
                device_store.pool.clear()
            if self._folder is not None:
                self._folder.clear()

    def _find(self, tensor: torch.Tensor, begin: int, size: int) -> OffloadedStorage | None:
        """The `OffloadedStorage` that covers these bytes, or None."""
        key = tensor.untyped_storage()._cdata
        current, root = version(tensor), root_of(tensor)
        references = []
        match = None
        for reference in self._storages.get(key, ()):
            stored = reference()
            if stored is not None and stored.storage() is not None:  # a new storage may have the same address by now
                references.append(reference)
                # Versions are comparable only between views of one base.
                same = stored.version == current and stored.root() is root
                if same and stored.begin <= begin and begin + size <= stored.begin + stored.size:
                    match = stored
        if references:
            self._storages[key] = references
        else:
            self._storages.pop(key, None)
        return match

    def _device_store(self, tensor) -> DeviceStore:
        key = device, without_data = tensor.device, tensor.is_meta or isinstance(tensor, FakeTensor)
        if key not in self._device_stores:
            limit = self._max_pinned_bytes
            if without_data:
                pool = Pool(no_memory)
            elif self._folder is not None:
                pool = Pool(self._folder.allocate)
            else:
                pool = Pool(Slabs(pinned_memory, limit) if device.type == "cuda" else host_memory, host_memory, limit)
            transport = Transport(device) if without_data else transport_for(device)
            self._device_stores[key] = DeviceStore(transport, pool)
        return self._device_stores[key]

    def _copy_out(self, stored: OffloadedStorage) -> None:
        """Start the copy to the store."""
        if stored.alias is None or stored.copy_out is not None:
            return
        stored.check_version(stored.alias)
        device_store = stored.device_store
        buffer = device_store.pool.take(stored.size)
        source = stored.alias.untyped_storage()
        try:
            stored.copy_out = device_store.transport.copy_out(
                source, stored.begin, buffer.bytes, stored.size, buffer.after, stored.stream
            )
        except BaseException:
            device_store.pool.give(buffer, buffer.after)
            raise
        stored.buffer = buffer
        self._store_changed(1, stored.size)
        self._submitted("out", stored.copy_out, stored.size)
        stored.forward.copying_out.append(weakref.ref(stored))

    def _bound_copies_out(self, forward: ForwardState, allowed: int) -> None:
        """Free the oldest sources of copies out until the rest takes at most `allowed` bytes."""
        copying_out = [stored for stored in live(forward.copying_out) if stored.alias is not None]
        total = sum(stored.size for stored in copying_out)
        while total > allowed:
            oldest = copying_out.pop(0)
            total -= oldest.size
            self._free_source(oldest)
        forward.copying_out = [weakref.ref(stored) for stored in copying_out]

    def _free_source(self, stored: OffloadedStorage) -> None:
        """Let compute wait for the copy to the store, then drop the reference to its source."""
        assert stored.alias is not None
        self._wait(stored.device_store, stored.copy_out)
        stored.check_version(stored.alias)
        stored.alias = None

    def _copy_in(self, stored: OffloadedStorage):
        """Start the copy back to the device; return the new storage there."""
        transport = stored.device_store.transport
        assert stored.buffer is not None
        if stored.device_store.is_lost:
            raise OffloadError(
                "a tensor was offloaded to disk before this process was forked off, and its parent may have written "
                "over it. Run backward before the fork, or offload to host memory."
            )
        reloaded = transport.allocate(stored.size)
        running = _events(stored.copy_out, stored.copy_in)
        stored.copy_in = transport.copy_in(stored.buffer.bytes, reloaded, stored.size, running)
        stored.reloaded, stored.copy_in_pending = reloaded, True
        self._submitted("in", stored.copy_in, stored.size)
        return reloaded

    def _hand_over(self, stored: OffloadedStorage) -> None:
        """Let compute wait for the copy back; from then on only autograd's tensors own the new storage."""
        assert stored.reloaded is not None
        if stored.copy_in_pending:
            self._wait(stored.device_store, stored.copy_in, stored.reloaded)
            stored.copy_in_pending = False
        else:  # an earlier reader has waited, perhaps on another stream
            stored.device_store.transport.wait_event(stored.copy_in, stored.reloaded)
        stored.reloaded_reference = weakref.ref(stored.reloaded)
        stored.reloaded = None

    def _wait(self, device_store, event, used=None) -> None:
        """Let compute wait for a copy. A GPU knows the duration of a wait only after it."""
        wait = device_store.transport.wait_event(event, used)
        self._unfinished_waits.append((wait, device_store.transport.stall_seconds, event))
        _notify("waited", event, 0)
        self._add_finished_waits()

    def _recycle_returned(self) -> None:
        """Free the memory and the buffers of storages whose graphs are gone."""
        while self.returned:
            device_store, key, size, alias, reloaded, copy_out, copy_in, buffer = self.returned.popleft()
            for memory, event in ((alias, copy_out), (reloaded, copy_in)):
                if memory is not None:
                    with contextlib.suppress(OffloadError):
                        self._wait(device_store, event)
            if buffer is not None:
                self._store_changed(-1, -size)
                device_store.pool.give(buffer, _events(copy_out, copy_in))
            references = [reference for reference in self._storages.pop(key, ()) if reference() is not None]
            if references:
                self._storages[key] = references

    def _reset_counts(self) -> None:
        self._unfinished_waits.clear()
        self._counts = {**dict.fromkeys(_COUNTS, 0), "seconds_copying": 0.0, "seconds_stalled": 0.0}
        self._peak = self._store_bytes

    def _submitted(self, direction: str, event, size: int) -> None:
        self._counts[f"copies_{direction}"] += 1
        self._counts[f"bytes_{direction}"] += size
        _notify(direction, event, size)

    def _store_changed(self, storages: int, size: int) -> None:
        self._stored += storages
        self._store_bytes += size
        self._peak = max(self._peak, self._store_bytes)
        _notify("store", self, self._store_bytes)

    def _add_finished_waits(self) -> None:
        while self._unfinished_waits and self._unfinished_waits[0][0].done():
            wait, stall_seconds, copy = self._unfinished_waits.popleft()
            seconds = wait.seconds()
            if seconds > stall_seconds:
                self._counts["stalls"] += 1
                self._counts["seconds_stalled"] += seconds
            self._counts["seconds_copying"] += copy.seconds()


def _events(*copies) -> list[Any]:
    return [event for event in copies if event is not None]


def _notify(*event) -> None:
    for observer in observers:
        observer(*event)
