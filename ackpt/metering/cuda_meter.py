"""Bytes of a step on a CUDA GPU, from the caching allocator's peak and its history, or from a model of the allocator.

The peak is ``max_memory_allocated``. The history has the requested bytes; rounded up to 512 they form the timeline. The
difference to the peak (blocks that the allocator did not split, tensors not listed as resident, workspaces) is the
category "other". The history cannot contain marks, so the start of backward and complete gradients are recorded
separately, with the number of allocations and frees so far as their position. `modeled` gives the peaks of a predicted
step.
"""

import contextlib
import gc

import torch

from .autograd_engine import around_backward
from .cpu_meter import no_collection
from .gpus import BLOCK, CachingAllocator
from .resident import rounded
from .timeline import MeterError, build_timeline, store_watched


def trace(step_fn, warm_up, owned, device):
    """Run `warm_up`, if given, then `step_fn` once with its allocations recorded; see ``meter.measure``."""
    if torch._C._cuda_isHistoryEnabled():
        raise MeterError(
            "the CUDA memory history is being recorded, and measure() needs it for itself: "
            "call torch.cuda.memory._record_memory_history(None) first"
        )
    index = torch.cuda.current_device() if device.index is None else device.index

    def counts(tensor):
        return tensor.device.type == "cuda" and tensor.device.index == index

    with torch.cuda.device(index):
        gc.collect()
        torch.cuda.empty_cache()  # so that reserved bytes are those of this step
        if warm_up is not None:
            warm_up()
            gc.collect()
        torch.cuda.synchronize()
        resident_bytes = owned.bytes(counts, BLOCK)
        before = {
            storage.data_ptr(): ("gradients", rounded(storage.nbytes(), BLOCK))
            for _, storage in owned.gradients(counts)
        }
        listed_bytes = sum(resident_bytes.values()) + sum(size for _, size in before.values())
        resident_bytes["other"] = torch.cuda.memory_allocated() - listed_bytes
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)
        try:
            with _marks(owned, counts) as (marks, note), store_watched(note) as store, no_collection():
                step_fn()
            torch.cuda.synchronize()
            history = torch.cuda.memory._snapshot().get("device_traces", [])[index]
        finally:
            torch.cuda.memory._record_memory_history(None)
        statistics = torch.cuda.memory_stats()
        after = owned.backed(counts, torch.UntypedStorage.data_ptr)
    peaks = {
        "requested_peak_bytes": statistics["requested_bytes.all.peak"],
        "reserved_peak_bytes": statistics["reserved_bytes.all.peak"],
    }
    if store.peak_bytes:
        peaks["store_peak_bytes"] = store.peak_bytes
    timeline = build_timeline(actions(history, marks), before, after)
    return timeline, resident_bytes, statistics["allocated_bytes.all.peak"], peaks


def modeled(before_step, loaded, actions, settings) -> dict[str, int]:
    """The peaks that the caching allocator would report for a step, and for its phases, in bytes.

    `before_step`: actions that load the model, the first `loaded` ones, and those of earlier steps. `actions`: those of
    the step.
    """
    allocator = CachingAllocator(settings)
    _replay(allocator, before_step[:loaded])
    start = allocator.allocated
    _replay(allocator, before_step[loaded:])
    before = allocator.allocated
    allocator.reset_peaks()
    peaks = _replay(allocator, actions)
    return {
        "allocated_peak_bytes": allocator.peak_allocated,
        "allocated_before_bytes": before,
        "start_peak_bytes": start,
        "reserved_peak_bytes": allocator.peak_reserved,
        "largest_free_block_bytes": allocator.largest_free_block,
        **{f"{phase}_peak_bytes": peak for phase, peak in peaks.items()},
    }


def _replay(allocator: CachingAllocator, actions) -> dict[str, int]:
    """Repeat the actions of a prediction; returns the largest number of allocated bytes in each phase."""
    phase, peaks = "forward", {"forward": allocator.allocated}
    for kind, *rest in actions:
        if kind in ("alloc", "workspace"):
            allocator.allocate(*rest)
        elif kind == "free" and rest[0] in allocator.blocks:
            allocator.free(rest[0])
        elif kind in ("backward", "optimizer"):
            phase = kind
        peaks[phase] = max(peaks.get(phase, 0), allocator.allocated)
    return peaks


def clock(step_fn, device) -> float:
    """Seconds of one run, between two CUDA events, after all earlier work has ended."""
    with torch.cuda.device(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        step_fn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000


def actions(history, marks):
    """The actions for ``build_timeline``, from a device trace and marks ``(events so far, action)``.

    Memory counts as freed when the free is requested, as in ``memory_allocated``, even if a stream still uses it.
    """
    marks = sorted(marks, key=lambda mark: mark[0])[::-1]  # those at one event are taken from the end, in their order
    events = 0
    for entry in history:
        if entry["action"] not in ("alloc", "free_requested"):
            continue
        while marks and marks[-1][0] <= events:
            yield marks.pop()[1]
        events += 1
        if entry["action"] == "alloc":
            yield "alloc", entry["addr"], rounded(entry["size"], BLOCK)
        else:
            yield "free", entry["addr"]
    yield from (action for _, action in reversed(marks))


@contextlib.contextmanager
def _marks(owned, counts):
    """Collect marks ``(events so far, action)`` at the start of backward and at every complete gradient."""
    marks = []
    start = _events()

    def note(action):
        marks.append((_events() - start, action))

    @contextlib.contextmanager
    def backward():
        note(("backward",))
        yield

    with owned.gradients_noted(counts, torch.UntypedStorage.data_ptr, note), around_backward(backward):
        yield marks, note


def _events() -> int:
    """Number of allocations and frees on the current device so far."""
    statistics = torch.cuda.memory_stats()
    return statistics["allocation.all.allocated"] + statistics["allocation.all.freed"]
