"""What the offload engine keeps of a forward: the storages that were saved, in their order, and where each is.

All of it hangs on what autograd holds. A `Forward` knows its storages by weak references; a `Stored` lives as long as
the graph that needs it, and whatever ends that graph (a backward, an exception, a loss that is dropped) ends it too.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ackpt.autograd_state import version

from .store import Buffer

if TYPE_CHECKING:
    from .engine import Engine, Lane


class Forward:
    """The storages saved in one forward, in their order, and how they leave."""

    def __init__(self, keep_last: int, lookahead: int | None, of_regions: bool):
        self.keep_last: int = keep_last
        self._of_regions = of_regions
        self._lookahead = lookahead
        self._order: list[list[weakref.ref[Stored]]] = []  # by node of the graph
        self._node = -1
        self.staying: deque[weakref.ref[Stored]] = deque()
        self.leaving: list[weakref.ref[Stored]] = []
        self.ahead: list[weakref.ref[Stored]] = []  # on the device before they were asked for
        self.largest: int = 0
        self.over: bool = False  # backward has begun

    @property
    def lookahead(self) -> int:
        """Bytes that may be on the device for the copies' sake: by default the largest storage, or what one region
        saved."""
        return self.largest if self._lookahead is None else self._lookahead

    def saved(self, stored: Stored) -> tuple[int, int]:
        """Note that `stored` was saved, once more perhaps; returns the place of this saving in the order."""
        reference = weakref.ref(stored)
        if reference in self.staying:
            self.staying.remove(reference)
        if stored.left is None:
            self.staying.append(reference)
        if (node := torch.autograd._get_sequence_nr()) != self._node:
            self._node = node
            self._order.append([])
        self._order[-1].append(reference)
        together = dict.fromkeys(alive(self._order[-1])) if self._of_regions else [stored]
        self.largest = max(self.largest, sum(other.size for other in together))
        return len(self._order) - 1, len(self._order[-1])

    def next(self, place: tuple[int, int], allowed: int, held: Stored | None = None) -> list[Stored]:
        """What backward is expected to ask for after `place`, up to `allowed` bytes; `held` costs none.

        Nodes run in reverse, and each asks in the order in which it saved.
        """
        node, rest = place
        found: list[Stored] = []
        asked = itertools.chain(self._order[node][rest:], *self._order[:node][::-1])
        for stored in alive(asked):
            if stored not in found:
                allowed -= stored.size if stored is not held else 0
                if allowed < 0:
                    break
                found.append(stored)
        return found

    def is_empty(self) -> bool:
        return not any(alive(itertools.chain(*self._order)))


class Stored:
    """A part of one storage, usually all of it: on its device, on the way, or in the store."""

    __slots__ = (
        *("engine", "lane", "forward", "key", "begin", "size", "mark", "alias", "owner", "root", "original"),
        *("storage", "buffer", "left", "loaded", "arriving", "back", "back_reference", "refused", "__weakref__"),
    )

    def __init__(self, engine: Engine, lane: Lane, forward: Forward, tensor: torch.Tensor, begin: int, size: int):
        self.engine: Engine = engine
        self.lane: Lane = lane
        self.forward: Forward = forward
        self.begin: int = begin
        self.size: int = size
        self.mark: int = version(tensor)
        # Shares storage and version counter, and knows no graph.
        self.alias: torch.Tensor | None = tensor.detach()
        self.owner: Any = lane.transport.current()  # its memory goes back there
        self.root: weakref.ref[torch.Tensor] = weakref.ref(root_of(tensor))
        self.original: weakref.ref[torch.Tensor] = weakref.ref(tensor)
        storage = tensor.untyped_storage()
        self.key: int = storage._cdata
        self.storage: weakref.ref[torch.UntypedStorage] = weakref.ref(storage)
        self.buffer: Buffer | None = None
        self.left: Any = None  # the event of the copy to the store
        self.loaded: Any = None  # the event of the last copy back
        self.arriving: bool = False
        self.back: torch.UntypedStorage | None = None  # the storage on the device that nobody uses yet
        self.back_reference: weakref.ref[torch.UntypedStorage] | None = None
        self.refused: str | None = None

    def here(self) -> tuple[torch.UntypedStorage, int] | None:
        """``(storage, its first byte here)`` if the bytes are on the device, else None."""
        if self.alias is not None:
            self.check(self.alias)
            return self.alias.untyped_storage(), 0
        storage = self.back
        if storage is None and self.back_reference is not None:
            storage = self.back_reference()
        if storage is not None:
            return storage, self.begin
        original, storage = self.original(), self.storage()
        if (
            original is not None
            and storage is not None
            and storage is original.untyped_storage()
            and version(original) == self.mark
        ):
            return storage, 0
        return None

    def is_back(self, storage: torch.UntypedStorage) -> bool:
        """Whether `storage` is what was loaded last."""
        return self.back_reference is not None and self.back_reference() is storage

    def check(self, tensor: torch.Tensor) -> None:
        if version(tensor) != self.mark:
            self.refused = "modified in place after it was saved for backward, before its copy was complete"

    def copies(self) -> list[Any]:
        """The events of the copies from and to the buffer that may still be running."""
        return [event for event in (self.left, self.loaded) if event is not None]

    def __del__(self) -> None:
        # Runs in any thread, in the middle of anything: only hand over what a copy may still read or write.
        alias = self.alias if self.left is not None else None
        back = self.back if self.arriving else None
        self.engine.returned.append((self.lane, self.key, self.size, alias, back, self.left, self.loaded, self.buffer))


def root_of(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is a view of, or itself: views of one root, and only they, surely share a version counter."""
    return tensor if tensor._base is None else tensor._base


def alive(references: Iterable[weakref.ref[Stored]]) -> Iterator[Stored]:
    """The `Stored` that still are, of weak references."""
    return (stored for reference in references if (stored := reference()) is not None)
