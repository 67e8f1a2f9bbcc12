"""Count the bytes that autograd saves while a forward runs, and compare them with a bound.

Every step of `PlannedRegions` runs under this count, which is cheap and needs no GPU. It includes what the
recomputation of each region will save in backward.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ackpt.autograd_state import is_recomputing, version
from ackpt.metering.resident import storages_of

_hooks: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
_local = threading.local()


class SavedBytes:
    """Counts the storages that autograd saves, each once while it is allocated.

    Args:
        resident: tensors that are allocated anyway, such as parameters and inputs.
        bound: more bytes than this call `exceeded` once; None for no bound.
        exceeded: gets the number of bytes; it may raise an error.
        observe: gets the key and the bytes of every storage that is saved, each time.
        base: bytes that count in addition.

    ``bytes``: saved now. ``most_bytes``: the most at one time, where the recomputation of a region counts as if it ran
    at the region's place in the forward.
    """

    def __init__(
        self,
        resident: Iterable[torch.Tensor] = (),
        bound: int | None = None,
        exceeded: Callable[[int], None] | None = None,
        observe: Callable[[int, int], None] | None = None,
        base: int = 0,
    ):
        self.bytes = self.most_bytes = base
        self._bound, self._exceeded, self._observe = bound, exceeded, observe
        self._counted: dict[int, weakref.ref | None] = {
            storage._cdata: None for tensor in resident for storage in storages_of(tensor)
        }

    @contextlib.contextmanager
    def counting(self) -> Iterator[SavedBytes]:
        """Count the bytes that autograd saves inside."""
        before = getattr(_local, "counter", None)
        _local.counter = self
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield self
        finally:
            _local.counter = before

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage is resident or saved."""
        return storage._cdata in self._counted

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        for storage in storages_of(tensor):
            self._count(storage)
        # The tensor itself would refer to its own graph if it is the result of the operation that saves it.
        return tensor.detach(), version(tensor)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._counted:
            if self._observe is not None and self._counted[key] is not None:
                self._observe(key, size)
            return
        if self._observe is not None:
            self._observe(key, size)
        self._counted[key] = weakref.ref(storage, lambda _: self._freed(key, size))
        self.bytes += size
        self._reached(self.bytes)

    def _freed(self, key: int, size: int) -> None:
        del self._counted[key]
        self.bytes -= size

    def _reached(self, size: int) -> None:
        self.most_bytes = max(self.most_bytes, size)
        if self._bound is not None and size > self._bound and self._exceeded is not None:
            self._bound = None  # once
            self._exceeded(size)

    @contextlib.contextmanager
    def _of_region(self) -> Iterator[None]:
        """Count the bytes that autograd saves inside as those of a recomputation, on top of the bytes saved now."""
        inner = SavedBytes(bound=self._bound, exceeded=self._exceeded, base=self.bytes)
        inner._counted = dict.fromkeys(self._counted)
        with inner.counting():
            yield
        self._bound = inner._bound
        self.most_bytes = max(self.most_bytes, inner.most_bytes)


def has_room(size: int) -> bool:
    """Whether so many more bytes can be saved within the bound of the count."""
    counter = getattr(_local, "counter", None)
    return counter is None or counter._bound is None or counter.bytes + size <= counter._bound


@contextlib.contextmanager
def counting_a_region():
    """Inside, the first forward of a region runs: what it saves is dropped and saved again by its recomputation."""
    counter = getattr(_local, "counter", None)
    if counter is None or is_recomputing():
        yield
        return
    with counter._of_region():
        yield


@contextlib.contextmanager
def not_counting():
    """Inside, the hooks of the count are off, as a capture requires."""
    counter = getattr(_local, "counter", None)
    hooks = _hooks._top_saved_tensors_default_hooks(True)
    if counter is None or hooks is None or getattr(hooks[0], "__self__", None) is not counter:
        yield
        return
    _hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        _hooks._push_saved_tensors_default_hooks(*hooks)


def _unpack(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    """The saved tensor; with hooks, torch does not compare its version."""
    tensor, before = saved
    if version(tensor) != before:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {list(tensor.shape)} is at version {version(tensor)}; expected version {before} instead"
        )
    return tensor
