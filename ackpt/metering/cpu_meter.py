"""Exact bytes of a step on the CPU, from the events that torch's allocator reports to the profiler.

The profiler records every allocation, and the free of every block that was allocated while it runs, so the warm-up runs
inside the profile too. Facts that only Python knows (a block now backs a ``.grad``, an earlier gradient was freed) are
written into the same stream as *marks*: profiler events with a special name.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import time
import weakref

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _EventType, _RecordFunctionFast
from torch.autograd.profiler import profile  # torch.profiler wraps it, and in torch 2.11 warns at its first start

from .resident import on, storages_of
from .timeline import MeterError, build_timeline, store_watched

_ON_CPU = on("cpu")
_MARK = "ackpt::"
_LEVEL = "KINETO_LOG_LEVEL"
_KEEP = ((-4, 0), (-1, -1))  # of glibc's malloc.h: M_MMAP_MAX, no block of its own; M_TRIM_THRESHOLD, never trim
_BACKWARD = "autograd::engine::evaluate_function"


def trace(step_fn, warm_up, owned, device):
    """Run `warm_up`, if given, then `step_fn` once with its allocations recorded; see ``meter.measure``."""
    if _profiler_enabled():
        raise MeterError("a torch profiler is running, and measure() needs it for itself: measure outside of it")
    if warm_up is not None:  # the step itself runs without collections
        gc.collect()
    # Keep the storages of earlier gradients: the allocator warns about frees of blocks allocated before the profile.
    earlier = [storage for _, storage in owned.gradients(_ON_CPU)]
    with contextlib.ExitStack() as stack:
        with _quiet():
            profiler = stack.enter_context(profile(use_kineto=True, profile_memory=True))
        if warm_up is not None:
            warm_up()
            gc.collect()
        resident_bytes = owned.bytes(_ON_CPU)
        existing = {storage.data_ptr(): storage for _, storage in owned.gradients(_ON_CPU)}
        with store_watched(_mark_action) as store, _marks(owned), no_collection():
            _mark("step")
            step_fn()
            _mark("end")
        after = owned.backed(_ON_CPU, torch.UntypedStorage.data_ptr)
    before = {pointer: ("gradients", storage.nbytes()) for pointer, storage in existing.items()}
    del earlier, existing  # kept until here, so that no block of the step has their address
    assert profiler is not None and profiler.kineto_results is not None
    peaks = {"store_peak_bytes": store.peak_bytes} if store.peak_bytes else {}
    return build_timeline(_actions(profiler.kineto_results), before, after), resident_bytes, None, peaks


def keep_freed_memory() -> bool:
    """From now on, this process keeps freed memory for later allocations, as the allocator of a GPU does.

    By default, glibc returns large blocks to the operating system. The next step then asks for them again, and the page
    faults cost more the larger its peak is. Returns False where the C library has no such setting.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in _KEEP)


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


def _actions(results):
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
            name = event.name
            if name.startswith(_MARK):
                mark, _, argument = name.removeprefix(_MARK).partition(":")
                if mark in ("step", "end"):
                    inside = mark == "step"
                elif mark == "gradient":
                    yield "mark", int(argument), "gradients"
                elif mark in ("recompute", "recomputed"):
                    yield (mark,)
                elif mark == "waited":
                    yield "waited", int(argument)
                elif mark == "copy":
                    number, way, size = argument.split(":")
                    yield "copy", int(number), way, int(size)
                else:
                    yield "free", int(argument)
            elif inside and name.startswith(_BACKWARD):
                yield ("backward",)


def clock(step_fn, device, now=time.perf_counter) -> float:
    """Seconds of one run, by the clock `now`."""
    start = now()
    step_fn()
    return now() - start


def _mark(name: str) -> None:
    with _RecordFunctionFast(_MARK + name):
        pass


def _mark_action(action) -> None:
    _mark(":".join(map(str, action)))


@contextlib.contextmanager
def _marks(owned):
    """Write marks when a leaf's gradient is complete, and when a gradient from before the step is freed."""

    def complete(leaf):
        for storage in storages_of(leaf.grad):
            _mark(f"gradient:{storage.data_ptr()}")

    def watch(gradient, pointer):
        return weakref.ref(gradient, lambda _: _mark(f"dropped:{pointer}"))

    dropped = [watch(gradient, storage.data_ptr()) for gradient, storage in owned.gradients(_ON_CPU)]
    handles = [leaf.register_post_accumulate_grad_hook(complete) for leaf in owned.trainable()]
    try:
        yield
    finally:
        dropped.clear()
        for handle in handles:
            handle.remove()


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
