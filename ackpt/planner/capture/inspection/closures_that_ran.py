"""Find the functions that run during a capture and close over variables, by the frames that run them."""

from __future__ import annotations

import gc
import sys
import types
import weakref

# Since Python 3.11, a frame references its function once it has ended.
_FRAMES_HAVE_FUNCTIONS = sys.version_info >= (3, 11)


class Closures:
    """The functions that ran and that something else still references.

    Frames keep their local variables alive: add frames only while a model runs on tensors without data.
    """

    def __init__(self) -> None:
        self._functions: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()
        self._frames: list[types.FrameType] = []
        self._unknown: dict[int, types.CodeType] = {}

    def add(self, frame: types.FrameType) -> None:
        """Add the function that starts to run in `frame`."""
        self._frames = [other for other in self._frames if not self._is_found(other)]
        self._frames.append(frame)

    def ended(self) -> None:
        """Drop all frames, because the model's forward has ended."""
        left = [frame.f_code for frame in self._frames if not self._is_found(frame)]
        self._unknown.update({id(code): code for code in left})
        self._frames = []

    def functions(self) -> list[types.FunctionType]:
        """The functions that were added, and all that have the code of a frame that did not reveal its function."""
        return [*self._functions, *functions_of([*self._unknown.values()])]

    def _is_found(self, frame: types.FrameType) -> bool:
        for function in gc.get_referents(frame) if _FRAMES_HAVE_FUNCTIONS else ():
            if isinstance(function, types.FunctionType) and function.__code__ is frame.f_code:
                self._functions.add(function)
                return True
        return False


def functions_of(codes: list[types.CodeType]) -> list[types.FunctionType]:
    """The functions with these codes, also those that ``gc.freeze`` hides from ``gc.get_referrers``.

    Objects that are garbage now or have become garbage while frozen must not stay frozen. A collection of all objects
    is slow, so it runs only after the number of frozen objects has grown by a quarter, as the collector itself does.
    """
    global _frozen_when_collected
    functions = _referrers_of(codes)
    if {id(function.__code__) for function in functions} == set(map(id, codes)):
        return functions
    frozen = gc.get_freeze_count()  # counts one by one
    if not frozen:
        return functions
    gc.collect()
    gc.unfreeze()
    functions = _referrers_of(codes)
    if frozen > 1.25 * _frozen_when_collected:
        gc.collect()
        _frozen_when_collected = frozen
    gc.freeze()
    return functions


_frozen_when_collected = 0


def _referrers_of(codes: list[types.CodeType]) -> list[types.FunctionType]:
    referrers = gc.get_referrers(*codes) if codes else ()
    return [function for function in referrers if isinstance(function, types.FunctionType)]
