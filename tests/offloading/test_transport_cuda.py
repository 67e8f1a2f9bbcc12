"""The CUDA transport on simulated streams: the order of every copy, event and wait."""

import pytest
import simulated_cuda as simulated
import torch
from simulated_cuda import DEVICE, Machine, SimulatedTransport

from ackpt.offloading.store import Pool
from ackpt.offloading.transport import CudaTransport

SIZE = 1024


class Setting:
    """A machine, a transport and a pool; `filled` is a storage that the current stream has written."""

    def __init__(self, kind=SimulatedTransport):
        self.machine = Machine()
        self.transport = kind(self.machine)
        self.pool = Pool(self.machine.host_memory)
        self.in_use = []

    def take(self):
        self.in_use.append(self.pool.take(SIZE))
        return self.in_use[-1]

    def filled(self, value=1, size=SIZE):
        storage = self.machine.allocate(size)
        storage.fill_(value)
        self.machine.launch(writes=[storage])
        return storage

    def out(self, storage, buffer, begin=0, size=SIZE):
        return self.transport.copy_out(storage, begin, buffer.bytes, size, buffer.after)

    def left(self):
        """A buffer that a storage, which stays in use, is copied to, and the event of the copy."""
        buffer, source = self.pool.take(SIZE), self.filled()
        self.in_use.append(source)
        return buffer, self.out(source, buffer)

    def back(self, buffer, after, size=SIZE):
        target = self.transport.allocate(size)
        return target, self.transport.copy_in(buffer.bytes, target, size, after)


@pytest.fixture
def s():
    return Setting()


def after(stream, event) -> bool:
    """Whether what is submitted to `stream` now happens after `event`."""
    return all(stream.clock.get(other, 0) >= tick for other, tick in event.ended.clock.items())


def values(storage):
    return set(torch.tensor(storage, dtype=torch.uint8).tolist())


# Random steps, in test_offload_order, find other broken transports, but these two not at once.


def a_source_is_freed_by_another_stream(s):
    source = s.filled()
    event = s.out(source, s.take())
    with s.machine.stream(s.machine.Stream(DEVICE)):
        s.transport.wait_event(event)
    del source
    s.filled()
    assert s.machine.reused == 1
    return list(s.machine.races)


def a_copy_in_right_behind_the_copy_out(s):
    buffer, left = s.left()
    s.back(buffer, [left])  # nobody has held the event: the copy in itself must wait
    return list(s.machine.races)


def a_buffer_is_taken_again_while_it_is_read(s):
    buffer, left = s.left()
    target, loaded = s.back(buffer, [left])
    s.pool.give(buffer, [left, loaded])
    assert s.pool.take(SIZE) is buffer
    s.out(s.filled(2), buffer)
    s.transport.wait_event(loaded, target)
    return list(s.machine.races)


@pytest.mark.parametrize(
    "broken, step",
    [
        (simulated.IgnoresOwner, a_source_is_freed_by_another_stream),
        (simulated.IgnoresEarlierCopies, a_copy_in_right_behind_the_copy_out),
        (simulated.IgnoresEarlierCopies, a_buffer_is_taken_again_while_it_is_read),
    ],
    ids=lambda each: each.__name__,
)
def test_a_race_is_found_where_the_transport_is_broken(broken, step):
    assert step(Setting()) == [] != step(Setting(broken))


def test_a_copy_waits_for_the_current_stream_and_no_other(s):
    other, mine = s.machine.Stream(DEVICE), s.machine.Stream(DEVICE)
    with s.machine.stream(other):
        s.filled()
    with s.machine.stream(mine):
        event = s.out(s.filled(), s.take())
    assert event.began.clock[mine] == mine.clock[mine] == 1
    assert event.owner is mine and other not in event.ended.clock


def test_copies_run_on_a_stream_per_direction_and_keep_the_current_one(s):
    out, back = s.transport.streams["out"], s.transport.streams["in"]
    assert len({out, back, s.machine.default}) == 3
    buffer, left = s.left()
    assert s.machine.current_stream() is s.machine.default
    assert (out.clock[out], back.clock) == (1, {})
    _, loaded = s.back(buffer, [left])
    assert back.clock[back] == 1 and s.machine.current_stream() is s.machine.default
    assert out not in s.machine.default.clock and back not in s.machine.default.clock  # computing goes on beside both
    assert loaded.owner is s.machine.default


def test_hold_on_another_stream_makes_that_and_the_owner_wait(s):
    source, other, third = s.filled(), s.machine.Stream(DEVICE), s.machine.Stream(DEVICE)
    event = s.out(source, s.take())
    with s.machine.stream(other):
        s.transport.wait_event(event)
    assert after(s.machine.default, event) and after(other, event) and not after(third, event)


def test_the_host_waits_for_nothing_but_buffers_that_are_released(s):
    buffer, left = s.left()
    s.transport.wait_event(left)
    target, loaded = s.back(buffer, [left])
    waited = s.transport.wait_event(loaded, target)
    assert s.machine.host_waits == 0 and not left.done() and not waited.done()
    s.pool.give(buffer, [left, loaded])
    s.pool.clear()
    assert s.machine.host_waits == 2 and left.done() and loaded.done()


def test_memory_used_by_another_stream_is_recorded_on_it_and_only_then(s):
    buffer, left = s.left()
    target, loaded = s.back(buffer, [left])
    s.transport.wait_event(left)
    s.transport.wait_event(loaded, target)
    assert s.machine.recorded == []  # its own stream needs none
    other = s.machine.Stream(DEVICE)
    with s.machine.stream(other):
        s.transport.wait_event(left)
        assert s.machine.recorded == []  # nothing is used
        s.transport.wait_event(loaded, target)
    assert s.machine.recorded == [(s.machine.block(target), other)]


def test_the_wait_is_timed_on_the_current_stream(s):
    event = s.out(s.filled(), s.take())
    waited = s.transport.wait_event(event)
    out = s.transport.streams["out"]
    assert out not in waited.began.clock and waited.ended.clock[out] == 1
    s.machine.synchronize()
    assert waited.done() and event.done() and (waited.seconds(), event.seconds()) == (0.001, 0.001)


def test_a_part_of_a_storage_goes_to_the_beginning_of_a_larger_buffer(s):
    source = s.filled(1, size=4 * SIZE)
    torch.empty(0, dtype=torch.uint8).set_(source)[SIZE : 2 * SIZE] = 9
    buffer = s.pool.take(SIZE)
    buffer.bytes.data.fill_(0)
    left = s.out(source, buffer, begin=SIZE)
    assert values(buffer.bytes.data[:SIZE].tolist()) == {9} and values(buffer.bytes.data[SIZE:].tolist()) == {0}
    target, _ = s.back(buffer, [left])
    assert target.nbytes() == SIZE and values(target) == {9}


def test_memory_is_of_the_transports_own_device():
    machine = Machine()
    assert CudaTransport(torch.device("cuda"), cuda=machine)._device == DEVICE
    here = CudaTransport(DEVICE, cuda=machine)
    here._device = torch.device("cpu")
    storage = here.allocate(SIZE)
    assert storage.nbytes() == SIZE
    part = here._bytes(storage, 64, 100)
    assert part.dtype == torch.uint8 and part.shape == (100,) and part.data_ptr() == storage.data_ptr() + 64
    assert part.untyped_storage() is storage
