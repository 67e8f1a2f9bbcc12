"""CPU streams: order, events, waits between streams, errors, and a fork."""

import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref

import pytest

from ackpt.offloading.cpu_streams import Stream

LONG = 20  # seconds that no test comes near


@pytest.fixture
def gate():
    event = threading.Event()
    yield event
    event.set()


def passes(gate):
    assert gate.wait(LONG)


def test_work_runs_in_the_order_of_its_submission_on_one_thread_that_is_not_the_callers():
    stream, found, threads = Stream("test"), [], set()

    def note(number):
        found.append(number)
        threads.add(threading.get_ident())

    events = [stream.submit(note, number) for number in range(100)]
    events[-1].wait()
    assert found == list(range(100)) and all(event.done() for event in events)
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_two_streams_run_concurrently(gate):
    first, second = Stream("first"), Stream("second")
    waiting = first.submit(passes, gate)
    second.submit(gate.set).wait()  # in one stream this would never run
    waiting.wait()
    assert gate.is_set()


def test_work_starts_after_the_events_of_other_streams(gate):
    first, second, found = Stream("first"), Stream("second"), []
    first.submit(passes, gate)
    events = [first.submit(found.append, number) for number in range(3)]
    later = second.submit(found.append, 3, after=iter(events))
    assert not later.done() and found == []
    gate.set()
    later.wait()
    second.submit(found.append, 4, after=[later]).wait()  # an event of its own
    assert found == [0, 1, 2, 3, 4]


def fails():
    raise OSError("no space left")


def test_wait_raises_what_the_work_raised_and_error_returns_it():
    event = Stream("test").submit(fails)
    with pytest.raises(OSError, match="no space left") as raised:
        event.wait()
    assert event.error() is raised.value and event.done() and event.ended >= event.began > 0


def test_work_after_failed_work_runs():
    stream, other, found = Stream("test"), Stream("other"), []
    failed = stream.submit(fails)
    same = stream.submit(found.append, "same stream")
    same.wait()
    other.submit(found.append, "other stream", after=[failed]).wait()
    assert found == ["same stream", "other stream"] and same.error() is None
    assert isinstance(failed.error(), OSError)


def test_seconds_exclude_the_waiting_before_the_work(gate):
    first, second = Stream("first"), Stream("second")
    blocking = first.submit(passes, gate)
    event = second.submit(lambda: None, after=[blocking])
    gate.set()
    event.wait()
    assert event.began >= blocking.ended >= blocking.began > 0
    assert event.seconds() == event.ended - event.began >= 0


def test_a_stream_without_references_ends():
    stream = Stream("test")
    stream.submit(lambda: None).wait()
    reference, thread = weakref.ref(stream), stream._thread
    del stream
    gc.collect()
    assert reference() is None
    thread.join(LONG)
    assert not thread.is_alive()


def in_a_child(work) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process has threads; newer versions of Python warn of that
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def test_a_forked_child_has_streams_of_its_own(gate):
    stream, found = Stream("test"), []
    stream.submit(found.append, "parent").wait()
    stream.submit(passes, gate)  # would keep the child waiting, had it got the parent's queue

    def child():
        stream.submit(found.append, "child").wait()
        return found == ["parent", "child"]

    assert in_a_child(child)
    gate.set()
    stream.submit(found.append, "parent again").wait()
    assert found == ["parent", "parent again"]


@pytest.mark.parametrize("starts", ["", "threading.Thread.start = refuse"], ids=["starts threads", "starts none"])
def test_work_runs_after_the_main_thread_has_returned(starts):
    code = f"""
import threading
from ackpt.metering.run_alone import in_new_thread
from ackpt.offloading.cpu_streams import Stream
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
def work():
    threading.main_thread().join()
    {starts or "assert in_new_thread(lambda: 1) == 1"}
    Stream("copies").submit(print, "copied").wait()
threading.Thread(target=work).start()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("copied\n", "")
