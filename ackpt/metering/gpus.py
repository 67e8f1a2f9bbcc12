"""What memory on a GPU depends on: capability, cuBLAS workspace, CUDA context, and the caching allocator of PyTorch.

Names are those of `ackpt.planner.costs.devices`. ``"cuda"`` is a GPU of compute capability 8.0. `CachingAllocator`
follows the blocks and segments that a sequence of requests takes.
"""

from __future__ import annotations

import bisect
import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from ackpt.core.errors import did_you_mean

from .timeline import MeterError

ANY = "cuda"
MIB = 2**20


class Gpu(NamedTuple):
    """A GPU as its memory sees it: `name`, and `capability`, its compute capability (major, minor)."""

    name: str
    capability: tuple[int, int]

    @property
    def cublas_workspace_bytes(self) -> int:
        """Bytes that every thread and stream that multiplies matrices allocates, once.

        ``parseChosenWorkspaceSize`` in torch's aten/src/ATen/cuda/CublasHandlePool.cpp (2.13): by default 2 x 4096 KiB
        and 8 x 16 KiB, 32 MiB for compute capabilities 9, 10 and 12; ``CUBLAS_WORKSPACE_CONFIG`` lists other sizes as
        ``:KiB:count``. cuBLASLt uses the same block unless ``TORCH_CUBLASLT_UNIFIED_WORKSPACE=0`` is set.
        """
        pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
        if pairs:
            return sum(int(size) * int(count) for size, count in pairs) * 1024
        return 32 * MIB if self.capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) * 1024

    @property
    def context_bytes(self) -> int:
        """Bytes of the CUDA context of a process with lazy loading of kernels, which is torch's default.

        It depends on the GPU and on the versions of driver and CUDA. The largest known figure where none is known for
        the architecture.
        """
        return CONTEXTS.get(self.capability, max(CONTEXTS.values())) * MIB


# Compute capabilities: developer.nvidia.com/cuda-gpus. AMD's GPUs have none; torch gives 9.4 for MI300X (gfx942).
CAPABILITIES = {
    ANY: (8, 0),
    "h100-80g": (9, 0),
    "h100-pcie": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "a100-40g": (8, 0),
    "a100-40g-pcie": (8, 0),
    "a100-80g": (8, 0),
    "a100-80g-pcie": (8, 0),
    "v100-16g": (7, 0),
    "v100-32g": (7, 0),
    "v100-pcie": (7, 0),
    "a10": (8, 6),
    "l4": (8, 9),
    "l40s": (8, 9),
    "t4": (7, 5),
    "rtx3090": (8, 6),
    "rtx4090": (8, 9),
    "rtx5090": (12, 0),
    "mi300x": (9, 4),
}
# MiB of a context by compute capability, as published: T4 with CUDA 13.0 after a step (FitCheck, t4-sweep-2026-09-15);
# RTX 6000 Ada with CUDA 13.0 (unslothai/unsloth-zoo, pull request 1053); B200 (unslothai/unsloth, pull request 8669).
CONTEXTS = {(7, 5): 141, (8, 9): 426, (10, 0): 612}


def gpu(name: str) -> Gpu:
    """The GPU called `name`; MeterError with the known names for any other."""
    if name not in CAPABILITIES:
        raise MeterError(
            f"device {name!r} cannot be predicted{did_you_mean(name, CAPABILITIES)}: choose 'cpu', or one of "
            f"{', '.join(CAPABILITIES)}"
        )
    return Gpu(name, CAPABILITIES[name])


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings of ``PYTORCH_CUDA_ALLOC_CONF`` that change what is reserved.

    ``max_split_bytes``: blocks of this size and more are not split, and serve only requests of this size and more.
    ``garbage_collection_threshold`` changes nothing here, as it is relative to a limit of the process.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None

    @classmethod
    def parsed(cls, text: str | None = None) -> AllocatorSettings:
        """The settings in `text`, by default in the environment; options that do not change sizes are ignored."""
        if text is None:
            names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
            text = next((os.environ[name] for name in names if name in os.environ), "")
        given = dict(part.strip().split(":", 1) for part in text.split(",") if ":" in part)
        split = given.get("max_split_size_mb")
        try:
            return cls(
                given.get("expandable_segments", "False").strip().lower() == "true",
                None if split is None else int(split) * MIB,
            )
        except ValueError as error:
            raise MeterError(f"PYTORCH_CUDA_ALLOC_CONF={text!r} cannot be read: {error}") from error


BLOCK = 512  # bytes; the caching allocator rounds every request up to a multiple
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
MEDIUM, MEDIUM_SEGMENT = 10 * MIB, 20 * MIB
LARGE_MULTIPLE = 2 * MIB


class Block:
    """A range of one segment; ``before`` and ``after`` are its neighbors. Free blocks are in their pool."""

    __slots__ = ("address", "size", "pool", "allocated", "before", "after")

    def __init__(self, address: int, size: int, pool: Pool):
        self.address, self.size, self.pool = address, size, pool
        self.allocated = False
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.size, self.address


class Pool:
    """The free blocks of small or of large requests by size and address; ``tail``: the last expandable one."""

    def __init__(self, is_small: bool):
        self.is_small = is_small
        self.tail: Block | None = None
        self.blocks: list[Block] = []

    def insert(self, block: Block) -> None:
        bisect.insort(self.blocks, block, key=lambda each: each.order)

    def remove(self, block: Block) -> None:
        del self.blocks[bisect.bisect_left(self.blocks, block.order, key=lambda each: each.order)]

    def smallest(self, size: int) -> Block | None:
        """The smallest free block with at least `size` bytes."""
        at = bisect.bisect_left(self.blocks, (size, 0), key=lambda each: each.order)
        return self.blocks[at] if at < len(self.blocks) else None


class CachingAllocator:
    """Follows requests and frees; ``allocated``, ``reserved``: bytes now, and ``peak_...``: the largest so far.

    As c10/cuda/CUDACachingAllocator.cpp of torch 2.13 (``malloc``, ``get_free_block``, ``should_split``,
    ``get_allocation_size``, ``free_block``): requests are rounded to 512 bytes; those up to 1 MiB share segments of
    2 MiB, those below 10 MiB segments of 20 MiB, larger ones get a segment of their own in multiples of 2 MiB. The
    smallest free block that is large enough serves a request, and what remains of it becomes a free block; of a large
    block only if more than 1 MiB remains: else the whole block counts as allocated.

    Segments get increasing addresses, so of equal free blocks the oldest serves first; a driver may place them
    otherwise. Not modeled: limits, CUDA graphs, several streams, and unmapped pages inside of an expandable segment.
    """

    def __init__(self, settings: AllocatorSettings | None = None):
        self.settings = AllocatorSettings() if settings is None else settings
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.blocks: dict[object, Block] = {}  # allocated ones, by key
        self.pools = Pool(True), Pool(False)
        self._end = 0  # of the last segment

    @property
    def largest_free_block(self) -> int:
        return max((block.size for pool in self.pools for block in pool.blocks), default=0)

    def allocate(self, key: object, size: int) -> None:
        """Allocate `size` bytes for `key`."""
        if size <= 0 or key in self.blocks:
            raise MeterError(f"a block needs a new key and a positive size, got {key!r} and {size} bytes")
        size = max(BLOCK, -(-size // BLOCK) * BLOCK)
        pool = self.pools[size > SMALL]
        block = self._free_block(pool, size) or self._new_block(pool, size)
        if self._splits(block, size):
            rest = Block(block.address + size, block.size - size, pool)
            rest.before, rest.after = block, block.after
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            if pool.tail is block:
                pool.tail = rest
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

    def _free_block(self, pool: Pool, size: int) -> Block | None:
        block = pool.smallest(size)
        if block is None:
            return None
        if block is pool.tail:  # it can grow, so a larger block that cannot fits better
            block = pool.smallest(block.size + 1) or block
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

    def _new_block(self, pool: Pool, size: int) -> Block:
        """A free block of at least `size` bytes in new memory."""
        if self.settings.expandable_segments:
            return self._expanded(pool, size)
        segment = SMALL_SEGMENT if pool.is_small else MEDIUM_SEGMENT
        if size >= MEDIUM:
            segment = -(-size // LARGE_MULTIPLE) * LARGE_MULTIPLE
        self._reserve(segment)
        self._end += segment
        return Block(self._end - segment, segment, pool)

    def _expanded(self, pool: Pool, size: int) -> Block:
        """Map pages at the end of the pool's expandable segment (``try_allocate_expandable_block``)."""
        page = SMALL_SEGMENT if pool.is_small else MEDIUM_SEGMENT
        tail = pool.tail
        free = tail.size if tail is not None and not tail.allocated else 0
        pages = -(-(size - free) // page) * page
        self._reserve(pages)
        if tail is not None and free:
            pool.remove(tail)
            tail.size += pages
            return tail
        if tail is None:
            block = Block(self._end, pages, pool)
            self._end += 2**50  # addresses for the whole device
        else:
            block = tail.after = Block(tail.address + tail.size, pages, pool)
            block.before = tail
        pool.tail = block
        return block

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

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
        if block.pool.tail is other:
            block.pool.tail = block
