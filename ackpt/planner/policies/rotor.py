"""Policy ``rotor``: the fastest persistent schedule of a chain of different stages within a budget.

Beaumont et al. 2019 (arXiv:1911.13214), theorem 1, algorithms 1 and 2. A forward of a stage saves either everything
that its backward reads, or its output alone, from which later stages can be recomputed. The schedule is optimal among
those in which a saved tensor stays until the backward that reads it. It has O(L^3 slots) time and O(L^2 slots) memory.

In the policy a block is a stage. The model does not know that the first forward runs anyway, nor that the recomputed
activations of a block need not all be live at once. So its schedules for every budget, with the overhead of stages and
without, are simulated with those of ``full``; the cheapest one that fits is taken.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from math import ceil, floor, gcd, inf
from numbers import Integral
from typing import NamedTuple

import numpy as np

from ackpt.core.errors import BudgetError
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.policies.chains.block_options import BlockStep
from ackpt.planner.policies.chains.blocks import BlockChain, Walk, fine_chain
from ackpt.planner.policies.chains.chain_table import BACKWARD, FORWARD, ChainTable, Option, Partial, Stage
from ackpt.planner.policies.chains.chain_table import Operation as ChainOperation
from ackpt.planner.policies.full import segmentations
from ackpt.planner.policies.search.frontier import cheapest, costs
from ackpt.planner.schedule.schedule import Schedule, lower

FORWARD_ALL, FORWARD_CHECKPOINT, FORWARD_NONE = "forward all", "forward checkpoint", "forward none"
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
    may be missed. The one that saves everything and the one that needs the least bytes are always found. A gradient has
    the size of the output that it belongs to.

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
    least, fewest = _least(chain)
    needed = least + chain.input_bytes
    if budget < needed:
        raise BudgetError(
            f"no persistent schedule of this chain of {len(chain.forward)} stages fits into {budget} bytes; "
            f"the smallest feasible budget is {needed} bytes."
        )
    table, capacity = _table(chain, budget, slots)
    ways = [fewest] if table.costs()[capacity] == inf else [table.operations(capacity), fewest]
    return min((_solution(chain, steps) for steps in ways), key=lambda solution: solution.time)


def frontier(chain: Chain, slots: int = 500) -> list[Solution]:
    """The fastest schedules for every budget, from the one that saves everything to the one that needs least bytes.

    Example:
        >>> [solution.time for solution in frontier(Chain([1] * 4, [1] * 4, [1] * 4, [1] * 4))]
        [8, 10, 13]
    """
    table, capacity = _table(chain, inf, slots)
    times = table.costs()
    steps = [left for left in range(capacity, -1, -1) if times[left] < (times[left - 1] if left else inf)]
    solutions = [_solution(chain, table.operations(left)) for left in steps]
    return list(dict.fromkeys([*solutions, _solution(chain, _least(chain)[1])]))


def _table(chain: Chain, budget, slots: int) -> tuple[ChainTable, int]:
    """The table of `chain` with sizes in units, rounded up, and the units of `budget` without the chain's input."""
    sizes = chain.output_bytes, chain.saved_bytes, chain.forward_overhead, chain.backward_overhead
    # More than saving everything needs is of no use, and would only make the units coarser.
    everything = left = Fraction(_everything(*sizes))
    if budget < everything + Fraction(chain.input_bytes):
        left = Fraction(budget) - Fraction(chain.input_bytes)
    whole = [int(size) for size in chain.sizes() if isinstance(size, Integral)]
    unit = Fraction(gcd(*whole) if len(whole) == len(chain.sizes()) else 0)
    if not unit or left / unit > slots:
        unit = left / slots or Fraction(1)
    in_units = [[ceil(Fraction(size) / unit) for size in group] for group in sizes]
    capacity = floor(left / unit) if left < everything else _everything(*in_units)
    stages = []
    for stage, (output, saved, forward, backward) in enumerate(zip(*in_units)):
        time = float(chain.forward[stage])
        whole_stage = Option(frozenset([stage]), saved - output, saved + forward, output + saved + backward, 0.0)
        nothing = Option(frozenset(), 0, output + forward, output + saved + max(forward, backward), time)
        stages.append(Stage((Partial(nothing, (whole_stage,), (time,), time),), output, output, 0))
    return ChainTable(stages, max(1, capacity), max(1, capacity), first_is_free=False), capacity


def _everything(output, saved, forward, backward):
    """The peak of the schedule that saves everything."""
    peaks = (max(output[-1] + s + f, o + s + b) for o, s, f, b in zip(output, saved, forward, backward))
    return max(map(operator.add, accumulate(saved, initial=0), peaks))


def _least(chain: Chain) -> tuple[float, Iterator[ChainOperation]]:
    """The least bytes that the stages need, exactly, and the fastest schedule with these bytes."""
    sizes = (chain.output_bytes, chain.saved_bytes, chain.forward_overhead, chain.backward_overhead)
    output, saved, in_forward, in_backward = map(np.asarray, sizes)
    n = len(output)
    begins = np.cumsum([0.0, *chain.forward])
    passing = np.append(0, output[:-1]) + output + in_forward
    needed = np.zeros((n, n), dtype=np.result_type(output, saved, in_forward, in_backward))
    times, lengths = np.zeros((n, n)), np.zeros((n, n), dtype=int)
    for s in reversed(range(n)):
        for t in range(s, n):
            later, sooner = slice(s + 1, t + 1), slice(s, t)  # first stages after stretches, and their last stages
            needs, costs = needed[s, sooner], times[s, sooner] + times[later, t] + begins[later] - begins[s]
            if s < t:
                pass_by = output[t] + max(output[s] + in_forward[s], passing[s + 1 : t].max(initial=0))
                needs = np.maximum(np.maximum(output[sooner] + needed[later, t], needs), pass_by)
            save_all = max(output[t] + saved[s] + in_forward[s], output[s] + saved[s] + in_backward[s])
            rest_bytes, rest = (saved[s] + needed[s + 1, t], times[s + 1, t]) if s < t else (0, 0.0)
            needs, costs = np.append(needs, max(save_all, rest_bytes)), np.append(costs, chain.forward[s] + rest)
            costs[needs > needs.min()] = inf
            lengths[s, t] = costs.argmin() + 1
            needed[s, t], times[s, t] = needs.min(), costs.min()

    def operations(s: int, t: int) -> Iterator[ChainOperation]:
        if (j := s + int(lengths[s, t])) <= t:
            yield ChainOperation(FORWARD, s, j - 1)
            yield from operations(j, t)
            yield from operations(s, j - 1)
            return
        if s < t:
            yield ChainOperation(FORWARD, s, s, frozenset([s]))
            yield from operations(s + 1, t)
        yield ChainOperation(BACKWARD, s, s)

    return needed[0, -1].item(), operations(0, n - 1)


def _solution(chain: Chain, steps: Iterable[ChainOperation]) -> Solution:
    """The schedule of a chain table's operations, which leave out a forward right before the stage's own backward."""
    operations: list[Operation] = []
    saved_whole = set()
    for kind, first, last, saved in ((step.kind, step.first, step.last, step.saved) for step in steps):
        if saved or (kind == BACKWARD and first not in saved_whole):
            saved_whole.add(first)
            operations.append(Operation(FORWARD_ALL, first))
        elif kind == FORWARD:
            operations.append(Operation(FORWARD_CHECKPOINT, first))
            operations += [Operation(FORWARD_NONE, stage) for stage in range(first + 1, last + 1)]
        if kind == BACKWARD:
            operations.append(Operation(BACKWARD, first))
    times = {BACKWARD: chain.backward}
    return Solution(sum(times.get(kind, chain.forward)[s] for kind, s in operations), tuple(operations))


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
