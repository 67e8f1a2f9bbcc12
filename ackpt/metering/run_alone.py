"""Run a function or one operation and count the bytes that it allocates on the CPU.

`kernel_memory.Workspaces` does this for the operations of a predicted step, and
`ackpt.planner.costs.workspace` for those of a graph: each distinct operation once, with made-up arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import ProfilerConfig, ProfilerState
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ackpt.offloading.cpu_streams import Stream

from .cpu_meter import no_collection
from .timeline import MeterError

# Integers, and whether square matrices are the identity: 0 is valid as an index of anything, 1 as a divisor, and the
# identity for operations that require a positive definite matrix.
_FILLS = ((0, False), (1, False), (0, True))
_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
_LSTM_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_FROM_ONE = (torch.ops.aten.linalg_lu_solve.default, torch.ops.aten.linalg_ldl_solve.default)  # LAPACK's pivots


@dataclass(frozen=True)
class Allocations:
    """What one run of an operation allocated, in bytes.

    ``workspace``: the peak beyond what is still allocated at the end; ``left``: the latter, its new results;
    ``results``: of each result the dtype and the bytes of its storage, None for what is not a tensor.
    """

    workspace: int
    left: int
    results: tuple[tuple[torch.dtype, int] | None, ...]


def in_own_thread(function: Callable[[], Any]) -> Any:
    """`function()`, called in a new thread without gradients; the caller's CPU RNG state stays as it is.

    In that thread the caller's autocast, fake tensors, FLOP counters and profilers have no effect.
    """

    threads = torch.get_num_threads()

    def run():
        torch.set_num_threads(threads)  # OpenMP's setting belongs to the thread, and workspaces depend on it
        with torch.no_grad(), no_collection():
            return function()

    with torch.random.fork_rng([]):
        return in_new_thread(run)


def in_new_thread(function: Callable[[], Any]) -> Any:
    """`function()`, called in a new thread."""
    results: list[Any] = []
    Stream("alone").submit(lambda: results.append(function())).wait()
    return results[0]


def count_allocations(function: Callable[[], Any]) -> tuple[Any, Allocations]:
    """The result of `function`, and what it allocated in this thread on the CPU."""
    result, live, peak = run_counted(function)
    return result, Allocations(peak - live, live, _results(result))


def run_operation(target, call, runs: int = 2) -> tuple[Allocations, Any]:
    """What an operation allocates in its last run, and its result without data; the first run may fill permanent
    caches.

    ``call`` is (args, kwargs); its tensors need no data. If its integers may be 1 as well as 0, the larger workspace
    counts: that of the backward of ``EmbeddingBag`` depends on which bags are empty. Raises the operation's own error
    if it fails with all fills.
    """
    leaves, spec = tree_flatten(call)

    def run(*fill):
        for _ in range(runs):
            args, kwargs = tree_unflatten([_made(leaf, *fill) for leaf in leaves], spec)
            if target is _LSTM_BACKWARD:
                args = (*args[:-1], _lstm_workspace(*args))
            with torch.set_grad_enabled(target is _LSTM and args[-1]):  # with which it keeps a workspace for backward
                result, taken = count_allocations(lambda: target(*args, **kwargs))  # noqa: B023
        return taken, tree_map(shape_only, result)

    reasons: list[Exception] = []
    outcomes: list[tuple[Allocations, Any]] = []
    for fill in _FILLS[1:2] if target in _FROM_ONE else _FILLS:
        if outcomes and not (fill == (1, False) and _may_be_one(leaves)):
            continue
        try:
            outcomes.append(run(*fill))
        except (RuntimeError, IndexError) as error:
            reasons.append(error.with_traceback(None))  # its frames would keep the arguments alive
    try:
        if not outcomes and (most := _most_selected(run, leaves)) is not None:
            outcomes.append(most)
        if not outcomes:
            raise reasons[0]
        return max(outcomes, key=lambda each: each[0].workspace)
    finally:
        reasons.clear()


@torch.enable_grad()  # the forward keeps nothing without
def _lstm_workspace(x, w1, w2, w3, w4, h, c, *others):
    """What oneDNN's forward keeps for a backward with these arguments, which would end the process with other bytes."""
    *_, reverse, mode, size, layers, has_biases, train, is_bidirectional, batch_sizes, batch_first, _ = others
    options = reverse, batch_sizes, mode, size, layers, has_biases, is_bidirectional, batch_first, train
    return _LSTM(x, w1, w2, w3, w4, h, c, *options)[-1]


def _most_selected(run, leaves):
    """`run` with the most True elements in masks with which it succeeds, as they may select no more than there is."""
    outcome, succeeds = None, -1
    fails = max((leaf.untyped_storage().nbytes() for leaf in leaves if _is_mask(leaf)), default=0)
    while fails - succeeds > 1:
        middle = (fails + succeeds) // 2
        try:
            outcome, succeeds = run(0, False, middle), middle
        except (RuntimeError, IndexError):
            fails = middle
    return outcome


def _may_be_one(leaves) -> bool:
    """Whether there are integers in tensors, and 1 is a valid index: some kernels do not check the indices."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    sizes = [*(leaf for leaf in leaves if type(leaf) is int), *(size for each in tensors for size in each.shape)]
    return 1 not in sizes and any(each.dtype in (torch.int32, torch.int64) for each in tensors)


def stand_in(value: torch.Tensor, fill: int = 0, device="cpu") -> torch.Tensor:
    """A tensor with the layout of `value` and its whole storage, filled with 0.5, True, or `fill` for integers."""
    floats = value.is_floating_point() or value.is_complex()
    filled = 0.5 if floats else True if value.dtype is torch.bool else fill
    size = value.untyped_storage().nbytes() // value.element_size()
    whole = torch.empty(size, dtype=value.dtype, device=device).fill_(filled)
    return flagged(whole.as_strided(value.shape, value.stride(), value.storage_offset()), value)


def flagged(made: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`made` with the conjugate and negative bits of `value`."""
    made = made.conj() if value.is_conj() else made
    return made._neg_view() if value.is_neg() else made


def shape_only(value):
    return stand_in(value, device="meta") if isinstance(value, torch.Tensor) else value


def _is_mask(leaf) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype is torch.bool


def _made(leaf, fill: int, as_identity: bool, selected: int | None = None):
    """`selected`: how many elements of the storage of a mask are True; all by default."""
    if isinstance(leaf, torch.Tensor):
        made = stand_in(leaf, fill, "cpu")
        if selected is not None and _is_mask(leaf):
            torch.empty(0, dtype=torch.bool).set_(made.untyped_storage())[selected:] = False
        if as_identity and made.is_floating_point() and made.dim() > 1 and made.shape[-1] == made.shape[-2]:
            made.copy_(torch.eye(made.shape[-1]))
        return made
    return leaf.clone_state() if isinstance(leaf, torch.Generator) else leaf


def signature(target, call) -> tuple:
    """The properties that two calls must share to allocate the same bytes."""
    leaves, spec = tree_flatten(call)
    return target, spec, tuple(map(described, leaves))


def described(leaf):
    if isinstance(leaf, torch.Tensor):
        layout = tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.untyped_storage().nbytes()
        return leaf.dtype, *layout, leaf.is_conj(), leaf.is_neg()
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str)):
        return type(leaf), repr(leaf)
    return type(leaf), leaf


def run_counted(function: Callable[[], Any]) -> tuple[Any, int, int]:
    """The result of `function`, the bytes that it left allocated on the CPU, and their peak."""
    begin_counting()
    try:
        result = function()
    finally:
        live, peak = end_counting()
    return result, live, peak


def begin_counting() -> None:
    """Count the bytes that torch's CPU allocator allocates in this thread, which must not have a profiler."""
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
