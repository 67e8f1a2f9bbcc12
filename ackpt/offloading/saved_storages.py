"""State of the offload engine: the storages that one forward saved, and where the bytes of each one are.

A `ForwardState` refers to its storages weakly. An `OffloadedStorage` is owned by the tensors that autograd saved, so
it is freed with the graph that needs it, whether a backward, an exception or a dropped loss ends that graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ackpt.core.autograd_state import version

from .store import Buffer, Pool
from .transport import Transport


class DeviceStore:
    """The transport and the buffer pool of one device. `is_lost`: a fork has cut this process off from the buffers."""

    def __init__(self, transport: Transport, pool: Pool):
        self.transport: Transport = transport
        self.pool: Pool = pool
        self.is_lost: bool = False


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
        """Bytes that copies in one direction may occupy on the device.

        By default the size of the largest storage, or of what one region saved.
        """
        return self.largest if self._lookahead is None else self._lookahead

    def record(self, stored: OffloadedStorage) -> tuple[int, int]:
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
        self, position: tuple[int, int], allowed: int, free: OffloadedStorage | None = None
    ) -> list[OffloadedStorage]:
        """The storages that backward is expected to read after `position`, up to `allowed` bytes.

        Nodes run in reverse order, and each reads its tensors in the order in which it saved them. `free` does not
        count towards `allowed`.
        """
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

    __slots__ = (
        *("returned", "device_store", "forward", "storage_id", "begin", "size", "version", "alias", "stream", "root"),
        *("original", "storage", "buffer", "copy_out", "copy_in", "copy_in_pending", "reloaded", "reloaded_reference"),
        *("refusal", "__weakref__"),
    )

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
        storage = self.reloaded
        if storage is None and self.reloaded_reference is not None:
            storage = self.reloaded_reference()
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

    def is_reloaded(self, storage: torch.UntypedStorage) -> bool:
        """Whether `storage` is the result of the last copy back."""
        return self.reloaded_reference is not None and self.reloaded_reference() is storage

    def check_version(self, tensor: torch.Tensor) -> None:
        """Refuse the storage from now on if `tensor` was modified since it was saved."""
        if version(tensor) != self.version:
            self.refusal = "modified in place after it was saved for backward, before its copy was complete"

    def copies(self) -> list[Any]:
        """The events of the copies from and to the buffer that may still be running."""
        return [event for event in (self.copy_out, self.copy_in) if event is not None]

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
