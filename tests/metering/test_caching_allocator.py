"""The model of the caching allocator: properties of random sequences, and sequences whose answers follow from torch's
c10/cuda/CUDACachingAllocator.cpp."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackpt.metering.gpus import MIB, AllocatorSettings, CachingAllocator
from ackpt.metering.timeline import MeterError

SIZES = st.one_of(st.integers(1, MIB), st.integers(1, 64 * MIB), st.sampled_from([512, MIB, MIB + 1, 10 * MIB]))
SETTINGS = st.builds(AllocatorSettings, st.booleans(), st.sampled_from([None, 20 * MIB, 32 * MIB]))


def check(allocator):
    """Blocks of a segment are adjacent, none overlap, neighbors are never both free, and the counters are sums."""
    free = [block for pool in allocator.pools for block in pool.blocks]
    blocks = sorted([*allocator.blocks.values(), *free], key=lambda block: block.address)
    for block, following in zip(blocks, blocks[1:]):
        assert block.address + block.size <= following.address
    for block in blocks:
        assert block.size % 512 == 0 and block.size > 0
        if block.after is not None:
            assert block.after.before is block and block.address + block.size == block.after.address
            assert block.allocated or block.after.allocated
    assert allocator.allocated == sum(block.size for block in blocks if block.allocated)
    assert allocator.reserved == sum(block.size for block in blocks)
    assert allocator.allocated <= allocator.peak_allocated and allocator.reserved <= allocator.peak_reserved
    assert allocator.largest_free_block == max((block.size for block in blocks if not block.allocated), default=0)


@given(st.lists(st.tuples(st.booleans(), SIZES)), SETTINGS)
def test_blocks_never_overlap_and_all_can_be_freed(steps, settings):
    allocator = CachingAllocator(settings)
    live = {}
    for number, (frees, size) in enumerate(steps):
        if frees and live:
            key = list(live)[size % len(live)]
            del live[key]
            allocator.free(key)
        else:
            allocator.allocate(number, size)
            live[number] = size
        check(allocator)
        assert sum(live.values()) <= allocator.allocated <= allocator.reserved
    for key in live:
        allocator.free(key)
    check(allocator)
    assert allocator.allocated == 0


def allocated(*sizes, **settings):
    allocator = CachingAllocator(AllocatorSettings(**settings))
    for key, size in enumerate(sizes):
        allocator.allocate(key, size)
    return allocator


@pytest.mark.parametrize(
    ("size", "counted", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 512, 10 * MIB + 512, 12 * MIB),  # more than 1 MiB remains
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB would remain, which is not split off
        (12 * MIB + 1, 12 * MIB + 512, 14 * MIB),
    ],
)
def test_one_request(size, counted, reserved):
    found = allocated(size)
    assert (found.allocated, found.reserved) == (counted, reserved)


def test_requests_below_10_mib_share_segments_of_20_mib():
    assert allocated(*[6 * MIB] * 3).reserved == 20 * MIB
    found = allocated(*[6 * MIB] * 4)
    assert (found.allocated, found.reserved) == (24 * MIB, 40 * MIB)


def test_a_remainder_of_at_most_1_mib_counts_as_allocated():
    found = allocated(9 * MIB, 9 * MIB + MIB // 2, MIB // 2)
    # 20 - 9 = 11 MiB were free: 1.5 MiB remain of it, and small requests have their own pool.
    assert (found.allocated, found.reserved) == (19 * MIB, 22 * MIB)
    found = allocated(9 * MIB, 10 * MIB)
    assert (found.allocated, found.reserved) == (20 * MIB, 20 * MIB)


def test_the_smallest_free_block_serves():
    found = allocated(30 * MIB, 14 * MIB, 2 * MIB)
    found.free(0)
    found.free(1)
    found.allocate("a", 13 * MIB)
    assert found.blocks["a"].size == 14 * MIB  # whole; those of 18 and 30 MiB are larger
    assert found.reserved == 64 * MIB


def test_expandable_segments_grow_by_pages():
    found = allocated(30 * MIB, 30 * MIB, MIB, expandable_segments=True)
    assert (found.allocated, found.reserved) == (61 * MIB, 62 * MIB)
    found.free(1)
    found.allocate("a", 45 * MIB)
    assert found.reserved == 82 * MIB


def test_blocks_above_the_largest_split_serve_only_requests_that_are_large():
    found = allocated(40 * MIB, max_split_bytes=32 * MIB)
    found.free(0)
    found.allocate("a", 16 * MIB)
    assert found.reserved == 56 * MIB
    found.allocate("b", 34 * MIB)
    assert found.blocks["b"].size == 40 * MIB


def test_bad_requests_are_refused():
    with pytest.raises(MeterError, match="a block needs a new key and a positive size, got 0 and 8 bytes"):
        allocated(8).allocate(0, 8)
    with pytest.raises(MeterError, match="max_split_size_mb:much.* cannot be read"):
        AllocatorSettings.parsed("max_split_size_mb:much")
