"""Checkmate's integer program as matrices for HiGHS, and the solver's result.

The nodes have one topological order; stage t ends with the first computation of node t. R[t, i] says that node i is
computed in stage t, S[t, i] that its result is saved from before stage t. The objective is the paper's. The lifetime of
a result within a stage has one variable for each stretch between two of its readers, instead of the paper's FREE: this
describes the same plans with a tighter relaxation. They are optimal if the nodes of a stage run in the given order too,
and if every result has one size and is live together with everything that its node reads.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, gcd, inf
from numbers import Integral
from typing import Any

import numpy as np

_OPTIMAL, _OUT_OF_TIME, _INFEASIBLE = 0, 1, 2  # statuses of scipy
_RANGE = 10**6  # largest number given to the solver, which treats less than 1e-6 as zero
_ROUNDING = 1e-6  # how far above a whole number a bound may be by the solver's rounding alone


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
class Result:
    """The solver's result: an ``order`` of nodes, None if none was found, and a lower ``bound`` on the cost."""

    order: list[int] | None
    bound: float
    optimal: bool
    infeasible: bool


def run(
    dag: Dag,
    budget: float | None,
    seconds: float | None,
    cost_limit: float | None = None,
    too_large: Sequence[Collection[int]] = (),
) -> Result:
    """The cheapest order within `budget` and below `cost_limit` that is found in `seconds`.

    Without a budget, the order with the lowest peak. `too_large`: sets of nodes whose results exceed the budget, some
    only together with the workspace of the node that runs.
    """
    milp, bounds, constraints = solver()
    program = Program(dag, budget)
    if cost_limit is not None:
        program.cost_less_than(cost_limit)
    for nodes in too_large:
        program.not_together(nodes)
    # With presolve HiGHS reports suboptimal plans as optimal: github.com/ERGO-Code/HiGHS/issues/3043; rarely in 1.12
    # too. Without it, about one in a thousand feasible programs is reported as infeasible, so both must agree on that.
    end = None if seconds is None else time.monotonic() + seconds
    result: Any = None
    for presolve in (False, True):
        options: dict[str, Any] = {"mip_rel_gap": 0.0, "presolve": presolve}
        if end is not None:
            options["time_limit"] = max(0.0, end - time.monotonic())
        result = milp(
            program.objective,
            integrality=program.whole,
            bounds=bounds(program.low, program.high),
            constraints=constraints(program.matrix(), -np.inf, program.limits),
            options=options,
        )
        if result.status != _INFEASIBLE:
            break
    if result.status not in (_OPTIMAL, _OUT_OF_TIME, _INFEASIBLE):
        raise RuntimeError(f"the solver failed: {result.message}")
    bound = -inf if result.mip_dual_bound is None else result.mip_dual_bound * program.cost_unit
    order = None if result.x is None else program.order(result.x)
    return Result(order, bound, result.status == _OPTIMAL, result.status == _INFEASIBLE)


class Program:
    """Minimize ``objective x`` such that ``matrix x <= limits`` and ``low <= x <= high``; `whole` x are integers.

    ``runs[t, i]`` is R[t, i], ``saved[t, i]`` is S[t, i]; ``live[t, i][j]`` is 1 if the result of j is live while i
    runs in stage t. Those without an entry are zero.
    """

    def __init__(self, dag: Dag, budget: float | None):
        self.dag, self.count, self.budget = dag, len(dag.costs), inf if budget is None else budget
        self.objective: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.whole: list[int] = []
        self.limits: list[float] = []
        self.entries: list[tuple[int, int, float]] = []
        self.cost_unit, self.exact = (1.0, True) if budget is None else _unit(dag.costs, sum(dag.costs))
        self.byte_unit, bytes_are_exact = unit_of_bytes(dag, budget)
        self.runs = {(t, i): self._run_variable(t, i, budget) for t in range(self.count) for i in self._may_run(t)}
        self.saved = {(t, i): self._saved_variable(i) for t in range(self.count) for i in self._may_be_saved(t)}
        self._inputs_are_live()
        self._siblings_run_together()
        if budget is None:
            self.top = self._variable(1.0, 0.0, inf)
        else:
            limit = budget / self.byte_unit + (not bytes_are_exact)  # slack for rounding; `not_together` is exact
            self.top = self._variable(0.0, limit, limit)
        self.live: dict[tuple[int, int], dict[int, int | None]] = {}
        for stage in range(self.count):
            self._count_bytes(stage)

    def cost_less_than(self, limit: float) -> None:
        """Add the constraint that the cost is less than `limit`; if costs are not integers, at most `limit`.

        The bound is put between two integers: at a cost that is reached, HiGHS has reported feasible as infeasible.
        """
        terms = [(cost, variable) for variable, cost in enumerate(self.objective) if cost]
        self._at_most(limit / self.cost_unit - self.exact / 2, *terms)

    def not_together(self, nodes: Collection[int]) -> None:
        """Forbid all results of `nodes` from being live while a node runs if they and its workspace exceed the budget.

        The budget implies this for exact integers, but the solver accepts values within a tolerance.
        """
        total = sum(self.dag.bytes[node] for node in nodes)
        for (stage, node), live in self.live.items():
            if total + self.dag.workspace[node] > self.budget:
                terms = [(1, live.get(other)) for other in nodes]
                self._at_most(len(nodes), (1, self.runs[stage, node]), *terms)

    def _may_run(self, stage):
        dag = self.dag
        if stage < dag.boundary or stage in dag.siblings:  # nothing runs between the results of one operation
            return [stage]
        recomputable = [i for i in range(stage) if i not in dag.once and i not in dag.held and dag.last_use[i] >= stage]
        return [*recomputable, stage]

    def _may_be_saved(self, stage):
        return [i for i in range(stage) if i in self.dag.held or self.dag.last_use[i] >= stage]

    def _run_variable(self, stage, node, budget):
        cost = 0.0 if budget is None else self.dag.costs[node] / self.cost_unit
        return self._variable(cost, float(node == stage), 1.0, 1)

    def _saved_variable(self, node):
        return self._variable(0.0, float(node in self.dag.held), 1.0, 1)

    def _variable(self, cost: float, low: float, high: float, whole: int = 0) -> int:
        self.objective.append(cost)
        self.low.append(low)
        self.high.append(high)
        self.whole.append(whole)
        return len(self.objective) - 1

    def _at_most(self, limit: float, *terms: tuple[float, int | None]) -> None:
        """Add the constraint that the sum of factor times variable is at most `limit`; a variable None is zero."""
        row = len(self.limits)
        self.limits.append(limit)
        self.entries += [(row, variable, factor) for factor, variable in terms if variable is not None]

    def _inputs_are_live(self) -> None:
        runs, saved = self.runs, self.saved
        for (stage, node), run in runs.items():
            for source in self.dag.inputs[node]:
                self._at_most(0.0, (1, run), (-1, runs.get((stage, source))), (-1, saved.get((stage, source))))
            if (stage, node) in saved:
                self._at_most(1.0, (1, run), (1, saved[stage, node]))  # a saved result is not computed
        for (stage, node), variable in saved.items():
            before = (stage - 1, node)
            self._at_most(0.0, (1, variable), (-1, runs.get(before)), (-1, saved.get(before)))

    def _siblings_run_together(self) -> None:
        for (stage, node), run in self.runs.items():
            if node in self.dag.siblings and node < stage:
                other = self.runs[stage, self.dag.siblings[node]]
                self._at_most(0.0, (1, run), (-1, other))
                self._at_most(0.0, (1, other), (-1, run))

    def _count_bytes(self, stage: int) -> None:
        """Bound the live bytes while each node of `stage` runs, by the changes from one node to the next."""
        runs = self.runs
        running = [node for node in range(stage + 1) if (stage, node) in runs]
        starts: dict[int, dict[int, int | None]] = {node: {} for node in running}
        for node in range(stage + 1):
            for start, is_live in self._stretches(stage, node):
                if (first := next((n for n in running if n >= start), None)) is not None:
                    starts[first][node] = is_live
        live_before, before = None, {}
        for node in running:
            changes = [
                (sign * self.dag.bytes[other] / self.byte_unit, variable)
                for other, is_live in starts[node].items()
                for sign, variable in ((1, is_live), (-1, before.get(other)))
            ]
            self.live[stage, node] = before = before | starts[node]
            live = self._variable(0.0, 0.0, self.high[self.top])
            self._at_most(0.0, (1, live_before), (-1, live), *changes)
            freed = [
                s for s, first in self.dag.siblings.items() if first == node < s < stage and (stage, s) not in runs
            ]
            workspace = (self.dag.workspace[node] + sum(self.dag.bytes[s] for s in freed)) / self.byte_unit
            self._at_most(0.0, (1, live), (workspace, runs[stage, node]), (-1, self.top))
            live_before = live

    def _stretches(self, stage: int, node: int) -> list[tuple[int, int | None]]:
        """(start, variable): from node `start` of `stage` on, the variable says whether the result of `node` is live.

        Each applies until the next.
        """
        runs = self.runs
        run, before, after = runs.get((stage, node)), self.saved.get((stage, node)), self.saved.get((stage + 1, node))
        if node in self.dag.held and stage == self.count - 1:
            after = run if before is None else before
        reads = [reader for reader in self.dag.readers[node] if (stage, reader) in runs]
        stretches = [(0, before)]
        if run is not None:
            stretches.append((node, self._variable(0.0, 0.0, 1.0)))
            self._at_most(0.0, (1, run), (-1, stretches[-1][1]))
        for reader in reads[:-1]:
            self._at_most(0.0, (1, runs[stage, reader]), (-1, stretches[-1][1]))
            stretches.append((reader + 1, self._variable(0.0, 0.0, 1.0)))
            self._at_most(0.0, (1, stretches[-1][1]), (-1, stretches[-2][1]))
        if reads:
            self._at_most(0.0, (1, runs[stage, reads[-1]]), (-1, stretches[-1][1]))
        if reads or run is not None:
            self._at_most(0.0, (1, after), (-1, stretches[-1][1]))
            stretches.append((max([node, *reads]) + 1, after))
        return stretches

    def matrix(self):
        from scipy.sparse import coo_array

        rows, columns, factors = zip(*self.entries)
        return coo_array((factors, (rows, columns)), shape=(len(self.limits), len(self.objective))).tocsr()

    def order(self, x) -> list[int]:
        return [node for (_, node), run in self.runs.items() if x[run] > 0.5]


def solver() -> tuple[Any, Any, Any]:
    """scipy's `milp`, `Bounds` and `LinearConstraint`."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise ImportError(
            f"policy 'ilp' solves an integer program and needs scipy ({error}): pip install \"ackpt[plan]\""
        ) from error
    return milp, Bounds, LinearConstraint


def rounded_up(dag: Dag, bound: float) -> float:
    """The lowest cost of a schedule that costs at least `bound`: the next multiple of the unit of all costs."""
    unit, exact = _unit(dag.costs, sum(dag.costs))
    return ceil(bound / unit - _ROUNDING) * int(unit) if exact else bound


def unit_of_bytes(dag: Dag, budget: float | None = None) -> tuple[float, bool]:
    """The number of bytes that the solver counts as 1, and whether its sums of bytes are exact."""
    return _unit([*dag.bytes, *dag.workspace], budget or sum(dag.bytes) + max(dag.workspace))


def _unit(values, total) -> tuple[float, bool]:
    """The unit of the solver's numbers, and whether it makes them integers that are small enough to be exact."""
    if all(isinstance(value, Integral) for value in values):
        divisor = gcd(*(int(value) for value in values)) or 1
        if total / divisor <= _RANGE:
            return divisor, True
    return total / _RANGE or 1.0, False
