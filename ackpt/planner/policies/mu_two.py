"""Policy ``mu-two``: swap or recompute one intermediate after the other, whichever has less overhead.

From Purandare, Wasay, Idreos and Jain, mu-TWO, MLSys 2023, whose names this file uses. The candidate for swapping is
the one that stays unused longest, the candidate for recomputation the one that frees most bytes per time. Where the
paper's algorithms are: A, the profile, in ``ackpt.profile``; B, the choice, in `states`; C, overheads, in `Link`; D to
F, what a choice changes for the other intermediates, in `Intermediate` and `drop`; G, the memory of a choice, in
`ackpt.graph.simulate`; H, execution on three streams, in `ackpt.planner.schedule.added_operations`. Where the printed
pseudocode is wrong, the function that differs says so. B continues until nothing is left to evict, and a budget takes
the cheapest schedule on the way that fits. So a smaller budget never gives a higher peak or a lower cost.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from ackpt.planner.capture.joint_graph import FORWARD, Analysis, JointGraph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.policies.search.frontier import cheapest, costs
from ackpt.planner.schedule.offload_steps import offloadable, offloaded
from ackpt.planner.schedule.schedule import (
    Schedule,
    bases_of,
    everything,
    live_before_backward,
    lower,
    missing,
    scheduled,
)

_MOST_STATES = 100  # of more choices only evenly spaced ones are simulated, and the last: bounds the time of a search


@dataclass(eq=False)
class Intermediate:
    """Attributes of one intermediate; times in seconds, or in the unit of the given run times.

    ``rank``: the node that computes it; ``storages``: its storages, ``memory_size`` bytes. ``last_fw_access``,
    ``first_bw_access``, ``last_bw_access``: nodes; ``inactive_time``: run time between the first two; ``swap_time``: of
    one copy, None without a link. ``recomp_nodes``: the nodes that recompute it from ``recomp_srcs``, the ranks of
    other intermediates. ``recomp_cnt``: how often it would be recomputed: once for itself and once for each
    recomputation that has it as a source. ``can_recompute``: whether all of its nodes can be recomputed.

    An intermediate is what one operation saves for backward, since recomputing it allocates all of its results. The
    printed D, E and F add run times along each path, so that an ancestor of two sources counts twice; here the nodes
    are a set, whose times are added once.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.policies import mu_two
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> (tanh,) = next(mu_two.states(graph, ackpt.profile(graph))).candidates
        >>> tanh.memory_size, tanh.recomp_cnt, tanh.total_recomp_time == tanh.recomp_time
        (128, 1, True)
    """

    rank: int
    storages: frozenset[int]
    memory_size: int
    last_fw_access: int
    first_bw_access: int
    last_bw_access: int
    inactive_time: float
    swap_time: float | None
    can_recompute: bool
    recomp_nodes: frozenset[int]
    recomp_srcs: set[int]
    recomp_time: float = 0.0
    recomp_cnt: int = 1
    run_time: Sequence[float] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        self.recomp_time = sum(self.run_time[node] for node in sorted(self.recomp_nodes))

    @property
    def total_recomp_time(self) -> float:
        """The overhead of recomputing it, by algorithm D."""
        return self.recomp_time * self.recomp_cnt

    @property
    def recompute_ratio(self) -> float:
        """Freed bytes per unit of recomputation time."""
        return self.memory_size / max(self.total_recomp_time, 1e-12)

    def replace_source(self, dropped: "Intermediate") -> None:
        """Algorithms E and F: read the sources of `dropped` instead of `dropped`, which is recomputed from them."""
        self.recomp_srcs = (self.recomp_srcs - {dropped.rank}) | dropped.recomp_srcs
        self.recomp_nodes |= dropped.recomp_nodes
        self.__post_init__()


def intermediates(analysis: Analysis, baseline: Schedule, run_time, swap_seconds) -> dict[int, Intermediate]:
    """The intermediates of the baseline by rank, before any choice.

    Args:
        analysis: of the graph.
        baseline: the schedule that saves everything.
        run_time: by node.
        swap_seconds: by storage, None without a link.
    """
    graph = analysis.graph
    begins = list(accumulate(run_time, initial=0.0))
    rank_of = {storage: graph.storages[storage].producer for storage in baseline.saved}
    always_live = analysis.live_to_end | analysis.must_be_saved
    live = {*analysis.sources, *bases_of(analysis, always_live.union(baseline.saved))}
    by_rank = {}
    for rank in sorted(set(rank_of.values())):
        storages = frozenset(storage for storage in baseline.saved if rank_of[storage] == rank) - analysis.live_to_end
        if not storages:
            continue
        others = live - bases_of(analysis, analysis.allocated[rank])
        nodes = frozenset(node for s in storages for node in missing(analysis, analysis.base_of[s], others))
        allocated = {s for n in nodes for s in analysis.storages(n, again=True) if s in analysis.allocated.get(n, ())}
        read = {source for node in nodes for source in analysis.reads(node, again=True)} & others
        lasts, firsts, ends = (
            [at for s in storages if (at := getattr(graph.storages[s], name)) is not None]
            for name in ("last_fw_access", "first_bw_access", "last_bw_access")
        )
        last, first = max(lasts, default=rank), min(firsts, default=len(graph.nodes) - 1)
        by_rank[rank] = Intermediate(
            rank=rank,
            storages=storages,
            memory_size=sum(analysis.bytes[storage] for storage in storages),
            last_fw_access=last,
            first_bw_access=first,
            last_bw_access=max(ends, default=first),
            inactive_time=begins[first] - begins[last + 1],
            swap_time=None if swap_seconds is None else sum(swap_seconds[storage] for storage in storages),
            can_recompute=not (nodes & analysis.not_recomputable.keys() or always_live & allocated),
            recomp_nodes=nodes,
            recomp_srcs={rank_of[s] for source in read for s in graph.nodes[source].storages if s in rank_of} - {rank},
            run_time=run_time,
        )
    return by_rank


def drop(chosen: Intermediate, recomps: list[Intermediate], kept: list[Intermediate]) -> None:
    """Algorithms E and F: move `chosen` from `kept` to `recomps`, and update the attributes of all others.

    Intermediates that the recomputation of `chosen` allocates anyway move with it, such as the saved mean of a batch
    norm whose result is recomputed. The printed E does not update total_recomp_time when a source is dropped, and the
    second case of F overwrites the values of the first; here both follow from the set and the count.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.policies import mu_two
        >>> layers = (layer for _ in range(3) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh()))
        >>> graph = ackpt.trace(torch.nn.Sequential(*layers), torch.ones(64, 8))
        >>> kept, recomps = list(next(mu_two.states(graph, ackpt.profile(graph))).kept), []
        >>> first, second = kept[:2]
        >>> drop(first, recomps, kept)
        >>> first in kept, first in recomps, first.recomp_nodes < second.recomp_nodes
        (False, True, True)
    """
    for dropped in [each for each in kept if each is chosen or each.rank in chosen.recomp_nodes]:
        kept.remove(dropped)
        for other in (*recomps, *kept):
            if dropped.rank in other.recomp_srcs:
                other.replace_source(dropped)
        recomps.append(dropped)
    uses = Counter(source for recomp in recomps for source in recomp.recomp_srcs)
    for other in (*recomps, *kept):
        other.recomp_cnt = 1 + uses[other.rank]


class Link:
    """The link to the host: run time that copies can still overlap with, by node (algorithm C).

    The printed C returns a negative overhead where there is more compute than the copy needs, and overlaps several
    copies with the same operations; here it is at least 0, and the time of each operation is used once.

    Args:
        run_time: seconds by node.
        boundary: the first node of the backward.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.policies import mu_two
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> profile = ackpt.profile(graph, "t4")
        >>> (tanh,) = next(mu_two.states(graph, profile)).candidates
        >>> 0 < Link(profile.seconds, graph.boundary).overhead(tanh) <= 2 * tanh.swap_time
        True
    """

    def __init__(self, run_time: Iterable[float], boundary: int):
        self.left: list[float] = list(run_time)
        self.boundary = boundary

    def overhead(self, wanted: Intermediate, spend: bool = False) -> float:
        """Seconds that the copies of `wanted` add to the step; with `spend`, use up the time that they overlap with.

        The copy out may last from its computation to the end of the forward, the copy back from the beginning of the
        backward to its first use there.
        """
        assert wanted.swap_time is not None
        out = self._not_overlapped(wanted.swap_time, range(wanted.rank + 1, self.boundary), spend)
        back = self._not_overlapped(wanted.swap_time, range(wanted.first_bw_access - 1, self.boundary - 1, -1), spend)
        return out + back

    def _not_overlapped(self, seconds: float, nodes, spend: bool) -> float:
        for node in nodes:
            if seconds <= 0:
                break
            overlap = min(seconds, self.left[node])
            seconds -= overlap
            if spend:
                self.left[node] -= overlap
        return seconds


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

    The branch for recomputation of the printed B takes the candidate for swapping, and it evicts once before it checks
    the budget.

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

    The paper recomputes a whole chain for each of its members. Saving each member from its first use in backward to its
    last is cheaper and takes more memory.

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
        for schedule in (lower(graph, saved), scheduled(graph, None, order_for_each_reader(analysis, saved)))
    ]


def _choice(candidates: list[Intermediate], link: Link) -> tuple[Intermediate, bool]:
    """One choice of algorithm B: the candidate with less overhead, and whether it is swapped."""
    swap = max((c for c in candidates if c.swap_time is not None), key=lambda c: c.inactive_time, default=None)
    recompute = max((c for c in candidates if c.can_recompute), key=lambda c: c.recompute_ratio, default=None)
    if swap is None or (recompute is not None and recompute.total_recomp_time < link.overhead(swap)):
        assert recompute is not None
        return recompute, False
    return swap, True


def order_for_each_reader(analysis: Analysis, saved) -> Iterator[int]:
    """The backward if the storages `saved` are saved, and each recomputation frees what only it needs on the way.

    This is the recomputation of the paper's pseudocode. On long chains it has millions of nodes.
    """
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
