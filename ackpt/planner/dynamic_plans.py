"""Choose the schedule for each new size of a dynamic capture from one shared search.

The Pareto frontier is computed at the largest sizes seen so far. At other sizes, the schedules of this frontier
whose simulated peak is within the budget may run. The cheapest compiled one runs until a cheaper one would have saved
the time that its compilation takes (`Stopgap`). If none is within the budget, a search at these sizes adds its
schedules to the others.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ackpt.core.budget import dynamic_limit, is_share
from ackpt.planner.capture.in_place import eager_graph
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.choose import MEASURED, baseline_of, check_runs, default_profile, plan, plan_of, resolved
from ackpt.planner.costs.devices import Device
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.policies import auto
from ackpt.planner.policies.search.frontier import costs, frontier, step_cost
from ackpt.planner.policies.search.schedule_cache import CachedCandidates
from ackpt.planner.schedule.plan import Plan
from ackpt.planner.schedule.schedule import Schedule, everything
from ackpt.planner.schedule.simulator import peak_of, saved_bytes
from ackpt.planner.step.choices import Candidate, Choice, Stopgap
from ackpt.planner.step.dynamic_step import DynamicStep
from ackpt.planner.step.eager_step import eager_schedule

_SECONDS_PER_FLOP = 1e-11  # where the profile has no times, to compare costs with the time of compiling a schedule


class DynamicPlans:
    """Chooses the schedule for sizes of `step`; called with the sizes."""

    def __init__(
        self,
        step: DynamicStep,
        budget: float | str | None,
        policy: str,
        options: dict[str, Any],
        folder: Path | None,
        device: Device | str | None = None,
    ):
        self.step, self.budget, self.policy, self.options, self.folder = step, budget, policy, options, folder
        self.device = device
        self._candidates: list[Candidate] = []  # from the least cost
        self._seconds_per_byte = 0.0  # of the baseline, by its dynamic peak, where the candidates were searched
        self._described: tuple[tuple, tuple[JointGraph, Profile]] | None = None
        self._everything = everything(step.reference)
        self._eager = eager_schedule(eager_graph(step.reference))
        self._is_share = budget is not None and is_share(budget)

    def __call__(self, values: tuple[int, ...]) -> Choice:
        baseline_is_unknown = self._is_share and bool(self.step.reference.as_compiled)
        if self.policy != "auto" or baseline_is_unknown:  # for which the search raises an error
            return self._searched(values)
        graph, workspace = self.step.sized(values), self.step.workspace_bytes(values)
        peak_bytes = peak_of(graph, self._everything, workspace)
        eager_bytes = peak_of(eager_graph(graph), self._eager, workspace) if self._is_share else peak_bytes
        limit = dynamic_limit(self.budget, min(peak_bytes, eager_bytes), graph.resident_bytes)
        if limit is None or peak_bytes <= limit:
            return self._choice(self._everything, values)
        if not self._candidates:
            self._search(max([*self.step.search_at, values], key=self._live_bytes))
        seconds = self._seconds_per_byte * peak_bytes
        chosen = self._fitting(graph, workspace, limit, seconds)
        if chosen is None:
            self._search(values)
            chosen = self._fitting(graph, workspace, limit, seconds)
        if chosen is None:
            return self._searched(values)  # raises, and names the smallest feasible budget
        candidate, stopgap = chosen
        candidate.is_compiled = True
        return self._choice(candidate.schedule, values, stopgap)

    def _fitting(
        self, graph: JointGraph, workspace, limit: int, seconds: float
    ) -> tuple[Candidate, Stopgap | None] | None:
        """The candidate that should run within the limit, and whether as a stopgap; None if none is within it.

        `seconds`: the estimated time of the baseline's step.
        """
        workspace = np.array(workspace)
        cheaper: list[Candidate] = []
        for each in self._candidates:
            if not _fits(graph, each.schedule, workspace, limit):
                continue
            if not each.is_compiled:
                cheaper.append(each)
                continue
            stopgap = _stopgap(each, cheaper, seconds)
            better = None if stopgap is None else stopgap.better()
            return (each, stopgap) if better is None else (better, _stopgap(better, cheaper, seconds))
        return (cheaper[0], None) if cheaper else None

    def _search(self, values: tuple[int, ...]) -> None:
        """Add the frontier at these sizes to the candidates."""
        graph, profile = self._at(values)
        whole = step_cost(self._everything, costs(graph, profile)) or 1.0
        candidates = auto.candidates if self.folder is None else CachedCandidates(self.folder, auto.candidates)
        seconds = whole if profile.seconds is not None else whole * _SECONDS_PER_FLOP
        self._seconds_per_byte = seconds / (peak_of(graph, everything(graph), profile.workspace_bytes) or 1)
        added = [
            # Searches at other sizes have costs of other steps.
            Candidate(point.cost / whole, self._of_reference(point.schedule))
            for point in frontier(graph, profile, candidates)
        ]
        self._candidates = sorted([*self._candidates, *added], key=lambda each: each.cost)

    def _live_bytes(self, values: tuple[int, ...]) -> int:
        """The baseline's dynamic peak at these sizes without workspace, to compare sizes by."""
        return peak_of(self.step.sized(values), self._everything, (0,) * len(self.step.reference.nodes))

    def _of_reference(self, schedule: Schedule) -> Schedule:
        return replace(schedule, graph=self.step.reference.hash)

    def _at(self, values: tuple[int, ...]) -> tuple[JointGraph, Profile]:
        if self.device == MEASURED:  # at the sizes of the first search; others use its rates
            self.device = resolved(self.step.graph(values), MEASURED)
        if self._described is None or self._described[0] != values:
            self._described = values, described(self.step, values, self.device)
        return self._described[1]  # of the same graph, so that one search serves all callers

    def _choice(self, schedule: Schedule, values: tuple[int, ...], stopgap: Stopgap | None = None) -> Choice:
        def make_plan() -> Plan:
            graph, profile = self._at(values)
            chosen = replace(schedule, graph=graph.hash)
            baseline = baseline_of(graph, profile, self.budget)
            made = plan_of(graph, profile, chosen, baseline, self.budget, self.policy)
            return replace(made, dynamic=dynamic_of(self.step))

        return Choice(schedule, make_plan, stopgap)

    def _searched(self, values: tuple[int, ...]) -> Choice:
        """The plan of a search at these sizes alone."""
        graph, profile = self._at(values)
        found = check_runs(
            graph, plan(graph, self.budget, self.policy, profile=profile, cache=self.folder, **self.options)
        )
        found = replace(found, dynamic=dynamic_of(self.step))
        return Choice(self._of_reference(found.schedule), lambda: found)


def _stopgap(candidate: Candidate, others: list[Candidate], seconds: float) -> Stopgap | None:
    """`candidate` in the place of those among `others` that cost less; None if it is no stopgap."""
    saves = tuple((each, (candidate.cost - each.cost) * seconds) for each in others if each.cost < candidate.cost)
    return Stopgap(saves) if saves else None


def _fits(graph: JointGraph, schedule: Schedule, workspace, limit: int) -> bool:
    """Whether the peak of `schedule` is within the limit; in most cases, its saved bytes alone decide."""
    return saved_bytes(graph, schedule) <= limit and peak_of(graph, schedule, workspace) <= limit


def described(
    step: DynamicStep, values: tuple[int, ...], device: Device | str | None = None
) -> tuple[JointGraph, Profile]:
    """The graph at these sizes and its profile, at the rates of `device` or of the GPU that it runs on."""
    graph = step.graph(values)
    return graph, default_profile(graph, device, step.workspace_bytes(values))


def dynamic_of(step: DynamicStep) -> tuple[tuple[int, int], ...]:
    """The dynamic dimensions of `step`, as a `Plan` names them."""
    return tuple((step.captured.given.index(each.leaf), each.dim) for each in step.symbols.dimensions)
