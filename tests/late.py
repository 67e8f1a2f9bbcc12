"""A CPU transport that makes races visible: copies run as late as allowed, and freed memory is reused at once."""

import dataclasses
import threading
import weakref

import torch

import ackpt
from ackpt.offloading.cpu_streams import Stream
from ackpt.offloading.engine import DeviceStore, Engine
from ackpt.offloading.store import Pool, host_memory
from ackpt.offloading.transport import CpuTransport, Ended

LONG = 30  # seconds that no test comes near


class Gate:
    """Shut until somebody asks for the work behind it. Stands first among the events that the work waits for."""

    def __init__(self):
        self._open = threading.Event()

    def open(self):
        self._open.set()

    def error(self):
        assert self._open.wait(LONG), "a copy that nobody has asked for"


class LateEvent:
    """An event of a `LateStream`: whoever waits for it lets its work begin."""

    def __init__(self, event, begin):
        self._event, self._begin = event, begin
        self.done, self.seconds = event.done, event.seconds

    def wait(self):
        self._begin()
        self._event.wait()

    def error(self):
        self._begin()
        return self._event.error()


class LateStream(Stream):
    """Nothing runs before somebody waits for it, or for what was submitted later."""

    def __init__(self, name: str):
        super().__init__(name)
        self._gates: list[Gate] = []

    def submit(self, function, *args, after=()) -> LateEvent:
        self._gates.append(Gate())
        number = len(self._gates)
        event = super().submit(function, *args, after=[self._gates[-1], *after])
        return LateEvent(event, lambda: self.begin(number))

    def begin(self, count=None):
        """Let the first `count` pieces of work run, or all."""
        for gate in self._gates[:count]:
            gate.open()


class Arena:
    """Memory of a device: a block is overwritten when its tensor dies, and the next tensor of its size gets it.

    Blocks are never given back to the system, so that a copy which comes too late reads wrong bytes, and no more.
    """

    def __init__(self):
        self._idle: dict[int, list[bytearray]] = {}
        self._blocks: dict[int, bytearray] = {}
        self.reused = 0
        self.freed: list = []  # called with the address and the size of a block that is freed

    def storage(self, size: int) -> torch.UntypedStorage:
        idle = self._idle.setdefault(size, [])
        self.reused += bool(idle)
        block = idle.pop() if idle else bytearray(size)
        storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
        self._blocks.setdefault(storage.data_ptr(), block)
        weakref.finalize(storage, self._free, storage.data_ptr(), block).atexit = False
        return storage

    def like(self, tensor) -> torch.Tensor:
        """An empty tensor of the same shape and dtype."""
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(self.storage(tensor.nbytes), 0, tensor.shape)

    def _free(self, address, block):
        for called in self.freed:
            called(address, len(block))
        block[:] = b"\xff" * len(block)  # NaN, for floats
        self._idle[len(block)].append(block)


@dataclasses.dataclass
class Copy:
    """One copy, and the memory of the device that it reads or writes."""

    way: str
    event: LateEvent
    address: int


class LateTransport(CpuTransport):
    """The CPU's transport over late streams and an arena. `faults`: memory that was freed under a running copy."""

    def __init__(self, arena: Arena):
        self.streams = {"out": LateStream("out"), "in": LateStream("in")}
        self.arena = arena
        self.copies: list[Copy] = []
        self.faults: list[str] = []
        arena.freed.append(self._freed)

    def copy_out(self, source, begin, buffer, size, after, *stream):
        event = super().copy_out(source, begin, buffer, size, after, *stream)
        self.copies.append(Copy("out", event, source.data_ptr() + begin))
        return event

    def copy_in(self, buffer, target, size, after):
        event = super().copy_in(buffer, target, size, after)
        self.copies.append(Copy("in", event, target.data_ptr()))
        return event

    def allocate(self, size):
        return self.arena.storage(size)

    def finish(self):
        """Let everything run that was submitted."""
        for stream in self.streams.values():
            stream.begin()
            stream.submit(int).error()

    def _freed(self, address, size):
        for copy in self.copies:
            if address <= copy.address < address + size and not copy.event.done():
                self.faults.append(f"memory freed under a copy {copy.way}")


class EventBeforeCopyOut(LateTransport):
    """Broken: the event of a copy out is reached before the copy."""

    def copy_out(self, source, begin, buffer, size, after, *stream):
        early = self.streams["out"].submit(int, after=after)
        super().copy_out(source, begin, buffer, size, after, *stream)
        return early


class EventBeforeCopyIn(LateTransport):
    """Broken: the event of a copy in is reached before the copy."""

    def copy_in(self, buffer, target, size, after):
        early = self.streams["in"].submit(int, after=after)
        super().copy_in(buffer, target, size, after)
        return early


class FreesSourceEarly(LateTransport):
    """Broken: the source of a copy out is freed without waiting."""

    def wait_event(self, event, used=None):
        return Ended() if used is None else super().wait_event(event, used)


class UsesTargetEarly(LateTransport):
    """Broken: the target of a copy in is used without waiting."""

    def wait_event(self, event, used=None):
        return super().wait_event(event, used) if used is None else Ended()


def late_offload(transport, mode="async", memory=host_memory, **options) -> ackpt.offloading.saved_tensors.Offload:
    """An Offload whose engine has `transport` and a pool of its own."""
    offload = ackpt.offload_saved_tensors(mode, min_bytes=options.pop("min_bytes", 1), **options)
    offload.engine = Engine("host")
    offload.engine._device_stores[torch.device("cpu"), False] = DeviceStore(transport, Pool(memory))
    return offload
