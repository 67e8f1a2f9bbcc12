"""Policy ``ilp``: the integer program of `ilp` on a whole graph, for small graphs.

The program has one node for every operation that allocates storages, in the graph's order. Storages of one operation
that different nodes read get a node for each group. Views are rebuilt where they are read. The forward runs as it is,
backward operations run once, and outputs and gradients stay allocated. The search starts from the plans of ``auto``,
``rotor`` and a greedy one. So its plan is the cheapest for the graph's own order of operations, and never more
expensive than theirs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import takewhile
from math import inf

from ackpt.core.errors import warn
from ackpt.planner.capture.joint_graph import Analysis, JointGraph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.policies.search.ilp_program import solver
from ackpt.planner.policies.search.recompute_costs import added_cost, costs, step_cost
from ackpt.planner.schedule.schedule import COMPUTE, Schedule, everything, recompute_late, scheduled
from ackpt.planner.schedule.simulator import peak_of

from . import auto, ilp, rotor_chain

_EXACT = 1e-6  # of the step: the solver's sums of times, which are no integers, differ by less
_MOST_NODES = 160  # the solver's time grows with a high power of them


@dataclass(frozen=True)
class Contracted:
    """A graph without its views: for each node of ``dag`` the graph's node and the storages that it allocates."""

    dag: ilp.Dag
    nodes: tuple[int, ...]
    storages: tuple[frozenset[int], ...]


@dataclass(frozen=True)
class Best:
    """The best ``schedule`` found, the ``cost`` of its recomputation, and the ``lower_bound`` of all costs.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.policies import ilp_graph
        >>> graph = ackpt.trace(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8))
        >>> ilp_graph.solve(graph, ackpt.profile(graph), limit_bytes=10**6).cost
        0.0
    """

    schedule: Schedule
    cost: float
    lower_bound: float


def schedule(
    graph: JointGraph, profile: Profile, limit_bytes: int | None, *, time_limit: float | None = 60.0
) -> Schedule:
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
        >>> ackpt.plan(graph, "100%", "ilp", time_limit=10).recompute_flops
        0
    """
    if limit_bytes is None:
        return everything(graph)
    best = solve(graph, profile, limit_bytes, time_limit)
    baseline = step_cost(everything(graph), costs(graph, profile)) or 1.0
    if best.cost - best.lower_bound > _EXACT * baseline:
        warn(
            f"policy 'ilp' ran out of time after {time_limit} s: the recomputation of its plan costs "
            f"{best.cost / baseline:.3%} of the baseline step, and at least {best.lower_bound / baseline:.3%} is "
            "proved to be needed. Raise time_limit for a smaller gap, or use policy 'auto', which proves nothing and "
            "takes seconds.",
        )
    return best.schedule


def solve(graph: JointGraph, profile: Profile, limit_bytes: int, time_limit: float | None = 60.0) -> Best:
    """The cheapest plan within `limit_bytes` that is found in time; if there is none, the one with the lowest peak.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.policies import ilp_graph
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> graph = ackpt.trace(model, torch.ones(64, 8))
        >>> auto = ackpt.plan(graph, budget=0.8)
        >>> best = ilp_graph.solve(graph, ackpt.profile(graph), auto.limit_bytes)
        >>> best.cost == best.lower_bound
        True
    """
    ilp.check_time_limit(time_limit)
    solver()

    def peak(candidate):
        return peak_of(graph, candidate, profile.workspace_bytes)

    baseline = everything(graph)
    if peak(baseline) <= limit_bytes:
        return Best(baseline, 0.0, 0.0)
    end = inf if time_limit is None else time.monotonic() + time_limit
    cost = costs(graph, profile)
    program = contracted(graph, profile)
    starts = [auto.schedule(graph, profile, limit_bytes), rotor_chain.schedule(graph, profile, limit_bytes)]
    if (order := ilp.greedy(program.dag, limit_bytes)) is not None:
        starts.append(lowered(graph, program, ilp.solution(program.dag, order).schedule))
    if min(map(peak, starts)) > limit_bytes:
        lowest, proved = ilp.lowest_peak(program.dag, time_limit)
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
        better, least = ilp.cheaper(program.dag, budget, sum(program.dag.costs) + cost_limit, time_limit=left)
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
    """The operations of `graph` that allocate storages or have an effect, one node for each group of their storages.

    Raises:
        ValueError: if there are too many for the solver.
    """
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


def _dag(analysis: Analysis, profile, nodes, storages, reads) -> ilp.Dag:
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
    return ilp.Dag(
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
        bases = {analysis.base_of[s] for s in group if s in analysis.base_of}
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
    return {analysis.base_of[s] for at in of_run for s in program.storages[at] if s in analysis.base_of}
