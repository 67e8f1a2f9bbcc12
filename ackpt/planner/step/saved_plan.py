"""Run a plan from a file, at the sizes that it was made for and at other sizes that keep its budget.

A schedule runs at all sizes of its capture. At other sizes than the plan's, it is simulated and must keep the same
bytes: the limit of the plan, less what the arguments take in addition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ackpt.core.errors import BudgetError
from ackpt.metering.meter import memory_format
from ackpt.planner.capture.aot import given_places
from ackpt.planner.capture.call_facts import Call
from ackpt.planner.capture.dynamic_sizes import SMALLEST, Dimension
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.choose import baseline_of, check_runs, plan_of
from ackpt.planner.schedule.host_copies import copies
from ackpt.planner.schedule.plan import Plan, PlanError, check_applies
from ackpt.planner.schedule.schedule import Schedule
from ackpt.planner.schedule.simulator import peak_of

from .runnable import Runnable


class Choice(NamedTuple):
    """What runs at some sizes: ``schedule``, whose `Plan` is ``plan()``."""

    schedule: Schedule
    plan: Callable[[], Plan]


def saved_dimensions(plan: Plan, call: Call) -> set[Dimension]:
    """The dimensions that must be dynamic for `plan` to serve `call`: those of its capture, and those that differ.

    Empty if no choice of dimensions makes the plan valid for `call`.
    """
    places = given_places(call.leaves)
    shapes = [tuple(call.leaves[place].shape) for place in places]
    if plan.sizes is None or list(map(len, shapes)) != list(map(len, plan.sizes)):
        return set()
    sizes = {
        (at, dim): (size, now)
        for at, (was, shape) in enumerate(zip(plan.sizes, shapes))
        for dim, (size, now) in enumerate(zip(was, shape))
    }
    needed = {*plan.dynamic, *(place for place, (size, now) in sizes.items() if size != now)}
    if any(place not in sizes or min(sizes[place]) < SMALLEST for place in needed):
        return set()
    return {Dimension(places[at], dim) for at, dim in needed}


class SavedPlan:
    """Runs the schedule of `plan` at all sizes of `step`; called with the sizes, as `Plans` is.

    Raises:
        PlanError: if the plan was made for another step, or offloads although `step` runs on the CPU.
    """

    def __init__(self, step: Runnable, plan: Plan):
        self.step, self.plan = step, plan
        self._values = self._planned_values()
        graph = step.graph(self._values)
        check_applies(graph, plan, is_instance=bool(step.dimensions))
        check_runs(graph, plan)
        self._schedule = replace(plan.schedule, graph=step.reference.hash)
        self._resident_bytes = graph.resident_bytes

    def __call__(self, values: tuple[int, ...]) -> Choice:
        if values == self._values:
            plan = self.plan
            return Choice(self._schedule, lambda: plan)
        if copies(self._schedule):
            raise PlanError(
                f"this plan offloads, so it is valid only for the sizes that it was made for, {self._planned_sizes()}: "
                "the copies may take longer at other sizes. Plan for the sizes of this call."
            )
        graph = self.step.sized(values)
        limit = self._limit_bytes(graph)
        peak_bytes = peak_of(graph, self._schedule, self.step.workspace_bytes(values))
        if limit is not None and peak_bytes > limit:
            raise self._exceeded(values, graph.resident_bytes, peak_bytes, limit)

        def make_plan() -> Plan:
            graph, profile = self.step.described(values)
            schedule = replace(self._schedule, graph=graph.hash)
            baseline = baseline_of(graph, profile, None)._replace(limit_bytes=limit)
            made = plan_of(graph, profile, schedule, baseline, None, self.plan.policy)
            return replace(made, dynamic=self.plan.dynamic)

        return Choice(self._schedule, make_plan)

    def _planned_values(self) -> tuple[int, ...]:
        """The sizes of the dynamic dimensions that the plan was made for."""
        symbols, sizes = self.step.captured.symbols, self.plan.sizes or ()
        if symbols is None:
            return ()
        try:
            values = tuple(sizes[place][dim] for place, dim in self.step.dynamic)
        except (IndexError, ValueError):
            raise PlanError("this plan was made for other arguments. Plan again for this model and these.") from None
        if not symbols.holds(values):
            raise PlanError(
                f"this plan was made for arguments of the shapes {self._planned_sizes()}, for which the model takes "
                "another path than for the sizes of this call. Plan for these sizes."
            )
        return values

    def _planned_sizes(self) -> str:
        return ", ".join(str(list(shape)) for shape in self.plan.sizes or ())

    def _limit_bytes(self, graph: JointGraph) -> int | None:
        """The bound on the dynamic bytes of `graph`, so that the whole peak is bounded as at the plan's own sizes."""
        if self.plan.limit_bytes is None:
            return None
        return self.plan.limit_bytes + self._resident_bytes - graph.resident_bytes

    def _exceeded(self, values: tuple[int, ...], resident_bytes: int, peak_bytes: int, limit: int) -> BudgetError:
        assert self.step.captured.symbols is not None  # else its only sizes are the plan's
        layouts = self.step.captured.symbols.layouts(values)
        shapes = ", ".join(str(list(shape)) for shape, *_ in dict.fromkeys(layouts))
        whole, allowed = peak_bytes + resident_bytes, limit + resident_bytes
        return BudgetError(
            f"this plan cannot keep its budget for arguments of the shapes {shapes}: its peak would be "
            f"{memory_format(whole)} ({whole} bytes), and its budget allows {memory_format(allowed)} ({allowed} "
            f"bytes). It was made for the shapes {self._planned_sizes()}. Save a plan that is made for the largest "
            "batch, or split this batch.",
            whole,
            allowed,
        )
