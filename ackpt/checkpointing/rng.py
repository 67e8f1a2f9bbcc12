"""Every random number stream a region may draw from: saved before the forward, replayed in the recompute.

A stream is torch's CPU generator, the generators of all initialised devices, Python's ``random``, numpy's global
state, and any generator object found in the region's arguments (``torch.Generator``, ``random.Random``,
``numpy.random.Generator`` and ``RandomState``). A state is kept only if the region really drew from the stream, so a
region without dropout saves nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import threading
from typing import Any

import torch

# One region at a time may own the global streams: another thread's dropout between snapshot and draw, or in the
# middle of a replay, would give the recompute another mask than the forward had.
LOCK = threading.RLock()


class TorchStream:
    """A ``torch.Generator``: a device's default one or one of the user's."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def get(self):
        return self.generator.get_state()

    def set(self, state):
        self.generator.set_state(state)

    def moved(self, state) -> bool:
        return _words(state) != _words(self.generator.get_state())


def _words(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


class PythonStream:
    """Python's global ``random`` or a ``random.Random`` object."""

    def __init__(self, source: Any = random):
        self.source = source

    def get(self):
        return self.source.getstate()

    def set(self, state):
        self.source.setstate(state)

    def moved(self, state) -> bool:
        return state != self.source.getstate()


class NumpyStream:
    """A ``numpy.random.Generator`` or ``RandomState`` of the user's."""

    def __init__(self, source):
        self.bits = getattr(source, "bit_generator", None)
        self.source = source

    def get(self):
        return self.source.get_state(legacy=False) if self.bits is None else self.bits.state

    def set(self, state):
        if self.bits is None:
            self.source.set_state(state)
        else:
            self.bits.state = state

    def moved(self, state) -> bool:
        return repr_state(state) != repr_state(self.get())


def repr_state(state):
    """A numpy state with its arrays turned into bytes, so that two of them compare by ``==``."""
    if isinstance(state, dict):
        return {key: repr_state(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


class NumpyGlobalStream:
    """numpy's legacy global state (Mersenne Twister).

    Reading the full state costs some 30 microseconds, so the raw words at the address that numpy publishes for
    ``ctypes`` users tell first whether anything moved since the last full read. They do not show the cached second
    half of a Gaussian pair: a state that has one is always read, and always kept.
    """

    _WORDS = 624 * 4 + 4  # key and position of the Mersenne Twister, in bytes

    def __init__(self, numpy_random):
        self.random = numpy_random
        bits = numpy_random.mtrand._rand._bit_generator
        self.bits = bits
        self.address = bits.ctypes.state_address if type(bits).__name__ == "MT19937" else None
        self._known = (None, None)

    def get(self):
        words = self._read_words()
        known_words, state = self._known
        if words is not None and state is not None and words == known_words and not state["has_gauss"]:
            return state
        state = self.random.get_state(legacy=False)
        self._known = (words, state)
        return state

    def set(self, state):
        self.random.set_state(state)
        self._known = (None, None)

    def moved(self, state) -> bool:
        if state.get("has_gauss"):
            return True
        words = self._read_words()
        if words is not None and words == self._known[0] and state is self._known[1]:
            return False
        return repr_state(state) != repr_state(self.random.get_state(legacy=False))

    def _read_words(self):
        return None if self.address is None else ctypes.string_at(self.address, self._WORDS)


_DEVICE_MODULES = [
    module
    for module, built in ((torch.cuda, torch.backends.cuda.is_built()), (torch.xpu, torch.xpu._is_compiled()))
    if built
]
_MPS = torch.backends.mps.is_built()


def _device_streams() -> list[TorchStream]:
    """The default generators of every device that is already in use (none is initialised for this)."""
    generators = [g for module in _DEVICE_MODULES if module.is_initialized() for g in module.default_generators]
    if _MPS and torch.backends.mps.is_available():
        generators.append(torch.mps._get_default_mps_generator())
    return [TorchStream(generator) for generator in generators]


_TORCH_CPU = TorchStream(torch.default_generator)
_PYTHON = PythonStream()
_numpy_global: list[NumpyGlobalStream] = []


def _numpy():
    """numpy's global stream if numpy is loaded; rebuilt when someone replaced the global bit generator."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return []
    if not _numpy_global or _numpy_global[0].bits is not numpy_random.mtrand._rand._bit_generator:
        _numpy_global[:] = [NumpyGlobalStream(numpy_random)]
    return _numpy_global


def stream_of(obj):
    """The stream of a generator object, or None if `obj` is none."""
    if isinstance(obj, torch.Generator):
        return TorchStream(obj)
    if isinstance(obj, random.Random) and not isinstance(obj, random.SystemRandom):
        return PythonStream(obj)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None and isinstance(obj, (numpy_random.Generator, numpy_random.RandomState)):
        return NumpyStream(obj)
    return None


def snapshot(generators=(), other=True) -> list:
    """States of all streams now: ``[(stream, state)]``; torch's own only when `other` is False."""
    streams = [_TORCH_CPU, *_device_streams()] if _DEVICE_MODULES or _MPS else [_TORCH_CPU]
    if other:
        streams += [_PYTHON, *_numpy(), *generators]
    return [(stream, stream.get()) for stream in streams]


def drawn_from(states: list) -> list:
    """The part of a snapshot whose streams have moved since: what the region drew from."""
    return [(stream, state) for stream, state in states if stream.moved(state)]


@contextlib.contextmanager
def replay(states: list):
    """Run the body with the streams set back to `states`; afterwards they stand where they stood before."""
    if not states:
        yield
        return
    with LOCK:
        now = [(stream, stream.get()) for stream, _ in states]
        try:
            for stream, state in states:
                stream.set(state)
            yield
        finally:
            for stream, state in now:
                stream.set(state)
