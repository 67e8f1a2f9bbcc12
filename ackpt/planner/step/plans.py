"""A captured step: its graph at the sizes that it serves, the schedule that runs it there, and its plan.

With policy ``"auto"`` and dynamic dimensions, the Pareto frontier at the largest sizes seen so far serves all sizes:
the cheapest of its schedules runs whose simulated peak is within the budget, or, with a slowdown alone, the one with
the lowest peak within it. If none keeps the budget, a search at these sizes adds its schedules to the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ackpt.core.budget import added_share, dynamic_limit, is_share, split_budget
from ackpt.core.errors import BudgetError
from ackpt.core.progress import shown
from ackpt.metering.meter import memory_format
from ackpt.planner.capture.aot import Capture, given_places
from ackpt.planner.capture.call_facts import Call
from ackpt.planner.capture.chunked_head import chunked
from ackpt.planner.capture.dynamic_sizes import SMALLEST, Dimension, DynamicModule, expression
from ackpt.planner.capture.in_place import eager_graph
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.capture.optimizer_state import Loop
from ackpt.planner.capture.tracing import captured_graph, described_graph, prepared
from ackpt.planner.choose import (
    baseline_of,
    candidates_of_auto,
    check_runs,
    checked_plan,
    default_profile,
    eager_schedule,
    plan_by_policy,
    plan_in_chunks,
)
from ackpt.planner.costs.devices import Device
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.costs.workspace import DynamicWorkspace, workspace_bytes
from ackpt.planner.policies import name_of
from ackpt.planner.policies.search.frontier import baseline_cost, costs, frontier, whole_added_cost
from ackpt.planner.request import Request, named_tensors
from ackpt.planner.schedule.plan import Plan, PlanError, check_applies
from ackpt.planner.schedule.schedule import COMPUTE, Schedule, Step, everything
from ackpt.planner.schedule.simulator import copies, peak_of, saved_bytes
from ackpt.planner.step.compiled_schedule import Strides, compiled_schedule, gradient_strides


class CapturedStep:
    """One capture, which serves all sizes for which its guards hold; without dynamic dimensions, its own sizes alone.

    ``module``: of a capture with dynamic dimensions. ``sizes``: the sizes of these dimensions in the captured call.
    ``reference``: the graph at these sizes; its schedules run at all sizes. ``names``: of the call's tensors, by leaf.
    """

    def __init__(self, captured: Capture, call: Call, model, loop: Loop, replays_random: bool = True):
        self.captured = captured
        self.module: DynamicModule | None = None
        self.sizes: tuple[int, ...] = ()
        self.dimensions: tuple[Dimension, ...] = ()
        instance = None
        if captured.symbols is not None:
            prepared(captured.joint.graph_module)
            self.module = DynamicModule(captured.joint.graph_module, captured.symbols)
            self.module.require_known_sizes()
            self.dimensions, self.sizes = captured.symbols.dimensions, captured.symbols.values(call.leaves)
            instance = self.module.at(self.sizes)
        self.reference: JointGraph = captured_graph(captured, model, loop, instance, replays_random)
        self.names = {at: name for name, at in named_tensors(model, call)}
        self._functions: dict[tuple, Callable[[Any, Strides], list[Any]]] = {}
        self._strides = gradient_strides(self.reference.analysis, None if self.module is None else self.module.fx)

    def sized(self, sizes: tuple[int, ...]) -> JointGraph:
        """The reference with the storages' bytes at these sizes, for simulations; its operations are unchanged."""
        if self.module is None or self.reference.analysis.restrided:
            return self.graph(sizes)
        return self.reference.resized(self.module.storage_bytes(sizes))

    def graph(self, sizes: tuple[int, ...]) -> JointGraph:
        """The graph of a step with these sizes, with all its shapes."""
        if self.module is None or sizes == self.sizes:
            return self.reference
        like = self.reference
        names = ("on_cpu", "optimizer_bytes", "optimizer_step_bytes", "accumulated_bytes", "scaled_loss_bytes")
        fields = {name: getattr(like, name) for name in (*names, "has_data", "as_compiled", "keeps_outputs")}
        return replace(described_graph(self.module.at(sizes)), **fields)

    def in_chunks(self, count: int) -> JointGraph:
        """The reference with its head in `count` chunks."""
        return self.reference if count == 1 else chunked(self.reference, count)

    def workspace_bytes(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The workspace of every operation at these sizes; 0 where it is not measured."""
        if not (self.reference.on_cpu and self.reference.has_data):
            return (0,) * len(self.reference.nodes)
        if sizes == self.sizes or not self._workspace.is_exact:
            return workspace_bytes(self.graph(sizes))
        return self._workspace.at(sizes)

    def described(self, sizes: tuple[int, ...], device: Device | None = None) -> tuple[JointGraph, Profile]:
        """The graph at these sizes and its profile, at the rates of `device` or of the GPU that it runs on."""
        graph = self.graph(sizes)
        return graph, default_profile(graph, device, self.workspace_bytes(sizes) if self.dimensions else None)

    @property
    def dynamic(self) -> tuple[tuple[int, int], ...]:
        """The dynamic dimensions, as a `Plan` names them."""
        return tuple((self.captured.given.index(each.leaf), each.dim) for each in self.dimensions)

    @cached_property
    def _workspace(self) -> DynamicWorkspace:
        assert self.module is not None
        return DynamicWorkspace(self.module, self.reference)

    def compiled(self, schedule: Schedule, sizes: tuple[int, ...], head_chunks: int) -> Callable[[Any], list[Any]]:
        """A function of the step's inputs, of these sizes, that runs `schedule`, one of ``in_chunks(head_chunks)``."""
        key = schedule.forward, schedule.backward, head_chunks
        if key not in self._functions:
            graph = self.in_chunks(head_chunks)
            self._functions[key] = compiled_schedule(self.captured, graph, schedule, self.module)
        function, strides = self._functions[key], self._strides_at(sizes)
        return lambda inputs: function(inputs, strides)

    def _strides_at(self, sizes: tuple[int, ...]) -> Strides:
        if self.module is None:
            return self._strides
        flat = tuple(expression(stride) for strides in self._strides.values() for stride in strides)
        numbers = iter(self.module.symbols.evaluated(flat, sizes))
        return {at: tuple(next(numbers) for _ in strides) for at, strides in self._strides.items()}


class Choice(NamedTuple):
    """What runs at some sizes: ``schedule``, whose `Plan` is ``plan()``, with the head in ``head_chunks`` chunks."""

    schedule: Schedule
    plan: Callable[[], Plan]
    head_chunks: int = 1


_ALIAS = "aten.alias.default"
PlanAt = Callable[[tuple[int, ...]], Choice]  # of the sizes of the dynamic dimensions
Earlier = tuple[tuple[int, ...] | None, PlanAt] | None  # a capture at these sizes alone, and its plans


def plan_function(
    step: CapturedStep, request: Request, expected: Sequence[tuple[int, ...]] = (), earlier: Earlier = None
) -> PlanAt:
    """The function from sizes to what `request` runs `step` with; `expected`: sizes that occurred or are declared."""
    return Plans(step, request, expected, earlier) if request.plan is None else SavedPlan(step, request.plan)


class Plans:
    """The plans of a policy: those of one search for all sizes of `step` where the policy allows it.

    The search of an `earlier` capture is not repeated at its sizes.
    """

    def __init__(self, step: CapturedStep, request: Request, expected: Sequence[tuple[int, ...]], earlier: Earlier):
        self.step, self.request, self.expected, self.earlier = step, request, expected, earlier
        self._candidates: list[tuple[float, Schedule]] = []  # by their cost, a fraction of the baseline's
        self._described: tuple[tuple, tuple[JointGraph, Profile]] | None = None
        self._is_share = request.budget is not None and is_share(request.budget)

    def __call__(self, sizes: tuple[int, ...]) -> Choice:
        if self.request.planner is not None:
            plan = self.request.planner(self.step.graph(sizes))
            return Choice(_for_graph(plan.schedule, self.step.reference), lambda: plan)
        baseline_is_unknown = self._is_share and bool(self.step.reference.as_compiled)
        baseline_is_unknown |= split_budget(self.request.budget)[1]  # reserved bytes need a search for each size
        if not self.step.dimensions or self.request.policy != "auto" or baseline_is_unknown:
            return self._plan_alone(sizes)
        graph, workspace = self.step.sized(sizes), self.step.workspace_bytes(sizes)
        peak_bytes = peak_of(graph, self._everything, workspace)
        eager_bytes = peak_of(eager_graph(graph), self._eager, workspace) if self._is_share else peak_bytes
        limit = dynamic_limit(self.request.budget, min(peak_bytes, eager_bytes), graph.resident_bytes)
        most = added_share(self.request.slowdown)
        if (limit is None and most is None) or (limit is not None and peak_bytes <= limit):
            return self._choice(self._everything, sizes)
        if not self._candidates:
            self._add_frontier(max([*self.expected, sizes], key=self._live_bytes))
        if limit is None:
            assert most is not None
            return self._choice(self._lowest(graph, workspace, sizes, most), sizes)
        schedule = self._cheapest(graph, workspace, limit)
        if schedule is None:
            self._add_frontier(sizes)
            schedule = self._cheapest(graph, workspace, limit)
        if schedule is None:
            return self._plan_alone(sizes)  # raises, and names the smallest feasible budget
        if most is not None and self._added(sizes)(schedule) > most:
            return self._plan_alone(sizes)  # raises if it adds too much as well
        return self._choice(schedule, sizes)

    def _cheapest(self, graph: JointGraph, workspace: tuple[int, ...], limit: int) -> Schedule | None:
        """The cheapest candidate whose peak is within the limit; in most cases, its saved bytes alone decide."""
        workspace_array = np.array(workspace)
        for _, schedule in self._candidates:
            if saved_bytes(graph, schedule) <= limit and peak_of(graph, schedule, workspace_array) <= limit:
                return schedule
        return None

    def _lowest(self, graph: JointGraph, workspace: tuple[int, ...], sizes: tuple[int, ...], most: float) -> Schedule:
        """The candidate with the lowest peak that adds at most this share of the baseline's cost."""
        added = self._added(sizes)
        candidates = [self._everything, *(each for _, each in self._candidates if added(each) <= most)]
        workspace_array = np.array(workspace)
        return min(candidates, key=lambda schedule: peak_of(graph, schedule, workspace_array))

    def _added(self, sizes: tuple[int, ...]) -> Callable[[Schedule], float]:
        """The cost that a schedule adds at these sizes, as a fraction of the baseline's."""
        graph, profile = self._at(sizes)
        cost, baseline = costs(graph, profile), baseline_cost(graph, profile)
        return lambda schedule: whole_added_cost(graph, profile, _for_graph(schedule, graph), cost) / baseline

    def _add_frontier(self, sizes: tuple[int, ...]) -> None:
        """Add the frontier at these sizes to the candidates."""
        graph, profile = self._at(sizes)
        earlier: Any = self.earlier[1] if self.earlier and self.earlier[0] == sizes else None
        translation = earlier and Translation.between(earlier.step.reference, graph)
        graph, profile = earlier._at(()) if translation else (graph, profile)
        points = frontier(graph, profile, candidates_of_auto(self.request))
        baseline = baseline_cost(graph, profile)
        if translation:
            points = [point._replace(schedule=translation.translated(point.schedule)) for point in points]
        added = [(point.cost / baseline, _for_graph(point.schedule, self.step.reference)) for point in points]
        self._candidates = sorted([*self._candidates, *added], key=lambda each: each[0])

    def _live_bytes(self, sizes: tuple[int, ...]) -> int:
        """The baseline's dynamic peak at these sizes without workspace, to compare sizes by."""
        return peak_of(self.step.sized(sizes), self._everything, (0,) * len(self.step.reference.nodes))

    @cached_property
    def _everything(self) -> Schedule:
        return everything(self.step.reference)

    @cached_property
    def _eager(self) -> Schedule:
        return eager_schedule(eager_graph(self.step.reference))

    def _at(self, sizes: tuple[int, ...]) -> tuple[JointGraph, Profile]:
        """The graph at these sizes and its profile; of the same graph, so that one search serves all callers."""
        if self._described is None or self._described[0] != sizes:
            self._described = sizes, self.step.described(sizes, self.request.device)
        return self._described[1]

    def _choice(self, schedule: Schedule, sizes: tuple[int, ...]) -> Choice:
        def make_plan() -> Plan:
            with shown():
                graph, profile = self._at(sizes)
                baseline = baseline_of(graph, profile, self.request.budget)
                of_policy = self.request.budget, name_of(self.request.policy)
                made = checked_plan(graph, profile, _for_graph(schedule, graph), baseline, *of_policy)
            return replace(made, dynamic=self.step.dynamic)

        return Choice(schedule, make_plan)

    def _plan_alone(self, sizes: tuple[int, ...]) -> Choice:
        """The plan of a search at these sizes alone."""
        graph, profile = self._at(sizes)
        if self.request.chunk_head:
            plan, graph, _ = plan_in_chunks(graph, self.request, profile, self._in_chunks)
            check_runs(graph, plan)
            return Choice(plan.schedule, lambda: plan, plan.head_chunks)
        plan = replace(check_runs(graph, plan_by_policy(graph, self.request, profile)), dynamic=self.step.dynamic)
        return Choice(_for_graph(plan.schedule, self.step.reference), lambda: plan)

    def _in_chunks(self, count: int) -> tuple[JointGraph, Profile]:
        graph = self.step.in_chunks(count)
        return graph, default_profile(graph, self.request.device)


def _for_graph(schedule: Schedule, graph: JointGraph) -> Schedule:
    """`schedule` as one of `graph`, which has the same operations at other sizes."""
    return replace(schedule, graph=graph.hash)


class Translation(NamedTuple):
    """The nodes and storages of a graph with symbols, `graph`, by those of a graph of the same step without any.

    The latter may have an alias where the former has nothing: torch's indexing returns one for a slice of everything.
    """

    graph: str
    nodes: dict[int, int]
    storages: dict[int, int]

    @staticmethod
    def between(one: JointGraph, other: JointGraph) -> "Translation | None":
        """From `one` to `other`, which is an instance of a capture with symbols; None if they differ otherwise."""
        nodes, storages, left = {}, {}, iter(one.nodes)
        place: dict[int, int] = {}  # also of what has no node of its own
        for node in other.nodes:
            for match in left:
                if match.target != _ALIAS or node.target == _ALIAS:
                    break
                place[match.id] = place[match.inputs[0]]
            else:
                return None
            if match.target != node.target or tuple(dict.fromkeys(place[i] for i in match.inputs)) != node.inputs:
                return None
            nodes[match.id] = place[match.id] = node.id
            storages.update(zip(match.storages, node.storages))
        is_same = all(one.storages[s].bytes == other.storages[t].bytes for s, t in storages.items())
        is_same &= all(each.target == _ALIAS for each in left)
        return Translation(other.hash, nodes, storages) if is_same else None

    def translated(self, schedule: Schedule) -> Schedule:
        """`schedule`, of the graph without symbols, as one of `graph`."""

        def steps(some):
            for kind, number in some:
                if kind != COMPUTE or number in self.nodes:
                    yield Step(kind, (self.nodes if kind == COMPUTE else self.storages)[number])

        saved, replayed = (self.storages[s] for s in schedule.saved), (self.nodes[n] for n in schedule.replayed)
        halves = tuple(steps(schedule.forward)), tuple(steps(schedule.backward))
        return Schedule(self.graph, *halves, tuple(sorted(saved)), tuple(sorted(replayed)))


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
    """Runs the schedule of `plan` at its own sizes, and at others where it keeps the same bytes; called as `Plans` is.

    A plan of another step, or one that offloads although `step` runs on the CPU, is a PlanError.
    """

    def __init__(self, step: CapturedStep, plan: Plan):
        self.step, self.plan = step, plan
        self._sizes = self._planned_sizes()
        graph = step.graph(self._sizes) if plan.head_chunks == 1 else self._in_chunks()
        check_applies(graph, plan, self._dynamic())
        check_runs(graph, plan)
        self._schedule = replace(plan.schedule, graph=step.reference.hash if plan.head_chunks == 1 else graph.hash)
        self._resident_bytes = graph.resident_bytes

    def __call__(self, sizes: tuple[int, ...]) -> Choice:
        if sizes == self._sizes:
            plan = self.plan
            return Choice(self._schedule, lambda: plan, plan.head_chunks)
        if copies(self._schedule):
            raise PlanError(
                "this plan offloads, so it is valid only for the sizes that it was made for, "
                f"{self._planned_shapes()}: the copies may take longer at other sizes. Plan for the sizes of this call."
            )
        graph, limit = self.step.sized(sizes), self.plan.limit_bytes
        if limit is not None:  # so that the whole peak is bounded as at the plan's own sizes
            limit += self._resident_bytes - graph.resident_bytes
        peak_bytes = peak_of(graph, self._schedule, self.step.workspace_bytes(sizes))
        if limit is not None and peak_bytes > limit:
            raise self._exceeded(sizes, graph.resident_bytes, peak_bytes, limit)

        def make_plan() -> Plan:
            graph, profile = self.step.described(sizes)
            schedule = replace(self._schedule, graph=graph.hash)
            baseline = baseline_of(graph, profile, None)._replace(limit_bytes=limit)
            made = checked_plan(graph, profile, schedule, baseline, None, self.plan.policy)
            return replace(made, dynamic=self.plan.dynamic)

        return Choice(self._schedule, make_plan)

    def _in_chunks(self) -> JointGraph:
        if self.step.dimensions:
            raise PlanError(
                f"this plan runs its head in {self.plan.head_chunks} chunks, so it is valid only for the sizes that it "
                f"was made for, {self._planned_shapes()}. Plan for the sizes of this call."
            )
        return self.step.in_chunks(self.plan.head_chunks)

    def _planned_sizes(self) -> tuple[int, ...]:
        """The sizes of the dynamic dimensions that the plan was made for."""
        symbols, shapes = self.step.captured.symbols, self.plan.sizes or ()
        if symbols is None:
            return ()
        try:
            sizes = tuple(shapes[place][dim] for place, dim in self.step.dynamic)
        except (IndexError, ValueError):
            raise PlanError("this plan was made for other arguments. Plan again for this model and these.") from None
        if not symbols.holds(sizes):
            raise PlanError(
                f"this plan was made for arguments of the shapes {self._planned_shapes()}, for which the model takes "
                "another path than for the sizes of this call. Plan for these sizes."
            )
        return sizes

    def _dynamic(self) -> dict[str, dict[int, tuple[int, int]]]:
        """The argument ``dynamic=`` of a plan for its own sizes and those of this call."""
        found: dict[str, dict[int, tuple[int, int]]] = {}
        pairs = list(zip(self.step.dimensions, self._sizes, self.step.sizes))
        for each, planned, now in [pair for pair in pairs if pair[1] != pair[2]] or pairs:
            found.setdefault(self.step.names[each.leaf], {})[each.dim] = min(planned, now), max(planned, now)
        return found

    def _planned_shapes(self) -> str:
        return ", ".join(str(list(shape)) for shape in self.plan.sizes or ())

    def _exceeded(self, sizes: tuple[int, ...], resident_bytes: int, peak_bytes: int, limit: int) -> BudgetError:
        assert self.step.captured.symbols is not None  # else its only sizes are the plan's
        layouts = self.step.captured.symbols.layouts(sizes)
        shapes = ", ".join(str(list(shape)) for shape, *_ in dict.fromkeys(layouts))
        whole, allowed = peak_bytes + resident_bytes, limit + resident_bytes
        return BudgetError(
            f"this plan cannot keep its budget for arguments of the shapes {shapes}: its peak would be "
            f"{memory_format(whole)} ({whole} bytes), and its budget allows {memory_format(allowed)} ({allowed} "
            f"bytes). It was made for the shapes {self._planned_shapes()}. Save a plan that is made for the largest "
            "batch, or split this batch.",
            whole,
            allowed,
        )
