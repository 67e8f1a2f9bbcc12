"""Exact bytes of a step on the CPU, from the events that torch's allocator reports to the profiler.

The profiler records every allocation, and the free of every block that was allocated while it runs, so the warm-up runs
inside the profile too. Facts that only Python knows (a block now backs a ``.grad``, an earlier gradient was freed) are
written into the same stream as *marks*: profiler events with a special name.
"""

import contextlib
import gc
import itertools
import os
import time
import weakref

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _EventType, _RecordFunctionFast
from torch.autograd.profiler import profile  # torch.profiler wraps it, and in torch 2.11 warns at its first start

from .timeline import MeterError, build_timeline, store_watched

_MARK = "ackpt::"
_LEVEL = "KINETO_LOG_LEVEL"
_BACKWARD = "autograd::engine::evaluate_function"


def trace(step_fn, warm_up, owned, device):
    """Run `warm_up`, if given, then `step_fn` once with its allocations recorded; see ``meter.measure``."""
    if _profiler_enabled():
        raise MeterError("a torch profiler is running, and measure() needs it for itself: measure outside of it")
    if warm_up is not None:  # the step itself runs without collections
        gc.collect()
    # Keep the storages of earlier gradients: the allocator warns about frees of blocks allocated before the profile.
    earlier = [storage for _, storage in owned.gradients(_on_cpu)]
    with contextlib.ExitStack() as stack:
        with _quiet():
            profiler = stack.enter_context(profile(use_kineto=True, profile_memory=True))
        if warm_up is not None:
            warm_up()
            gc.collect()
        resident_bytes = owned.bytes(_on_cpu)
        existing = {storage.data_ptr(): storage for _, storage in owned.gradients(_on_cpu)}
        marks = _Marks()
        with store_watched(marks.note) as store, _gradients(owned, marks.note), no_collection():
            marks.note(("step",))
            step_fn()
            marks.note(("end",))
        after = owned.backed(_on_cpu, torch.UntypedStorage.data_ptr)
    before = {pointer: ("gradients", storage.nbytes()) for pointer, storage in existing.items()}
    del earlier, existing  # kept until here, so that no block of the step has their address
    assert profiler is not None and profiler.kineto_results is not None
    peaks = {"store_peak_bytes": store.peak_bytes} if store.peak_bytes else {}
    return build_timeline(_actions(profiler.kineto_results, marks), before, after), resident_bytes, None, peaks


@contextlib.contextmanager
def _quiet():
    """Inside, the profiler starts; without this level, Kineto prints a line to stderr at every start and stop.

    Kineto reads the level once, at its first start. Afterwards the environment, which models may read, is as it was.
    """
    is_ours = _LEVEL not in os.environ
    if is_ours:
        os.environ[_LEVEL] = "6"
    try:
        yield
    finally:
        if is_ours:
            del os.environ[_LEVEL]


class _Marks(dict[str, tuple]):
    """The actions that are written into the profiler's events, by the name of their event."""

    def __init__(self):
        self._numbers = itertools.count()

    def note(self, action: tuple) -> None:
        name = f"{_MARK}{next(self._numbers)}"
        self[name] = action
        with _RecordFunctionFast(name):
            pass


def _actions(results, marks):
    """The actions for `build_timeline`, from the events between the marks "step" and "end", in order of time."""
    events, stack = [], results.experimental_event_tree()[::-1]
    while stack:
        event = stack.pop()
        stack += event.children[::-1]
        events.append(event)
    events.sort(key=lambda event: event.start_time_ns)
    inside = False
    for event in events:
        kind, extra = event.typed
        if kind == _EventType.Allocation:
            if inside and extra.device.type == "cpu":
                if extra.alloc_size > 0:
                    yield "alloc", extra.ptr, extra.alloc_size
                else:
                    yield "free", extra.ptr
        elif kind == _EventType.TorchOp:
            if (mark := marks.get(event.name)) is not None:
                if mark[0] in ("step", "end"):
                    inside = mark[0] == "step"
                else:
                    yield mark
            elif inside and event.name.startswith(_BACKWARD):
                yield ("backward",)


def clock(step_fn, device, now=time.perf_counter) -> float:
    """Seconds of one run, by the clock `now`."""
    start = now()
    step_fn()
    return now() - start


def _on_cpu(tensor) -> bool:
    return tensor.device.type == "cpu"


@contextlib.contextmanager
def _gradients(owned, note):
    """Note when a leaf's gradient is complete, and when a gradient from before the step is freed."""

    def watch(gradient, pointer):
        return weakref.ref(gradient, lambda _: note(("free", pointer)))

    dropped = [watch(gradient, storage.data_ptr()) for gradient, storage in owned.gradients(_on_cpu)]
    try:
        with owned.gradients_noted(_on_cpu, torch.UntypedStorage.data_ptr, note):
            yield
    finally:
        dropped.clear()


@contextlib.contextmanager
def no_collection():
    """Disable the garbage collector, so that reference cycles are not freed at a random point of the step."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
