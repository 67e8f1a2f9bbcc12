"""Streams and events on a CPU: a stream is one worker thread that runs what it is given in order.

The words are those of CUDA: work is *submitted* to a stream and runs later; an *event* is reached when a piece of work
has ended; work can be told to start only *after* events of other streams. What can go wrong between streams of a GPU
goes wrong between these in the same way, which is how races are tested, and shown in the book, without one.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

_streams: weakref.WeakSet[Stream] = weakref.WeakSet()
_forks = 0


def _after_fork() -> None:
    """Threads do not survive a fork: in the child all streams get new ones, and what was running is lost."""
    global _forks
    _forks += 1
    for stream in _streams:
        stream._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Event:
    """The end of one piece of work: a future, and when the work ran (seconds of ``time.perf_counter``).

    Example:
        >>> from ackpt.offloading.cpu_streams import Stream
        >>> copied = []
        >>> event = Stream("copies").submit(copied.append, 1)
        >>> event.wait()
        >>> copied, event.done(), event.seconds() >= 0
        ([1], True, True)
    """

    __slots__ = ("_failure", "_forks", "_future", "began", "ended")

    def __init__(self):
        self._future: Future
        self._failure: BaseException | None = None
        self._forks = _forks
        self.began: float = 0.0
        self.ended: float = 0.0

    def done(self) -> bool:
        return self._forks != _forks or self._future.done()

    def wait(self) -> None:
        """Return when the work has ended; raises what it raised."""
        if (error := self.error()) is not None:
            raise error

    def error(self) -> BaseException | None:
        """What the work raised; waits for it."""
        if self._forks == _forks:
            return self._future.exception()
        if self._failure is None and not self.ended:
            return RuntimeError("it was running when this process was forked off; run backward before the fork")
        return self._failure

    def seconds(self) -> float:
        """How long the work took, without the waiting before it."""
        return self.ended - self.began


class Stream:
    """Runs functions in the order of their submission, beside the thread that submits them.

    Example:
        >>> from ackpt.offloading.cpu_streams import Stream
        >>> copies, found = Stream("copies"), []
        >>> first = copies.submit(found.append, 1)
        >>> copies.submit(found.append, 2, after=[first]).wait()
        >>> found
        [1, 2]
    """

    def __init__(self, name: str):
        self._name = name
        self._start()
        _streams.add(self)

    def _start(self):
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"ackpt-{self._name}")

    def submit(self, function: Callable[..., object], *args: object, after: Iterable[Event] = ()) -> Event:
        """Run ``function(*args)`` once everything submitted before and the events `after` have ended, well or not."""
        event = Event()
        event._future = self._executor.submit(_run, event, function, args, tuple(after))
        return event


def _run(event, function, args, after):
    for other in after:
        other.error()  # whoever needs its result has asked for it
    event.began = time.perf_counter()
    try:
        function(*args)
    except BaseException as error:
        event._failure = error
        raise
    finally:
        event.ended = time.perf_counter()
