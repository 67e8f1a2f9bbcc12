"""Policy ``mu-two``: swap or recompute one intermediate after the other, whichever has less overhead.

From Purandare et al., mu-TWO, MLSys 2023. The candidate for swapping is the one that stays unused longest, the
candidate for recomputation the one that frees most bytes per time. Where the paper's algorithms are: A, the profile, in
``ackpt.profile``, also for graphs that do not fit on the device; B, the choice, here; C to F, overheads and what a
choice changes for the other intermediates, in `intermediates`; G, the memory of a choice, in `ackpt.graph.simulate`; H,
execution on three streams, in `ackpt.planner.schedule.added_operations`.

The printed B has two errors: its branch for recomputation takes the candidate for swapping, and it evicts once before
it checks the budget. The printed G starts with all intermediates in memory although it adds the dropped ones again when
they are recomputed, and it ignores the memory of a chain of recomputations; the simulator does neither. The paper
recomputes a whole chain for each of its members. Saving each member from its first use in backward to its last is
cheaper and takes more memory, so both schedules are tried.

B continues until nothing is left to evict. A budget takes the cheapest schedule on the way that fits. So a smaller
budget never gives a higher peak or a lower cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ackpt.planner.capture.joint_graph import FORWARD, Analysis, JointGraph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.policies.search.frontier import cheapest
from ackpt.planner.policies.search.intermediates import Intermediate, Link, drop, intermediates
from ackpt.planner.policies.search.recompute_costs import costs
from ackpt.planner.schedule.offload_steps import offloadable, offloaded
from ackpt.planner.schedule.schedule import Schedule, everything, live_before_backward, lower, missing, scheduled

_MOST_STATES = 100  # of more choices only evenly spaced ones are simulated, and the last


def schedule(graph, profile, limit_bytes) -> Schedule:
    return cheapest(graph, profile, limit_bytes, evictions)


class State(NamedTuple):
    """The state of algorithm B after a choice; the next choice changes the intermediates and `kept`.

    ``chosen``: the last choice, None at first; ``is_swap``: whether it is swapped. ``kept``: the intermediates that are
    not dropped; ``swaps``: those of them that are swapped; ``candidates``: those that may still be chosen.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.policies import mu_two
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
    """The states of algorithm B before the first choice and after each, until nothing is left to evict.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.policies import mu_two
        >>> layers = (layer for _ in range(3) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh()))
        >>> graph = ackpt.trace(torch.nn.Sequential(*layers), torch.ones(64, 8))
        >>> [len(state.candidates) for state in mu_two.states(graph, ackpt.profile(graph))]
        [2, 1, 0]
    """
    run_time = costs(graph, profile)
    swap_seconds = None if profile.seconds is None else profile.swap_seconds
    kept = list(intermediates(graph.analysis, everything(graph), run_time, swap_seconds).values())
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
    remaining = states(graph, profile)
    count = len(next(remaining).candidates)
    every = max(1, -(-count // _MOST_STATES))
    schedules: list[Schedule] = []
    for state in remaining:
        if len(state.candidates) % every == 0:
            schedules += schedules_of(graph, profile, state)
    return schedules


def schedules_of(graph: JointGraph, profile: Profile, state: State) -> list[Schedule]:
    """Two schedules of a state: dropped intermediates are recomputed once, or once for each of their readers.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.policies import mu_two
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> profile = ackpt.profile(graph)
        >>> *_, end = mu_two.states(graph, profile)
        >>> [schedule.saved for schedule in mu_two.schedules_of(graph, profile, end)]
        [(), ()]
    """
    analysis = graph.analysis
    saved = analysis.must_be_saved.union(*(i.storages for i in state.kept))
    swapped = {storage for swap in state.swaps for storage in swap.storages}
    return [
        offloaded(graph, schedule, swapped.intersection(offloadable(graph, schedule)), profile)
        for schedule in (lower(graph, saved), once_for_each_reader(analysis, saved))
    ]


def _choice(candidates: list[Intermediate], link: Link) -> tuple[Intermediate, bool]:
    """One choice of algorithm B: the candidate with less overhead, and whether it is swapped."""
    swap = max((c for c in candidates if c.swap_time is not None), key=lambda c: c.inactive_time, default=None)
    recompute = max((c for c in candidates if c.can_recompute), key=lambda c: c.recompute_ratio, default=None)
    if swap is None or (recompute is not None and recompute.total_recomp_time < link.overhead(swap)):
        assert recompute is not None
        return recompute, False
    return swap, True


def once_for_each_reader(analysis: Analysis, saved) -> Schedule:
    """As `lower`, but what a recomputation needs on the way is freed, and recomputed again for its own readers.

    This is the recomputation of the paper's pseudocode.

    Raises:
        ScheduleError: if a value is not saved that cannot be recomputed.
    """
    return scheduled(analysis.graph, None, order_for_each_reader(analysis, saved))


def order_for_each_reader(analysis: Analysis, saved) -> Iterator[int]:
    """The backward of `once_for_each_reader`, one node after the other; on long chains it has millions."""
    graph = analysis.graph
    nodes = graph.nodes
    saved = {*saved, *(s for s in analysis.live_to_end if nodes[graph.storages[s].producer].phase == FORWARD)}
    live = live_before_backward(analysis, saved)
    for reader in analysis.needed_backward:
        runs = missing(analysis, reader, live)
        yield from runs
        if len(runs) == 1:
            live.add(reader)
            continue
        read = {storage for source in nodes[reader].inputs for storage in nodes[source].storages}
        recomputed = {s for node in runs if nodes[node].phase == FORWARD for s in analysis.allocated.get(node, ())}
        freed = {s for s in recomputed if not analysis.allocated[graph.storages[s].producer] & read}
        live |= {node for node in runs if not freed.intersection(nodes[node].storages)}
