"""``offload_saved_tensors``: copy the tensors that autograd saves to host memory or disk, and back for backward.

Autograd provides a pair of hooks for this: *pack* is called with every saved tensor and returns an object to save in
its place, *unpack* turns that object back into the tensor. The pack hook here decides which tensors to offload. It
passes their bytes to the engine, and saves an `OffloadedTensor` with everything else.
"""

import contextlib
import operator
import os
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor, disable_fake_tensor_cache
from torch.autograd.graph import saved_tensors_hooks

from ackpt.core.autograd_state import phase, version
from ackpt.core.errors import OffloadError

from .engine import Engine, ForwardState, OffloadedStorage, root_of

MODES = ("sync", "async")
STORES = ("host", "disk")
MIN_BYTES = 1 << 16

_local = threading.local()
_current_node = torch._C._current_autograd_node  # pyright: ignore[reportAttributeAccessIssue]
_CALL = nn.Module._call_impl.__code__
_PLAIN = (torch.Tensor, nn.Parameter)
_ALIGNMENT = 64  # bytes; a range of a storage starts at a multiple, so that it can be viewed in any dtype
_NOTHING = contextlib.nullcontext()
_task = torch._C._current_graph_task_id


def offload_saved_tensors(
    mode: Literal["sync", "async"] = "async",
    store: Literal["host", "disk"] = "host",
    *,
    min_bytes: int = MIN_BYTES,
    keep_last: int = 1,
    lookahead_bytes: int | None = None,
    max_pinned_bytes: int | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> "Offload":
    """Return a context manager that offloads the tensors saved for backward. Nothing is recomputed.

    Args:
        mode: ``"async"`` overlaps copies with compute and prefetches for backward; ``"sync"`` waits for every copy.
        store: ``"host"`` memory (page-locked for a GPU), or ``"disk"``: memory-mapped files in `folder`.
        min_bytes: storages smaller than this stay on the device.
        keep_last: the number of newest storages that stay on the device, because backward reads them first.
        lookahead_bytes: device memory that ``"async"`` may use for running copies, in bytes per direction. ``None``:
            the size of the largest offloaded storage, or of the inputs of one region.
        max_pinned_bytes: upper bound on page-locked memory, in bytes; a block counts with the power of two to which
            torch rounds it up. Beyond this bound, the store uses pageable memory and warns once.
        folder: the folder for the files of ``"disk"``. The files have no names and disappear with the process.

    Returns:
        A context manager. Enter it around each forward; it can be entered repeatedly, nested and in several threads.
        It yields the :class:`~ackpt.offloading.engine.Engine`, whose ``stats()`` returns counters. The ``offload=``
        argument of :func:`checkpoint` accepts this object too.

    Raises:
        ValueError: for an unknown mode or store, a negative size, a folder without ``"disk"``, or ``"disk"`` without a
            folder.
        OffloadError: if `folder` is not writable. Inside the context: if the store is full, a copy fails, the device
            has no streams, or a saved tensor was modified in place before its copy was complete.

    Gradients are bit-equal to the baseline's. Parameters, buffers, leaves that require grad, tensor subclasses and
    sparse tensors stay on the device. A storage is copied once, no matter how many views of it are saved; a view that
    spans less than half of its storage is copied by itself, from its first to its last element. So an expanded row
    counts as one row, and a column of a matrix as the whole matrix. On the CPU the same engine copies in worker
    threads, to memory outside of torch's allocator.

    Source: the hooks are ``torch.autograd.graph.saved_tensors_hooks``; overlapping offload with compute is from Rhu et
    al. 2016, vDNN (arXiv:1602.08124).

    Example:
        >>> import torch, ackpt
        >>> x = torch.ones(256, 256, requires_grad=True)
        >>> with ackpt.offload_saved_tensors():
        ...     loss = (x * 2).exp().sum()
        >>> loss.backward()
        >>> torch.equal(x.grad, (x * 2).exp() * 2)
        True
    """
    return Offload(mode, store, min_bytes, keep_last, lookahead_bytes, max_pinned_bytes, folder)


class Offload:
    """The context manager that :func:`offload_saved_tensors` returns.

    Example:
        >>> import torch, ackpt
        >>> offload = ackpt.offload_saved_tensors("sync", min_bytes=0)
        >>> offload
        <ackpt offload: sync, store='host'>
        >>> layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
        >>> ackpt.checkpoint(layer, x * 2, offload=offload).sum().backward()
    """

    def __init__(
        self,
        mode: Literal["sync", "async"],
        store: Literal["host", "disk"],
        min_bytes: int,
        keep_last: int,
        lookahead_bytes: int | None,
        max_pinned_bytes: int | None,
        folder: str | os.PathLike[str] | None,
    ):
        self._arguments = (mode, store, min_bytes, keep_last, lookahead_bytes, max_pinned_bytes, folder)
        _one_of("mode", mode, MODES)
        _one_of("store", store, STORES)
        self.min_bytes: int = _size("min_bytes", min_bytes)
        self.keep_last: int = _size("keep_last", keep_last)
        self.lookahead: int | None = None if lookahead_bytes is None else _size("lookahead_bytes", lookahead_bytes)
        if max_pinned_bytes is not None:
            max_pinned_bytes = _size("max_pinned_bytes", max_pinned_bytes)
        if (store == "disk") != (folder is not None):
            raise ValueError(
                "store='disk' needs folder=, the folder for its files"
                if folder is None
                else f"folder={folder!r} is only used with store='disk'; store is {store!r}"
            )
        if mode == "sync":
            self.lookahead = 0
        self.engine: Engine = _engine(store, None if folder is None else _path(folder), max_pinned_bytes)

    def __reduce__(self) -> "tuple[type[Offload], tuple[Any, ...]]":
        return Offload, self._arguments

    def __repr__(self) -> str:
        return f"<ackpt offload: {self._arguments[0]}, store={self._arguments[1]!r}>"

    def __enter__(self) -> Engine:
        entry = _Entry(self)
        entry.hooks.__enter__()
        _entered().append(entry)
        return self.engine

    def __exit__(self, *exception: Any) -> None:
        if not _entered():
            raise RuntimeError("this offload context was not entered in this thread: use it as `with offload: ...`")
        _entered().pop().hooks.__exit__(*exception)

    def for_region(self) -> "_Entry":
        """The entry with which checkpointed regions save their inputs; all regions of a forward share one."""
        open_entries = _local.__dict__.setdefault("open", weakref.WeakKeyDictionary())
        entry = open_entries.get(self)
        if entry is None or entry.is_over():
            open_entries[self] = entry = _Entry(self, of_regions=True)
        return entry


def resolve(offload: Offload | str | None) -> Offload | None:
    """Convert an ``offload=`` argument, which is None, a mode or an `Offload`, to an `Offload` or None."""
    if offload is None or isinstance(offload, Offload):
        return offload
    if isinstance(offload, str) and offload in MODES:
        return _DEFAULTS[offload]
    raise ValueError(
        f"offload={offload!r} is unknown: choose None, 'sync', 'async', or pass ackpt.offload_saved_tensors(...)"
    )


_engines: dict[tuple, Engine] = {}


def _engine(*key) -> Engine:
    """The engine for (store, folder, limit): one per process, so that all steps reuse its buffers."""
    for stale in [other for other in _engines if other[1] is not None and not os.path.isdir(other[1])]:
        del _engines[stale]
    if key not in _engines:
        _engines[key] = Engine(*key)
    return _engines[key]


def _entered() -> "list[_Entry]":
    return _local.__dict__.setdefault("entered", [])


class _Entry:
    """The saved-tensors hooks of one ``with offload:`` block, or of one forward of regions."""

    def __init__(self, offload: Offload, of_regions: bool = False):
        self._min_bytes = offload.min_bytes
        self._engine = offload.engine
        self._forward = ForwardState(offload.keep_last, offload.lookahead, of_regions)
        self._task = _task()
        self._modules: dict[int, tuple[weakref.ref[nn.Module], frozenset[int]]] = {}
        self.hooks: saved_tensors_hooks = saved_tensors_hooks(self.pack, lambda packed: packed.unpack())

    def is_over(self) -> bool:
        return self._forward.is_over or self._forward.is_empty() or self._task != _task()

    def pack(self, tensor: torch.Tensor) -> "TensorOnDevice | OffloadedTensor":
        if self._stays_on_device(tensor):
            return TensorOnDevice(tensor)
        begin, size = _extent(tensor)
        if size < max(1, self._min_bytes):
            return TensorOnDevice(tensor)
        storage, position = self._engine.put(tensor, self._forward, begin, size)
        layout = tensor.shape, tensor.stride(), int(tensor.storage_offset()) * tensor.itemsize
        described = tensor.dtype, tensor.device, *layout, tensor.is_conj(), tensor.is_neg()
        return OffloadedTensor(self._engine, storage, self._forward, position, described)

    def _stays_on_device(self, tensor) -> bool:
        # In a backward that this block did not start in, a recomputation saves tensors that are read right away.
        if self._task != _task() or phase.dropping:
            return True
        if type(tensor) not in (torch.Tensor, FakeTensor) or tensor.layout is not torch.strided:
            return True
        if is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor():  # of torch.func's transforms: no storage
            return True
        if tensor.is_leaf and tensor.requires_grad:
            return True
        root = root_of(tensor)
        if not root.is_leaf:
            return False
        if root.requires_grad or isinstance(root, nn.Parameter):
            return True
        return root.untyped_storage()._cdata in self._storages_of_running_module()

    def _storages_of_running_module(self) -> frozenset:
        """Storages of the parameters and buffers of the outermost module that this thread is calling or recomputing."""
        outermost = _module_called() if phase.function is None else getattr(phase.function, "__self__", phase.function)
        if not isinstance(outermost, nn.Module):
            return frozenset()
        cached = self._modules.get(id(outermost))
        if cached is None or cached[0]() is not outermost:
            tensors = [*outermost.parameters(), *outermost.buffers()]
            storages = {tensor.untyped_storage()._cdata for tensor in tensors if type(tensor) in _PLAIN}
            cached = self._modules[id(outermost)] = weakref.ref(outermost), frozenset(storages)
        return cached[1]


def _module_called() -> nn.Module | None:
    call, frame = None, sys._getframe(1)
    while frame is not None:
        call = frame if frame.f_code is _CALL else call
        frame = frame.f_back
    return None if call is None else call.f_locals["self"]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """``(first byte, bytes)`` to offload for a tensor: its storage, or its own span if that is less than half of it."""
    if tensor.numel() == 0:
        return 0, 0
    storage_bytes = tensor.untyped_storage().nbytes()
    first = int(tensor.storage_offset()) * tensor.itemsize
    last = sum(map(operator.mul, [size - 1 for size in tensor.shape], tensor.stride())) + 1
    end = first + last * tensor.itemsize
    if 2 * (end - first) >= storage_bytes:
        return 0, storage_bytes
    first = first // _ALIGNMENT * _ALIGNMENT
    return first, end - first


class TensorOnDevice:
    """A saved tensor that is not offloaded. Checks the version itself, as torch does not while hooks are active."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor):
        # Detached, because an output that a node saves would otherwise form a cycle with that node.
        self.tensor: torch.Tensor = tensor if tensor.requires_grad and tensor.is_leaf else tensor.detach()
        self.version: int = version(tensor)

    def unpack(self) -> torch.Tensor:
        if version(self.tensor) != self.version:
            raise OffloadError(
                f"a tensor saved for backward (shape {list(self.tensor.shape)}) was modified by an in-place operation: "
                f"it is at version {version(self.tensor)}, and was at {self.version} when it was saved. Change a clone "
                "instead, or run backward before the change."
            )
        return self.tensor


@dataclass(eq=False, slots=True)
class OffloadedTensor:
    """A saved tensor whose bytes the engine has."""

    engine: Engine
    storage: OffloadedStorage
    forward: ForwardState
    position: tuple[int, int]
    described: tuple[Any, ...]  # everything but the bytes

    def unpack(self) -> torch.Tensor:
        _refuse_written_later()
        postponed = getattr(_local, "postponed", None)
        position = self.position if postponed is None else None
        storage, first = self.engine.fetch(self.storage, self.forward, position)
        if postponed is not None and self.forward.lookahead:
            postponed.append((self.engine, self.forward, self.position))
        dtype, device, shape, stride, first_byte, is_conj, is_neg = self.described
        with torch.no_grad():
            tensor = torch.empty(0, dtype=dtype, device=device)
            # Keys of the cache would keep the storage alive.
            with disable_fake_tensor_cache(tensor.fake_mode) if isinstance(tensor, FakeTensor) else _NOTHING:
                tensor.set_(storage, (first_byte - first) // tensor.itemsize, shape, stride)
            tensor = tensor.conj() if is_conj else tensor
            return torch._neg_view(tensor) if is_neg else tensor


def _refuse_written_later() -> None:
    """Raise in the backward of ``rrelu``, whose kernel fills its noise after autograd has saved it."""
    node = _current_node()
    if node is not None and node.name().startswith("RreluWithNoise") and getattr(node, "_saved_training", True):
        raise OffloadError(
            "F.rrelu in training fills its noise after autograd has saved it, so the offloaded copy has no values yet. "
            "Compute it in a region, ackpt.checkpoint(torch.nn.functional.rrelu, x, training=True), or outside of the "
            "offload."
        )


def saved_tensors_of(ctx):
    """``ctx.saved_tensors`` of a region, and a function that starts the prefetching once memory is not short."""
    _local.postponed = postponed = []
    try:
        tensors = ctx.saved_tensors
    finally:
        _local.postponed = None

    def prefetch(*_):
        while postponed:
            engine, forward, position = postponed.pop()
            engine.prefetch(forward, position)

    return tensors, prefetch if postponed else None


def _path(folder) -> str:
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise ValueError(f"folder must be the path of a folder, got {folder!r}")
    return os.path.realpath(os.path.expanduser(folder))


def _one_of(name: str, value, choices) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: choose {' or '.join(map(repr, choices))}")


def _size(name: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number, 0 or more; got {value!r}")
    return value


_DEFAULTS = {mode: offload_saved_tensors(mode) for mode in MODES}
