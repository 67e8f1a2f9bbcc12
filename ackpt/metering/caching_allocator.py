"""A model of PyTorch's caching allocator for CUDA: which blocks and segments a sequence of requests takes.

`CachingAllocator` follows c10/cuda/CUDACachingAllocator.cpp of torch 2.13 (``malloc``, ``get_free_block``,
``should_split``, ``get_allocation_size``, ``free_block``, ``release_cached_blocks``): requests are rounded to 512
bytes; those up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB, larger ones get a segment of
their own in multiples of 2 MiB. The smallest free block that is large enough serves a request, and what remains of it
becomes a free block; of a large block only if more than 1 MiB remains: else the whole block counts as allocated.

Segments get increasing addresses, so of equal free blocks the oldest serves first; a driver may place them otherwise.
Not modeled: CUDA graphs, waiting for other streams, and unmapped pages inside of an expandable segment.
"""

from __future__ import annotations

import bisect

from .gpus import MIB, AllocatorSettings
from .timeline import MeterError

BLOCK = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
MEDIUM, MEDIUM_SEGMENT = 10 * MIB, 20 * MIB
LARGE_MULTIPLE = 2 * MIB


class OutOfMemory(MeterError):
    """A request that does not fit the device's memory, even after all cached segments are freed."""


class Block:
    """A range of one segment; ``before`` and ``after`` are its neighbors. Free blocks are in their pool."""

    __slots__ = ("address", "size", "pool", "stream", "allocated", "before", "after", "age")

    def __init__(self, address: int, size: int, pool: Pool, stream: int):
        self.address, self.size, self.pool, self.stream = address, size, pool, stream
        self.allocated, self.age = False, 0
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def is_whole_segment(self) -> bool:
        return self.before is None and self.after is None

    @property
    def order(self) -> tuple[int, int, int]:
        return self.stream, self.size, self.address


class Pool:
    """The free blocks of small or of large requests, ordered by stream, size and address."""

    def __init__(self, is_small: bool):
        self.is_small = is_small
        self.searches = 0
        self._blocks: list[Block] = []

    def __iter__(self):
        return iter(tuple(self._blocks))

    def insert(self, block: Block) -> None:
        block.age = self.searches
        bisect.insort(self._blocks, block, key=lambda each: each.order)

    def remove(self, block: Block) -> None:
        del self._blocks[bisect.bisect_left(self._blocks, block.order, key=lambda each: each.order)]

    def smallest(self, size: int, stream: int) -> Block | None:
        """The smallest free block of `stream` with at least `size` bytes."""
        at = bisect.bisect_left(self._blocks, (stream, size, 0), key=lambda each: each.order)
        return self._blocks[at] if at < len(self._blocks) and self._blocks[at].stream == stream else None


class CachingAllocator:
    """Follows requests and frees; ``allocated``, ``reserved``: bytes now, and ``peak_...``: the largest so far.

    Example:
        >>> allocator = CachingAllocator()
        >>> allocator.allocate("weight", 3 * MIB)
        >>> allocator.allocated // MIB, allocator.reserved // MIB, allocator.largest_free_block // MIB
        (3, 20, 17)
    """

    def __init__(self, settings: AllocatorSettings | None = None):
        self.settings = AllocatorSettings() if settings is None else settings
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        self.blocks: dict[object, Block] = {}  # allocated ones, by key
        self._pools = Pool(True), Pool(False)
        self._end = 0  # of the last segment
        self._tails: dict[tuple[bool, int], Block] = {}  # last mapped block of an expandable segment

    @property
    def largest_free_block(self) -> int:
        return max((block.size for pool in self._pools for block in pool), default=0)

    def allocate(self, key: object, size: int, stream: int = 0) -> None:
        """Allocate `size` bytes for `key`; raises `OutOfMemory` if they exceed the limit of the settings."""
        if size <= 0 or key in self.blocks:
            raise MeterError(f"a block needs a new key and a positive size, got {key!r} and {size} bytes")
        size = max(BLOCK, -(-size // BLOCK) * BLOCK)
        pool = self._pools[size > SMALL]
        block = self._free_block(pool, size, stream) or self._new_block(pool, size, stream)
        if self._splits(block, size):
            rest = Block(block.address + size, block.size - size, pool, stream)
            rest.before, rest.after = block, block.after
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            if self._tails.get((pool.is_small, stream)) is block:
                self._tails[pool.is_small, stream] = rest
            pool.insert(rest)
        block.allocated = True
        self.blocks[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: object) -> None:
        """Free the block of `key`: it becomes a free block, together with free neighbors."""
        block = self.blocks.pop(key)
        self.allocated -= block.size
        block.allocated = False
        for other in (block.before, block.after):
            if other is not None and not other.allocated:
                block.pool.remove(other)
                self._merge(block, other)
        block.pool.insert(block)

    def reset_peaks(self) -> None:
        """Start new peaks, as ``torch.cuda.reset_peak_memory_stats`` does."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def empty_cache(self) -> None:
        """Free all segments without an allocated block, as ``torch.cuda.empty_cache`` does."""
        for pool in self._pools:
            for block in pool:
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif block.is_whole_segment:
                    self._release(block)

    def all_blocks(self) -> list[Block]:
        """Free and allocated blocks in the order of their addresses."""
        return sorted([*self.blocks.values(), *self._pools[0], *self._pools[1]], key=lambda block: block.address)

    def _free_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        pool.searches += 1
        block = pool.smallest(size, stream)
        if block is None:
            return None
        if block is self._tails.get((pool.is_small, stream)):  # it can grow, so a larger block that cannot fits better
            block = pool.smallest(block.size + 1, stream) or block
        limit = self.settings.max_split_bytes
        if limit is not None and (size < limit <= block.size or limit <= size <= block.size - MEDIUM_SEGMENT):
            return None
        pool.remove(block)
        return block

    def _splits(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.is_small or self.settings.expandable_segments:
            return rest >= BLOCK
        limit = self.settings.max_split_bytes
        return rest > SMALL and (limit is None or size < limit)

    def _new_block(self, pool: Pool, size: int, stream: int) -> Block:
        if self.settings.gc_threshold and self.settings.limit_bytes is not None:
            self._collect_garbage()
        for makes_room in (lambda: True, lambda: self._release_oversized(pool, size, stream), self._retry):
            if makes_room() and (block := self._reserve(pool, size, stream)) is not None:
                return block
        raise OutOfMemory(
            f"{size} bytes do not fit: {self.reserved} of {self.settings.limit_bytes} bytes are reserved, of them "
            f"{self.allocated} allocated; the largest free block has {self.largest_free_block}"
        )

    def _retry(self) -> bool:
        self.retries += 1
        self.empty_cache()
        return True

    def _reserve(self, pool: Pool, size: int, stream: int) -> Block | None:
        """A free block of at least `size` bytes in new memory; None if that exceeds the limit."""
        if self.settings.expandable_segments:
            return self._expand(pool, size, stream)
        segment = SMALL_SEGMENT if pool.is_small else MEDIUM_SEGMENT
        if size >= MEDIUM:
            segment = -(-size // LARGE_MULTIPLE) * LARGE_MULTIPLE
        if not self._grow(segment):
            return None
        self._end += segment
        return Block(self._end - segment, segment, pool, stream)

    def _expand(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Map pages at the end of the pool's expandable segment (``try_allocate_expandable_block``)."""
        page = SMALL_SEGMENT if pool.is_small else MEDIUM_SEGMENT
        tail = self._tails.get((pool.is_small, stream))
        free = tail.size if tail is not None and not tail.allocated else 0
        pages = -(-(size - free) // page) * page
        if not self._grow(pages):
            return None
        if tail is not None and free:
            pool.remove(tail)
            tail.size += pages
            return tail
        if tail is None:
            block = Block(self._end, pages, pool, stream)
            self._end += 2**50  # addresses for the whole device
        else:
            block = tail.after = Block(tail.address + tail.size, pages, pool, stream)
            block.before = tail
        self._tails[pool.is_small, stream] = block
        return block

    def _grow(self, size: int) -> bool:
        limit = self.settings.limit_bytes
        if limit is not None and self.reserved + size > limit:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _merge(self, block: Block, other: Block) -> None:
        """Add the free neighbor `other`, which is in no pool, to `block`."""
        if other is block.before:
            block.address, block.before = other.address, other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        block.size += other.size
        if self._tails.get((block.pool.is_small, block.stream)) is other:
            self._tails[block.pool.is_small, block.stream] = block

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved -= block.size

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages at the end of an expandable segment."""
        if block.after is not None:
            return
        page = SMALL_SEGMENT if block.pool.is_small else MEDIUM_SEGMENT
        pages = block.size // page * page
        block.pool.remove(block)
        block.size -= pages
        self.reserved -= pages
        if block.size:
            block.pool.insert(block)
            return
        key = (block.pool.is_small, block.stream)
        if block.before is not None:
            block.before.after = None
            self._tails[key] = block.before
        else:
            del self._tails[key]

    def _release_oversized(self, pool: Pool, size: int, stream: int) -> bool:
        """Free unsplit blocks above ``max_split_bytes`` until they suffice (``release_available_cached_blocks``)."""
        limit = self.settings.max_split_bytes
        if limit is None:
            return False
        needed, released = max(size, limit), 0
        if (block := pool.smallest(needed, stream)) is not None:
            self._release(block)
            return True
        for block in reversed(tuple(each for each in pool if each.stream == stream)):
            if released >= needed or block.size < limit:
                break
            released += block.size
            self._release(block)
        return released >= needed

    def _collect_garbage(self) -> None:
        """Free the large segments that were unused longest, if more is reserved than the threshold."""
        assert self.settings.limit_bytes is not None
        excess = self.reserved - int(self.settings.gc_threshold * self.settings.limit_bytes)
        pool = self._pools[1]
        whole = [block for block in pool if block.is_whole_segment]
        while excess > 0 and whole:
            mean = sum(pool.searches - block.age for block in whole) / len(whole)
            old = [block for block in whole if pool.searches - block.age >= mean]
            for block in old:
                excess -= block.size
                self._release(block)
            whole = [block for block in whole if block not in old]
