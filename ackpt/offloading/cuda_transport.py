"""Offload on a CUDA GPU: one stream for copies each way, and events between them and the stream that computes.

The rules that make it right, each of which has been broken in the wild:

- A copy out starts after what was given so far to the stream that was *current* when the tensor was saved; the
  current stream is asked for every time.
- The event of a copy is recorded on the copy's own stream, behind the copy.
- The source of a copy out is freed only after the computing stream has been made to wait for that event, since the
  allocator may give its block to the next operation at once.
- Memory for a copy in is allocated on the computing stream, and the copy waits for what that stream was given so far:
  the block may have been in use until then.
- A buffer is used again only behind the events of its earlier copies (the caller passes them as `after`).
"""

from __future__ import annotations

import torch


class CudaEvent:
    """The end of a copy on its stream, with the time between its beginning and its end."""

    __slots__ = ("began", "ended", "owner")

    def __init__(self, began, ended, owner):
        self.began, self.ended, self.owner = began, ended, owner

    def done(self) -> bool:
        return self.ended.query()

    def error(self) -> None:
        """Block the host until the copy has ended; CUDA's own errors are raised."""
        self.ended.synchronize()

    def seconds(self) -> float:
        """How long the copy took on the GPU; only once it is ``done``."""
        return self.began.elapsed_time(self.ended) / 1000


class CudaTransport:
    """Copies between a GPU and host memory; see the module. `cuda` is ``torch.cuda``, or what a test puts there."""

    stall_seconds = 20e-6  # two events in a row lie this far apart without any wait

    def __init__(self, device: torch.device, cuda=torch.cuda):
        self._cuda = cuda
        self._device = torch.device("cuda", cuda.current_device() if device.index is None else device.index)
        self.streams = {"out": cuda.Stream(self._device), "in": cuda.Stream(self._device)}

    def current(self):
        """The stream that computes here."""
        return self._cuda.current_stream(self._device)

    def copy_out(
        self, source: torch.UntypedStorage, begin: int, buffer: torch.Tensor, size: int, after, owner=None
    ) -> CudaEvent:
        """Copy `size` bytes of `source`, from byte `begin` on, into `buffer`; `source` lives until ``hold``.

        `owner` is the stream that has computed them, by default the current one.
        """
        return self._copy("out", buffer[:size], self._bytes(source, begin, size), after, owner or self.current())

    def copy_in(self, buffer: torch.Tensor, target: torch.UntypedStorage, size: int, after) -> CudaEvent:
        """Copy `size` bytes of `buffer` into `target`, allocated on the current stream; it lives until ``hold``."""
        return self._copy("in", self._bytes(target, 0, size), buffer[:size], after, self.current())

    def allocate(self, size: int) -> torch.UntypedStorage:
        """Memory on the GPU, of the current stream."""
        return torch.empty(size, dtype=torch.uint8, device=self._device).untyped_storage()

    def hold(self, event: CudaEvent, used: torch.UntypedStorage | None = None) -> CudaEvent:
        """Let the current stream, and the one that the memory belongs to, go on after `event`; the host goes on.

        `used` is a storage that the current stream works on from now on.
        """
        current = self.current()
        before, after = self._timed(), self._timed()
        before.record(current)
        current.wait_event(event.ended)
        after.record(current)
        if event.owner != current:
            event.owner.wait_event(event.ended)
            if used is not None:  # its block goes back to the other stream
                self._bytes(used, 0, used.nbytes()).record_stream(current)
        return CudaEvent(before, after, current)

    def _copy(self, way: str, target, source, after, owner) -> CudaEvent:
        stream = self.streams[way]
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
