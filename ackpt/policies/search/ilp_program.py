"""Checkmate's integer program (see `ilp`) in the form that scipy's HiGHS takes, and what the solver finds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import ceil, gcd, inf
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ackpt.policies.ilp import Dag

_OPTIMAL, _OUT_OF_TIME, _INFEASIBLE = 0, 1, 2  # scipy's words for how it ended
_RANGE = 10**6  # what the solver's numbers are scaled to; it tells 1e-6 from zero
_WHOLE = 1e-6  # how far above a whole number a bound may be by the solver's rounding alone


@dataclass(frozen=True)
class Found:
    """``order``: of nodes, None if none was found; ``bound``: no order costs less; ``optimal``: nor can be better."""

    order: list[int] | None
    bound: float
    optimal: bool
    infeasible: bool


def run(dag: Dag, budget: float | None, seconds: float | None, known: float | None = None) -> Found:
    """The cheapest order within `budget`, or, without one, that of the lowest peak, as far as found in `seconds`.

    One that costs `known` is of no interest.
    """
    milp, bounds, constraints = solver()
    program = Program(dag, budget)
    if known is not None:
        program.cost_less_than(known)
    # Presolve takes worse plans for optimal: github.com/ERGO-Code/HiGHS/issues/3043, and rarely 1.12 too.
    # Without presolve it has called infeasible what is not, about once in a thousand, so that both have to say so.
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
    return Found(order, bound, result.status == _OPTIMAL, result.status == _INFEASIBLE)


class Program:
    """Minimise ``objective x`` where ``matrix x <= limits`` and ``low <= x <= high``; `whole` x are whole numbers.

    ``runs[t, i]`` is R, ``kept[t, i]`` is S; without an entry they are zero.
    """

    def __init__(self, dag: Dag, budget: float | None):
        self.dag, self.count = dag, len(dag.costs)
        self.objective: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.whole: list[int] = []
        self.limits: list[float] = []
        self.entries: list[tuple[int, int, float]] = []
        self.cost_unit, self.exact = (1.0, True) if budget is None else _unit(dag.costs, sum(dag.costs))
        self.byte_unit, _ = _unit([*dag.bytes, *dag.workspace], budget or sum(dag.bytes) + max(dag.workspace))
        self.runs = {(t, i): self._run_variable(t, i, budget) for t in range(self.count) for i in self._may_run(t)}
        self.kept = {(t, i): self._kept_variable(i) for t in range(self.count) for i in self._may_be_kept(t)}
        self._read_what_is_there()
        self._siblings_run_together()
        if budget is None:
            self.top = self._variable(1.0, 0.0, inf)
        else:
            self.top = self._variable(0.0, budget / self.byte_unit, budget / self.byte_unit)
        for stage in range(self.count):
            self._count_bytes(stage)

    def cost_less_than(self, known: float) -> None:
        """Where rounding could hide what is cheaper, not more than `known`.

        Between two whole costs: at a cost that can be reached, the solver has called what is there infeasible.
        """
        terms = [(cost, variable) for variable, cost in enumerate(self.objective) if cost]
        self._at_most(known / self.cost_unit - self.exact / 2, *terms)

    def _may_run(self, stage):
        dag = self.dag
        if stage < dag.boundary or stage in dag.siblings:  # nothing runs between the results of one operation
            return [stage]
        again = [i for i in range(stage) if i not in dag.once and i not in dag.held and dag.last_help[i] >= stage]
        return [*again, stage]

    def _may_be_kept(self, stage):
        return [i for i in range(stage) if i in self.dag.held or self.dag.last_help[i] >= stage]

    def _run_variable(self, stage, node, budget):
        cost = 0.0 if budget is None else self.dag.costs[node] / self.cost_unit
        return self._variable(cost, float(node == stage), 1.0, 1)

    def _kept_variable(self, node):
        return self._variable(0.0, float(node in self.dag.held), 1.0, 1)

    def _variable(self, cost: float, low: float, high: float, whole: int = 0) -> int:
        self.objective.append(cost)
        self.low.append(low)
        self.high.append(high)
        self.whole.append(whole)
        return len(self.objective) - 1

    def _at_most(self, limit: float, *terms: tuple[float, int | None]) -> None:
        """The sum of (factor, variable) is at most `limit`; what is not there (None) is zero."""
        row = len(self.limits)
        self.limits.append(limit)
        self.entries += [(row, variable, factor) for factor, variable in terms if variable is not None]

    def _read_what_is_there(self) -> None:
        runs, kept = self.runs, self.kept
        for (stage, node), run in runs.items():
            for source in self.dag.inputs[node]:
                self._at_most(0.0, (1, run), (-1, runs.get((stage, source))), (-1, kept.get((stage, source))))
            if (stage, node) in kept:
                self._at_most(1.0, (1, run), (1, kept[stage, node]))  # what is there is not computed
        for (stage, node), keep in kept.items():
            before = (stage - 1, node)
            self._at_most(0.0, (1, keep), (-1, runs.get(before)), (-1, kept.get(before)))

    def _siblings_run_together(self) -> None:
        for (stage, node), run in self.runs.items():
            if node in self.dag.siblings and node < stage:
                other = self.runs[stage, self.dag.siblings[node]]
                self._at_most(0.0, (1, run), (-1, other))
                self._at_most(0.0, (1, other), (-1, run))

    def _count_bytes(self, stage: int) -> None:
        """What lives while each node of `stage` runs, by how it changes from one to the next."""
        runs = self.runs
        places = [node for node in range(stage + 1) if (stage, node) in runs]
        changes: dict[int, list[tuple[float, int | None]]] = {place: [] for place in places}
        for node in range(stage + 1):
            size = self.dag.bytes[node] / self.byte_unit
            before = None
            for start, lives in self._stretches(stage, node):
                if (place := next((p for p in places if p >= start), None)) is not None:
                    changes[place] += [(size, lives), (-size, before)]
                    before = lives
        live = None
        for place in places:
            now = self._variable(0.0, 0.0, self.high[self.top])
            self._at_most(0.0, (1, live), (-1, now), *changes[place])
            freed = [s for s, one in self.dag.siblings.items() if one == place < s < stage and (stage, s) not in runs]
            own = (self.dag.workspace[place] + sum(self.dag.bytes[s] for s in freed)) / self.byte_unit
            self._at_most(0.0, (1, now), (own, runs[stage, place]), (-1, self.top))
            live = now

    def _stretches(self, stage: int, node: int) -> list[tuple[int, int | None]]:
        """From which node of `stage` on which variable says that the result of `node` lives."""
        runs = self.runs
        run, keep, after = runs.get((stage, node)), self.kept.get((stage, node)), self.kept.get((stage + 1, node))
        reads = [reader for reader in self.dag.readers[node] if (stage, reader) in runs]
        found = [(0, keep)]
        if run is not None:
            found.append((node, self._variable(0.0, 0.0, 1.0)))
            self._at_most(0.0, (1, run), (-1, found[-1][1]))
        for reader in reads[:-1]:
            self._at_most(0.0, (1, runs[stage, reader]), (-1, found[-1][1]))
            found.append((reader + 1, self._variable(0.0, 0.0, 1.0)))
            self._at_most(0.0, (1, found[-1][1]), (-1, found[-2][1]))
        if reads:
            self._at_most(0.0, (1, runs[stage, reads[-1]]), (-1, found[-1][1]))
        if reads or run is not None:
            self._at_most(0.0, (1, after), (-1, found[-1][1]))
            found.append((max([node, *reads]) + 1, after))
        return found

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
    """What costs at least `bound` costs at least this."""
    unit, exact = _unit(dag.costs, sum(dag.costs))
    return ceil(bound / unit - _WHOLE) * int(unit) if exact else bound


def _unit(values, total) -> tuple[float, bool]:
    """What the solver's numbers are counted in, and whether they are whole then and small enough to be told apart."""
    if all(isinstance(value, Integral) for value in values):
        divisor = gcd(*(int(value) for value in values)) or 1
        if total / divisor <= _RANGE:
            return divisor, True
    return total / _RANGE or 1.0, False
