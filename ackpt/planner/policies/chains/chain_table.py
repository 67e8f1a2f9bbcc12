"""Dynamic programming: the cheapest schedule of a chain for every memory size.

This is rotor's recursion (Beaumont et al. 2019, arXiv:1911.13214) with several ways to run each block, as in Rockmate
(Zhao et al. 2023, arXiv:2307.01236). A block either runs and saves what one of its options says until its backward, or
a stretch of blocks runs for the sake of its last output and is recomputed later. It goes beyond both in three ways: the
gradients of parameters stay allocated once they exist, the first forward costs nothing, and a stretch that runs for its
last output may save a part of every block (a `Partial`), from which recomputing it is cheaper.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

FORWARD, BACKWARD = "forward", "backward"
_FIRST = -1  # in place of a partial: the first forward, which costs nothing and before which nothing is saved


@dataclass(frozen=True)
class Option:
    """One choice for one block; sizes in bytes.

    ``saved``: storages inside the block that its forward saves for its backward, ``saved_bytes`` of them; options that
    differ in nothing else are equal. ``forward_peak``, ``backward_peak``: the dynamic peak of each pass without the
    activations of other blocks. ``cost``: of what its backward recomputes.
    """

    saved: frozenset[int] = field(compare=False)
    saved_bytes: int
    forward_peak: int
    backward_peak: int
    cost: float


@dataclass(frozen=True)
class Partial:
    """The part of a block that is saved when the block runs for the sake of a later output, and what follows from it.

    ``option``: the option that saves exactly this part. ``options``: the ways to run the block again for its backward,
    with the cost of each such forward in ``run_costs``; ``forward_cost``: of running it again for its output alone.
    """

    option: Option
    options: tuple[Option, ...]
    run_costs: tuple[float, ...]
    forward_cost: float


@dataclass(frozen=True)
class Stage:
    """A block as the recursion sees it; sizes in bytes. Equal ones have equal solutions.

    ``partials``: the first saves nothing. ``incoming_bytes``: gradients that the block's backward begins with;
    ``gradient_bytes``: gradients of parameters that it leaves.
    """

    partials: tuple[Partial, ...]
    output_bytes: int
    incoming_bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class Operation:
    """``forward``: run the blocks `first` to `last` and save the storages ``saved`` and the output of the last one.

    ``backward``: run the backward of block `first`.
    """

    kind: str
    first: int
    last: int
    saved: frozenset[int] = field(default=frozenset())


class _Options(NamedTuple):
    """The options of a stage as arrays; ``costs``: with what their forward recomputes in a later pass.

    ``saved_slots``: of memory, for what the option saves and the output of the block.
    """

    costs: np.ndarray
    forward_peaks: np.ndarray
    backward_peaks: np.ndarray
    saved_slots: np.ndarray


class ChainTable:
    """The least added cost of every stretch of the chain for every number of memory slots.

    A decision is one number, ``number * (blocks + 1) + length``. Either the first `length` blocks run for the sake of
    their last output, with the partial `number` saved; or, if `length` is 0, the first block runs and saves what its
    option `number` says until its backward. A single block of which a part is saved has no decision.
    ``first_is_free``: whether the first forward costs nothing and no gradient is live during it.
    """

    def __init__(self, stages: list[Stage], memory_bytes: int, slots: int = 600, first_is_free: bool = True):
        self.stages, self.slots, self._start = stages, slots, _FIRST if first_is_free else 0
        self.slot_bytes = max(1.0, memory_bytes / slots)
        n = len(stages)
        self.partials = range(len(stages[0].partials))
        rows = [[stage.partials[number] for stage in stages] for number in self.partials]
        # Prefix sums over the blocks: entry t - entry s is the sum of the blocks from s up to and without t.
        self.gradients = _prefix_sums([stage.gradient_bytes for stage in stages])
        self.saved = [_prefix_sums([partial.option.saved_bytes for partial in row]) for row in rows]
        self.forward_costs = [_prefix_sums([partial.forward_cost for partial in row]) for row in rows]
        for by_partial in (self.saved, self.forward_costs):
            by_partial.append(np.zeros(n + 1))  # of the first forward
        self.input_bytes = np.array([0, *(stage.output_bytes for stage in stages[:-1])], dtype=float)
        self.forward_peaks = [np.array([partial.option.forward_peak for partial in row], dtype=float) for row in rows]
        # By partial and first block of a stretch, for every block after it; by last block, for every block up to it.
        self._saved_slots = [
            [self._slots(self.input_bytes[s + 1 :] + (row[s + 1 : n] - row[s])) for s in range(n)]
            for row in self.saved[:_FIRST]
        ]
        self._gradient_slots = [self._slots(self.gradients[t + 1] - self.gradients[: t + 1]) for t in range(n)]
        self.options = [[self._options_of(stage, partial) for partial in (*self.partials, _FIRST)] for stage in stages]
        # The costs of all stretches by slots, in one array, so that many rows are read at once.
        self._costs = np.empty((1 + len(self.partials) * n * (n + 1) // 2 + n) * (slots + 1))
        self._costs[: slots + 1] = np.inf  # padding, which `_moved` reads before the first row
        self._windows = np.lib.stride_tricks.sliding_window_view(self._costs, slots + 1)
        self._solved = [_Best(slots)]  # by row
        self._row = np.zeros((len(self.partials) + 1, n, n), dtype=np.int64)  # by partial, first and last block
        kind_of: dict[Stage, int] = {}
        kinds = [kind_of.setdefault(stage, len(kind_of)) for stage in stages]
        solved: dict[tuple[int, ...], int] = {}
        for partial in reversed(self.partials):
            for length in range(1, n + 1):
                for s in range(n - length + 1):
                    t = s + length - 1
                    key = (partial, *kinds[s : t + 1])
                    if key not in solved:
                        solved[key] = self._solve(partial, s, t)
                    self._row[partial, s, t] = solved[key]
        for s in range(n - 1, -1, -1) if first_is_free else ():
            self._row[_FIRST, s, n - 1] = self._solve(_FIRST, s, n - 1)

    def costs(self) -> np.ndarray:
        """Added cost of the whole chain by slots of memory; infinite where it does not fit."""
        return self._solved[self._row[self._start, 0, -1]].costs

    def operations(self, slot: int) -> Iterator[Operation]:
        """The cheapest way through the chain within `slot` slots."""
        yield from self._operations(self._start, 0, len(self.stages) - 1, slot)

    def _solve(self, partial: int, s: int, t: int) -> int:
        """The backward of the blocks `s` to `t`, from the input of `s` and the saved `partial` of all of them: a row.

        `partial`: `_FIRST` for the first forward of the blocks from `s` on, and their backward.
        """
        best = _Best(self.slots)
        if s == t and partial != _FIRST:
            option = self.stages[s].partials[partial].option
            best.costs[self._slots(option.backward_peak) :] = option.cost
            return self._add(best)
        incoming = 0 if partial == _FIRST else self.stages[t].incoming_bytes
        saved = self.saved[partial][t + 1] - self.saved[partial][s + 1]
        gradients = self.gradients[t + 1] - self.gradients[s + 1]
        options = self.options[s][partial]
        needs = self._slots(np.maximum(options.forward_peaks + incoming + saved, options.backward_peaks + gradients))
        rest = np.zeros((len(needs), self.slots + 1))
        if s < t:
            rest = self._moved(np.full(len(needs), self._row[partial, s + 1, t]), options.saved_slots)
            needs = np.maximum(options.saved_slots, needs)
        rest += options.costs[:, None]
        best.choose(rest, needs, np.arange(len(needs)) * (len(self.stages) + 1))
        # A part may be saved when blocks are recomputed; from then on it is the same part until their backward.
        for new in (partial,) if partial > 0 else self.partials:
            self._offer_stretches(best, s, t, partial, new, incoming)
        return self._add(best)

    def _offer_stretches(self, best: "_Best", s: int, t: int, partial: int, new: int, incoming: int) -> None:
        """Offer, for every stretch from `s` on: run it with the partial `new` saved, solve the rest, then the stretch.

        `partial`: what is already saved of the blocks up to `t`.
        """
        if s == t:
            return
        saved_after = self.saved[partial][t + 1] - self.saved[partial][s + 1 : t + 1]
        saved_before = self.saved[new][s:t] - self.saved[new][s]
        running = self.forward_peaks[new][s:t] + self.input_bytes[s:t] + saved_before + saved_after
        running[0] -= self.input_bytes[s]  # the caller accounts for the input of the first block
        saved, gradients = self._saved_slots[new][s][: t - s], self._gradient_slots[t][s + 1 :]
        needs = np.maximum(self._slots(np.maximum.accumulate(running) + incoming), np.maximum(saved, gradients))
        # Those of the rest after each stretch, plus those of the stretch itself.
        costs = self._moved(self._row[partial, s + 1 : t + 1, t], saved)
        costs += self._moved(self._row[new, s, s:t], gradients)
        costs += (self.forward_costs[partial][s + 1 : t + 1] - self.forward_costs[partial][s])[:, None]
        best.choose(costs, needs, new * (len(self.stages) + 1) + np.arange(1, t - s + 1))

    def _add(self, best: "_Best") -> int:
        """Add a row; returns its number."""
        row, width = len(self._solved), self.slots + 1
        self._solved.append(best)
        self._costs[row * width : (row + 1) * width] = best.costs
        return row

    def _moved(self, rows: np.ndarray, by: np.ndarray) -> np.ndarray:
        """A copy of these rows, each moved to the right by its own number of slots; the first entries are arbitrary."""
        width = self.slots + 1
        return self._windows[rows * width - np.minimum(by, width)]

    def _operations(self, partial: int, s: int, t: int, slot: int) -> Iterator[Operation]:
        """The operations of the solution of `_solve` for the same blocks within `slot` slots."""
        if s < t or partial == _FIRST:
            decisions = self._solved[self._row[partial, s, t]].decisions
            number, length = divmod(int(decisions[slot]), len(self.stages) + 1)
            if length:
                j = s + length
                blocks = self.stages[s:j]
                saved = frozenset().union(*(stage.partials[number].option.saved for stage in blocks))
                yield Operation(FORWARD, s, j - 1, saved)
                yield from self._operations(partial, j, t, slot - int(self._saved_slots[number][s][length - 1]))
                yield from self._operations(number, s, j - 1, slot - int(self._gradient_slots[t][j]))
                return
            yield Operation(FORWARD, s, s, self.stages[s].partials[max(partial, 0)].options[number].saved)
            if s < t:
                left = slot - int(self.options[s][partial].saved_slots[number])
                yield from self._operations(partial, s + 1, t, left)
        yield Operation(BACKWARD, s, s)

    def _slots(self, size):
        return np.maximum(0, np.rint(np.asarray(size, dtype=float) / self.slot_bytes)).astype(np.int64)

    def _options_of(self, stage: Stage, partial: int) -> _Options:
        ways = stage.partials[max(partial, 0)]
        run_costs = np.zeros(len(ways.options)) if partial == _FIRST else np.array(ways.run_costs, dtype=float)
        return _Options(
            costs=run_costs + np.array([option.cost for option in ways.options], dtype=float),
            forward_peaks=np.array([option.forward_peak for option in ways.options], dtype=float),
            backward_peaks=np.array([option.backward_peak for option in ways.options], dtype=float),
            saved_slots=self._slots([option.saved_bytes + stage.output_bytes for option in ways.options]),
        )


class _Best:
    """The cheapest of the decisions that are offered, and their costs, by slots."""

    def __init__(self, slots: int):
        self.costs = np.full(slots + 1, np.inf)
        self.decisions = np.zeros(slots + 1, dtype=np.int64)

    def choose(self, costs: np.ndarray, needs: np.ndarray, decisions: np.ndarray) -> None:
        """Offer every row of `costs`, which is overwritten, with its own need and decision."""
        if not len(costs):
            return
        np.putmask(costs, np.arange(costs.shape[1]) < needs[:, None], np.inf)
        least = costs.min(axis=0)
        better = np.flatnonzero(least < self.costs)
        if len(better):
            self.costs[better] = least[better]
            self.decisions[better] = decisions[costs[:, better].argmin(axis=0)]


def _prefix_sums(values) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(values)])
