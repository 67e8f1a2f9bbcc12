"""What a region saves before its forward and replays in its recomputation: random number streams, and autocast.

The streams are torch's CPU generator, the default generators of all initialized devices, Python's ``random``, numpy's
global state, and the generator objects in the region's arguments (``torch.Generator``, ``random.Random``,
``numpy.random.Generator`` and ``RandomState``). A state is kept only if the region drew from the stream, so a region
without random numbers keeps nothing.
"""

import contextlib
import ctypes
import random
import struct
import sys
import threading
from typing import Any

import torch

from ackpt.core import autograd_state
from ackpt.core.errors import CheckpointError


class _Lock:
    """A lock for one region at a time, and for those nested in it in the same thread."""

    def __init__(self):
        self._lock, self.owner = threading.RLock(), 0

    def __exit__(self, *error):
        self._lock.release()

    def __enter__(self):
        waits = 0
        while not self._lock.acquire(timeout=0.5):
            frame = sys._current_frames().get(self.owner)
            waits = waits + 1 if frame is not None and frame.f_code.co_filename == threading.__file__ else 0
            if waits > 3:
                raise CheckpointError(
                    "a checkpointed region runs in a thread while the region of another thread waits, perhaps for this "
                    "one, as when a region runs parts of itself in a thread pool. Only one thread at a time can run a "
                    "region, because regions restore random numbers. Use checkpoint() either around the code that "
                    "starts the threads or inside them, or pass preserve_rng_state=False to the outer region."
                )
        self.owner = threading.get_ident()


# Only one region at a time may use the global streams. Otherwise a draw of another region, between snapshot and draw or
# during a replay, would give the recomputation another dropout mask than the forward.
LOCK = _Lock()
#: The memory of this process as bytes by address; a slice takes a quarter of the time of ``ctypes.string_at``.
MEMORY: Any = (ctypes.c_char * (1 << 62)).from_address(0)


class Stream:
    """A source of random numbers, whose state subclasses ``get`` and ``set``."""

    name: str
    get: Any
    set: Any

    def comparable(self, state):
        return state

    def moved(self, state) -> bool:
        """Whether the stream has another state now."""
        present = self.get()
        return present is not state and self.comparable(state) != self.comparable(present)

    def mark_of(self, state) -> int:
        return hash(self.comparable(state))


class TorchStream(Stream):
    """A ``torch.Generator``, either a device's default generator or the user's."""

    name = "torch"

    def __init__(self, generator: torch.Generator):
        self.generator, self.set = generator, generator.set_state
        self.get = lambda: autograd_state.generator_state(generator)

    def comparable(self, state: torch.Tensor) -> bytes:
        with torch._C.DisableTorchFunction():  # the recorder of an outer region would take this for a possible write
            address = state.data_ptr()
            return MEMORY[address : address + state.numel()]


class PythonStream(Stream):
    """Python's ``random`` or a ``random.Random``; its state is CPython's words, as ``getstate`` is slow."""

    name = "Python's random"

    def __init__(self, source: Any = random):
        self.source, self.get, self.set = source, source.getstate, source.setstate
        owner: Any = random._inst if source is random else source  # pyright: ignore[reportAttributeAccessIssue]
        if _HAS_WORDS and type(owner) is random.Random:
            self.get = lambda: (_words_of(owner), owner.gauss_next)  # pyright: ignore[reportAttributeAccessIssue]
            self.set = lambda state: owner.setstate((3, _numbers(state[0]), state[1]))


def _words_of(owner: Any) -> bytes:
    """The position and the 624 words of the Mersenne Twister in an object of CPython."""
    address = id(owner) + object.__basicsize__
    return MEMORY[address : address + 4 * 625]


def _numbers(words: bytes) -> tuple[int, ...]:
    position, *numbers = struct.unpack("625I", words)
    return *numbers, position


_PROBE = random.Random(7)
_HAS_WORDS = random.Random.__basicsize__ >= 4 * 625 and _numbers(_words_of(_PROBE)) == _PROBE.getstate()[1]


class NumpyStream(Stream):
    """A user's ``numpy.random.Generator`` or ``RandomState``."""

    name = "numpy.random"

    def __init__(self, source):
        self.source = source
        self.bits = bits = getattr(source, "bit_generator", None)
        self.get = (lambda: source.get_state(legacy=False)) if bits is None else lambda: bits.state
        self.set = source.set_state if bits is None else lambda state: setattr(bits, "state", state)

    def comparable(self, state) -> str:
        return repr(_without_arrays(state))


def _without_arrays(state):
    """A numpy state with its arrays turned into bytes."""
    if isinstance(state, dict):
        return {key: _without_arrays(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


class NumpyGlobalStream(Stream):
    """numpy's legacy global state (Mersenne Twister).

    Reading the full state takes about 30 microseconds. So the stream first compares the raw words, at the address that
    numpy publishes for ``ctypes``, with those of the last full read. They do not include the cached second half of a
    Gaussian pair; a state that has one is always read and always kept.
    """

    name = "numpy.random"
    comparable = NumpyStream.comparable
    _WORDS = 624 * 4 + 4  # key and position of the Mersenne Twister, in bytes

    def __init__(self, numpy_random):
        self.random = numpy_random
        self.bits = bits = numpy_random.mtrand._rand._bit_generator
        self.address = bits.ctypes.state_address if type(bits).__name__ == "MT19937" else None
        self._last_read = (None, None)

    def get(self):
        words = self._read_words()
        last_words, state = self._last_read
        if words is not None and state is not None and words == last_words and not state["has_gauss"]:
            return state
        state = self.random.get_state(legacy=False)
        self._last_read = (words, state)
        return state

    def set(self, state):
        self.random.set_state(state)
        self._last_read = (None, None)

    def moved(self, state) -> bool:
        if state.get("has_gauss"):
            return True
        words = self._read_words()
        is_last = words is not None and words == self._last_read[0] and state is self._last_read[1]
        return not is_last and super().moved(state)

    def _read_words(self):
        return None if self.address is None else MEMORY[self.address : self.address + self._WORDS]


_DEVICE_MODULES = [
    module
    for module, built in ((torch.cuda, torch.backends.cuda.is_built()), (torch.xpu, torch.xpu._is_compiled()))
    if built
]
_MPS = torch.backends.mps.is_built()


def _device_streams() -> list[TorchStream]:
    """The default generators of all initialized devices; initializes none."""
    generators = [g for module in _DEVICE_MODULES if module.is_initialized() for g in module.default_generators]
    if _MPS and torch.backends.mps.is_available():
        generators.append(torch.mps._get_default_mps_generator())
    return [TorchStream(generator) for generator in generators]


_TORCH_CPU = TorchStream(torch.default_generator)
_TORCH_CPU.get = lambda: torch.get_rng_state()  # noqa: PLW0108 (`ackpt.predict` replaces it)
_PYTHON = PythonStream()
_numpy_global: list[NumpyGlobalStream] = []


def _numpy():
    """A list with numpy's global stream, empty if numpy is not loaded; follows ``numpy.random.set_bit_generator``."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return []
    if not _numpy_global or _numpy_global[0].bits is not numpy_random.mtrand._rand._bit_generator:
        _numpy_global[:] = [NumpyGlobalStream(numpy_random)]
    return _numpy_global


def stream_of(obj):
    """The stream of a generator object; None for other objects."""
    if isinstance(obj, torch.Generator):
        return TorchStream(obj)
    if isinstance(obj, random.Random) and not isinstance(obj, random.SystemRandom):
        return PythonStream(obj)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None and isinstance(obj, (numpy_random.Generator, numpy_random.RandomState)):
        return NumpyStream(obj)
    return None


def seeds() -> tuple[int, ...]:
    """The seeds of torch's default generators of all initialized devices."""
    return tuple([each.generator.initial_seed() for each in (_TORCH_CPU, *_device_streams())])


def state_mark(generator: torch.Generator) -> int:
    """A number that tells the state of a generator from others."""
    stream = TorchStream(generator)
    return stream.mark_of(stream.get())


def snapshot(generators=(), other=True) -> list:
    """The present states of all streams, ``[(stream, state)]``; only torch's streams if `other` is False."""
    streams = [_TORCH_CPU, *_device_streams()] if _DEVICE_MODULES or _MPS else [_TORCH_CPU]
    if other:
        streams += [_PYTHON, *_numpy(), *generators]
    return [(stream, stream.get()) for stream in streams]


def drawn_from(states: list) -> list:
    """The part of a snapshot whose streams have advanced since, because the region drew from them."""
    return [(stream, state) for stream, state in states if stream.moved(state)]


def without(states: list, other: list) -> list:
    """The part of a snapshot whose streams are not in another one."""
    streams = [stream for stream, _ in other]
    return [pair for pair in states if pair[0] not in streams]


def is_of_cpu(stream: Stream) -> bool:
    """Whether threads that prepare data may draw from a stream, as from all but a device's."""
    return not isinstance(stream, TorchStream) or stream.generator.device.type == "cpu"


def unknown(used, states: list) -> list:
    """The part of `used`, ``[(weak reference to a torch.Generator, state)]``, that is not in a snapshot, as one."""
    existing = {id(stream.generator) for stream, _ in states if isinstance(stream, TorchStream)}
    generators = ((reference(), state) for reference, state in used)
    return [(TorchStream(each), state) for each, state in generators if each is not None and id(each) not in existing]


def ended_elsewhere(facts) -> str:
    """The name of the first stream whose state differs from those at the beginning and end of the first run, or "".

    `facts`: each stream, and `mark_of` these two states.
    """
    return next((stream.name for stream, *marks in facts if stream.mark_of(stream.get()) not in marks), "")


@contextlib.contextmanager
def replay(states: list):
    """Set the streams to `states` for the body, which may clear the list, and back to their present states after it."""
    if not states:
        yield
        return
    with LOCK:
        present = [(stream, stream.get()) for stream, _ in states]
        try:
            for stream, state in states:
                stream.set(state)
            state = None
            yield
        finally:
            for stream, state in present:
                stream.set(state)


_DEVICES = ("cpu", "cuda", "xpu", "mps")


class Autocast:
    """The autocast state of all devices in this thread, to be restored in a recomputation; ``off``: autocast disabled.

    `restored` sets the switches directly, because ``torch.autocast("cuda")`` disables itself without a GPU, for example
    when `predict` runs a step from shapes alone.
    """

    __slots__ = ("modes", "cache")

    def __init__(self, off: bool = False):
        is_on = torch.is_autocast_enabled
        self.modes = [(name, not off and is_on(name), torch.get_autocast_dtype(name)) for name in _DEVICES]
        self.cache = torch.is_autocast_cache_enabled()

    def _apply(self):
        for name, enabled, dtype in self.modes:
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, dtype)
        torch.set_autocast_cache_enabled(self.cache)

    @contextlib.contextmanager
    def restored(self):
        """Apply this state in the body, and the present one after it."""
        present = Autocast()
        torch.autocast_increment_nesting()
        self._apply()
        # A cached cast made outside the region has its autograd history there; the recomputation needs its own cast.
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            present._apply()


AUTOCAST_OFF = Autocast(off=True)
