"""Pitfalls of asynchronous copies: five bugs, each with its fix, on the streams of `ackpt.offloading.cpu_streams`.

The first four are races: their results are usually correct. To make a race fail every time, one side is delayed
until the other has finished, for at most `DELAY` seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ackpt.offloading.cpu_streams import Stream
from ackpt.offloading.store import Pool, host_memory

DELAY = 0.1


class Race:
    """A `block` of device memory, a `host` buffer, and two streams; `passed` tells the delayed side to continue."""

    def __init__(self):
        self.compute, self.copies = Stream("compute"), Stream("copies")
        self.block, self.host = torch.ones(4), torch.zeros(4)
        self.passed = threading.Event()

    def late_copy(self) -> None:
        """Copy the block to the host, late."""
        self.passed.wait(DELAY)
        self.host.copy_(self.block)

    def next_tensor(self) -> None:
        """Reuse the block for the next tensor of the computation."""
        self.block.fill_(2)
        self.passed.set()

    def copied_wrong(self, value: float = 1) -> bool:
        """Wait for all work; whether the host has anything but `value`."""
        for stream in (self.compute, self.copies):
            record(stream).wait()
        return bool((self.host != value).any())


def record(stream: Stream):
    """An event that marks the end of all work submitted to the stream so far."""
    return stream.submit(lambda: None)


def freed_early(fixed: bool) -> bool:
    """The next tensor reuses the memory of the source, without waiting for the copy."""
    race = Race()
    copied = race.copies.submit(race.late_copy)
    race.compute.submit(race.next_tensor, after=[copied] if fixed else [])
    return race.copied_wrong()


def recorded_before(fixed: bool) -> bool:
    """The event is recorded in the copy stream before the copy, so waiting for it does not wait for the copy."""
    race = Race()
    recorded = record(race.copies)
    race.copies.submit(race.late_copy)
    if fixed:
        recorded = record(race.copies)
    race.compute.submit(race.next_tensor, after=[recorded])
    return race.copied_wrong()


def cached_stream(fixed: bool) -> bool:
    """The tensor is computed in another stream than the one that the code looked up once."""
    race, side = Race(), Stream("side")

    def late_compute():
        race.passed.wait(DELAY)
        race.block.fill_(3)

    def copy():
        race.host.copy_(race.block)
        race.passed.set()

    side.submit(late_compute)
    race.copies.submit(copy, after=[record(side if fixed else race.compute)])
    wrong = race.copied_wrong(3)
    record(side).wait()
    return wrong


def reused_early(fixed: bool) -> bool:
    """The buffer goes back to the pool while the copy back to the device is only submitted."""
    race, pool = Race(), Pool(host_memory)
    buffer = pool.take(16)
    buffer.bytes[:16].view(torch.float32).fill_(1)

    def late_copy_in():
        race.passed.wait(DELAY)
        race.host.copy_(buffer.bytes[:16].view(torch.float32))

    def next_copy_out():
        again.bytes[:16].view(torch.float32).fill_(2)
        race.passed.set()

    loaded = race.copies.submit(late_copy_in)
    pool.give(buffer, after=[loaded] if fixed else [])
    again = pool.take(16)
    race.compute.submit(next_copy_out, after=again.after)
    return race.copied_wrong()


def allocations(fixed: bool, steps: int = 6, tensors: int = 8) -> int:
    """The number of buffers allocated; pinning each of them can take longer than its copy."""
    pool = Pool(host_memory)
    for _ in range(steps):
        taken = [pool.take(4096) for _ in range(tensors)]
        for buffer in taken if fixed else ():
            pool.give(buffer)
    return pool.misses


RACES: dict[str, tuple[str, Callable[[bool], bool]]] = {
    "the source is freed early": ("keep it until compute waits for the copy", freed_early),
    "the event is recorded before the copy": ("record it in the copy stream, after the copy", recorded_before),
    "the compute stream is cached": ("look up the current stream for each copy", cached_stream),
    "a buffer is reused early": ("the next copy waits for the buffer's last copies", reused_early),
}


def outcomes() -> list[dict[str, str]]:
    """One row per bug: the bug, its fix, and what happens with each.

    Example:
        >>> from experiments.pitfalls.copies import outcomes
        >>> row = outcomes()[0]
        >>> row["with the bug"], row["with the fix"]
        ('wrong bytes', 'correct')
    """
    said = {True: "wrong bytes", False: "correct"}
    rows = [
        {"bug": bug, "fix": fix, "with the bug": said[race(False)], "with the fix": said[race(True)]}
        for bug, (fix, race) in RACES.items()
    ]
    counts = {f"with the {name}": f"{allocations(name == 'fix')} allocations" for name in ("bug", "fix")}
    return [*rows, {"bug": "memory is pinned for each tensor", "fix": "allocate buffers once"} | counts]
