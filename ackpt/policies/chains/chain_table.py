"""The best way through a chain of blocks for every amount of memory at once, by dynamic programming.

rotor's recursion (Beaumont et al. 2019, arXiv:1911.13214) with several ways to run each block, as in Rockmate (Zhao et
al. 2023, arXiv:2307.01236): either a block is run and what one of its options saves is kept until its backward, or
blocks are run for the sake of their last output alone and run again later. Beyond both: the gradients of parameters
stay once they exist, what the first forward runs anyway costs nothing, and blocks that are run for their last output
may leave a part of their insides behind, from which running them again is cheaper (a `Level`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .block_options import Option

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Level:
    """What stays of a block that is run for the sake of a later output, and what follows from that; bytes.

    ``kept``: the option that saves just this. ``options``: ways to run it again for its backward, with the cost of
    running each forward in ``run_costs``; ``forward_cost``: of running it again for its output alone.
    """

    kept: Option
    options: tuple[Option, ...]
    run_costs: tuple[float, ...]
    forward_cost: float


@dataclass(frozen=True)
class Stage:
    """A block as the recursion sees it, in bytes.

    ``levels``: the first keeps nothing; ``output_bytes``: what it hands on; ``incoming_bytes``: gradients that its
    backward begins with; ``left_bytes``: gradients of parameters that it leaves.
    """

    levels: tuple[Level, ...]
    output_bytes: int
    incoming_bytes: int
    left_bytes: int

    def numbers(self) -> tuple:
        """What the recursion depends on: stages that agree in this are solved once."""

        def of(option):
            return option.saved_bytes, option.forward_peak, option.backward_peak, option.cost

        levels = tuple(
            (of(level.kept), tuple(map(of, level.options)), level.run_costs, level.forward_cost)
            for level in self.levels
        )
        return levels, self.output_bytes, self.incoming_bytes, self.left_bytes


@dataclass(frozen=True)
class Operation:
    """``forward``: run the blocks `first` to `last`; ``kept``: storages that stay beside the output of the last one.

    ``backward``: run the backward of block `first`. ``is_first``: a forward of the first pass, which runs whatever is
    planned.
    """

    kind: str
    first: int
    last: int
    kept: frozenset[int] = field(default=frozenset())
    is_first: bool = False


@dataclass(frozen=True)
class _Solved:
    """By slots of memory: the least cost, and what to do first: an option, or where to split and at which level."""

    costs: np.ndarray
    choices: np.ndarray


class ChainTable:
    """Least added cost of every stretch of the chain for every number of memory slots."""

    def __init__(self, stages: list[Stage], memory_bytes: int, slots: int = 600):
        self.stages, self.slots = stages, slots
        self.slot_bytes = max(1.0, memory_bytes / slots)
        n = len(stages)
        self.levels = len(stages[0].levels)
        self.left = _sums([stage.left_bytes for stage in stages])
        kept = [[stage.levels[level].kept for stage in stages] for level in range(self.levels)]
        self.kept = [_sums([option.saved_bytes for option in row]) for row in kept]
        self.forward = [_sums([stage.levels[level].forward_cost for stage in stages]) for level in range(self.levels)]
        self.given = np.array([0, *(stage.output_bytes for stage in stages[:-1])], dtype=float)
        self.running = [np.array([option.forward_peak for option in row], dtype=float) for row in kept]
        self.again: dict[tuple[int, int, int], _Solved] = {}  # level, first and last block
        numbers: dict[tuple, int] = {}
        kinds = [numbers.setdefault(stage.numbers(), len(numbers)) for stage in stages]
        solved: dict[tuple, _Solved] = {}
        for level in range(self.levels - 1, -1, -1):
            for length in range(1, n + 1):
                for s in range(n - length + 1):
                    t = s + length - 1
                    key = (level, *kinds[s : t + 1])
                    if key not in solved:
                        solved[key] = self._solve(level, s, t)
                    self.again[level, s, t] = solved[key]
        self.first: dict[int, _Solved] = {}
        for s in range(n - 1, -1, -1):
            self.first[s] = self._solve_first(s)

    def costs(self) -> np.ndarray:
        """Added cost of the whole chain by slots of memory; infinite where it does not fit."""
        return self.first[0].costs

    def operations(self, slot: int) -> Iterator[Operation]:
        """The cheapest way through the chain within `slot` slots."""
        yield from self._first_pass(0, slot)

    def _solve(self, level: int, s: int, t: int) -> _Solved:
        """Backward of the blocks `s` to `t`, of which `level` has stayed and whose input is there."""
        stage, rows = self.stages[s], _Rows(self.slots)
        delta = self.stages[t].incoming_bytes
        left, kept = self.left[t + 1] - self.left[s + 1], self.kept[level][t + 1] - self.kept[level][s + 1]
        here = stage.levels[level]
        if s == t:
            rows.offer(-1, here.kept.cost, self._slots(here.kept.backward_peak))
            return rows.solved()
        for number, (option, run) in enumerate(zip(here.options, here.run_costs)):
            need = max(option.forward_peak + delta + kept, option.backward_peak + left)
            stays = option.saved_bytes + stage.output_bytes
            rest = self.again[level, s + 1, t].costs
            rows.offer(number, self._shifted(rest, stays) + (run + option.cost), self._slots(need))
        # What stays may grow from nothing when blocks are run again; from then on it is the same until their backward.
        for new in range(self.levels) if level == 0 else (level,):
            self._offer_splits(
                rows, s, t, level, new, delta, [self.again[level, j, t].costs for j in range(s + 1, t + 1)]
            )
        return rows.solved()

    def _solve_first(self, s: int) -> _Solved:
        """First forward of the blocks from `s` on, and the backward of them."""
        stage, rows, t = self.stages[s], _Rows(self.slots), len(self.stages) - 1
        left = self.left[t + 1] - self.left[s + 1]
        for number, option in enumerate(stage.levels[0].options):
            need = max(option.forward_peak, option.backward_peak + left)
            rest: np.ndarray | float = 0.0
            if s < t:
                rest = self._shifted(self.first[s + 1].costs, option.saved_bytes + stage.output_bytes)
            rows.offer(number, rest + option.cost, self._slots(need))
        for new in range(self.levels):
            self._offer_splits(rows, s, t, None, new, 0, [self.first[j].costs for j in range(s + 1, t + 1)])
        return rows.solved()

    def _offer_splits(self, rows: _Rows, s: int, t: int, level: int | None, new: int, delta: int, rests) -> None:
        """Run blocks from `s` on for one output alone, leaving level `new` of them; then what follows; then them.

        `level`: what there is of the blocks up to `t` before, None in the first pass, which costs nothing.
        """
        if s == t:
            return
        j = np.arange(s + 1, t + 1)
        stays = self.kept[new][j] - self.kept[new][s]
        beside = np.zeros(t - s) if level is None else self.kept[level][t + 1] - self.kept[level][s + 1 : t + 1]
        before = self.kept[new][s:t] - self.kept[new][s]
        running = self.running[new][s:t] + self.given[s:t] + before + beside
        running[0] -= self.given[s]  # the input of the first one is accounted for by the caller
        needs = np.maximum.accumulate(running) + delta
        cost = np.zeros(t - s) if level is None else self.forward[level][j] - self.forward[level][s]
        later = np.stack([self.again[new, s, last].costs for last in range(s, t)])
        after = _moved(later, self._slots(self.left[t + 1] - self.left[j]))
        first = _moved(np.stack(rests), self._slots(self.given[j] + stays))
        costs = first + after + cost[:, None]
        costs[np.arange(self.slots + 1)[None, :] < self._slots(needs)[:, None]] = np.inf
        best = np.argmin(costs, axis=0)
        rows.take(np.take_along_axis(costs, best[None, :], axis=0)[0], self._number(new, 1 + best))

    def _number(self, level: int, length):
        """One whole number below -1 for a split after `length` blocks, of which a level stays."""
        return -2 - (level * len(self.stages) + length)

    def _split(self, number: int) -> tuple[int, int]:
        return divmod(-2 - number, len(self.stages))

    def _first_pass(self, s: int, slot: int) -> Iterator[Operation]:
        stage, t = self.stages[s], len(self.stages) - 1
        number = int(self.first[s].choices[slot])
        if number >= 0:
            option = stage.levels[0].options[number]
            yield Operation(FORWARD, s, s, option.saved, True)
            if s < t:
                yield from self._first_pass(s + 1, slot - int(self._slots(option.saved_bytes + stage.output_bytes)))
            yield Operation(BACKWARD, s, s)
            return
        level, length = self._split(number)
        j = s + length
        yield Operation(FORWARD, s, j - 1, self._left_behind(level, s, j), True)
        stays = self.given[j] + self.kept[level][j] - self.kept[level][s]
        yield from self._first_pass(j, slot - int(self._slots(stays)))
        yield from self._second_pass(level, s, j - 1, slot - int(self._slots(self.left[t + 1] - self.left[j])))

    def _second_pass(self, level: int, s: int, t: int, slot: int) -> Iterator[Operation]:
        number = int(self.again[level, s, t].choices[slot])
        if number == -1:
            yield Operation(BACKWARD, s, s)
            return
        if number >= 0:
            option = self.stages[s].levels[level].options[number]
            yield Operation(FORWARD, s, s, option.saved)
            stays = option.saved_bytes + self.stages[s].output_bytes
            yield from self._second_pass(level, s + 1, t, slot - int(self._slots(stays)))
            yield Operation(BACKWARD, s, s)
            return
        new, length = self._split(number)
        j = s + length
        yield Operation(FORWARD, s, j - 1, self._left_behind(new, s, j))
        stays = self.given[j] + self.kept[new][j] - self.kept[new][s]
        yield from self._second_pass(level, j, t, slot - int(self._slots(stays)))
        yield from self._second_pass(new, s, j - 1, slot - int(self._slots(self.left[t + 1] - self.left[j])))

    def _left_behind(self, level: int, s: int, j: int) -> frozenset[int]:
        return frozenset().union(*(self.stages[i].levels[level].kept.saved for i in range(s, j)))

    def _slots(self, size):
        return np.maximum(0, np.rint(np.asarray(size, dtype=float) / self.slot_bytes)).astype(np.int64)

    def _shifted(self, costs, size) -> np.ndarray:
        return _moved(costs[None, :], self._slots([size]))[0]


class _Rows:
    """The best of what is offered, by slots."""

    def __init__(self, slots: int):
        self.costs = np.full(slots + 1, np.inf)
        self.choices = np.full(slots + 1, -1, dtype=np.int64)

    def offer(self, number: int, costs, need) -> None:
        costs = np.broadcast_to(np.asarray(costs, dtype=float), self.costs.shape).copy()
        costs[: int(need)] = np.inf
        self.take(costs, np.full(len(costs), number))

    def take(self, costs, numbers) -> None:
        better = costs < self.costs
        self.costs[better] = costs[better]
        self.choices[better] = numbers[better]

    def solved(self) -> _Solved:
        return _Solved(self.costs, self.choices)


def _moved(rows: np.ndarray, by) -> np.ndarray:
    """Every row moved to the right by its own number of slots."""
    at = np.arange(rows.shape[1])[None, :] - np.asarray(by)[:, None]
    return np.where(at >= 0, np.take_along_axis(rows, np.maximum(at, 0), axis=1), np.inf)


def _sums(values) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(values)])
