"""Policy ``ilp``: the integer program of `ilp` on a whole graph, for small ones.

One node for every operation that brings storages along, in the order of the graph, and one more for each further group
of its storages that the same nodes read; views are rebuilt where they are read. The forward runs as it is, backward
operations run once, and what the caller gets stays. The search starts from the plans of ``auto``, ``rotor`` and a
greedy one. So the plan is the cheapest for the graph's own order of operations, and never dearer than those.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from itertools import takewhile
from math import inf

from ackpt.capture.analysis import Facts, facts
from ackpt.capture.joint_graph import JointGraph
from ackpt.costs.profiles import Profile
from ackpt.planning.schedule import COMPUTE, Schedule, everything, recompute_late, scheduled
from ackpt.planning.simulator import peak_of
from ackpt.policies.search.ilp_program import solver
from ackpt.policies.search.recompute_costs import added_cost, costs, step_cost

from . import auto, ilp, rotor_chain

_MOST = 160  # nodes; what the solver takes grows with a high power of them


@dataclass(frozen=True)
class Contracted:
    """``places``: the graph's operation for each node of the program's graph ``dag``; ``storages``: its results."""

    dag: ilp.Dag
    places: tuple[int, ...]
    storages: tuple[frozenset[int], ...]


@dataclass(frozen=True)
class Best:
    """``cost``: of what ``schedule`` runs again; ``lower_bound``: no plan of the program costs less.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.policies import ilp_graph
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
    """The cheapest schedule, as far as that is proved in time.

    Args:
        time_limit: seconds after which the best plan so far is returned, with a warning that says how far it may be
            from the cheapest; None: until that is proved.

    Raises:
        ValueError: for a graph of more nodes than can be solved, or a time limit that is not positive.
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
    found = solve(graph, profile, limit_bytes, time_limit)
    if found.cost > found.lower_bound:
        plain = step_cost(everything(graph), costs(graph, profile)) or 1.0
        warnings.warn(
            f"policy 'ilp' ran out of time after {time_limit} s: what its plan runs again costs "
            f"{found.cost / plain:.3%} of the plain step, and {found.lower_bound / plain:.3%} is proved to be needed. "
            "Raise time_limit for a smaller gap, or use policy 'auto', which proves nothing and takes seconds.",
            stacklevel=3,
        )
    return found.schedule


def solve(graph: JointGraph, profile: Profile, limit_bytes: int, time_limit: float | None = 60.0) -> Best:
    """The cheapest plan within `limit_bytes` that is found in time; if there is none, that of the lowest peak.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.policies import ilp_graph
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> graph = ackpt.trace(model, torch.ones(64, 8))
        >>> auto = ackpt.plan(graph, budget=0.8)
        >>> found = ilp_graph.solve(graph, ackpt.profile(graph), auto.limit_bytes)
        >>> found.cost == found.lower_bound
        True
    """
    ilp.check_time_limit(time_limit)
    solver()

    def peak(candidate):
        return peak_of(graph, candidate, profile.workspace_bytes)

    plain = everything(graph)
    if peak(plain) <= limit_bytes:
        return Best(plain, 0.0, 0.0)
    end = inf if time_limit is None else time.monotonic() + time_limit
    cost = costs(graph, profile)
    found = contracted(graph, profile)
    starts = [auto.schedule(graph, profile, limit_bytes), rotor_chain.schedule(graph, profile, limit_bytes)]
    if (order := ilp.greedy(found.dag, limit_bytes)) is not None:
        starts.append(lowered(graph, found, ilp.solution(found.dag, order).schedule))
    if min(map(peak, starts)) > limit_bytes:
        lowest, proved = ilp.lowest_peak(found.dag, time_limit)
        starts.append(lowered(graph, found, lowest.schedule))
        if proved and min(map(peak, starts)) > limit_bytes:
            start = min(starts, key=peak)
            added = added_cost(graph, start, cost)
            return Best(start, added, added)
    start = min(starts, key=lambda one: (max(0, peak(one) - limit_bytes), added_cost(graph, one, cost)))
    added = added_cost(graph, start, cost)
    known = added if peak(start) <= limit_bytes else inf
    bound, budget = 0.0, limit_bytes
    while budget > 0 and time.monotonic() < end:
        left = None if time_limit is None else end - time.monotonic()
        better, least = ilp.cheaper(found.dag, budget, sum(found.dag.costs) + known, time_limit=left)
        if budget == limit_bytes:
            bound = min(known, least - sum(found.dag.costs))
        if better is None:
            break
        candidate = lowered(graph, found, better.schedule)
        if peak(candidate) <= limit_bytes:
            return Best(candidate, added_cost(graph, candidate, cost), bound)
        budget -= peak(candidate) - limit_bytes  # states of random generators are not in the program
    return Best(start, added, min(bound, added))


def contracted(graph: JointGraph, profile) -> Contracted:
    """The operations of `graph` that bring storages along or have an effect, by groups of storages.

    Raises:
        ValueError: if there are too many for the solver.
    """
    known = facts(graph)
    plain = everything(graph)
    order = {step.id for step in (*plain.forward, *plain.backward) if step.kind == COMPUTE} | set(known.tangents)
    order = sorted(place for place in order if known.born.get(place, set()) - known.resident or place in known.effects)
    reads = {place: _read_storages(known, place) for place in order}
    places: list[int] = []
    storages: list[frozenset[int]] = []
    for place in order:
        groups: dict[tuple, set[int]] = {}
        for storage in sorted(known.born.get(place, frozenset()) - known.resident):
            comes_again = storage in known.storages(place, again=True)
            who = (reader for reader in order if storage in reads[reader])
            groups.setdefault((comes_again, storage in known.held, *who), set()).add(storage)
        found = sorted(groups, key=lambda group: not group[0]) or [()]  # what every run brings along first
        places += [place] * len(found)
        storages += [frozenset(groups.get(group, ())) for group in found]
    if len(places) > _MOST:
        raise ValueError(
            f"policy 'ilp' solves graphs of up to {_MOST} nodes, and this one has {len(places)}: use policy 'auto', or "
            "a smaller model"
        )
    return Contracted(_dag(known, profile, places, storages, reads), tuple(places), tuple(storages))


def _read_storages(known: Facts, place: int) -> set[int]:
    sources = {*known.reads(place), *known.reads(place, again=place < known.graph.boundary)}
    return {s for source in sources for s in known.graph.nodes[source].storages}


def _dag(known: Facts, profile, places, storages, reads) -> ilp.Dag:
    graph = known.graph
    cost = costs(graph, profile)
    whole = all(value.is_integer() for value in cost)
    nodes = range(len(places))
    first = {place: at for at, place in reversed(list(enumerate(places)))}
    last = {place: at for at, place in enumerate(places)}
    producer = {storage: at for at in nodes for storage in storages[at]}
    edges = {(producer[s], at) for at in nodes for s in reads[places[at]] if producer.get(s, at) < first[places[at]]}
    edges |= {(first[places[at]], at) for at in nodes if first[places[at]] < at}
    comes_again = [not storages[at] or bool(storages[at] & set(known.storages(places[at], True))) for at in nodes]
    held = {at for at in nodes if storages[at] & known.held}
    fixed = {places[at] for at in held} | set(known.fixed)
    return ilp.Dag(
        [0 if at != first[place] else int(cost[place]) if whole else cost[place] for at, place in enumerate(places)],
        [sum(known.bytes[s] for s in group) for group in storages],
        sorted(edges),
        workspace=[max(0, profile.workspace_bytes[place]) * (at == last[place]) for at, place in enumerate(places)],
        held=held,
        once={at for at in nodes if places[at] >= graph.boundary or places[at] in fixed or not comes_again[at]},
        boundary=sum(place < graph.boundary for place in places),
        siblings={at: first[places[at]] for at in nodes if first[places[at]] < at and comes_again[at]},
    )


def lowered(graph: JointGraph, found: Contracted, steps) -> Schedule:
    """The backward's part of `steps` as an order of nodes: views are put where they are read."""
    known = facts(graph)
    kept: set[int] = set()
    order: list[int] = []
    live: set[int] = set()
    is_backward = False

    for number, (kind, at) in enumerate(steps):
        place, group = found.places[at], found.storages[at]
        covers = {known.cover[s] for s in group if s in known.cover}
        if place >= graph.boundary and not is_backward:
            live |= {*known.given, *kept}
            is_backward = True
        if not is_backward:
            kept = kept | covers if kind == COMPUTE else kept - covers
        elif kind != COMPUTE:
            live -= {node for node in live if group & set(graph.nodes[node].storages)}
        elif place not in known.tangents and at == found.places.index(place):
            bases = sorted(_bases_of_run(known, found, steps[number:]))  # before what comes with them is freed
            order += recompute_late(known, [place, *bases], live)
    order += recompute_late(known, [place for place in known.bw_outputs if place is not None], live)
    return scheduled(graph, None, order)


def _bases_of_run(known: Facts, found: Contracted, steps) -> set[int]:
    """Values of all results that the run at the beginning of `steps` is for."""
    place = found.places[steps[0][1]]
    computed = (at for kind, at in steps if kind == COMPUTE)
    own = takewhile(lambda at: found.places[at] == place, computed)
    return {known.cover[s] for at in own for s in found.storages[at] if s in known.cover}
