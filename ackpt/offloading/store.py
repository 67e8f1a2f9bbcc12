"""Where regions and `offload_saved_tensors` store bytes: reusable buffers in host memory, or files on disk.

Planned steps use `ackpt.planner.schedule.added_operations` instead. Files are memory-mapped, in a folder that may be on
an NVMe drive; `engine` chooses the store. The buffers come from the operating system instead of torch's allocator, so
that the store never counts as memory of the device, even if the device is the CPU.
"""

import mmap
import os
import tempfile
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ackpt.core.errors import OffloadError, warn

PAGE = 4096
LARGEST_FILE = 1 << 30  # bytes, unless one buffer is larger
# A forked child must not share the store with its parent.
_PRIVATE: dict = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


def host_memory(size: int) -> torch.Tensor:
    """Allocate `size` bytes of pageable host memory; raises `OffloadError` if there are none left.

    Example:
        >>> from ackpt.offloading.store import host_memory
        >>> host_memory(4096).shape
        torch.Size([4096])
    """
    try:
        return torch.frombuffer(mmap.mmap(-1, size, **_PRIVATE), dtype=torch.uint8)
    except OSError as error:
        raise OffloadError(
            f"the offload store cannot get {size} bytes of host memory ({error.strerror}). Offload less (min_bytes), "
            "use store='disk', or train without offload."
        ) from error


def pinned_memory(size: int) -> torch.Tensor:
    """Allocate `size` bytes of page-locked host memory, which a GPU can copy to and from while it computes."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class Slabs:
    """Cuts pinned buffers from slabs of powers of two, to which torch rounds up every pinned block.

    A size that fills less than 3/4 of its power of two gets slabs for several buffers once several have that size.
    The rest of a slab serves smaller buffers. Source: torch's aten/src/ATen/core/CachingHostAllocator.h.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor] = pinned_memory, limit: int | None = None):
        self._allocate = allocate
        self._limit = limit
        self._rests: list[tuple[weakref.ref[torch.UntypedStorage], int, int]] = []  # slab, start and end of its rest
        self._cut: Counter[int] = Counter()

    @property
    def bytes(self) -> int:
        """Bytes of all slabs, as the system counts them."""
        slabs = (slab() for slab, *_ in self._rests)
        return sum(slab.nbytes() for slab in slabs if slab is not None)

    def added(self, size: int) -> int:
        """Bytes that a buffer of `size` bytes adds."""
        return 0 if self._fitting(size) is not None else _power_of_two(size)

    def __call__(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes."""
        fitting = self._fitting(size)
        if fitting is None:
            whole = _power_of_two(size)
            several = whole << max(0, min(self._cut[size], 4).bit_length() - 1)
            if 4 * size > 3 * whole or (self._limit is not None and self.bytes + several > self._limit):
                several = whole
            try:
                slab = self._allocate(several).untyped_storage()
            except RuntimeError:
                if several == whole:
                    raise
                slab = self._allocate(whole).untyped_storage()
            self._rests.append((weakref.ref(slab), 0, slab.nbytes()))
            at = -1
        else:
            _, at, slab = fitting
        reference, begin, end = self._rests.pop(at)
        self._rests.append((reference, begin + size, end))
        self._cut[size] += 1
        return torch.empty(0, dtype=torch.uint8).set_(slab, begin, (size,), (1,))

    def _fitting(self, size: int) -> tuple[int, int, torch.UntypedStorage] | None:
        """The bytes, index and slab of the smallest rest that has at least `size` bytes; otherwise None."""
        self._rests = [rest for rest in self._rests if rest[0]() is not None]
        fitting = [
            (end - begin, at, slab)
            for at, (reference, begin, end) in enumerate(self._rests)
            if end - begin >= size and (slab := reference()) is not None
        ]
        return min(fitting, key=lambda rest: rest[0]) if fitting else None


def no_memory(size: int) -> None:
    """Allocate nothing, for tensors without data."""


class Folder:
    """Memory-mapped files in one folder, unlinked before the first byte is written.

    Their blocks are reserved at once, so a full disk raises here and not in a copy. Buffers share files of doubling
    size, because each file needs a file descriptor.
    """

    def __init__(self, path):
        self.path = os.fspath(path)
        self._rest = torch.empty(0, dtype=torch.uint8)  # the unused bytes of the last file
        self._next_size = PAGE
        self._file(PAGE)

    def allocate(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes, a multiple of `PAGE`, in a file."""
        if size > len(self._rest):
            self._rest = torch.empty(0, dtype=torch.uint8)
            try:
                self._rest = self._file(max(size, min(self._next_size, LARGEST_FILE)))
            except OffloadError:
                self._rest = self._file(size)
            self._next_size += len(self._rest)
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def clear(self) -> None:
        """Release the unused bytes of the last file."""
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._next_size = PAGE

    def _file(self, size: int) -> torch.Tensor:
        try:
            with tempfile.TemporaryFile(dir=self.path, prefix="ackpt-") as file:
                _reserve(file, size)
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        except OSError as error:
            raise OffloadError(
                f"store='disk' cannot hold {size} more bytes in folder {self.path!r}: {error.strerror}. Nothing was "
                "left there. Name a folder that exists, that you may write to and that has room, raise min_bytes or "
                "the limit of open files (ulimit -n), or train without offload."
            ) from error


def _reserve(file, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    for start in range(0, size, 1 << 20):
        file.write(bytes(min(1 << 20, size - start)))
    file.flush()


@dataclass(eq=False, slots=True)
class Buffer:
    """Bytes of a store. Their next user must wait for the events `after`.

    Example:
        >>> from ackpt.offloading.store import Pool, host_memory
        >>> buffer = Pool(host_memory).take(4096)
        >>> buffer.size, buffer.bytes.dtype, buffer.is_fallback
        (4096, torch.uint8, False)
    """

    bytes: Any  # a tensor of bytes, or None for tensors without data
    size: int
    is_fallback: bool
    after: tuple[Any, ...] = ()


class Pool:
    """A pool of buffers that are allocated once and then reused.

    Args:
        allocate: allocates the bytes of a new buffer; the bytes of `Slabs` count as the system counts them.
        fallback: allocates them if `allocate` fails or `limit` is reached, with one warning (pageable instead of pinned
            memory). Without a fallback the error is raised.
        limit: largest number of bytes that `allocate` may have allocated at one time.

    Sizes are rounded up by at most an eighth, and an idle buffer can serve any request of at least half its size, so
    that steps of different lengths share buffers. Idle buffers never exceed the largest number of bytes that were in
    use at one time.

    Example:
        >>> from ackpt.offloading.store import Pool, host_memory
        >>> pool = Pool(host_memory)
        >>> buffer = pool.take(5000)  # rounded up to whole pages
        >>> pool.give(buffer)
        >>> pool.take(6000) is buffer, pool.bytes, pool.hits, pool.misses
        (True, 8192, 1, 1)
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor | None] | Slabs,
        fallback: Callable[[int], torch.Tensor | None] | None = None,
        limit: int | None = None,
    ):
        self._allocate, self._fallback = allocate, fallback
        self._slabs = allocate if isinstance(allocate, Slabs) else None
        self.limit: int | None = limit
        self._idle: dict[int, deque[Buffer]] = {}
        self._warned = False
        self.hits: int = 0
        self.misses: int = 0
        self.bytes: int = 0
        self.fallback_bytes: int = 0
        self.idle_bytes: int = 0
        self._peak_in_use = 0

    def take(self, size: int) -> Buffer:
        """A buffer of at least `size` bytes; raises `OffloadError` if none can be allocated."""
        size = _rounded(size)
        if (fitting := self._fitting(size)) is not None:
            buffer = self._idle[fitting].popleft()
            self.idle_bytes -= fitting
            self.hits += 1
        else:
            buffer = self._new(size)
            self.misses += 1
        self._peak_in_use = max(self._peak_in_use, self.bytes - self.idle_bytes)
        return buffer

    def give(self, buffer: Buffer, after: Iterable[Any] = ()) -> None:
        """Return `buffer` to the pool; copies from and to it may still run until the events `after`."""
        buffer.after = tuple(after)
        idle = self._idle.pop(buffer.size, deque())
        idle.append(buffer)
        self._idle[buffer.size] = idle  # most recently used sizes come last
        self.idle_bytes += buffer.size
        self._shrink(self._peak_in_use)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the memory that contains all buffers."""
        return self.bytes if self._slabs is None else self._slabs.bytes + self.fallback_bytes

    def clear(self) -> None:
        """Release all idle buffers."""
        self._shrink(0)

    def _fitting(self, size: int) -> int | None:
        """The size of the idle buffer to use for `size` bytes, at most twice as large; None without one."""
        if self._idle.get(size):
            return size
        return min((other for other, idle in self._idle.items() if idle and size < other <= 2 * size), default=None)

    def _shrink(self, allowed: int) -> None:
        while self.idle_bytes > allowed:
            size = next(size for size, idle in self._idle.items() if idle)
            buffer = self._idle[size].popleft()
            for event in buffer.after:
                event.error()  # waits; a failed copy has been reported to its waiter
            self.idle_bytes -= size
            self.bytes -= size
            self.fallback_bytes -= size * buffer.is_fallback

    def _new(self, size: int) -> Buffer:
        if self._is_full(size):
            self._shrink(max(0, self.idle_bytes - size) if self._slabs is None else 0)
        data, is_fallback = None, False
        if self._is_full(size):
            self._warn(f"max_pinned_bytes={self.limit} is reached")
            is_fallback = True
        else:
            try:
                data = self._allocate(size)
            except RuntimeError as error:
                if self._fallback in (None, self._allocate):
                    raise
                self._warn(f"pinning {size} bytes of host memory failed ({str(error).splitlines()[0]})")
                is_fallback = True
        if is_fallback and self._fallback is not None:
            data = self._fallback(size)
        self.bytes += size
        self.fallback_bytes += size * is_fallback
        return Buffer(data, size, is_fallback)

    def _is_full(self, size: int) -> bool:
        if self.limit is None or self._fallback is None:
            return False
        if self._slabs is not None:
            return self._slabs.bytes + self._slabs.added(size) > self.limit
        return self.bytes - self.fallback_bytes + size > self.limit

    def _warn(self, cause: str) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"offload: {cause}; from here on copies go through pageable memory, correct but without overlap. "
                "Raise max_pinned_bytes or the limit of locked memory (ulimit -l), or offload less (min_bytes)."
            )


def _power_of_two(size: int) -> int:
    """The smallest power of two that is not less than `size`."""
    return 1 << (size - 1).bit_length()


def _rounded(size: int) -> int:
    step = max(PAGE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step
