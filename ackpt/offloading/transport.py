"""How bytes get from a device to the store and back: the CPU's transport, the one for tensors without data, the choice.

A transport knows one device. ``copy_out`` and ``copy_in`` submit a copy and return its event at once; ``hold`` makes
the device's computing wait for an event. What is copied when, and what may be freed, is not decided here.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ackpt.errors import OffloadError

from .cpu_streams import Event, Stream


class Transport(Protocol):
    """What the engine asks of a device; events are the transport's own kind."""

    stall_seconds: float

    def current(self) -> Any: ...

    def copy_out(
        self, source: Any, begin: int, buffer: Any, size: int, after: Iterable[Any], owner: Any = None
    ) -> Any: ...

    def copy_in(self, buffer: Any, target: Any, size: int, after: Iterable[Any]) -> Any: ...

    def allocate(self, size: int) -> torch.UntypedStorage: ...

    def hold(self, event: Any, used: Any = None) -> Any: ...


class Waited:
    """How long computing stood still for a copy."""

    __slots__ = ("_seconds",)

    def __init__(self, seconds: float):
        self._seconds = seconds

    def done(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._seconds


class CpuTransport:
    """Two worker threads copy, one each way; what computes is the thread that asks.

    The CPU stands in for a device here: its memory is what offload relieves, the store lies beside it.
    """

    stall_seconds = 0.0  # a wait longer than this is a stall

    def __init__(self):
        self.streams = {"out": Stream("out"), "in": Stream("in")}

    def current(self) -> None:
        """What a transport with several computing streams names: the one that computes here."""

    def copy_out(
        self, source: torch.UntypedStorage, begin: int, buffer: torch.Tensor, size: int, after, owner=None
    ) -> Event:
        """Copy `size` bytes of `source`, from byte `begin` on, into `buffer`.

        Whoever calls keeps `source` alive until ``hold``: if the worker had the last reference, the memory would be
        freed by another thread, at a moment that does not repeat.
        """
        addresses = buffer.data_ptr(), source.data_ptr() + begin
        return self.streams["out"].submit(_move, buffer, *addresses, size, after=after)

    def copy_in(self, buffer: torch.Tensor, target: torch.UntypedStorage, size: int, after) -> Event:
        """Copy `size` bytes of `buffer` into `target`, which the caller keeps alive until ``hold``."""
        addresses = target.data_ptr(), buffer.data_ptr()
        return self.streams["in"].submit(_move, buffer, *addresses, size, after=after)

    def allocate(self, size: int) -> torch.UntypedStorage:
        """Memory on the device for a copy back."""
        return torch.empty(size, dtype=torch.uint8).untyped_storage()

    def hold(self, event: Event, used=None) -> Waited:
        """Let computing go on after `event`, and use the storage `used`; raises `OffloadError` if the copy failed."""
        if event.done():
            waited = 0.0
        else:
            began = time.perf_counter()
            event.error()
            waited = time.perf_counter() - began
        if (error := event.error()) is not None:
            raise OffloadError(f"a copy to or from the offload store failed: {error}") from error
        return Waited(waited)


def _move(buffer, target: int, source: int, size: int) -> None:
    """The copy itself, without the GIL and without torch's thread pool. `buffer` is only kept alive."""
    ctypes.memmove(target, source, size)


class _Reached:
    """The event of a copy that moves nothing."""

    def done(self) -> bool:
        return True

    def error(self) -> None:
        pass

    def seconds(self) -> float:
        return 0.0


class ShapeTransport:
    """For meta and fake tensors: allocates and frees as a copy would, so that peaks can be predicted from shapes."""

    stall_seconds = 0.0

    def __init__(self, device: torch.device):
        self._device = device

    def current(self) -> None:
        pass

    def copy_out(self, source, begin, buffer, size, after, owner=None) -> _Reached:
        return _Reached()

    def copy_in(self, buffer, target, size, after) -> _Reached:
        return _Reached()

    def allocate(self, size: int) -> torch.UntypedStorage:
        return torch.empty(size, dtype=torch.uint8, device=self._device).untyped_storage()

    def hold(self, event, used=None) -> Waited:
        return Waited(0.0)


def has_no_data(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def transport_for(device: torch.device) -> Transport:
    """The transport of a device; raises `OffloadError` for one without streams."""
    if device.type == "cpu":
        return CpuTransport()
    if device.type == "cuda":
        from .cuda_transport import CudaTransport

        return CudaTransport(device)
    raise OffloadError(
        f"tensors on {device} cannot be offloaded: that device has no copy streams that ackpt knows. Move the model to "
        "a CUDA GPU (or the CPU), or train without offload."
    )
