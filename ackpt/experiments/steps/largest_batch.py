"""The largest batch whose step stays within a limit of memory: found by search, checked by running it.

On the CPU a batch that should fit by its prediction is run, and the measured peak decides. On a GPU
every batch that is asked for is run, with `torch.cuda.set_per_process_memory_fraction` as the limit.
"""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from ackpt.errors import BudgetError

from .named_steps import Method, NotRun, RunStep, Setting, needs_limit
from .step_shapes import Shapes, does_not_fit

AT_MOST = 65_536
# What libraries say where torch's allocator has nothing left for their workspaces.
_NO_MEMORY = re.compile("out of memory|ALLOC_FAILED|valid cuDNN (algorithm|engine)|engine to execute", re.IGNORECASE)


@dataclass(frozen=True)
class Largest:
    """`batch` fits and the next one does not; 0 if not even one does.

    ``least_peak_bytes``: the smallest predicted peak of the method at that batch; ``measured_peak_bytes`` None: it
    was not run, for the reason `not_measured`. ``one_peak_bytes``: the smallest predicted peak of a batch of one, where
    that does not fit.
    """

    batch: int
    least_peak_bytes: int | None
    measured_peak_bytes: int | None
    not_measured: str | None = None
    one_peak_bytes: int | None = None


def search(fits: Callable[[int], bool], guess: int = 1, at_most: int = AT_MOST) -> int:
    """The largest n from 0 to `at_most` with ``fits(n)``, if whatever is smaller than what fits does fit, too.

    From `guess` on in strides that double until the answer is enclosed, then by bisection. What it returns was asked
    for, and so was the next.

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
    """Where a line through the peaks of the smallest and the largest batch meets the limit; 1 if there is no line."""
    first, last = min(peaks, default=0), max(peaks, default=0)
    if first == last or peaks[first] >= peaks[last]:
        return max(1, first)
    slope = (peaks[last] - peaks[first]) / (last - first)
    return max(1, int(first + (limit_bytes - peaks[first]) / slope))


def largest_predicted(method: Method, limit_bytes: int, shapes: Callable[[int], Shapes], known: Iterable[int]):
    """By prediction alone. ``shapes(batch_size)`` predict a batch; a line through two of the `known` is the guess."""
    least = functools.cache(lambda batch_size: shapes(batch_size).least_bytes(method))
    guess = extrapolated({batch_size: least(batch_size) for batch_size in {min(known), max(known)}}, limit_bytes)
    batch = search(lambda batch_size: least(batch_size) <= limit_bytes, guess)
    reason = "only predicted, from shapes"
    return Largest(batch, least(batch), None, reason) if batch else Largest(0, None, None, reason, least(1))


def largest_on_cpu(method: Method, limit_bytes: int, shapes: Callable[[int], Shapes], known: Iterable[int]) -> Largest:
    """By prediction, then run; where that is over the limit, by running, from where the peak says that it may fit.

    What operations take within themselves is in the measured peak and not in the prediction.
    """
    found = largest_predicted(method, limit_bytes, shapes, known)
    if found.least_peak_bytes is None:
        return replace(found, not_measured=None)
    if reason := does_not_fit(limit_bytes if needs_limit(method.name) else found.least_peak_bytes, "cpu"):
        return replace(found, not_measured=reason)
    peaks: dict[int, int] = {}

    def fits(batch: int) -> bool:
        peaks[batch] = _peak_on_cpu(shapes(batch).setting, method)
        return peaks[batch] <= limit_bytes

    if fits(found.batch):
        return Largest(found.batch, found.least_peak_bytes, peaks[found.batch])
    batch = search(fits, found.batch * limit_bytes // peaks[found.batch], found.batch - 1)
    if not batch:
        return Largest(0, None, None, one_peak_bytes=peaks.get(1))
    return Largest(batch, shapes(batch).least_bytes(method), peaks.get(batch))


def _peak_on_cpu(setting: Setting, method: Method) -> int:
    """The measured peak; if no plan keeps the method's budget, the least that it says it could keep."""
    run = RunStep(setting)
    try:
        run.prepare(method)
    except NotRun as refused:
        error = refused.__cause__
        assert isinstance(error, BudgetError) and error.least_bytes is not None
        return error.least_bytes
    return run.measure(method)["peak_bytes"]


def largest_on_cuda(setting: Setting, method: Method, limit_bytes: int, guess: int = 1) -> Largest:
    """By running steps in a process that is allowed no more than the limit, reserved memory included."""
    peaks: dict[int, int] = {}

    def fits(batch_size: int) -> bool:
        peak = _peak_within(replace(setting, batch_size=batch_size), method, limit_bytes)
        if peak is not None:
            peaks[batch_size] = peak
        return peak is not None

    batch = search(fits, guess)
    return Largest(batch, None, peaks.get(batch))


def _peak_within(setting: Setting, method: Method, limit_bytes: int) -> int | None:
    """Allocated bytes at the peak of two steps, the first of which makes the optimizer's states; None if too much."""
    _free_all()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))
    torch.cuda.reset_peak_memory_stats()
    try:
        run = RunStep(setting)
        run.prepare(method)
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
