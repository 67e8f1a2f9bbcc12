"""The largest batch whose step stays within a limit of memory: found by search, checked by running it.

On the CPU, the search runs a batch that fits according to its prediction, and the measured peak decides. On a GPU,
the search runs every batch that it tries, with `torch.cuda.set_per_process_memory_fraction` as the limit.
"""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from ackpt.core.errors import BudgetError

from .named_steps import Method, NotRun, RunStep, Setting, needs_limit
from .step_shapes import Shapes, does_not_fit

AT_MOST = 65_536
# Messages of libraries whose workspace torch's allocator cannot allocate.
_NO_MEMORY = re.compile("out of memory|ALLOC_FAILED|valid cuDNN (algorithm|engine)|engine to execute", re.IGNORECASE)


@dataclass(frozen=True)
class Largest:
    """`batch` fits and the next larger one does not; 0 if a batch of one does not fit.

    ``least_peak_bytes``: the smallest predicted peak of the method at that batch; ``measured_peak_bytes``: None if it
    was not run, for the reason `not_measured`. ``one_peak_bytes``: the smallest predicted peak of a batch of one, if
    that does not fit.
    """

    batch: int
    least_peak_bytes: int | None
    measured_peak_bytes: int | None
    not_measured: str | None = None
    one_peak_bytes: int | None = None


def search(fits: Callable[[int], bool], guess: int = 1, at_most: int = AT_MOST) -> int:
    """The largest n from 0 to `at_most` with ``fits(n)``, if `fits` is true for every smaller n, too.

    Starts at `guess` with strides that double until the answer is enclosed, then bisects. `fits` has been called for
    the result and for the next larger number.

    Example:
        >>> search(lambda n: n <= 37, guess=30)
        37
    """
    fits = functools.cache(fits)
    low, high, stride = 0, at_most + 1, 1  # low fits, high does not
    probe = min(max(1, guess), at_most)
    while low < probe < high:
        if fits(probe):
            low, probe = probe, probe + stride
        else:
            high, probe = probe, probe - stride
        stride *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def extrapolated(peaks: dict[int, int], limit_bytes: int) -> int:
    """The batch at which a line through the peaks of the smallest and the largest batch meets the limit, at least 1."""
    first, last = min(peaks, default=0), max(peaks, default=0)
    if first == last or peaks[first] >= peaks[last]:
        return max(1, first)
    slope = (peaks[last] - peaks[first]) / (last - first)
    return max(1, int(first + (limit_bytes - peaks[first]) / slope))


def largest_predicted(method: Method, limit_bytes: int, shapes: Callable[[int], Shapes], batches: Iterable[int]):
    """The largest batch by prediction alone.

    ``shapes(batch_size)`` predicts a batch; the search starts from a line through two of `batches`.
    """
    least = functools.cache(lambda batch_size: shapes(batch_size).least_bytes(method))
    guess = extrapolated({batch_size: least(batch_size) for batch_size in {min(batches), max(batches)}}, limit_bytes)
    batch = search(lambda batch_size: least(batch_size) <= limit_bytes, guess)
    reason = "only predicted, from shapes"
    return Largest(batch, least(batch), None, reason) if batch else Largest(0, None, None, reason, least(1))


def largest_on_cpu(
    method: Method, limit_bytes: int, shapes: Callable[[int], Shapes], batches: Iterable[int]
) -> Largest:
    """The largest batch by prediction, checked by running it; if its measured peak is over the limit, by running.

    The measured peak contains the workspaces of operations, the predicted one does not.
    """
    predicted = largest_predicted(method, limit_bytes, shapes, batches)
    if predicted.least_peak_bytes is None:
        return replace(predicted, not_measured=None)
    if reason := does_not_fit(limit_bytes if needs_limit(method.name) else predicted.least_peak_bytes, "cpu"):
        return replace(predicted, not_measured=reason)
    peaks: dict[int, int] = {}

    def fits(batch: int) -> bool:
        peaks[batch] = _peak_on_cpu(shapes(batch).setting, method)
        return peaks[batch] <= limit_bytes

    if fits(predicted.batch):
        return Largest(predicted.batch, predicted.least_peak_bytes, peaks[predicted.batch])
    batch = search(fits, predicted.batch * limit_bytes // peaks[predicted.batch], predicted.batch - 1)
    if not batch:
        return Largest(0, None, None, one_peak_bytes=peaks.get(1))
    return Largest(batch, shapes(batch).least_bytes(method), peaks.get(batch))


def _peak_on_cpu(setting: Setting, method: Method) -> int:
    """The measured peak; if the method's budget is infeasible, the smallest feasible one."""
    run = RunStep(setting)
    try:
        run.prepare(method)
    except NotRun as refused:
        error = refused.__cause__
        assert isinstance(error, BudgetError) and error.least_bytes is not None
        return error.least_bytes
    return run.measure(method)["peak_bytes"]


def largest_on_cuda(setting: Setting, method: Method, limit_bytes: int, guess: int = 1) -> Largest:
    """The largest batch by running steps in this process, whose reserved memory is limited meanwhile."""
    peaks: dict[int, int] = {}

    def fits(batch_size: int) -> bool:
        peak = _peak_within(replace(setting, batch_size=batch_size), method, limit_bytes)
        if peak is not None:
            peaks[batch_size] = peak
        return peak is not None

    batch = search(fits, guess)
    return Largest(batch, None, peaks.get(batch))


def _peak_within(setting: Setting, method: Method, limit_bytes: int) -> int | None:
    """Allocated bytes at the peak of two steps, of which the first creates the optimizer's state; None if too many."""
    _free_all()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))
    torch.cuda.reset_peak_memory_stats()
    try:
        run = RunStep(setting)
        run.prepare(method)
        run.switch(method)
        for _ in range(2):
            run.step(method)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    except (RuntimeError, NotRun) as error:
        if not isinstance(error, (torch.OutOfMemoryError, NotRun)) and not _NO_MEMORY.search(str(error)):
            raise
        return None
    finally:
        run = None
        torch.cuda.set_per_process_memory_fraction(1.0)
        _free_all()


def _free_all() -> None:
    gc.collect()
    torch.cuda.empty_cache()
