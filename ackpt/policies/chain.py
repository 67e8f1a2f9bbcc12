"""The best way through a chain of blocks for every amount of memory at once, by dynamic programming.

rotor's recursion (Beaumont et al. 2019, arXiv:1911.13214) with several ways to run each block, as in Rockmate (Zhao et
al. 2023, arXiv:2307.01236): either a block is run and what one of its options saves is kept until its backward, or
blocks are run for the sake of their last output alone and run again later. Beyond both, the gradients of parameters
stay once they exist, and what the first forward runs anyway costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .options import Option

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Stage:
    """A block as the recursion sees it, in bytes.

    ``options``: ways to run it, the last resort (nothing saved) among them; ``output_bytes``: what it hands on;
    ``forward_cost``: of running it again; ``incoming_bytes``: gradients that its backward begins with;
    ``left_bytes``: gradients of parameters that it leaves.
    """

    options: tuple[Option, ...]
    output_bytes: int
    forward_cost: float
    incoming_bytes: int
    left_bytes: int

    @property
    def bare(self) -> Option:
        """The option that saves least."""
        return min(self.options, key=lambda option: (option.saved_bytes, option.backward_peak, option.cost))


@dataclass(frozen=True)
class Operation:
    """``forward``: run the blocks `first` to `last` and keep `option`'s results (None: the last output alone).

    ``backward``: run the backward of block `first`, for which `option` was kept. ``is_first``: a forward of the first
    pass, which runs whatever is planned.
    """

    kind: str
    first: int
    last: int
    option: Option | None
    is_first: bool = False


class ChainTable:
    """Least added cost of every stretch of the chain for every number of memory slots."""

    def __init__(self, stages: list[Stage], memory_bytes: int, slots: int = 200):
        self.stages, self.slots = stages, slots
        self.slot_bytes = max(1.0, memory_bytes / slots)
        n = len(stages)
        self.left = np.concatenate([[0], np.cumsum([stage.left_bytes for stage in stages])])
        self.again = {(s, s): self._alone(s) for s in range(n)}
        self.choices: dict[tuple[int, int], np.ndarray] = {}
        for length in range(2, n + 1):
            for s in range(n - length + 1):
                self._solve(s, s + length - 1, False)
        self.first: dict[int, np.ndarray] = {}
        self.first_choices: dict[int, np.ndarray] = {}
        for s in range(n - 1, -1, -1):
            self._solve(s, n - 1, True)

    def costs(self) -> np.ndarray:
        """Added cost of the whole chain by slots of memory; infinite where it does not fit."""
        return self.first[0]

    def operations(self, slot: int) -> Iterator[Operation]:
        """The cheapest way through the chain within `slot` slots."""
        yield from self._first_pass(0, slot)

    def _alone(self, s: int) -> np.ndarray:
        bare = self.stages[s].bare
        costs = np.full(self.slots + 1, np.inf)
        costs[self._need(bare.backward_peak) :] = bare.cost
        return costs

    def _solve(self, s: int, t: int, is_first: bool) -> None:
        stages = self.stages
        stage = stages[s]
        best = np.full(self.slots + 1, np.inf)
        choice = np.full(self.slots + 1, -1, dtype=np.int32)

        def offer(costs, need, number):
            costs = costs.copy()
            costs[: min(need, self.slots + 1)] = np.inf
            better = costs < best
            best[better] = costs[better]
            choice[better] = number

        delta = 0 if is_first else stages[t].incoming_bytes
        run = 0.0 if is_first else stage.forward_cost
        left = self.left[t + 1] - self.left[s + 1]
        for number, option in enumerate(stage.options):
            need = max(option.forward_peak + delta, option.backward_peak + left)
            if s == t:
                if is_first:
                    offer(np.full(self.slots + 1, float(option.cost)), self._need(need), number)
                continue
            kept = option.saved_bytes + stage.output_bytes
            rest = self.first[s + 1] if is_first else self.again[s + 1, t]
            offer(self._shifted(rest, kept) + (run + option.cost), self._need(need), number)
        cost, peak, given = 0.0, 0, 0
        for j in range(s + 1, t + 1):
            before = stages[j - 1]
            cost += 0.0 if is_first else before.forward_cost
            peak = max(peak, given + before.bare.forward_peak)
            given = before.output_bytes
            rest = self.first[j] if is_first else self.again[j, t]
            later = self._shifted(self.again[s, j - 1], self.left[t + 1] - self.left[j])
            offer(self._shifted(rest, given) + later + cost, self._need(peak + delta), -2 - j)
        if is_first:
            self.first[s], self.first_choices[s] = best, choice
        else:
            self.again[s, t], self.choices[s, t] = best, choice

    def _first_pass(self, s: int, slot: int) -> Iterator[Operation]:
        stage, t = self.stages[s], len(self.stages) - 1
        number = int(self.first_choices[s][slot])
        if number >= 0:
            option = stage.options[number]
            yield Operation(FORWARD, s, s, option, True)
            if s < t:
                yield from self._first_pass(s + 1, slot - self._slots(option.saved_bytes + stage.output_bytes))
            yield Operation(BACKWARD, s, s, option)
        else:
            j = -2 - number
            yield Operation(FORWARD, s, j - 1, None, True)
            yield from self._first_pass(j, slot - self._slots(self.stages[j - 1].output_bytes))
            yield from self._second_pass(s, j - 1, slot - self._slots(self.left[t + 1] - self.left[j]))

    def _second_pass(self, s: int, t: int, slot: int) -> Iterator[Operation]:
        stage = self.stages[s]
        if s == t:
            yield Operation(BACKWARD, s, s, stage.bare)
            return
        number = int(self.choices[s, t][slot])
        if number >= 0:
            option = stage.options[number]
            yield Operation(FORWARD, s, s, option)
            yield from self._second_pass(s + 1, t, slot - self._slots(option.saved_bytes + stage.output_bytes))
            yield Operation(BACKWARD, s, s, option)
        else:
            j = -2 - number
            yield Operation(FORWARD, s, j - 1, None)
            yield from self._second_pass(j, t, slot - self._slots(self.stages[j - 1].output_bytes))
            yield from self._second_pass(s, j - 1, slot - self._slots(self.left[t + 1] - self.left[j]))

    def _slots(self, size) -> int:
        return round(float(size) / self.slot_bytes)

    def _need(self, size) -> int:
        return max(0, self._slots(size))

    def _shifted(self, costs, size) -> np.ndarray:
        by = min(self._slots(size), self.slots + 1)
        found = np.full(self.slots + 1, np.inf)
        found[by:] = costs[: self.slots + 1 - by]
        return found
