"""mu-TWO for one model: swap or recompute, whatever is cheaper, the longest idle or the most rewarding first.

Purandare et al., mu-TWO, MLSys 2023. Its algorithms, and where they are: A, the profile: ``ackpt.profile``, also of
graphs that the device does not hold; B, the choice: here; C to F, overheads and what a choice changes in others:
`intermediates`; G, the memory that a choice takes: `ackpt.graph.simulate`; H, running on three streams:
`ackpt.planning.copy_operations`.

Of the printed B, two lines are wrong: in the branch that recomputes it takes the candidate for swapping, and it evicts
once before it looks at the budget. The printed G starts with all intermediates in memory although those that are
dropped are added again when they come back, and knows nothing of what a chain of recomputations takes while it runs;
the simulator does. The paper recomputes a chain anew for every member of it; keeping each member from its first use in
backward to its last is cheaper and takes more memory, so both orders are tried.

B goes on until nothing is left to evict. A budget takes the cheapest of the schedules on the way that fits: so a lower
budget never gives a higher peak, and never a lower cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ackpt.capture.analysis import Facts, facts
from ackpt.capture.joint_graph import FORWARD, JointGraph
from ackpt.costs.profiles import Profile
from ackpt.planning.offload_steps import offloadable, offloaded
from ackpt.planning.schedule import Schedule, at_hand, everything, lower, missing, scheduled
from ackpt.policies.search.frontier import cheapest
from ackpt.policies.search.intermediates import Intermediate, Link, drop, intermediates
from ackpt.policies.search.recompute_costs import costs

_SCHEDULES = 100  # at most; of many choices only some are simulated, evenly spaced, and the last


def schedule(graph, profile, limit_bytes) -> Schedule:
    return cheapest(graph, profile, limit_bytes, evictions)


class State(NamedTuple):
    """Where algorithm B stands. Attributes and `kept` are those of now: the next choice changes them.

    ``chosen``: the last choice, None at first, and whether it ``is_swap``; ``kept``: intermediates that are not
    dropped, ``swaps``, those of them that are swapped, ``candidates``, those that still may be chosen.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.policies import mu_two
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> begin = next(mu_two.states(graph, ackpt.profile(graph)))
        >>> begin.chosen, [graph.nodes[each.rank].name for each in begin.candidates]
        (None, ['tanh'])
    """

    chosen: Intermediate | None
    is_swap: bool
    kept: list[Intermediate]
    swaps: list[Intermediate]
    candidates: list[Intermediate]


def states(graph: JointGraph, profile: Profile) -> Iterator[State]:
    """Algorithm B to its end: where it stands before the first choice and after each.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.policies import mu_two
        >>> layers = (layer for _ in range(3) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh()))
        >>> graph = ackpt.trace(torch.nn.Sequential(*layers), torch.ones(64, 8))
        >>> [len(state.candidates) for state in mu_two.states(graph, ackpt.profile(graph))]
        [2, 1, 0]
    """
    known, run_time = facts(graph), costs(graph, profile)
    swap_seconds = None if profile.seconds is None else profile.swap_seconds
    kept = list(intermediates(known, everything(graph), run_time, swap_seconds).values())
    candidates = [i for i in kept if i.can_recompute or i.swap_time is not None]
    recomps: list[Intermediate] = []
    swaps: list[Intermediate] = []
    link = Link(run_time, graph.boundary)
    yield State(None, False, kept, swaps, candidates)
    while candidates:
        chosen, is_swap = _choice(candidates, link)
        if is_swap:
            link.overhead(chosen, spend=True)
            swaps.append(chosen)
        else:
            drop(chosen, recomps, kept)
        swaps = [i for i in swaps if i in kept]
        candidates = [i for i in candidates if i in kept and i not in swaps]
        yield State(chosen, is_swap, kept, swaps, candidates)


def evictions(graph: JointGraph, profile) -> list[Schedule]:
    """The schedules after the choices of algorithm B."""
    found = states(graph, profile)
    count = len(next(found).candidates)
    schedules: list[Schedule] = []
    for state in found:
        if count < _SCHEDULES or not len(state.candidates) % -(-count // _SCHEDULES):
            schedules += schedules_of(graph, profile, state)
    return schedules


def schedules_of(graph: JointGraph, profile: Profile, state: State) -> list[Schedule]:
    """Two that keep and swap what `state` says: whatever is dropped runs again once, or each for itself.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.policies import mu_two
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> profile = ackpt.profile(graph)
        >>> *_, end = mu_two.states(graph, profile)
        >>> [schedule.saved for schedule in mu_two.schedules_of(graph, profile, end)]
        [(), ()]
    """
    known = facts(graph)
    saved = known.pinned.union(*(i.storages for i in state.kept))
    away = {storage for swap in state.swaps for storage in swap.storages}
    return [
        offloaded(graph, found, away.intersection(offloadable(graph, found)), profile)
        for found in (lower(graph, saved), each_for_itself(known, saved))
    ]


def _choice(candidates: list[Intermediate], link: Link) -> tuple[Intermediate, bool]:
    """One step of algorithm B: the candidate with the smaller overhead, and whether it is swapped."""
    swap = max((c for c in candidates if c.swap_time is not None), key=lambda c: c.inactive_time, default=None)
    recompute = max((c for c in candidates if c.can_recompute), key=lambda c: c.recompute_ratio, default=None)
    if swap is None or (recompute is not None and recompute.total_recomp_time < link.overhead(swap)):
        assert recompute is not None
        return recompute, False
    return swap, True


def each_for_itself(known: Facts, saved) -> Schedule:
    """As `lower`, but what was recomputed only on the way to something else is dropped, and run again for itself.

    Raises:
        ScheduleError: if a value is not saved that cannot be recomputed.
    """
    graph = known.graph
    nodes = graph.nodes
    saved = {*saved, *(s for s in known.held if nodes[graph.storages[s].producer].phase == FORWARD)}
    live = at_hand(known, saved)
    backward: list[int] = []
    for place in known.needed_backward:
        chain = missing(known, place, live)
        backward += chain
        read = {storage for source in nodes[place].inputs for storage in nodes[source].storages}
        again = {s for node in chain if nodes[node].phase == FORWARD for s in known.born.get(node, ())}
        dropped = {s for s in again if not known.born[graph.storages[s].producer] & read}
        live |= {node for node in chain if not dropped.intersection(nodes[node].storages)}
    return scheduled(graph, None, backward)
