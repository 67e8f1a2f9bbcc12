"""Transports copy bytes between a device and the store: the protocol, the CPU's, and the one for tensors without data.

A transport belongs to one device. ``copy_out`` and ``copy_in`` submit a copy and return its event at once.
``wait_event`` lets compute on the device wait for an event. The engine decides what is copied when and what may be
freed. `cuda_transport` has the transport for GPUs.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ackpt.core.errors import OffloadError

from .cpu_streams import Event, Stream


class Transport(Protocol):
    """The operations that the engine needs from a device. Each transport has its own class of events."""

    stall_seconds: float

    def current(self) -> Any: ...

    def copy_out(
        self, source: Any, begin: int, buffer: Any, size: int, after: Iterable[Any], owner: Any = None
    ) -> Any: ...

    def copy_in(self, buffer: Any, target: Any, size: int, after: Iterable[Any]) -> Any: ...

    def allocate(self, size: int) -> torch.UntypedStorage: ...

    def wait_event(self, event: Any, used: Any = None) -> Any: ...


class Wait:
    """A finished wait of compute for a copy, with its duration in seconds."""

    __slots__ = ("_seconds",)

    def __init__(self, seconds: float):
        self._seconds = seconds

    def done(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._seconds


class CpuTransport:
    """Copies in two worker threads, one per direction; the calling thread computes.

    The CPU plays the device: offload saves memory of torch's CPU allocator, and the store is memory outside of it.
    """

    stall_seconds = 0.0  # a longer wait counts as a stall

    def __init__(self):
        self.streams = {"out": Stream("out"), "in": Stream("in")}

    def current(self) -> None:
        """The current compute stream; the CPU has no streams of its own, so None."""

    def copy_out(
        self, source: torch.UntypedStorage, begin: int, buffer: torch.Tensor, size: int, after, owner=None
    ) -> Event:
        """Copy `size` bytes of `source`, from byte `begin` on, into `buffer`.

        The caller keeps `source` alive until ``wait_event``. If the worker held the last reference, it would free the
        memory in its own thread, at a time that differs from run to run.
        """
        addresses = buffer.data_ptr(), source.data_ptr() + begin
        return self.streams["out"].submit(_move, buffer, *addresses, size, after=after)

    def copy_in(self, buffer: torch.Tensor, target: torch.UntypedStorage, size: int, after) -> Event:
        """Copy `size` bytes of `buffer` into `target`, which the caller keeps alive until ``wait_event``."""
        addresses = target.data_ptr(), buffer.data_ptr()
        return self.streams["in"].submit(_move, buffer, *addresses, size, after=after)

    def allocate(self, size: int) -> torch.UntypedStorage:
        """Allocate memory on the device for a copy back."""
        return torch.empty(size, dtype=torch.uint8).untyped_storage()

    def wait_event(self, event: Event, used=None) -> Wait:
        """Block until `event`; raises `OffloadError` if the copy failed. `used` is the storage to be used next."""
        if event.done():
            waited = 0.0
        else:
            began = time.perf_counter()
            event.error()
            waited = time.perf_counter() - began
        if (error := event.error()) is not None:
            raise OffloadError(f"a copy to or from the offload store failed: {error}") from error
        return Wait(waited)


def _move(buffer, target: int, source: int, size: int) -> None:
    """Copy bytes between two addresses, without the GIL or torch's thread pool. The argument keeps `buffer` alive."""
    ctypes.memmove(target, source, size)


class _DoneEvent:
    """The event of a copy without data, which is done at once."""

    def done(self) -> bool:
        return True

    def error(self) -> None:
        pass

    def seconds(self) -> float:
        return 0.0


class ShapeTransport:
    """The transport for meta and fake tensors: allocates like a real copy, so that `predict` finds the same peak."""

    stall_seconds = 0.0

    def __init__(self, device: torch.device):
        self._device = device

    def current(self) -> None:
        pass

    def copy_out(self, source, begin, buffer, size, after, owner=None) -> _DoneEvent:
        return _DoneEvent()

    def copy_in(self, buffer, target, size, after) -> _DoneEvent:
        return _DoneEvent()

    def allocate(self, size: int) -> torch.UntypedStorage:
        return torch.empty(size, dtype=torch.uint8, device=self._device).untyped_storage()

    def wait_event(self, event, used=None) -> Wait:
        return Wait(0.0)


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
