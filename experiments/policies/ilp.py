"""Policy `ilp`: the cheapest recomputation of a small graph within a budget, by Checkmate's integer program.

From Jain et al. 2020 (arXiv:1910.02653), section 4; the variables are in `ilp_program`. A plan is optimal for the
graph's own order of first computations; another order may need less memory. The solver is HiGHS, called through scipy;
it proves optimality up to about a hundred nodes. Out of time, it still gives a lower bound, and the better of its plan
and a greedy one. Offload and partly saved results are not modeled.

In the policy, the program has a node for every operation that allocates storages, one for each group of them that
different nodes read. Views are rebuilt where they are read, the forward runs as it is, backward operations run once,
and outputs and gradients stay allocated. The search starts from the plans of ``auto``, ``rotor`` and a greedy one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from math import inf
from numbers import Real

from ackpt.core.errors import BudgetError, warn
from ackpt.planner.capture.joint_graph import Analysis, JointGraph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.policies import auto, rotor
from ackpt.planner.policies.search.frontier import added_cost, baseline_cost, costs
from ackpt.planner.schedule.schedule import COMPUTE, FREE, Schedule, bases_of, everything, recompute_late, scheduled
from ackpt.planner.schedule.simulator import peak_of

from .ilp_program import Dag, Result, rounded_up, run, solver, unit_of_bytes

_EXACT = 1e-6  # of the step: the solver's sums of times, which are no integers, differ by less
_MOST_NODES = 160  # the solver's time grows with a high power of them


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


@dataclass(frozen=True)
class Contracted:
    """A graph without its views: for each node of ``dag`` the graph's node and the storages that it allocates."""

    dag: Dag
    nodes: tuple[int, ...]
    storages: tuple[frozenset[int], ...]


@dataclass(frozen=True)
class Best:
    """The best ``schedule`` found, the ``cost`` of its recomputation, and the ``lower_bound`` of all costs.

    Example:
        >>> import torch, ackpt
        >>> from experiments.policies import ilp
        >>> graph = ackpt.trace(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8))
        >>> ilp.solve_graph(graph, ackpt.profile(graph), limit_bytes=10**6).cost
        0.0
    """

    schedule: Schedule
    cost: float
    lower_bound: float


def ilp(graph: JointGraph, profile: Profile, limit_bytes: int | None, *, time_limit: float | None = 60.0) -> Schedule:
    """The cheapest schedule within `limit_bytes`, as far as `time_limit` allows to prove it.

    Args:
        time_limit: seconds after which the best plan so far is returned, with a warning that names its largest possible
            optimality gap; None: no limit.

    Raises:
        ValueError: for a graph of more nodes than the solver can handle, or a time limit that is not positive.
        ImportError: without scipy.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> ackpt.plan(graph, "100%", ilp, time_limit=10).recompute_flops
        0
    """
    if limit_bytes is None:
        return everything(graph)
    best = solve_graph(graph, profile, limit_bytes, time_limit)
    baseline = baseline_cost(graph, profile)
    if best.cost - best.lower_bound > _EXACT * baseline:
        warn(
            f"policy 'ilp' ran out of time after {time_limit} s: the recomputation of its plan costs "
            f"{best.cost / baseline:.3%} of the baseline step, and at least {best.lower_bound / baseline:.3%} is "
            "proved to be needed. Raise time_limit for a smaller gap, or use policy 'auto', which proves nothing and "
            "takes seconds."
        )
    return best.schedule


def solve_graph(graph: JointGraph, profile: Profile, limit_bytes: int, time_limit: float | None = 60.0) -> Best:
    """The cheapest plan within `limit_bytes` that is found in time; if there is none, the one with the lowest peak.

    Example:
        >>> import torch, ackpt
        >>> from experiments.policies import ilp
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> graph = ackpt.trace(model, torch.ones(64, 8))
        >>> auto = ackpt.plan(graph, budget=0.8)
        >>> best = ilp.solve_graph(graph, ackpt.profile(graph), auto.limit_bytes)
        >>> best.cost == best.lower_bound
        True
    """
    check_time_limit(time_limit)
    solver()

    def peak(candidate):
        return peak_of(graph, candidate, profile.workspace_bytes)

    baseline = everything(graph)
    if peak(baseline) <= limit_bytes:
        return Best(baseline, 0.0, 0.0)
    end = inf if time_limit is None else time.monotonic() + time_limit
    cost = costs(graph, profile)
    program = contracted(graph, profile)
    starts = [auto.schedule(graph, profile, limit_bytes), rotor.schedule(graph, profile, limit_bytes)]
    if (order := greedy(program.dag, limit_bytes)) is not None:
        starts.append(lowered(graph, program, solution(program.dag, order).schedule))
    if min(map(peak, starts)) > limit_bytes:
        lowest, proved = lowest_peak(program.dag, time_limit)
        starts.append(lowered(graph, program, lowest.schedule))
        if proved and min(map(peak, starts)) > limit_bytes:
            start = min(starts, key=peak)
            added = added_cost(graph, start, cost)
            return Best(start, added, added)
    start = min(starts, key=lambda one: (max(0, peak(one) - limit_bytes), added_cost(graph, one, cost)))
    added = added_cost(graph, start, cost)
    cost_limit = added if peak(start) <= limit_bytes else inf
    bound, budget = 0.0, limit_bytes
    while budget > 0 and time.monotonic() < end:
        left = None if time_limit is None else end - time.monotonic()
        better, least = cheaper(program.dag, budget, sum(program.dag.costs) + cost_limit, time_limit=left)
        if budget == limit_bytes:
            bound = min(cost_limit, least - sum(program.dag.costs))
        if better is None:
            break
        candidate = lowered(graph, program, better.schedule)
        if peak(candidate) <= limit_bytes:
            return Best(candidate, added_cost(graph, candidate, cost), bound)
        budget -= peak(candidate) - limit_bytes  # the program does not model RNG states
    return Best(start, added, min(bound, added))


def contracted(graph: JointGraph, profile) -> Contracted:
    """The operations of `graph` that allocate storages or have an effect, one node for each group of their storages."""
    analysis = graph.analysis
    baseline = everything(graph)
    order = {step.id for step in (*baseline.forward, *baseline.backward) if step.kind == COMPUTE}
    order |= set(analysis.tangents)
    order = sorted(
        node for node in order if analysis.allocated.get(node, set()) - analysis.resident or node in analysis.effects
    )
    reads = {node: _read_storages(analysis, node) for node in order}
    nodes: list[int] = []
    storages: list[frozenset[int]] = []
    for node in order:
        groups: dict[tuple, set[int]] = {}
        for storage in sorted(analysis.allocated.get(node, frozenset()) - analysis.resident):
            is_reallocated = storage in analysis.storages(node, again=True)
            readers = (reader for reader in order if storage in reads[reader])
            groups.setdefault((is_reallocated, storage in analysis.live_to_end, *readers), set()).add(storage)
        # First the group that every run allocates.
        keys = sorted(groups, key=lambda key: not key[0]) or [()]
        nodes += [node] * len(keys)
        storages += [frozenset(groups.get(key, ())) for key in keys]
    if len(nodes) > _MOST_NODES:
        raise ValueError(
            f"policy 'ilp' solves graphs of up to {_MOST_NODES} nodes, and this one has {len(nodes)}: use policy "
            "'auto', or a smaller model"
        )
    return Contracted(_dag(analysis, profile, nodes, storages, reads), tuple(nodes), tuple(storages))


def _read_storages(analysis: Analysis, node: int) -> set[int]:
    sources = {*analysis.reads(node), *analysis.reads(node, again=node < analysis.graph.boundary)}
    return {s for source in sources for s in analysis.graph.nodes[source].storages}


def _dag(analysis: Analysis, profile, nodes, storages, reads) -> Dag:
    """The program's graph; its nodes are indices into `nodes`."""
    graph = analysis.graph
    cost = costs(graph, profile)
    is_integral = all(value.is_integer() for value in cost)
    indices = range(len(nodes))
    first = {node: at for at, node in reversed(list(enumerate(nodes)))}
    last = {node: at for at, node in enumerate(nodes)}
    producer = {storage: at for at in indices for storage in storages[at]}
    edges = {(producer[s], at) for at in indices for s in reads[nodes[at]] if producer.get(s, at) < first[nodes[at]]}
    edges |= {(first[nodes[at]], at) for at in indices if first[nodes[at]] < at}
    boundary = sum(node < graph.boundary for node in nodes)
    # The caller drops these when the forward is done.
    edges |= {(at, boundary) for at in range(boundary) if storages[at] & analysis.dropped}
    is_reallocated = [
        not storages[at] or bool(storages[at] & set(analysis.storages(nodes[at], True))) for at in indices
    ]
    held = {at for at in indices if storages[at] & analysis.live_to_end}
    fixed = {nodes[at] for at in held} | set(analysis.not_recomputable)
    return Dag(
        [0 if at != first[node] else int(cost[node]) if is_integral else cost[node] for at, node in enumerate(nodes)],
        [sum(analysis.bytes[s] for s in group) for group in storages],
        sorted(edges),
        workspace=[max(0, profile.workspace_bytes[node]) * (at == last[node]) for at, node in enumerate(nodes)],
        held=held,
        once={at for at in indices if nodes[at] >= graph.boundary or nodes[at] in fixed or not is_reallocated[at]},
        boundary=boundary,
        siblings={at: first[nodes[at]] for at in indices if first[nodes[at]] < at and is_reallocated[at]},
    )


def lowered(graph: JointGraph, program: Contracted, steps) -> Schedule:
    """The schedule of the backward part of `steps`, a solution of the program; views are rebuilt for their readers."""
    analysis = graph.analysis
    saved: set[int] = set()
    order: list[int] = []
    live: set[int] = set()
    is_backward = False
    for number, (kind, at) in enumerate(steps):
        node, group = program.nodes[at], program.storages[at]
        bases = bases_of(analysis, group)
        if node >= graph.boundary and not is_backward:
            live |= {*analysis.sources, *saved}
            is_backward = True
        if not is_backward:
            saved = saved | bases if kind == COMPUTE else saved - bases
        elif kind != COMPUTE:
            live -= {value for value in live if group & set(graph.nodes[value].storages)}
        elif node not in analysis.tangents and at == program.nodes.index(node):
            # All results of the run, before the first of them is freed.
            order += recompute_late(analysis, [node, *sorted(_bases_of_run(analysis, program, steps[number:]))], live)
    order += recompute_late(analysis, [node for node in analysis.bw_outputs if node is not None], live)
    return scheduled(graph, None, order)


def _bases_of_run(analysis: Analysis, program: Contracted, steps) -> set[int]:
    """The base tensors of all results of the run that `steps` begins with."""
    node = program.nodes[steps[0][1]]
    computed = (at for kind, at in steps if kind == COMPUTE)
    of_run = takewhile(lambda at: program.nodes[at] == node, computed)
    return bases_of(analysis, (storage for at in of_run for storage in program.storages[at]))
