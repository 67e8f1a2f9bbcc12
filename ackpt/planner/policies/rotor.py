"""Policy ``rotor``: the fastest persistent schedule of a chain of different stages within a budget.

Beaumont et al. 2019 (arXiv:1911.13214), theorem 1, algorithms 1 and 2. A forward of a stage saves either everything
that its backward reads, or its output alone, from which later stages can be recomputed. The schedule is optimal among
those in which a saved tensor stays until the backward that reads it. It has O(L^3 slots) time and O(L^2 slots) memory.

In the policy a block is a stage. The model does not know that the first forward runs anyway, nor that the recomputed
activations of a block need not all be live at once. So its schedules for every budget, with the overhead of stages and
without, are simulated with those of ``full``; the cheapest one that fits is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, gcd, inf
from numbers import Integral
from typing import NamedTuple

import numpy as np

from ackpt.core.errors import BudgetError
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.policies.chains.block_options import BlockStep
from ackpt.planner.policies.chains.blocks import BlockChain, Walk, fine_chain
from ackpt.planner.policies.full import segmentations
from ackpt.planner.policies.search.frontier import cheapest, costs
from ackpt.planner.schedule.schedule import Schedule, lower

FORWARD_ALL, FORWARD_CHECKPOINT, FORWARD_NONE = "forward all", "forward checkpoint", "forward none"
BACKWARD = "backward"
# Sizes are rounded to so many parts of all that can be saved, rotor's own 500; the simulator decides what fits.
_SIZE_UNITS = 500
# More blocks than this are joined, equally many neighbors at a time: time grows with their third power.
_MOST_STAGES = 120


@dataclass(frozen=True)
class Chain:
    """One value per stage, first to last.

    ``forward``, ``backward``: times (uf, ub). ``output_bytes``: of the stage's output a (wa). ``saved_bytes``: of
    everything that a forward saves for its backward, its output included (wab). ``forward_overhead``,
    ``backward_overhead``: further bytes that are live only while the stage runs (of, ob). ``input_bytes``: of the
    chain's input (wa of stage 0).

    Raises:
        ValueError: for sequences of different lengths, no stage, negative values, or an output larger than what is
            saved with it.

    Example:
        >>> chain = Chain(forward=[2, 1], backward=[4, 2], output_bytes=[1, 2], saved_bytes=[2, 5])
        >>> solve(chain, budget=100).time
        9
    """

    forward: Sequence[float]
    backward: Sequence[float]
    output_bytes: Sequence[float]
    saved_bytes: Sequence[float]
    forward_overhead: Sequence[float] = ()
    backward_overhead: Sequence[float] = ()
    input_bytes: float = 0

    def __post_init__(self) -> None:
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
    """One operation on the stage `stage`, counted from 0.

    ``forward all``: save everything that its backward reads; ``forward checkpoint``: save its input and its output;
    ``forward none``: save its output and free its input; ``backward``: run the backward, which frees what was saved.

    Example:
        >>> solve(Chain([1], [2], [1], [1]), budget=10).operations
        (Operation(kind='forward all', stage=0), Operation(kind='backward', stage=0))
    """

    kind: str
    stage: int


@dataclass(frozen=True)
class Solution:
    """A schedule: its ``operations`` in order, and the ``time`` of all of them.

    Example:
        >>> solution = solve(Chain([1] * 4, [1] * 4, [1] * 4, [1] * 4), budget=3)
        >>> solution.time, sum(kind.startswith("forward") for kind, stage in solution.operations)
        (13, 9)
    """

    time: float
    operations: tuple[Operation, ...]


def solve(chain: Chain, budget: float, slots: int = 500) -> Solution:
    """The fastest persistent schedule of `chain` within `budget` bytes.

    Sizes are exact if the budget is at most `slots` units, where the unit is the greatest common divisor of whole
    sizes. Otherwise sizes are rounded up to a `slots`-th of the budget: the budget is kept, but the fastest schedule
    may be missed. The schedule of least bytes is always found. A gradient has the size of the output that it belongs
    to.

    Args:
        chain: times and bytes of its stages.
        budget: an upper bound on the live bytes, the chain's input included.
        slots: the number of parts that the budget is divided into where sizes are not exact.

    Raises:
        BudgetError: if the budget is infeasible; names the smallest feasible one.
        ValueError: for a budget or a number of slots that is not positive.

    Example:
        >>> solve(Chain([1] * 4, [1] * 4, [1] * 4, [1] * 4), 4).time
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
            f"the smallest feasible budget is {needed} bytes."
        )
    table = _Table(chain, budget, slots, least)
    return _unrolled(chain, table.choose, table.capacity)


def frontier(chain: Chain, slots: int = 500) -> list[Solution]:
    """The fastest schedules for every budget, from the one that saves everything to the one that needs least bytes.

    Example:
        >>> [solution.time for solution in frontier(Chain([1] * 4, [1] * 4, [1] * 4, [1] * 4))]
        [8, 10, 13]
    """
    least = _Least(chain)
    table = _Table(chain, inf, slots, least)
    times = table.costs[0][-1]
    steps = [left for left in range(table.capacity, -1, -1) if times[left] < (times[left - 1] if left else inf)]
    solutions = [_unrolled(chain, table.choose, left) for left in steps]
    return list(dict.fromkeys([*solutions, _unrolled(chain, table.choose, None)]))


def _unrolled(chain: Chain, choose: Callable, left: int | None) -> Solution:
    """The schedule that ``choose(first, last, left)`` decides, from the whole chain down to single stages.

    For a stretch with `left` units of memory, `choose` returns the next checkpoint, or None to save everything of the
    first stage, and the units left for the stages that follow.
    """
    stages = len(chain.forward)
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
    times = {BACKWARD: chain.backward}
    time = sum(times.get(kind, chain.forward)[stage] for kind, stage in operations)
    return Solution(time, tuple(operations))


class _Needs:
    """Memory that a stage needs while the gradient of stage t's output is live, in the unit of the sizes."""

    def __init__(self, output, saved, forward_overhead, backward_overhead):
        self.output, self.saved = np.asarray(output), np.asarray(saved)
        self.forward_overhead, self.backward_overhead = np.asarray(forward_overhead), np.asarray(backward_overhead)
        self.passing = self.output[:-1] + self.output[1:] + self.forward_overhead[1:]

    def all(self, s: int) -> np.ndarray:
        """m_all(s, t) for all t >= s."""
        forward = self.saved[s] + self.forward_overhead[s]
        return np.maximum(self.output[s:] + forward, self.output[s] + self.saved[s] + self.backward_overhead[s])

    def null(self, s: int) -> np.ndarray:
        """m_null(s, t) for all t > s."""
        alone = self.output[s : s + 1] + self.forward_overhead[s]
        return self.output[s + 1 :] + np.maximum.accumulate(np.concatenate([alone, self.passing[s:-1]]))

    def everything(self):
        """The peak of the schedule that saves everything."""
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
            save_all, pass_by = needs.all(s), needs.null(s)
            time = chain.forward[s] + chain.backward[s]
            self.needed[s, s], self.times[s, s] = save_all[0], time
            for t in range(s + 1, n):
                later, sooner = slice(s + 1, t + 1), slice(s, t)
                split = np.maximum(needs.output[sooner] + self.needed[later, t], self.needed[s, sooner])
                saved = max(save_all[t - s], needs.saved[s] + self.needed[s + 1, t])
                needed = np.append(np.maximum(split, pass_by[t - s - 1]), saved)
                times = before[later] - before[s] + self.times[later, t] + self.times[s, sooner]
                times = np.where(needed == needed.min(), np.append(times, time + self.times[s + 1, t]), np.inf)
                at = int(np.argmin(times))
                self.needed[s, t], self.times[s, t] = needed.min(), times[at]
                self.splits[s, t] = s + 1 + at if s + at < t else -1
        self.bytes = self.needed[0, n - 1].item()


class _Table:
    """C(s, t, m): the least time of the stages s to t, for every m from 0 to ``capacity`` units.

    ``costs[s][t - s]`` is C(s, t, .). ``after[t][j]`` is the time of all forwards before j plus C(j, t, .) with the
    output that j starts from live, so that the minimum over all splits j of (s, t) is one sum of two tables. Sizes are
    rounded up, so a schedule that just fits may seem not to; the schedule of least bytes is known to fit.
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
            save_all, pass_by = needs.all(s), needs.null(s)
            for t in range(s, n):
                best = self._save_all(s, t)
                best[: save_all[t - s]] = np.inf
                if t > s:
                    passed = (self.after[t][s + 1 :] + self.costs[s][: t - s]).min(axis=0) - self.before[s]
                    passed[: pass_by[t - s - 1]] = np.inf
                    np.minimum(best, passed, out=best)
                feasible = best[self.least_units[s, t] :]
                np.minimum(feasible, least.times[s, t], out=feasible)
                self.costs[s][t - s] = best
                if s:
                    self.after[t][s] = _with_taken(best, needs.output[s - 1]) + self.before[s]

    def choose(self, s: int, t: int, left: int | None) -> tuple[int | None, int | None]:
        """See `_unrolled`; `left` is None where the schedule of least bytes is taken."""
        needs = self.needs
        if left is not None:
            saved = self._save_all(s, t)[left] if left >= needs.all(s)[t - s] else np.inf
            passed = self.after[t][s + 1 :, left] + self.costs[s][: t - s, left] - self.before[s]
            split = int(np.argmin(passed))
            passes = passed[split] if left >= needs.null(s)[t - s - 1] else np.inf
            if left < self.least_units[s, t] or min(saved, passes) <= self.least.times[s, t]:
                if saved <= passes:
                    return None, left - int(needs.saved[s])
                return s + 1 + split, left - int(needs.output[s + split])
        split = int(self.least.splits[s, t])
        return (None if split < 0 else split), None

    def _save_all(self, s: int, t: int) -> np.ndarray:
        time = self.forward[s] + self.backward[s]
        if s == t:
            return np.full(self.capacity + 1, float(time))
        return _with_taken(self.costs[s + 1][t - s - 1], self.needs.saved[s]) + time


def _with_taken(costs: np.ndarray, size: int) -> np.ndarray:
    """`costs` by units of memory if `size` units are taken."""
    shifted = np.full(len(costs), np.inf)
    shifted[size:] = costs[: max(0, len(costs) - size)]
    return shifted


def _in_units(chain: Chain, budget, slots: int):
    """The four sizes in units, rounded up; the budget without the input in units, rounded down; the bytes of a unit."""
    sizes = (chain.output_bytes, chain.saved_bytes, chain.forward_overhead, chain.backward_overhead)
    # More than saving everything needs is of no use, and would only make the units coarser.
    left = Fraction(_Needs(*sizes).everything().item())
    if budget < left + Fraction(chain.input_bytes):
        left = Fraction(budget) - Fraction(chain.input_bytes)
    whole = [int(size) for size in chain.sizes() if isinstance(size, Integral)]
    unit = Fraction(gcd(*whole) if len(whole) == len(chain.sizes()) else 0)
    if not unit or left / unit > slots:
        unit = left / slots or Fraction(1)
    return [[ceil(Fraction(size) / unit) for size in group] for group in sizes], floor(left / unit), unit


def schedule(graph, profile, limit_bytes) -> Schedule:
    return cheapest(graph, profile, limit_bytes, candidates)


def candidates(graph: JointGraph, profile) -> list[Schedule]:
    """rotor's schedules for every budget, and those that save cut points alone."""
    blocks = fine_chain(graph, _MOST_STAGES)
    chain = stages(graph, blocks, profile)
    chains = [chain, replace(chain, forward_overhead=(), backward_overhead=())]
    solutions = dict.fromkeys(s.operations for chain in chains for s in frontier(chain, 2 * _SIZE_UNITS))
    segments = (lower(graph, saved) for saved in segmentations(graph))
    return [*(_persistent(graph, blocks, operations) for operations in solutions), *segments]


def stages(graph: JointGraph, chain: BlockChain, profile) -> Chain:
    """The blocks of `chain` as stages of rotor's model."""
    walk = Walk(graph, chain)
    cost = costs(graph, profile)
    times, sizes = [], []
    gradients = 0  # of the parameters of later blocks
    for block in reversed(chain.blocks):
        step = BlockStep(walk.analysis, block, chain.pinned, cost, profile.workspace_bytes)
        option = step.option(frozenset(s for unit in block.units for s in unit) & walk.read)
        output = sum(walk.analysis.bytes[s] for s in block.output)
        saved = option.saved_bytes + output
        times.append([sum(cost[node] for node in nodes) for nodes in (block.forward, block.backward)])
        backward_overhead = max(0, option.backward_peak - saved - output) + gradients
        sizes.append((output, saved, max(0, option.forward_peak - saved), backward_overhead))
        gradients += step.parameter_gradient_bytes
    unit = max(1, sum(saved for _, saved, _, _ in sizes) // _SIZE_UNITS)
    forward, backward = zip(*reversed(times))
    output, saved, in_forward, in_backward = zip(*([round(size / unit) for size in row] for row in reversed(sizes)))
    return Chain(forward, backward, output, saved, in_forward, in_backward)


def _persistent(graph: JointGraph, chain: BlockChain, operations) -> Schedule:
    walk = Walk(graph, chain)
    saved_whole = set()
    for (kind, stage), following in zip(operations, [*operations[1:], None]):
        if kind == FORWARD_ALL:
            saved_whole.add(stage)
            # Right before its backward a block need not be saved: the backward recomputes it piece by piece.
            if walk.in_first_forward or following != (BACKWARD, stage):
                walk.save_all(stage)
        elif kind == BACKWARD:
            walk.reverse(stage, stage)
            if stage - 1 not in saved_whole:
                walk.free_output(stage - 1)
        else:
            walk.save_output(stage)
            if kind == FORWARD_NONE:
                walk.free_output(stage - 1)
    return walk.schedule()
