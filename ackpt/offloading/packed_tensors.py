"""The objects that the pack hook returns in place of saved tensors, and the unpack hook turns back into tensors.

A packed tensor stores everything about a tensor but its bytes: dtype, shape, strides, offset, conjugation. The engine
stores the bytes.
"""

from __future__ import annotations

import contextlib
import operator
import threading

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ackpt.core.autograd_state import version
from ackpt.core.errors import OffloadError

from .engine import Engine
from .saved_storages import ForwardState, OffloadedStorage

ALIGNMENT = 64  # bytes; a range of a storage starts at a multiple, so that it can be viewed in any dtype

_local = threading.local()
_current_node = torch._C._current_autograd_node  # pyright: ignore[reportAttributeAccessIssue]
_NOTHING = contextlib.nullcontext()


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """``(first byte, number of bytes)`` of the storage that are offloaded for a tensor.

    That is the whole storage, unless the tensor spans less than half of it.
    """
    if tensor.numel() == 0:
        return 0, 0
    storage_bytes = tensor.untyped_storage().nbytes()
    first = int(tensor.storage_offset()) * tensor.itemsize
    last = sum(map(operator.mul, [size - 1 for size in tensor.shape], tensor.stride())) + 1
    end = first + last * tensor.itemsize
    if 2 * (end - first) >= storage_bytes:
        return 0, storage_bytes
    first = first // ALIGNMENT * ALIGNMENT
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


class OffloadedTensor:
    """A saved tensor whose bytes the engine has."""

    __slots__ = (
        *("conjugate", "device", "dtype", "engine", "forward", "negative", "offset", "position", "shape", "storage"),
        "stride",
    )

    def __init__(
        self,
        tensor: torch.Tensor,
        engine: Engine,
        storage: OffloadedStorage,
        forward: ForwardState,
        position: tuple[int, int],
    ):
        self.engine: Engine = engine
        self.storage: OffloadedStorage = storage
        self.forward: ForwardState = forward
        self.position: tuple[int, int] = position
        self.dtype: torch.dtype = tensor.dtype
        self.device: torch.device = tensor.device
        self.shape: torch.Size = tensor.shape
        self.stride: tuple[int, ...] = tensor.stride()
        self.offset: int = int(tensor.storage_offset()) * tensor.itemsize
        self.conjugate: bool = tensor.is_conj()
        self.negative: bool = tensor.is_neg()

    def unpack(self) -> torch.Tensor:
        _refuse_written_later()
        postponed = getattr(_local, "postponed", None)
        position = self.position if postponed is None else None
        storage, first = self.engine.fetch(self.storage, self.forward, position)
        if postponed is not None and self.forward.lookahead:
            postponed.append((self.engine, self.forward, self.position))
        with torch.no_grad():
            tensor = torch.empty(0, dtype=self.dtype, device=self.device)
            with _no_cache(tensor.fake_mode) if isinstance(tensor, FakeTensor) else _NOTHING:
                tensor.set_(storage, (self.offset - first) // tensor.itemsize, self.shape, self.stride)
            tensor = tensor.conj() if self.conjugate else tensor
            return torch._neg_view(tensor) if self.negative else tensor


def _refuse_written_later() -> None:
    """Raise an error in the backward of ``rrelu``, whose noise was offloaded before it had values.

    Autograd saves the noise before the kernel fills it, and the kernel does not bump its version. No other operator of
    torch saves an argument like this and reads it in backward.
    """
    node = _current_node()
    if node is not None and node.name().startswith("RreluWithNoise") and getattr(node, "_saved_training", True):
        raise OffloadError(
            "F.rrelu in training fills its noise after autograd has saved it, so the offloaded copy has no values yet. "
            "Compute it in a region, ackpt.checkpoint(torch.nn.functional.rrelu, x, training=True), or outside of the "
            "offload."
        )


@contextlib.contextmanager
def _no_cache(mode):
    """Disable the cache of a FakeTensorMode, whose keys would keep the storage alive."""
    was, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = was


def unpack(packed: TensorOnDevice | OffloadedTensor) -> torch.Tensor:
    return packed.unpack()


def saved_tensors_of(ctx):
    """``(ctx.saved_tensors, prefetch)`` of a region's autograd node.

    Memory is short while a region is recomputed, so prefetching starts when ``prefetch()`` is called instead of at
    once. `prefetch` is None if there is nothing to prefetch.
    """
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
