"""The algorithm of policy ``ilp``: the cheapest recomputation of any graph within a budget, as an integer program.

From Jain et al. 2020, "Checkmate: breaking the memory wall with optimal tensor rematerialization" (arXiv:1910.02653),
section 4. The nodes have one topological order; stage t ends with the first computation of node t. R[t, i] says that
node i is computed in stage t, S[t, i] that its result is saved from before stage t. The objective is the paper's. The
lifetime of a result within a stage has one variable for each stretch between two of its readers, instead of the paper's
FREE: this describes the same plans with a tighter relaxation.

The plan is optimal for that order of first computations if the nodes of a stage run in that order too, and if every
result has one size and is live together with everything its node reads. Another order may need less memory. The solver
is HiGHS, called through scipy; it proves optimality up to about a hundred nodes. Out of time, it still gives a lower
bound, and the better of its plan and a greedy one. Offload and partly saved results are not modeled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import inf
from numbers import Real

from ackpt.core.errors import BudgetError
from ackpt.planner.policies.search.ilp_program import Result, rounded_up, run, solver, unit_of_bytes

COMPUTE, FREE = "compute", "free"


@dataclass(frozen=True)
class Dag:
    """A step's operations in topological order.

    ``costs`` and ``bytes``: of every node's computation and result. ``edges``: (producer, consumer) pairs of indices.
    ``workspace``: bytes that a node allocates while it runs. ``held``: nodes whose results live to the end; ``once``:
    nodes that cannot be recomputed. Nothing is recomputed until all nodes before ``boundary`` have been computed.
    ``siblings``: ``{node: earlier node}``, further results of one operation, which every later run of it allocates too.

    Raises:
        ValueError: for lengths that differ, negative numbers, or an edge that does not lead forward.

    Example:
        >>> dag = Dag(costs=[1, 1, 2], bytes=[4, 4, 4], edges=[(0, 1), (0, 2), (1, 2)])
        >>> dag.inputs, dag.readers
        ([[], [0], [0, 1]], [[1, 2], [2], []])
    """

    costs: Sequence[float]
    bytes: Sequence[int]
    edges: Sequence[tuple[int, int]]
    workspace: Sequence[int] = ()
    held: Collection[int] = ()
    once: Collection[int] = ()
    boundary: int = 0
    siblings: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.costs)
        if not len(self.workspace):
            object.__setattr__(self, "workspace", (0,) * count)
        for name in ("bytes", "workspace"):
            if len(getattr(self, name)) != count:
                raise ValueError(f"{name} has {len(getattr(self, name))} values for a graph of {count} nodes")
        if not count:
            raise ValueError("a graph has at least one node")
        if min(*self.costs, *self.bytes, *self.workspace) < 0:
            raise ValueError("costs and bytes of a graph are not negative")
        for producer, consumer in self.edges:
            if not 0 <= producer < consumer < count:
                raise ValueError(
                    f"the edge {(producer, consumer)} does not lead from a node to a later one of the {count}: number "
                    "the nodes in topological order"
                )

    @cached_property
    def inputs(self) -> list[list[int]]:
        """The nodes that each node reads."""
        return [sorted({a for a, b in self.edges if b == node}) for node in range(len(self.costs))]

    @cached_property
    def readers(self) -> list[list[int]]:
        """The nodes that read each node."""
        return [sorted({b for a, b in self.edges if a == node}) for node in range(len(self.costs))]

    @cached_property
    def last_use(self) -> list[int]:
        """The last stage in which each node's result is read, directly or to recompute something."""
        last = list(range(len(self.costs)))
        for node in reversed(last):
            last[node] = max([node, *(last[reader] for reader in self.readers[node])])
        return last


@dataclass(frozen=True)
class Solution:
    """A schedule of a `Dag`, and how good it is.

    ``schedule``: (``"compute"`` or ``"free"``, node) in order; every result is freed right after its last use.
    ``cost``: of all its computations. ``lower_bound``: no schedule within the budget costs less. ``optimal``: whether
    the two are equal. ``peak_bytes``: the largest number of live bytes.

    Example:
        >>> solution = solve(Dag(costs=[1, 2], bytes=[4, 4], edges=[(0, 1)]), budget=8)
        >>> solution.schedule
        (('compute', 0), ('compute', 1), ('free', 0), ('free', 1))
        >>> solution.peak_bytes, solution.optimal
        (8, True)
    """

    cost: float
    lower_bound: float
    optimal: bool
    schedule: tuple[tuple[str, int], ...]
    peak_bytes: int


def solve(dag: Dag, budget: float, *, time_limit: float | None = None) -> Solution:
    """The cheapest schedule of `dag` within `budget` bytes.

    Args:
        dag: the operations and what they read.
        budget: an upper bound on the bytes of all live results.
        time_limit: seconds after which the best schedule so far is returned; None: until it is optimal. The search for
            the budget that a refusal names takes at most as long again.

    Raises:
        BudgetError: if the budget is infeasible; names the smallest feasible one. Also if no schedule was found in
            time; names a budget that is known to be feasible.
        ImportError: without scipy.
        ValueError: for a budget or a time limit that is not positive.

    Example: four layers; the backward of each reads the layer's input and output and the gradient.
        >>> forward = [(0, 1), (1, 2), (2, 3)]
        >>> backward = [(2, 4), (3, 4), (1, 5), (2, 5), (4, 5), (0, 6), (1, 6), (5, 6), (0, 7), (6, 7)]
        >>> solution = solve(Dag([1, 1, 1, 1, 2, 2, 2, 2], [1] * 8, forward + backward), budget=4)
        >>> solution.cost, solution.optimal, solution.peak_bytes
        (13, True, 4)
    """
    if not budget > 0:
        raise ValueError(f"a budget is a positive number of bytes, got {budget!r}")
    check_time_limit(time_limit)
    solver()
    least = sum(dag.costs)
    baseline = solution(dag, range(len(dag.costs)), least)
    if baseline.peak_bytes <= budget:
        return baseline
    start = greedy(dag, budget)
    result = _search(dag, budget, time_limit, None if start is None else sum(dag.costs[node] for node in start))
    if start is None and result.infeasible:
        raise BudgetError(_refusal(dag, budget, time_limit))
    bound = rounded_up(dag, max(result.bound, least))
    solutions = [solution(dag, order, bound) for order in (result.order, start) if order is not None]
    if not solutions:
        raise BudgetError(
            f"no schedule within {budget} bytes was found in {time_limit} s, and no proof that none exists: raise the "
            f"time limit, or the budget; {baseline.peak_bytes} bytes are feasible without recomputation."
        )
    return min(solutions, key=lambda solution: solution.cost)


def cheaper(dag: Dag, budget: float, cost: float, *, time_limit: float | None = None) -> tuple[Solution | None, float]:
    """A schedule within `budget` that costs less than `cost`, None if none was found; and a lower bound on all costs.

    The constraint to cost less than `cost` makes the solver faster where there is no such schedule, and slower where
    there is one. So the first third of the time has the constraint, the rest has not.
    """
    parts = [(None, 1)] if cost == inf else [(cost, 1 / 3), (None, 2 / 3)]
    bound, best = float(sum(dag.costs)), None
    for cost_limit, share in parts:
        result = _search(dag, budget, None if time_limit is None else time_limit * share, cost_limit)
        bound = max(bound, min(cost, rounded_up(dag, result.bound)))
        if result.order is not None and (best is None or solution(dag, result.order).cost < best.cost):
            best = solution(dag, result.order)
        if result.infeasible or best is not None and best.cost <= bound:
            break
    return (best if best is not None and best.cost < cost else None), bound


def _search(dag: Dag, budget: float, time_limit: float | None, cost: float | None) -> Result:
    """The solver's result for orders that cost less than `cost`; any order it returns keeps the budget to the byte.

    The solver's variables are integers up to a tolerance, so its sums of bytes are not exact. A set of results that
    were live together and do not fit becomes a further constraint, which no schedule within the budget violates.
    """
    left = _countdown(time_limit)
    bound, too_large = -inf, []
    while True:
        result = run(dag, budget, left(), cost, too_large)
        bound = max(bound, result.bound)  # with more constraints, but perhaps out of time
        if result.order is None:
            return replace(result, bound=cost if result.infeasible and cost is not None else bound)
        best = solution(dag, result.order)
        if best.peak_bytes <= budget:
            return replace(result, bound=best.cost if result.optimal else bound)
        too_large.append(_too_large(dag, best, budget))


def _countdown(time_limit: float | None) -> Callable[[], float | None]:
    """A function that returns the seconds left of `time_limit` from now on; None if there is no limit."""
    end = None if time_limit is None else time.monotonic() + time_limit
    return lambda: None if end is None else max(0.0, end - time.monotonic())


def _too_large(dag: Dag, solution: Solution, budget: float) -> frozenset[int]:
    """The fewest of the largest results live at the peak of `solution` that, with the workspace, exceed `budget`."""
    live: set[int] = set()
    moments = []
    for kind, node in solution.schedule:
        live = live | {node} if kind == COMPUTE else live - {node}
        if kind == COMPUTE:
            moments.append((sum(dag.bytes[n] for n in live) + dag.workspace[node], node, live))
    _, node, live = max(moments, key=lambda moment: moment[0])
    largest = sorted(live, key=lambda node: dag.bytes[node], reverse=True)
    totals = accumulate((dag.bytes[n] for n in largest), initial=dag.workspace[node])
    return frozenset(largest[: next(count for count, total in enumerate(totals) if total > budget)])


def check_time_limit(time_limit: float | None) -> None:
    if time_limit is not None and not (isinstance(time_limit, Real) and time_limit > 0):
        raise ValueError(f"time_limit is a positive number of seconds, or None; got {time_limit!r}")


def greedy(dag: Dag, budget: float) -> list[int] | None:
    """An order of nodes within `budget`, evicting results that are cheap, large and not read soon; None if it fails.

    Like Kirisame et al. 2021, "Dynamic tensor rematerialization" (arXiv:2006.09616), but by the next stage that reads a
    result instead of the time since it was last read. Always None for graphs with siblings.
    """
    if dag.siblings:
        return None
    live: set[int] = set()
    order: list[int] = []

    def next_reader(node, stage):
        return next((reader for reader in dag.readers[node] if reader >= stage), inf)

    def compute(node, stage, pinned) -> bool:
        """Compute `node` without evicting `pinned`; False if that fails."""
        if (node in dag.once or stage < dag.boundary) and node != stage:
            return False
        for source in dag.inputs[node]:
            if source not in live and not compute(source, stage, pinned | set(dag.inputs[node])):
                return False
        needed = pinned | {*dag.inputs[node], node}
        live.add(node)
        while sum(dag.bytes[n] for n in live) + dag.workspace[node] > budget:
            evictable = [n for n in live - needed if n not in dag.held and not is_needed(n, stage)]
            if not evictable:
                return False
            live.remove(min(evictable, key=lambda n: priority(n, stage)))
        order.append(node)
        return True

    def is_needed(node, stage):  # and cannot be recomputed
        return (node in dag.once or stage < dag.boundary) and next_reader(node, stage) < inf

    def priority(node, stage):
        return dag.costs[node] / max(dag.bytes[node], 1) / (next_reader(node, stage) - stage + 1), node

    for stage in range(len(dag.costs)):
        if not compute(stage, stage, set()):
            return None
        live = {node for node in live if dag.last_use[node] > stage or node in dag.held}
    return order


def solution(dag: Dag, order, bound: float = 0) -> Solution:
    """The nodes in `order`, without recomputations that nobody reads, each result freed right after its last use."""
    needed: set[int] = set(dag.held)
    first = {}
    for at, node in enumerate(order):
        first.setdefault(node, at)
    steps: list[tuple[str, int]] = []
    for at, node in reversed(list(enumerate(order))):
        if node in needed or first[node] == at:
            touched = {node, *dag.inputs[node]}
            steps += [(FREE, other) for other in sorted(touched - needed, reverse=True)]
            steps.append((COMPUTE, node))
            needed -= {node} - set(dag.held)
            needed |= set(dag.inputs[node])
    steps.reverse()
    total = peak = 0
    for kind, node in steps:
        total += dag.bytes[node] if kind == COMPUTE else -dag.bytes[node]
        if kind == COMPUTE:
            peak = max(peak, total + dag.workspace[node])
    cost = sum(dag.costs[node] for kind, node in steps if kind == COMPUTE)
    return Solution(cost, min(bound, cost), cost <= bound, tuple(steps), peak)


def lowest_peak(dag: Dag, time_limit: float | None = None) -> tuple[Solution, bool]:
    """The schedule of the lowest peak that is found in time, and whether no schedule has a lower one."""
    left = _countdown(time_limit)
    result = run(dag, None, left())
    best = solution(dag, result.order or range(len(dag.costs)))
    _, is_exact = unit_of_bytes(dag)
    while result.optimal and not is_exact:  # sums were rounded: verify that one byte less is infeasible
        result = _search(dag, best.peak_bytes - 1, left(), None)
        if result.order is None:
            return best, result.infeasible
        best = solution(dag, result.order)
    return best, result.optimal


def _refusal(dag: Dag, budget, time_limit: float | None) -> str:
    lowest, proven = lowest_peak(dag, time_limit)
    which = f"the smallest feasible budget is {lowest.peak_bytes} bytes"
    if not proven:
        which = (
            f"a budget of {lowest.peak_bytes} bytes is feasible; {time_limit} s were too short to tell whether a "
            "smaller one is"
        )
    return f"no schedule of this graph of {len(dag.costs)} nodes fits into {budget} bytes; {which}."
