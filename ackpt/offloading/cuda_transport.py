"""The transport for CUDA GPUs: one copy stream per direction, synchronized with the compute stream by events.

It follows five rules; published offload code has broken each of them:

- A copy out waits for the work submitted so far to the stream that was *current* when the tensor was saved. The
  current stream is looked up for every tensor.
- The event of a copy is recorded on the copy stream, after the copy.
- The source of a copy out is freed only after the compute stream waits for that event, because the allocator may reuse
  its block for the next operation.
- Memory for a copy in is allocated on the compute stream, and the copy waits for the work submitted to that stream so
  far, which may still use the same block.
- A buffer is reused only after the events of its earlier copies (the caller passes them as `after`).
"""

from __future__ import annotations

import torch


class CudaEvent:
    """The end of a copy on its stream, and the event of its start for timing."""

    __slots__ = ("began", "ended", "owner")

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


class CudaTransport:
    """Copies between a GPU and host memory; see the module. `cuda` is ``torch.cuda``, or a simulation in tests."""

    stall_seconds = 20e-6  # two consecutive events differ by this much even without a wait

    def __init__(self, device: torch.device, cuda=torch.cuda):
        self._cuda = cuda
        self._device = torch.device("cuda", cuda.current_device() if device.index is None else device.index)
        self.streams = {"out": cuda.Stream(self._device), "in": cuda.Stream(self._device)}

    def current(self):
        """The current compute stream."""
        return self._cuda.current_stream(self._device)

    def copy_out(
        self, source: torch.UntypedStorage, begin: int, buffer: torch.Tensor, size: int, after, owner=None
    ) -> CudaEvent:
        """Copy `size` bytes of `source`, from byte `begin` on, into `buffer`.

        The caller keeps `source` alive until ``wait_event``. `owner` is the stream that computed the bytes, by default
        the current one.
        """
        return self._copy("out", buffer[:size], self._bytes(source, begin, size), after, owner or self.current())

    def copy_in(self, buffer: torch.Tensor, target: torch.UntypedStorage, size: int, after) -> CudaEvent:
        """Copy `size` bytes of `buffer` into `target`, which was allocated on the current stream.

        The caller keeps `target` alive until ``wait_event``.
        """
        return self._copy("in", self._bytes(target, 0, size), buffer[:size], after, self.current())

    def allocate(self, size: int) -> torch.UntypedStorage:
        """Allocate memory on the GPU for the current stream."""
        return torch.empty(size, dtype=torch.uint8, device=self._device).untyped_storage()

    def wait_event(self, event: CudaEvent, used: torch.UntypedStorage | None = None) -> CudaEvent:
        """Let the current stream, and the stream that owns the memory, wait for `event`, without blocking the host.

        `used` is the storage that the current stream uses next.
        """
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
