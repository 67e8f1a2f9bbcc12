"""rotor: the fastest persistent schedule of a chain of stages that differ, within a budget.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019, "Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory" (arXiv:1911.13214), theorem 1, algorithms 1 and 2. A stage is run either with
everything that its backward reads kept, or for the sake of its output alone; a kept output is a checkpoint, from which
the stages after it can be run again.

Optimal among *persistent* schedules: what is kept stays until the backward that reads it. The best of all schedules can
be faster; finding it is NP-hard. Sizes are exact where the budget is at most `slots` units (the unit: the greatest
common divisor of whole sizes); otherwise sizes are rounded up to the budget's `slots`-th part, which keeps the budget
but may miss the fastest schedule; what needs least bytes is always found. A gradient has the size of the output it
belongs to.

It does not choose between several ways to run a stage, as `chain` does for ``policy="auto"``, and knows no gradients of
parameters. O(L^3 slots) time, O(L^2 slots) memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, gcd
from numbers import Integral
from typing import NamedTuple

import numpy as np

from ..errors import BudgetError

FORWARD_ALL, FORWARD_CHECKPOINT, FORWARD_NONE = "forward all", "forward checkpoint", "forward none"
BACKWARD = "backward"


@dataclass(frozen=True)
class Chain:
    """One value per stage, first to last.

    ``forward``, ``backward``: times (uf, ub). ``output_bytes``: of the stage's output a (wa). ``saved_bytes``: of all
    that a forward leaves for its backward, the output included (wab). ``forward_overhead``, ``backward_overhead``:
    bytes that live beside this while the stage runs (of, ob). ``input_bytes``: of the chain's input (wa of stage 0).

    Raises:
        ValueError: for sequences of different lengths, no stage, negative values, or an output larger than what is
            saved with it.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    output_bytes: Sequence[float]
    saved_bytes: Sequence[float]
    forward_overhead: Sequence[float] = ()
    backward_overhead: Sequence[float] = ()
    input_bytes: float = 0

    def __post_init__(self):
        stages = len(self.forward)
        for name in ("forward_overhead", "backward_overhead"):
            if not len(getattr(self, name)):
                object.__setattr__(self, name, (0,) * stages)
        for name in ("backward", "output_bytes", "saved_bytes", "forward_overhead", "backward_overhead"):
            if len(getattr(self, name)) != stages:
                raise ValueError(f"{name} has {len(getattr(self, name))} values for a chain of {stages} stages")
        if not stages:
            raise ValueError("a chain has at least one stage")
        if min(*self.forward, *self.backward, *self.sizes()) < 0:
            raise ValueError("times and bytes of a chain are not negative")
        for stage, (output, saved) in enumerate(zip(self.output_bytes, self.saved_bytes)):
            if saved < output:
                raise ValueError(f"stage {stage} saves {saved} bytes, less than the {output} of its output")

    def sizes(self) -> list[float]:
        overheads = (*self.forward_overhead, *self.backward_overhead)
        return [*self.output_bytes, *self.saved_bytes, *overheads, self.input_bytes]


class Operation(NamedTuple):
    """What is done with the stage `stage`, counted from 0.

    ``forward all``: keep what its backward reads; ``forward checkpoint``: keep its input and its output;
    ``forward none``: keep its output, the input is dropped; ``backward``: use up what was kept.
    """

    kind: str
    stage: int


@dataclass(frozen=True)
class Solution:
    """``time``: of all ``operations``, which are in order."""

    time: float
    operations: tuple[Operation, ...]


def solve(chain: Chain, budget: float, slots: int = 500) -> Solution:
    """The fastest persistent schedule of `chain` within `budget` bytes.

    Args:
        chain: times and bytes of its stages.
        budget: bytes for all that lives at once, the chain's input included.
        slots: into how many parts the budget is divided where sizes are not solved exactly.

    Raises:
        BudgetError: if there is no schedule; names the smallest budget for which there is one.
        ValueError: for a budget or a number of slots that is not positive.

    Example:
        >>> found = solve(Chain([1] * 4, [1] * 4, [1] * 4, [1] * 4), 4)
        >>> found.time
        10
    """
    if not budget > 0:
        raise ValueError(f"a budget is a positive number of bytes, got {budget!r}")
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
        raise ValueError(f"slots must be a whole number, at least 1; got {slots!r}")
    least = _Least(chain)
    needed = least.bytes + chain.input_bytes
    if budget < needed:
        raise BudgetError(
            f"no persistent schedule of this chain of {len(chain.forward)} stages fits into {budget} bytes; "
            f"the smallest budget that can be kept is {needed} bytes."
        )
    table = _Table(chain, budget, slots, least)
    operations = _operations(len(chain.forward), table.choose, table.capacity)
    times = {BACKWARD: chain.backward}
    return Solution(sum(times.get(kind, chain.forward)[stage] for kind, stage in operations), operations)


def _operations(stages: int, choose: Callable, left: int | None) -> tuple[Operation, ...]:
    """What ``choose(first, last, left)`` decides, from the whole chain down to single stages.

    It returns the stage from which the backward of the last stages is made first, or None to keep all that the first
    stage saves, and what is left for the stages after it.
    """
    operations: list[Operation] = []
    todo: list = [(0, stages - 1, left)]
    while todo:
        item = todo.pop()
        if isinstance(item, Operation):
            operations.append(item)
            continue
        first, last, left = item
        split, left_after = (None, 0) if first == last else choose(first, last, left)
        if split is None:
            operations.append(Operation(FORWARD_ALL, first))
            todo.append(Operation(BACKWARD, first))
            if first < last:
                todo.append((first + 1, last, left_after))
        else:
            operations.append(Operation(FORWARD_CHECKPOINT, first))
            operations += [Operation(FORWARD_NONE, stage) for stage in range(first + 1, split)]
            todo += [(first, split - 1, left), (split, last, left_after)]
    return tuple(operations)


class _Needs:
    """What must fit while a stage runs beside the gradient of stage t's output, in the unit of the sizes."""

    def __init__(self, output, saved, forward_overhead, backward_overhead):
        self.output, self.saved = np.asarray(output), np.asarray(saved)
        self.forward_overhead, self.backward_overhead = np.asarray(forward_overhead), np.asarray(backward_overhead)
        self.passing = self.output[:-1] + self.output[1:] + self.forward_overhead[1:]

    def all(self, s: int) -> np.ndarray:
        """m_all(s, t) for all t >= s."""
        own = self.saved[s] + self.forward_overhead[s]
        return np.maximum(self.output[s:] + own, self.output[s] + self.saved[s] + self.backward_overhead[s])

    def null(self, s: int) -> np.ndarray:
        """m_null(s, t) for all t > s."""
        alone = self.output[s : s + 1] + self.forward_overhead[s]
        return self.output[s + 1 :] + np.maximum.accumulate(np.concatenate([alone, self.passing[s:-1]]))

    def everything(self):
        """Of the schedule that keeps all."""
        last = len(self.output) - 1
        before = np.cumsum(self.saved) - self.saved
        return max(before[s] + self.all(s)[last - s] for s in range(last + 1))


class _Least:
    """The least bytes that the stages s to t need, exactly, and the least time with these bytes."""

    def __init__(self, chain: Chain):
        needs = _Needs(chain.output_bytes, chain.saved_bytes, chain.forward_overhead, chain.backward_overhead)
        n = len(needs.output)
        before = np.concatenate([[0.0], np.cumsum(chain.forward)])
        self.needed = np.zeros((n, n), dtype=needs.saved.dtype)
        self.times = np.zeros((n, n))
        self.splits = np.full((n, n), -1)
        for s in reversed(range(n)):
            keep, pass_by = needs.all(s), needs.null(s)
            own = chain.forward[s] + chain.backward[s]
            self.needed[s, s], self.times[s, s] = keep[0], own
            for t in range(s + 1, n):
                later, sooner = slice(s + 1, t + 1), slice(s, t)
                split = np.maximum(needs.output[sooner] + self.needed[later, t], self.needed[s, sooner])
                kept = max(keep[t - s], needs.saved[s] + self.needed[s + 1, t])
                needed = np.append(np.maximum(split, pass_by[t - s - 1]), kept)
                times = before[later] - before[s] + self.times[later, t] + self.times[s, sooner]
                times = np.where(needed == needed.min(), np.append(times, own + self.times[s + 1, t]), np.inf)
                at = int(np.argmin(times))
                self.needed[s, t], self.times[s, t] = needed.min(), times[at]
                self.splits[s, t] = s + 1 + at if s + at < t else -1
        self.bytes = self.needed[0, n - 1].item()


class _Table:
    """C(s, t, m): the least time of the stages s to t, for every m from 0 to ``capacity`` units.

    ``costs[s][t - s]`` is C(s, t, .); ``after[t][j]`` is the time of all forwards before j and C(j, t, .) beside the
    output that it starts from, so that the least over all splits j of (s, t) is one sum of two tables. Rounded up, what
    only just fits may seem not to: the schedule of least bytes is known to fit.
    """

    def __init__(self, chain: Chain, budget, slots: int, least: _Least):
        sizes, self.capacity, unit = _in_units(chain, budget, slots)
        self.needs = needs = _Needs(*sizes)
        self.least, self.least_units = least, np.vectorize(lambda size: ceil(size / unit), otypes=[int])(least.needed)
        self.forward, self.backward = chain.forward, chain.backward
        self.before = np.concatenate([[0.0], np.cumsum(chain.forward)])
        n = len(chain.forward)
        self.costs = [np.empty((n - s, self.capacity + 1)) for s in range(n)]
        self.after = [np.empty((t + 1, self.capacity + 1)) for t in range(n)]
        for s in reversed(range(n)):
            keep, pass_by = needs.all(s), needs.null(s)
            for t in range(s, n):
                best = self._keep(s, t)
                best[: keep[t - s]] = np.inf
                if t > s:
                    passed = (self.after[t][s + 1 :] + self.costs[s][: t - s]).min(axis=0) - self.before[s]
                    passed[: pass_by[t - s - 1]] = np.inf
                    np.minimum(best, passed, out=best)
                known = best[self.least_units[s, t] :]
                np.minimum(known, least.times[s, t], out=known)
                self.costs[s][t - s] = best
                if s:
                    self.after[t][s] = _beside(best, needs.output[s - 1]) + self.before[s]

    def choose(self, s: int, t: int, left: int | None) -> tuple[int | None, int | None]:
        """See `_operations`; nothing is said to be left where the schedule of least bytes is taken."""
        needs = self.needs
        if left is not None:
            keep = self._keep(s, t)[left] if left >= needs.all(s)[t - s] else np.inf
            passed = self.after[t][s + 1 :, left] + self.costs[s][: t - s, left] - self.before[s]
            split = int(np.argmin(passed))
            passes = passed[split] if left >= needs.null(s)[t - s - 1] else np.inf
            if left < self.least_units[s, t] or min(keep, passes) <= self.least.times[s, t]:
                if keep <= passes:
                    return None, left - int(needs.saved[s])
                return s + 1 + split, left - int(needs.output[s + split])
        split = int(self.least.splits[s, t])
        return (None if split < 0 else split), None

    def _keep(self, s: int, t: int) -> np.ndarray:
        own = self.forward[s] + self.backward[s]
        if s == t:
            return np.full(self.capacity + 1, float(own))
        return _beside(self.costs[s + 1][t - s - 1], self.needs.saved[s]) + own


def _beside(costs: np.ndarray, size: int) -> np.ndarray:
    """`costs` by units of memory, when `size` of them are taken."""
    found = np.full(len(costs), np.inf)
    found[size:] = costs[: max(0, len(costs) - size)]
    return found


def _in_units(chain: Chain, budget, slots: int):
    """The chain's four sizes in units, rounded up, the units left beside its input, rounded down, and their bytes."""
    sizes = (chain.output_bytes, chain.saved_bytes, chain.forward_overhead, chain.backward_overhead)
    # More than what keeps everything is of no use, and would only make the units coarser.
    left = min(Fraction(budget) - Fraction(chain.input_bytes), Fraction(_Needs(*sizes).everything().item()))
    whole = [int(size) for size in chain.sizes() if isinstance(size, Integral)]
    unit = Fraction(gcd(*whole) if len(whole) == len(chain.sizes()) else 0)
    if not unit or left / unit > slots:
        unit = left / slots or Fraction(1)
    return [[ceil(Fraction(size) / unit) for size in group] for group in sizes], floor(left / unit), unit
