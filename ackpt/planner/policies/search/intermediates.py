"""The attributes of mu-TWO's intermediates, and their update after each choice (algorithms C to F).

Names are the paper's: Purandare, Wasay, Idreos and Jain, mu-TWO: 3x Faster Multi-Model Training with Orchestration and
Memory Optimization, MLSys 2023. An intermediate is what one operation saves for backward. Several results of one
operation are one intermediate, since recomputing it allocates all of them.

This code corrects the printed pseudocode in three places:

- C returns a negative overhead where there is more compute than the copy needs; here the overhead is at least 0. C also
  overlaps several copies with the same operations; here the time of each operation is used once.
- D, E and F add the run times of sources along each path, so that an ancestor of two sources counts twice; here the
  recomputed operations are a set, whose times are added once.
- E does not update total_recomp_time when a source is dropped, and F's second case overwrites the values of the first;
  here both follow from the set and from the number of recomputations that need it, after every choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ackpt.planner.capture.joint_graph import Analysis
from ackpt.planner.schedule.schedule import Schedule, missing


@dataclass(eq=False)
class Intermediate:
    """Attributes of one intermediate; times in seconds, or in the unit of the given run times.

    ``rank``: the node that computes it; ``storages``: its storages, ``memory_size`` bytes. ``last_fw_access``,
    ``first_bw_access``, ``last_bw_access``: nodes; ``inactive_time``: run time between the first two; ``swap_time``: of
    one copy, None without a link. ``recomp_nodes``: the nodes that recompute it from ``recomp_srcs``, the ranks of
    other intermediates. ``recomp_cnt``: how often it would be recomputed: once for itself and once for each
    recomputation that has it as a source. ``can_recompute``: whether all of its nodes can be recomputed.

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

    def replace_source(self, dropped: Intermediate) -> None:
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
    live = {*analysis.sources, *_bases(analysis, always_live.union(baseline.saved))}
    by_rank = {}
    for rank in sorted(set(rank_of.values())):
        storages = frozenset(storage for storage in baseline.saved if rank_of[storage] == rank) - analysis.live_to_end
        if not storages:
            continue
        others = live - _bases(analysis, analysis.allocated[rank])
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


def _bases(analysis: Analysis, storages) -> set[int]:
    """The base tensors of `storages`, as node ids."""
    return {analysis.base_of[storage] for storage in storages if storage in analysis.base_of}


def drop(chosen: Intermediate, recomps: list[Intermediate], kept: list[Intermediate]) -> None:
    """Algorithms E and F: move `chosen` from `kept` to `recomps`, and update the attributes of all others.

    Intermediates that the recomputation of `chosen` allocates anyway move with it, such as the saved mean of a batch
    norm whose result is recomputed.

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
