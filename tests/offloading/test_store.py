"""Buffers of the store: sizes, reuse, the limit, failed allocations, and files without names."""

import itertools
import os
import random
import stat
import weakref

import pytest
import torch
from conftest import raises

from ackpt.core.errors import OffloadError
from ackpt.offloading.cpu_streams import Stream
from ackpt.offloading.store import PAGE, Folder, Pool, Slabs, host_memory, no_memory

KIB = 1 << 10


def refused(size):
    raise RuntimeError(f"CUDA error: out of memory\nwhile pinning {size}")


class Made:
    def __init__(self):
        self.sizes = []

    def __call__(self, size):
        self.sizes.append(size)
        return f"{size} bytes"


class Ended:
    def __init__(self):
        self.waits = 0

    def error(self):
        self.waits += 1


def size_class(size):
    return Pool(no_memory).take(size).size


def test_sizes_are_rounded_up_by_at_most_an_eighth():
    rng = random.Random(0)
    for size in [8 * PAGE, 8 * PAGE + 1, *(rng.randrange(8 * PAGE, 1 << 34) for _ in range(2000))]:
        assert size <= size_class(size) <= size * 9 / 8, size


def test_small_sizes_are_rounded_up_to_pages():
    assert [size_class(size) for size in (1, PAGE, PAGE + 1, 7 * PAGE - 1)] == [PAGE, PAGE, 2 * PAGE, 7 * PAGE]


def test_a_returned_buffer_serves_every_size_of_its_class():
    pool = Pool(made := Made())
    first = pool.take(100 * KIB)
    assert pool.take(100 * KIB) is not first
    pool.give(first)
    assert pool.take(98 * KIB) is first and first.size == 104 * KIB
    assert (pool.hits, pool.misses, made.sizes) == (1, 2, [104 * KIB] * 2)


def test_the_buffer_returned_first_is_taken_first():
    pool = Pool(no_memory)
    buffers = [pool.take(PAGE) for _ in range(3)]
    for buffer in (buffers[1], buffers[2], buffers[0]):
        pool.give(buffer)
    assert [pool.take(PAGE) for _ in range(3)] == [buffers[1], buffers[2], buffers[0]]


@pytest.mark.parametrize("seed", range(5))
def test_idle_bytes_never_exceed_the_peak_in_use(seed):
    pool, rng = Pool(no_memory), random.Random(seed)
    used, most = [], 0
    for _ in range(2000):
        if used and rng.random() < 0.5:
            pool.give(used.pop(rng.randrange(len(used))))
        elif len(used) < 5:
            used.append(pool.take(rng.randrange(1, 400 * KIB)))
        in_use = sum(buffer.size for buffer in used)
        most = max(most, in_use)
        assert pool.bytes - pool.idle_bytes == in_use
        assert 0 <= pool.idle_bytes <= most
        assert pool.idle_bytes == sum(buffer.size for idle in pool._idle.values() for buffer in idle)


def test_the_least_recently_used_buffer_is_released_first():
    pool = Pool(no_memory)
    old, new = pool.take(4 * PAGE), None
    pool.give(old)
    new = pool.take(9 * PAGE)
    pool.give(new)
    assert (pool.bytes, pool.idle_bytes) == (9 * PAGE, 9 * PAGE)
    assert pool.take(9 * PAGE) is new


def test_clear_releases_idle_buffers_alone():
    pool = Pool(no_memory)
    idle, used = pool.take(2 * PAGE), pool.take(PAGE)
    pool.give(idle)
    pool.clear()
    assert (pool.bytes, pool.idle_bytes) == (PAGE, 0)
    assert pool.take(2 * PAGE) is not idle
    pool.give(used)
    assert pool.take(PAGE) is used


def test_events_of_a_returned_buffer_pass_to_its_next_user():
    pool, events = Pool(no_memory), [Ended(), Ended()]
    buffer = pool.take(PAGE)
    assert buffer.after == ()
    pool.give(buffer, events)
    assert pool.take(PAGE).after == tuple(events)
    pool.give(buffer)
    assert pool.take(PAGE).after == ()
    assert [event.waits for event in events] == [0, 0]  # the next user waits, not the pool


def test_a_failed_copy_does_not_keep_its_buffer_from_being_released():
    def failing():
        raise OSError("copy failed")

    pool = Pool(no_memory)
    event = Stream("test").submit(failing)
    assert event.error() is not None  # whoever needed the copy has asked for it
    pool.give(pool.take(2 * PAGE), [event])
    pool.clear()
    assert (pool.bytes, pool.idle_bytes) == (0, 0)


def test_at_the_limit_the_fallback_is_used_with_one_warning():
    pinned, pageable = Made(), Made()
    pool = Pool(pinned, pageable, limit=3 * PAGE)
    first = [pool.take(PAGE), pool.take(2 * PAGE)]
    assert pageable.sizes == [] and pool.fallback_bytes == 0
    with pytest.warns(UserWarning) as warned:
        more = [pool.take(PAGE), pool.take(4 * PAGE)]
    assert len(warned) == 1 and f"max_pinned_bytes={3 * PAGE} is reached" in str(warned[0].message)
    assert "pageable" in str(warned[0].message) and "Raise max_pinned_bytes" in str(warned[0].message)
    assert (pinned.sizes, pageable.sizes) == ([PAGE, 2 * PAGE], [PAGE, 4 * PAGE])
    assert [buffer.is_fallback for buffer in first + more] == [False, False, True, True]
    assert (pool.bytes, pool.fallback_bytes, pool.misses) == (8 * PAGE, 5 * PAGE, 4)


def test_at_the_limit_idle_buffers_make_room_for_another_size():
    pinned, pageable, event = Made(), Made(), Ended()
    pool = Pool(pinned, pageable, limit=4 * PAGE)
    pool.give(pool.take(4 * PAGE), [event])
    assert not pool.take(PAGE).is_fallback
    assert (pinned.sizes, pageable.sizes, event.waits) == ([4 * PAGE, PAGE], [], 1)
    assert (pool.bytes, pool.idle_bytes) == (PAGE, 0)


def test_a_larger_idle_buffer_serves_for_half_its_size_and_more():
    pool = Pool(Made())
    small, large = pool.take(4 * PAGE), pool.take(8 * PAGE)
    pool.give(large)
    pool.give(small)
    assert pool.take(3 * PAGE) is small and pool.take(5 * PAGE) is large
    pool.give(large)
    assert pool.take(3 * PAGE) is not large
    assert (pool.hits, pool.misses) == (2, 3)


def test_fallback_buffers_are_reused_and_counted_off():
    pool = Pool(Made(), Made(), limit=0)
    with pytest.warns(UserWarning):
        buffer = pool.take(PAGE)
    pool.give(buffer)
    assert pool.take(PAGE) is buffer and pool.hits == 1
    pool.give(buffer)
    pool.clear()
    assert (pool.bytes, pool.fallback_bytes) == (0, 0)


def test_where_memory_is_refused_the_fallback_is_taken_with_one_warning_that_says_why():
    pool = Pool(refused, Made())
    with pytest.warns(UserWarning) as warned:
        buffers = [pool.take(PAGE), pool.take(2 * PAGE), pool.take(PAGE)]
    assert len(warned) == 1
    message = str(warned[0].message)
    assert f"pinning {PAGE} bytes of host memory failed (CUDA error: out of memory)" in message
    assert "pageable memory" in message and "\n" not in message
    assert all(buffer.is_fallback for buffer in buffers) and pool.fallback_bytes == pool.bytes == 4 * PAGE


def test_without_a_fallback_the_error_is_raised_and_nothing_is_counted():
    pool = Pool(refused, limit=0)
    raises(RuntimeError, "out of memory", lambda: pool.take(PAGE))
    assert (pool.bytes, pool.fallback_bytes, pool.misses, pool.idle_bytes) == (0, 0, 0, 0)


def test_an_offload_error_is_raised_when_no_memory_is_left():
    pool = Pool(host_memory, host_memory)
    raises(OffloadError, "memory", lambda: pool.take(1 << 60))


class Pinned:
    """Replaces `pinned_memory`: rounds every block up to a power of two, and refuses more than `most` bytes."""

    def __init__(self, most=1 << 40):
        self.most, self.blocks = most, []

    def __call__(self, size):
        block = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8)
        if self.live() + block.numel() > self.most:
            raise RuntimeError("CUDA error: out of memory")
        self.blocks.append(weakref.ref(block.untyped_storage()))
        return block[:size]

    def live(self):
        return sum(block().nbytes() for block in self.blocks if block() is not None)


@pytest.mark.parametrize("seed", range(4))
def test_pinned_bytes_are_counted_as_torch_rounds_them(seed):
    pinned, rng = Pinned(), random.Random(seed)
    pool, used = Pool(Slabs(pinned), host_memory), []
    for _ in range(500):
        if used and rng.random() < 0.5:
            pool.give(used.pop(rng.randrange(len(used))))
        elif len(used) < 12:
            used.append(pool.take(rng.choice((9, 10, 33, 65, 100)) * KIB))
        assert pool.allocated_bytes == pinned.live() >= pool.bytes
    places = sorted((buffer.bytes.data_ptr(), len(buffer.bytes)) for buffer in used)
    assert all(begin + size <= after for (begin, size), (after, _) in itertools.pairwise(places))
    used.clear()
    pool.clear()
    assert pool.idle_bytes == pinned.live() == 0


def test_slabs_for_several_buffers_waste_little():
    pinned = Pinned()
    pool = Pool(Slabs(pinned), host_memory)
    kept = [pool.take(68 * KIB) for _ in range(41)]  # in blocks of their own 41 * 128 KiB
    assert kept[0].size == 72 * KIB and pinned.live() == (1 + 1 + 2 + 6 * 4) * 128 * KIB
    slabs = [pool.take(size * KIB).bytes.untyped_storage().nbytes() for size in (100, 48)]  # in what is left
    assert slabs == [512 * KIB, 128 * KIB] and pool.allocated_bytes == 28 * 128 * KIB


def test_the_limit_holds_for_pinned_bytes_as_torch_rounds_them():
    pinned = Pinned()
    pool = Pool(Slabs(pinned, 256 * KIB), host_memory, 256 * KIB)
    with pytest.warns(UserWarning, match="max_pinned_bytes=262144 is reached") as warned:
        buffers = [pool.take(72 * KIB) for _ in range(4)]
    assert [buffer.is_fallback for buffer in buffers] == [False, False, True, True] and len(warned) == 1
    assert pinned.live() == 256 * KIB and pool.allocated_bytes == 256 * KIB + 2 * 72 * KIB
    assert not pool.take(48 * KIB).is_fallback  # what is left of a slab


def test_where_a_slab_for_several_is_refused_one_for_a_single_buffer_is_tried():
    pinned = Pinned(most=384 * KIB)
    pool = Pool(Slabs(pinned), host_memory)
    with pytest.warns(UserWarning, match="host memory failed .CUDA error: out of memory.*pageable memory") as warned:
        buffers = [pool.take(72 * KIB) for _ in range(5)]
    assert [buffer.is_fallback for buffer in buffers] == [False, False, False, True, True] and len(warned) == 1
    for number, buffer in enumerate(buffers):
        buffer.bytes.fill_(number)
    assert [int(buffer.bytes.max()) for buffer in buffers] == [int(b.bytes.min()) for b in buffers] == [0, 1, 2, 3, 4]


def test_a_folder_keeps_bytes_and_shows_no_file(tmp_path):
    folder = Folder(tmp_path)
    data = [folder.allocate(16 * PAGE) for _ in range(3)]
    for place, each in enumerate(data):
        each.fill_(place)
    assert list(tmp_path.iterdir()) == []
    assert [int(each.max()) for each in data] == [int(each.min()) for each in data] == [0, 1, 2]
    pool = Pool(folder.allocate)
    pool.give(pool.take(PAGE))
    del data, each
    assert list(tmp_path.iterdir()) == [] and folder.path == os.fspath(tmp_path)


def test_the_blocks_of_a_file_are_reserved_before_it_is_mapped(tmp_path, monkeypatch):
    folder, reserved, reserve = Folder(tmp_path), [], os.posix_fallocate

    def noted(descriptor, offset, size):
        reserve(descriptor, offset, size)
        status = os.fstat(descriptor)
        reserved.append((offset, size, status.st_size, status.st_nlink))

    monkeypatch.setattr(os, "posix_fallocate", noted)
    assert folder.allocate(64 * PAGE).numel() == 64 * PAGE
    assert reserved == [(0, 64 * PAGE, 64 * PAGE, 0)]  # no name is left then


def test_a_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    if os.geteuid() == 0:  # root may write everywhere: let the system say what it says to others
        monkeypatch.setattr("tempfile.TemporaryFile", denied)
    else:
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    raises(OffloadError, "Permission denied", lambda: Folder(tmp_path))
    assert list(tmp_path.iterdir()) == []


def denied(**_):
    raise PermissionError(13, "Permission denied")


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    folder = Folder(tmp_path)
    pool = Pool(folder.allocate)

    def full(descriptor, offset, size):
        raise OSError(28, "No space left on device")

    kept = pool.take(PAGE)
    monkeypatch.setattr(os, "posix_fallocate", full)
    raises(OffloadError, f"cannot hold {2 * PAGE} more bytes.*No space left on device", lambda: pool.take(2 * PAGE))
    assert list(tmp_path.iterdir()) == [] and (pool.bytes, pool.misses) == (PAGE, 1)
    monkeypatch.undo()
    pool.give(kept)
    assert pool.take(2 * PAGE).size == 2 * PAGE


def test_a_system_without_fallocate_reserves_by_writing(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    size = (1 << 20) + 3 * PAGE
    data = Folder(tmp_path).allocate(size)
    assert data.numel() == size and not data.any()
    data.fill_(1)
    assert data.all() and list(tmp_path.iterdir()) == []
