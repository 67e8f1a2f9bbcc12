"""Transports copy bytes between a device and the store: `CpuTransport`, `CudaTransport`, and the base without data.

A transport belongs to one device. ``copy_out`` and ``copy_in`` submit a copy and return its event at once.
``wait_event`` lets compute on the device wait for an event. The engine decides what is copied when and what may be
freed.
"""

import ctypes
import time
from collections.abc import Iterable
from typing import Any

import torch

from ackpt.core.errors import OffloadError

from .cpu_streams import Stream


class Ended:
    """The event of a copy that has ended, or a wait for one that is over, with its duration in seconds."""

    def __init__(self, seconds: float = 0.0):
        self._seconds = seconds

    def done(self) -> bool:
        return True

    def error(self) -> None:
        pass

    def seconds(self) -> float:
        return self._seconds


class Transport:
    """The base of all transports, for meta and fake tensors: allocates like a real one, and copies nothing."""

    stall_seconds: float = 0.0  # a longer wait counts as a stall

    def __init__(self, device: torch.device):
        self._device: torch.device = device

    def current(self) -> Any:
        """The current compute stream; None for a device without streams."""
        return None

    def copy_out(
        self, source: torch.UntypedStorage, begin: int, buffer: Any, size: int, after: Iterable[Any], owner: Any = None
    ) -> Any:
        """Copy `size` bytes of `source` from `begin` on, after the events `after` and the work of stream `owner`."""
        return Ended()

    def copy_in(self, buffer: Any, target: torch.UntypedStorage, size: int, after: Iterable[Any]) -> Any:
        """Copy `size` bytes of `buffer` into `target`, which the caller keeps alive until ``wait_event``."""
        return Ended()

    def allocate(self, size: int) -> torch.UntypedStorage:
        """Allocate memory on the device, for the current stream."""
        return torch.empty(size, dtype=torch.uint8, device=self._device).untyped_storage()

    def wait_event(self, event: Any, used: torch.UntypedStorage | None = None) -> Any:
        """Let compute wait for a copy; return the wait. `used` is the storage that compute uses next."""
        return Ended()


class CpuTransport(Transport):
    """Copies in two worker threads, one per direction, which never hold the last reference to a source."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.streams = {"out": Stream("out"), "in": Stream("in")}

    def copy_out(self, source, begin, buffer, size, after, owner=None):
        addresses = buffer.data_ptr(), source.data_ptr() + begin
        return self.streams["out"].submit(_move, buffer, *addresses, size, after=after)

    def copy_in(self, buffer, target, size, after):
        addresses = target.data_ptr(), buffer.data_ptr()
        return self.streams["in"].submit(_move, buffer, *addresses, size, after=after)

    def wait_event(self, event, used=None):
        """Block until `event`; raises `OffloadError` if the copy failed."""
        is_done, began = event.done(), time.perf_counter()
        if (error := event.error()) is not None:
            raise OffloadError(f"a copy to or from the offload store failed: {error}") from error
        return Ended(0.0 if is_done else time.perf_counter() - began)


def _move(buffer, target: int, source: int, size: int) -> None:
    """Copy bytes between two addresses, without the GIL or torch's thread pool. The argument keeps `buffer` alive."""
    ctypes.memmove(target, source, size)


class CudaEvent:
    """The end of a copy on its stream, and the event of its start for timing."""

    def __init__(self, began, ended, owner):
        self.began, self.ended, self.owner = began, ended, owner

    def done(self) -> bool:
        return self.ended.query()

    def error(self) -> None:
        """Block the host until the copy has ended; raises CUDA's own errors."""
        self.ended.synchronize()

    def seconds(self) -> float:
        """Duration of the copy on the GPU; valid once it is ``done``."""
        return self.began.elapsed_time(self.ended) / 1000


class CudaTransport(Transport):
    """Copies between a GPU and host memory: one stream per direction, synchronized with the compute stream by events.

    It follows five rules; published offload code has broken each of them:

    - A copy out waits for the work submitted so far to the stream that was *current* when the tensor was saved. The
      current stream is looked up for every tensor.
    - The event of a copy is recorded on the copy stream, after the copy.
    - The source of a copy out is freed only after the compute stream waits for that event, because the allocator may
      reuse its block for the next operation.
    - Memory for a copy in is allocated on the compute stream, and the copy waits for the work submitted to that stream
      so far, which may still use the same block.
    - A buffer is reused only after the events of its earlier copies (the caller passes them as `after`).

    `cuda` is ``torch.cuda``, or a simulation in tests.
    """

    stall_seconds = 20e-6  # two consecutive events differ by this much even without a wait

    def __init__(self, device: torch.device, cuda=torch.cuda):
        super().__init__(torch.device("cuda", cuda.current_device() if device.index is None else device.index))
        self._cuda = cuda
        self.streams = {"out": cuda.Stream(self._device), "in": cuda.Stream(self._device)}

    def current(self):
        return self._cuda.current_stream(self._device)

    def copy_out(self, source, begin, buffer, size, after, owner=None) -> CudaEvent:
        return self._copy("out", buffer[:size], self._bytes(source, begin, size), after, owner or self.current())

    def copy_in(self, buffer, target, size, after) -> CudaEvent:
        """Copy into `target`, which was allocated on the current stream."""
        return self._copy("in", self._bytes(target, 0, size), buffer[:size], after, self.current())

    def wait_event(self, event, used=None) -> CudaEvent:
        """Let the current stream, and the stream that owns the memory, wait for `event`, without blocking the host."""
        current = self.current()
        before, after = self._timed(), self._timed()
        before.record(current)
        current.wait_event(event.ended)
        after.record(current)
        if event.owner != current:
            event.owner.wait_event(event.ended)
            if used is not None:  # when freed, its block returns to the owner
                self._bytes(used, 0, used.nbytes()).record_stream(current)
        return CudaEvent(before, after, current)

    def _copy(self, direction: str, target, source, after, owner) -> CudaEvent:
        stream = self.streams[direction]
        stream.wait_stream(owner)
        for event in after:
            stream.wait_event(event.ended)
        began, ended = self._timed(), self._timed()
        with self._cuda.stream(stream):
            began.record(stream)
            target.copy_(source, non_blocking=True)
            ended.record(stream)
        return CudaEvent(began, ended, owner)

    def _timed(self):
        return self._cuda.Event(enable_timing=True)

    def _bytes(self, storage, begin: int, size: int) -> torch.Tensor:
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        return empty.set_(storage, begin, (size,), (1,))  # pyright: ignore[reportArgumentType]


def transport_for(device: torch.device) -> Transport:
    """The transport of a device; raises `OffloadError` for one without streams."""
    if device.type == "cpu":
        return CpuTransport()
    if device.type == "cuda":
        return CudaTransport(device)
    raise OffloadError(
        f"tensors on {device} cannot be offloaded: that device has no copy streams that ackpt knows. Move the model to "
        "a CUDA GPU (or the CPU), or train without offload."
    )
