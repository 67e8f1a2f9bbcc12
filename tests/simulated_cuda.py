"""A simulated ``torch.cuda`` that detects races between memory accesses and computes nothing.

Streams and events carry vector clocks. Every copy and every launch records the block that it reads or writes. Two
accesses of one block, at least one of them a write, are a race unless they are ordered, even if a real GPU would rarely
show it. Device memory behaves like that of a caching allocator: a freed block goes to the next tensor of the same size
and stream. Bytes are copied at once.
"""

import contextlib
import dataclasses
import weakref

import torch

from ackpt.offloading.transport import CudaEvent, CudaTransport

DEVICE = torch.device("cuda", 0)


def join(clock: dict, other: dict) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


class Stream:
    """Work in order; `clock`: how much of every stream has ended before what is submitted next."""

    def __init__(self, machine):
        self.machine, self.clock = machine, {}

    def wait_stream(self, other):
        join(self.clock, other.clock)

    def wait_event(self, event):
        join(self.clock, event.clock)

    def run(self) -> tuple:
        """Submit one piece of work; returns when it runs: the stream, and its place there."""
        join(self.clock, self.machine.host)
        self.clock[self] = self.clock.get(self, 0) + 1
        return self, self.clock[self]


class Event:
    def __init__(self, machine):
        self.machine, self.clock = machine, {}

    def record(self, stream):
        self.clock = dict(stream.clock)

    def query(self):
        return all(self.machine.host.get(stream, 0) >= tick for stream, tick in self.clock.items())

    def synchronize(self):
        self.machine.host_waits += 1
        join(self.machine.host, self.clock)

    def elapsed_time(self, other):
        return 1.0


@dataclasses.dataclass(eq=False)
class Block:
    """A piece of memory, of which stream, and who accessed it."""

    name: str
    owner: Stream | None = None
    write: tuple | None = None
    reads: list = dataclasses.field(default_factory=list)


class Span:
    """Bytes of a block, as a tensor: what the transport copies."""

    def __init__(self, machine, block, data):
        self.machine, self.block, self.data = machine, block, data

    def __getitem__(self, part):
        return Span(self.machine, self.block, self.data[part])

    def copy_(self, source, non_blocking):
        assert non_blocking and self.data.numel() == source.data.numel()
        self.machine.access(reads=[source.block], writes=[self.block])
        self.data.copy_(source.data)

    def record_stream(self, stream):
        self.machine.recorded.append((self.block, stream))


class Machine:
    """The namespace ``torch.cuda`` of one GPU, and the memory there and beside it."""

    def __init__(self):
        self.host: dict = {}  # what the host has waited for
        self.host_waits = 0
        self.races: list[str] = []
        self.recorded: list = []
        self.reused = 0
        self._current = self.default = Stream(self)
        self._idle: dict[tuple, list[Block]] = {}
        self._blocks: dict[int, Block] = {}
        self._count = 0

    # What the transport calls.

    def Stream(self, device):
        assert device == DEVICE
        return Stream(self)

    def Event(self, enable_timing):
        return Event(self)

    def current_device(self):
        return 0

    def current_stream(self, device=None):
        return self._current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    # Memory.

    def allocate(self, size: int) -> torch.UntypedStorage:
        """Device memory of the current stream."""
        owner = self._current
        idle = self._idle.setdefault((owner, size), [])
        index = next((index for index in reversed(range(len(idle))) if self._is_free(idle[index])), None)
        if index is None:
            block = self._block("device", owner)
        else:
            block = idle.pop(index)[0]
            self.reused += 1
        storage = torch.empty(size, dtype=torch.uint8).untyped_storage()
        self._blocks[storage._cdata] = block
        weakref.finalize(storage, self._free, storage._cdata, idle).atexit = False
        return storage

    def host_memory(self, size: int) -> Span:
        """Pinned memory; the host may take it back only when it knows that no copy uses it."""
        data = torch.empty(size, dtype=torch.uint8)
        block = self._block("buffer")
        weakref.finalize(data.untyped_storage(), self._take_back, block).atexit = False
        return Span(self, block, data)

    def block(self, storage) -> Block:
        return self._blocks[storage._cdata]

    def used_on(self, storage, stream):
        """``record_stream`` by the program, where it must be."""
        block = self._blocks.get(storage._cdata)
        if block is not None and block.owner is not stream and (block, stream) not in self.recorded:
            self.recorded.append((block, stream))

    def _block(self, kind, owner=None) -> Block:
        self._count += 1
        return Block(f"{kind} block {self._count}", owner)

    def _free(self, key, idle):
        block = self._blocks.pop(key)
        until: dict = {}
        for other, stream in self.recorded:
            if other is block:
                join(until, stream.clock)
        self.recorded = [each for each in self.recorded if each[0] is not block]
        idle.append((block, until))

    def _is_free(self, entry) -> bool:
        return all(self.host.get(stream, 0) >= tick for stream, tick in entry[1].items())

    def _take_back(self, block):
        for access in [block.write, *block.reads]:
            if access is not None and self.host.get(access[0], 0) < access[1]:
                self.races.append(f"{block.name} taken back by the host under a copy")

    # Accesses.

    def launch(self, reads=(), writes=()) -> None:
        """A kernel on the current stream over these storages."""
        self.access([self.block(storage) for storage in reads], [self.block(storage) for storage in writes])

    def access(self, reads, writes) -> None:
        now = self._current.run()
        for block in reads:
            self._after(now, block, "read", [block.write])
            block.reads.append(now)
        for block in writes:
            self._after(now, block, "written", [block.write, *block.reads])
            block.write, block.reads = now, []

    def _after(self, now, block, access_kind, earlier):
        clock = now[0].clock
        if any(access is not None and clock.get(access[0], 0) < access[1] for access in earlier):
            self.races.append(f"{block.name} {access_kind} without waiting")

    def synchronize(self):
        """The host waits for everything that was submitted to the current stream."""
        join(self.host, self._current.clock)


class SimulatedTransport(CudaTransport):
    """``CudaTransport`` over a `Machine`: only where memory comes from is another."""

    def __init__(self, machine: Machine):
        super().__init__(DEVICE, cuda=machine)
        self.machine = machine

    def allocate(self, size):
        return self.machine.allocate(size)

    def _bytes(self, storage, begin, size):
        data = torch.empty(0, dtype=torch.uint8).set_(storage, begin, (size,), (1,))
        return Span(self.machine, self.machine.block(storage), data)


class EventBeforeTheCopy(SimulatedTransport):
    """Broken: the event is recorded before the copy."""

    def _copy(self, way, target, source, after, owner):
        event = super()._copy(way, target, source, after, owner)
        event.ended = event.began
        return event


class EventOnTheComputingStream(SimulatedTransport):
    """Broken: the event is recorded behind the copy, but on the stream that computes."""

    def _copy(self, way, target, source, after, owner):
        event = super()._copy(way, target, source, after, owner)
        event.ended.record(owner)
        return event


class CachedStream(SimulatedTransport):
    """Broken: the computing stream is asked for once."""

    def __init__(self, machine):
        super().__init__(machine)
        self.cached = machine.current_stream()

    def _copy(self, way, target, source, after, owner):
        return super()._copy(way, target, source, after, self.cached)


class FreesSourceEarly(SimulatedTransport):
    """Broken: nobody waits before the source of a copy out is freed."""

    def wait_event(self, event, used=None):
        return super().wait_event(event, used) if used is not None else CudaEvent(self._timed(), self._timed(), None)


class UsesTargetEarly(SimulatedTransport):
    """Broken: nobody waits before what was copied in is used."""

    def wait_event(self, event, used=None):
        return super().wait_event(event, used) if used is None else CudaEvent(self._timed(), self._timed(), None)


class IgnoresOwner(SimulatedTransport):
    """Broken: the current stream waits, the one that the memory belongs to does not."""

    def wait_event(self, event, used=None):
        self.machine.current_stream().wait_event(event.ended)
        return event


class IgnoresComputing(SimulatedTransport):
    """Broken: a copy does not wait for what was computed so far."""

    def _copy(self, way, target, source, after, owner):
        event = super()._copy(way, target, source, after, Stream(self.machine))
        event.owner = owner
        return event


class IgnoresEarlierCopies(SimulatedTransport):
    """Broken: a buffer is used without the events of its earlier copies."""

    def _copy(self, way, target, source, after, owner):
        return super()._copy(way, target, source, (), owner)
