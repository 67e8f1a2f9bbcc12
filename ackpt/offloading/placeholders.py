"""What stands in the place of a saved tensor: the tensor itself, or all that it takes to make it again.

A tensor is more than its bytes: it may be a view with strides, half of a storage, expanded, conjugated. That much is
remembered here; where the bytes are is the engine's business.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ackpt.autograd_state import version
from ackpt.errors import OffloadError

if TYPE_CHECKING:
    from .saved_storages import Forward, Stored

ALIGNMENT = 64  # bytes; a part of a storage begins at a multiple, so that any dtype may be viewed in it

_local = threading.local()
_current_node = torch._C._current_autograd_node  # pyright: ignore[reportAttributeAccessIssue]
_NOTHING = contextlib.nullcontext()


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """``(first byte, bytes)`` of the part of its storage that stands for a tensor: all of it, unless the tensor
    reaches over less than half."""
    if tensor.numel() == 0:
        return 0, 0
    whole = tensor.untyped_storage().nbytes()
    first = int(tensor.storage_offset()) * tensor.itemsize
    last = sum(map(operator.mul, [size - 1 for size in tensor.shape], tensor.stride())) + 1
    end = first + last * tensor.itemsize
    if 2 * (end - first) >= whole:
        return 0, whole
    first = first // ALIGNMENT * ALIGNMENT
    return first, end - first


class Kept:
    """A saved tensor that stays where it is. Torch checks no versions where hooks are on, so that is done here."""

    __slots__ = ("mark", "tensor")

    def __init__(self, tensor: torch.Tensor):
        # An output would hold the node that holds it.
        self.tensor: torch.Tensor = tensor if tensor.requires_grad and tensor.is_leaf else tensor.detach()
        self.mark: int = version(tensor)

    def unpack(self) -> torch.Tensor:
        if version(self.tensor) != self.mark:
            raise OffloadError(
                f"a tensor saved for backward (shape {list(self.tensor.shape)}) was modified by an in-place operation: "
                f"it is at version {version(self.tensor)}, and was at {self.mark} when it was saved. Change a clone "
                "instead, or run backward before the change."
            )
        return self.tensor


class Saved:
    """A saved tensor whose bytes the engine has: all that it takes to make it again."""

    __slots__ = ("conjugate", "device", "dtype", "forward", "negative", "offset", "place", "shape", "stored", "stride")

    def __init__(self, tensor: torch.Tensor, stored: Stored, forward: Forward, place: tuple[int, int]):
        self.stored: Stored = stored
        self.forward: Forward = forward
        self.place: tuple[int, int] = place
        self.dtype: torch.dtype = tensor.dtype
        self.device: torch.device = tensor.device
        self.shape: torch.Size = tensor.shape
        self.stride: tuple[int, ...] = tensor.stride()
        self.offset: int = int(tensor.storage_offset()) * tensor.itemsize
        self.conjugate: bool = tensor.is_conj()
        self.negative: bool = tensor.is_neg()

    def unpack(self) -> torch.Tensor:
        _refuse_written_later()
        later = getattr(_local, "later", None)
        engine = self.stored.engine
        storage, first = engine.fetch(self.stored, self.forward, self.place if later is None else None)
        if later is not None and self.forward.lookahead:
            later.append((engine, self.forward, self.place))
        with torch.no_grad():
            tensor = torch.empty(0, dtype=self.dtype, device=self.device)
            with _no_cache(tensor.fake_mode) if isinstance(tensor, FakeTensor) else _NOTHING:
                tensor.set_(storage, (self.offset - first) // tensor.itemsize, self.shape, self.stride)
            tensor = tensor.conj() if self.conjugate else tensor
            return torch._neg_view(tensor) if self.negative else tensor


def _refuse_written_later() -> None:
    """Refuse what autograd saves before the kernel writes it, without a new version: the noise of ``rrelu``.

    No other operator of torch saves such an argument and reads it in backward.
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
    """The cache of a FakeTensorMode would keep the storage alive as part of its key."""
    was, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = was


def unpack(packed: Kept | Saved) -> torch.Tensor:
    return packed.unpack()


def saved_tensors_of(ctx):
    """``(ctx.saved_tensors, later)`` of a region's node.

    While a region is recomputed memory is short, so what comes next is brought back when ``later()`` is called, not
    at once; `later` is None where nothing is to be brought back.
    """
    _local.later = waiting = []
    try:
        tensors = ctx.saved_tensors
    finally:
        _local.later = None

    def later(*_):
        while waiting:
            engine, forward, place = waiting.pop()
            engine.bring_ahead(forward, place)

    return tensors, later if waiting else None
