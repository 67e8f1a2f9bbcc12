"""Show the current stage on one line of a terminal if capture, planning or a measurement takes longer than two seconds.

A thread writes the line, since one call into torch may take seconds. Nothing is written where stderr is no terminal, as
in notebooks and pipes.
"""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_DELAY_SECONDS = 2.0
_INTERVAL_SECONDS = 0.2


class _Line:
    """The line: it shows ``stage`` after ``about``, the larger task that the stage belongs to."""

    about = ""

    def __init__(self, stream: Any, stage: str):
        self.stream, self.start, self.stage = stream, time.time(), stage
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._write, name="ackpt-progress", daemon=True)

    def __enter__(self) -> "_Line":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._is_done.set()
        self._thread.join()

    def _write(self) -> None:
        if self._is_done.wait(_DELAY_SECONDS):
            return
        width = 0
        while True:
            minutes, seconds = divmod(int(time.time() - self.start), 60)
            text = f"ackpt: {self.about}{self.stage} [{minutes:02}:{seconds:02}]"
            text = text[: shutil.get_terminal_size().columns - 1]
            self._put(text.ljust(width))
            width = len(text)
            if self._is_done.wait(_INTERVAL_SECONDS):
                self._put(f"{' ' * width}\r")
                return

    def _put(self, text: str) -> None:
        self.stream.write(f"\r{text}")
        self.stream.flush()


class _Current(threading.local):
    """The line of this thread, if there is one."""

    line: _Line | None = None


_current = _Current()


@contextlib.contextmanager
def shown(text: str = "") -> Iterator[None]:
    """Inside, the line is shown after two seconds; `text`: its first stage, if it is known."""
    stream = sys.stderr
    if _current.line is not None or stream is None or not stream.isatty():
        if text:
            stage(text)
        yield
        return
    try:
        with _Line(stream, text or "planning") as _current.line:
            yield
    finally:
        _current.line = None


def stage(text: str) -> None:
    """Say what happens now."""
    if _current.line is not None:
        _current.line.stage = text


@contextlib.contextmanager
def about(text: str) -> Iterator[None]:
    """Inside, the line is shown, with `text` before every stage."""
    with shown():
        line = _current.line
        if line is not None:
            was, line.about = line.about, f"{text}: "
        try:
            yield
        finally:
            if line is not None:
                line.about = was  # pyright: ignore[reportPossiblyUnboundVariable]


def counted(items: Iterable[T], text: str) -> Iterator[T]:
    """`items` one by one; the line says `text` and their number."""
    items = items if isinstance(items, Sequence) else list(items)
    for number, item in enumerate(items, 1):
        stage(f"{text} {number} of {len(items)}")
        yield item
