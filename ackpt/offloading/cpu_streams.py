"""CUDA-like streams and events on a CPU: a stream is one worker thread that runs functions in order.

Work is *submitted* to a stream and runs later. An *event* marks the end of one piece of work, and work can be told to
start only *after* events of other streams. Races between the streams of a GPU occur here in the same way, so tests and
the book can show them without a GPU.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from queue import SimpleQueue

_streams: "weakref.WeakSet[Stream]" = weakref.WeakSet()
_forks = 0


def _after_fork() -> None:
    """Give all streams new threads in a forked child, since threads do not survive a fork; running work is lost."""
    global _forks
    _forks += 1
    for stream in _streams:
        stream._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Event:
    """The end of one piece of work, with the times at which it began and ended (``time.perf_counter``, seconds).

    Example:
        >>> from ackpt.offloading.cpu_streams import Stream
        >>> copied = []
        >>> event = Stream("copies").submit(copied.append, 1)
        >>> event.wait()
        >>> copied, event.done(), event.seconds() >= 0
        ([1], True, True)
    """

    def __init__(self):
        self._done = threading.Event()
        self._failure: BaseException | None = None
        self._forks = _forks
        self.began: float = 0.0
        self.ended: float = 0.0

    def done(self) -> bool:
        return self._forks != _forks or self._done.is_set()

    def wait(self) -> None:
        """Block until the work has ended, and raise its exception if it raised one."""
        if (error := self.error()) is not None:
            raise error

    def error(self) -> BaseException | None:
        """Block until the work has ended, and return the exception that it raised, or None."""
        if self._forks == _forks:
            self._done.wait()
        elif not self._done.is_set():
            return RuntimeError("it was running when this process was forked off; run backward before the fork")
        return self._failure

    def seconds(self) -> float:
        """Duration of the work, without the time before it started."""
        return self.ended - self.began


class Stream:
    """Runs functions in the order of their submission, in a thread of its own.

    A daemon thread, as a `ThreadPoolExecutor` takes no work once the main thread has returned, and others may still
    train. Where Python starts no thread any more, the caller runs the functions.

    Example:
        >>> from ackpt.offloading.cpu_streams import Stream
        >>> copies, log = Stream("copies"), []
        >>> first = copies.submit(log.append, 1)
        >>> copies.submit(log.append, 2, after=[first]).wait()
        >>> log
        [1, 2]
    """

    def __init__(self, name: str):
        self._name = name
        self._start()
        _streams.add(self)

    def _start(self):
        self._lock, self._thread = threading.Lock(), None
        self._work: SimpleQueue = SimpleQueue()
        weakref.finalize(self, self._work.put, None).atexit = False

    def submit(self, function: Callable[..., object], *args: object, after: Iterable[Event] = ()) -> Event:
        """Run ``function(*args)`` after all work submitted before and the events `after`, even if these failed."""
        event, after = Event(), tuple(after)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_run_all, args=[self._work], name=f"ackpt-{self._name}", daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError:  # from Python 3.12 on, once the main thread has returned
                    self._thread = None
                    _run(event, function, args, after)
                    return event
            self._work.put((event, function, args, after))
        return event


def _run_all(work: SimpleQueue) -> None:
    while (item := work.get()) is not None:
        _run(*item)
        del item  # and with it the last reference to what it used


def _run(event, function, args, after):
    for other in after:
        other.error()  # waits; its own waiters raise the error
    event.began = time.perf_counter()
    try:
        function(*args)
    except BaseException as error:
        event._failure = error
    event.ended = time.perf_counter()
    event._done.set()
