"""Errors of single methods, collected so that the other methods still have results."""

from __future__ import annotations

import contextlib
import traceback


class Failures:
    """``reasons``: the errors by the names of what failed. A strict one collects nothing and lets every error through.

    Example:
        >>> from experiments.steps.failures import Failures
        >>> failures = Failures()
        >>> with failures.of("auto"):
        ...     raise RuntimeError("no kernel")
        >>> failures.reasons
        {'auto': 'RuntimeError: no kernel'}
    """

    def __init__(self, strict: bool = False):
        self.strict = strict
        self.reasons: dict[str, str] = {}

    @contextlib.contextmanager
    def of(self, name: str):
        """Inside, an error becomes the reason why `name` has no result; the memory that it holds is freed."""
        try:
            yield
        except Exception as error:
            if self.strict:
                raise
            self.reasons[name] = described(error)
            traceback.clear_frames(error.__traceback__)

    def without(self, names) -> list:
        """The names that did not fail, in order."""
        return [name for name in names if name not in self.reasons]


STRICT = Failures(strict=True)


def described(error: BaseException) -> str:
    """Kind and message of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
