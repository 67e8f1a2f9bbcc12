"""rotor's tables (see `rotor`): the least time of every stretch of a chain for every amount of memory."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor, gcd
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ackpt.policies.rotor import Chain


class Needs:
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


class Least:
    """The least bytes that the stages s to t need, exactly, and the least time with these bytes."""

    def __init__(self, chain: Chain):
        needs = Needs(chain.output_bytes, chain.saved_bytes, chain.forward_overhead, chain.backward_overhead)
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


class Table:
    """C(s, t, m): the least time of the stages s to t, for every m from 0 to ``capacity`` units.

    ``costs[s][t - s]`` is C(s, t, .); ``after[t][j]`` is the time of all forwards before j and C(j, t, .) beside the
    output that it starts from, so that the least over all splits j of (s, t) is one sum of two tables. Rounded up, what
    only just fits may seem not to: the schedule of least bytes is known to fit.
    """

    def __init__(self, chain: Chain, budget, slots: int, least: Least):
        sizes, self.capacity, unit = _in_units(chain, budget, slots)
        self.needs = needs = Needs(*sizes)
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
        """See `rotor._unrolled`; nothing is said to be left where the schedule of least bytes is taken."""
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
    left = Fraction(Needs(*sizes).everything().item())
    if budget < left + Fraction(chain.input_bytes):
        left = Fraction(budget) - Fraction(chain.input_bytes)
    whole = [int(size) for size in chain.sizes() if isinstance(size, Integral)]
    unit = Fraction(gcd(*whole) if len(whole) == len(chain.sizes()) else 0)
    if not unit or left / unit > slots:
        unit = left / slots or Fraction(1)
    return [[ceil(Fraction(size) / unit) for size in group] for group in sizes], floor(left / unit), unit
