"""Run a function and count the bytes that it allocates, on the CPU or a CUDA device.

`operation_runs` does this for every operation of a graph in turn, with the values that the graph computes; `workspace`
for every different operation once, with made-up arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import ProfilerConfig, ProfilerState
from torch.utils._pytree import tree_leaves

from ackpt.metering.cpu_meter import no_collection
from ackpt.metering.timeline import MeterError


@dataclass(frozen=True)
class Allocations:
    """What one run of an operation allocated, in bytes.

    ``workspace``: the peak beyond what is still allocated at the end; ``left``: the latter, its new results;
    ``results``: of each result the dtype and the bytes of its storage, None for what is not a tensor.
    """

    workspace: int
    left: int
    results: tuple[tuple[torch.dtype, int] | None, ...]


def in_own_thread(function: Callable[[], Any], devices=()) -> Any:
    """`function()`, called in a new thread without gradients; the caller's RNG states stay as they are.

    In that thread the caller's autocast, fake tensors, FLOP counters and profilers have no effect. `devices`: GPUs
    whose RNG states the function may change, besides the CPU's.
    """

    threads = torch.get_num_threads()

    def run():
        torch.set_num_threads(threads)  # OpenMP's setting belongs to the thread, and workspaces depend on it
        with torch.no_grad(), no_collection():
            return function()

    with torch.random.fork_rng(devices), ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()


def count_allocations(function: Callable[[], Any], on_cuda: bool = False) -> tuple[Any, Allocations]:
    """The result of `function`, and what it allocated: in this thread on the CPU, or on the current CUDA device."""
    result, live, peak = (_on_cuda if on_cuda else run_counted)(function)
    return result, Allocations(peak - live, live, _results(result))


def run_counted(function: Callable[[], Any]) -> tuple[Any, int, int]:
    """The result of `function`, the bytes that it left allocated on the CPU, and their peak."""
    begin_counting()
    try:
        result = function()
    finally:
        live, peak = end_counting()
    return result, live, peak


def begin_counting() -> None:
    """Count what torch's CPU allocator hands out in this thread, which must not have a profiler."""
    # The older of torch's profilers belongs to one thread: it also works while the user's profiler runs in another.
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))


def end_counting() -> tuple[int, int]:
    """The bytes that were allocated since `begin_counting` and are left, and their peak."""
    live = peak = 0
    for record in (record for thread in _disable_profiler_legacy() for record in thread):
        if record.kind() == "memory_alloc":
            live += record.cpu_memory_usage()
            peak = max(peak, live)
    return live, peak


def _on_cuda(function) -> tuple[Any, int, int]:
    """By the caching allocator's counters; this resets its peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    return result, torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before


def _results(value) -> tuple[tuple[torch.dtype, int] | None, ...]:
    return tuple(
        (leaf.dtype, leaf.untyped_storage().nbytes()) if isinstance(leaf, torch.Tensor) else None
        for leaf in tree_leaves(value)
    )


def cannot_run(node, where: str, error: Exception, advice: str) -> MeterError:
    """The error for a `node` that fails when it runs alone; `where` continues "does not run"."""
    module = node.module or "the model itself"
    return MeterError(
        f"{node.name} ({node.target}) of module {module!r} does not run{where}: {str(error).splitlines()[0]}. {advice}"
    )
