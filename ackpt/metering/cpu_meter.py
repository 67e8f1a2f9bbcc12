"""Exact bytes on the CPU: the allocator's own events, ordered by the profiler's clock.

The allocator reports to the profiler every block that is born, and the death of every block that was born while
profiling. So the warm-up runs inside the profile too, and what only Python knows (a block backs a ``.grad`` now, a
gradient that existed before is gone) is written into the same stream as a mark: an event with a name.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import weakref

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _EventType, _RecordFunctionFast
from torch.autograd.profiler import profile  # torch.profiler wraps it, and in torch 2.11 warns at its first start

from .resident import on, storages_of
from .store_meter import store_watched
from .timeline import MeterError, build_timeline

_ON_CPU = on("cpu")
_MARK = "ackpt::"
_BACKWARD = "autograd::engine::evaluate_function"


def trace(step_fn, warm_up, owned, device):
    """Run `warm_up`, then `step_fn` once with its allocations recorded; see ``meter.measure``."""
    if _profiler_enabled():
        raise MeterError("a torch profiler is running, and measure() needs it for itself: measure outside of it")
    # Kineto prints a line to stderr at every start and stop; it reads its log level once, at its first start.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    gc.collect()
    # The allocator prints a warning when a block that was born before profiling dies in it: keep those storages.
    earlier = [storage for _, storage in owned.gradients(_ON_CPU)]
    with profile(use_kineto=True, profile_memory=True) as profiler:
        warm_up()
        gc.collect()
        held = owned.bytes(_ON_CPU)
        existing = {storage.data_ptr(): storage for _, storage in owned.gradients(_ON_CPU)}
        with store_watched(_mark_copy) as store, _marks(owned), no_collection():
            _mark("step")
            step_fn()
            _mark("end")
        after = owned.backed(_ON_CPU, torch.UntypedStorage.data_ptr)
    before = {pointer: ("gradients", storage.nbytes()) for pointer, storage in existing.items()}
    del earlier, existing  # alive until here, so that no block of the step could take their addresses
    assert profiler is not None and profiler.kineto_results is not None
    peaks = {"store_peak_bytes": store.peak_bytes} if store.peak_bytes else {}
    return build_timeline(_actions(profiler.kineto_results), before, after), held, None, peaks


def _actions(results):
    """The allocator's events and our marks between the marks "step" and "end", in the order of their clock."""
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
                what, _, pointer = name.removeprefix(_MARK).partition(":")
                if what in ("step", "end"):
                    inside = what == "step"
                elif what == "gradient":
                    yield "mark", int(pointer), "gradients"
                elif what == "held":
                    yield "held", int(pointer)
                elif what == "copy":
                    number, way, size = pointer.split(":")
                    yield "copy", int(number), way, int(size)
                else:
                    yield "free", int(pointer)
            elif inside and name.startswith(_BACKWARD):
                yield ("backward",)


def clock(step_fn, device) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    step_fn()
    return time.perf_counter() - start


def _mark(name: str) -> None:
    with _RecordFunctionFast(_MARK + name):
        pass


def _mark_copy(action) -> None:
    _mark(":".join(map(str, action)))


@contextlib.contextmanager
def _marks(owned):
    """Note in the profile when a leaf's gradient is complete, and when one that existed before is dropped."""

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
    """Cycles that die inside the step die after it: a collection at a random moment would not repeat."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
