"""What mu-TWO knows of every intermediate, and keeps right while fates are chosen (algorithms C to F of the paper).

Names are the paper's: Purandare, Wasay, Idreos and Jain, mu-TWO: 3x Faster Multi-Model Training with Orchestration and
Memory Optimization, MLSys 2023. An intermediate is what one operation leaves for backward; several results of one
operation are one, since running it again brings them all.

Where the printed pseudocode errs it is mended here:

- C can return a negative overhead, where computing would hide more than the copy: what is left is never below 0. It
  hides several copies behind the same operations: here each operation's time is spent once.
- D, E and F add run times of sources along each path, so that an ancestor of two sources counts twice: here what runs
  again is a set of operations, whose times are added once.
- E leaves total_recomp_time as it was before a source was dropped, and F's second case overwrites what the first has
  set: here both follow from the set and from how many recomputations need it, after every choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ackpt.capture.analysis import Facts
from ackpt.planning.schedule import Schedule, missing


@dataclass(eq=False)
class Intermediate:
    """Attributes of one intermediate; times in seconds, or in the unit of the run times it was made from.

    ``rank``: the node that makes it; ``storages``: where it lies, ``memory_size`` bytes. ``last_fw_access``,
    ``first_bw_access``, ``last_bw_access``: nodes; ``inactive_time``: run time between the first two; ``swap_time``: of
    one copy, None without a link. ``recomp_nodes``: what runs to have it again, from ``recomp_srcs``, ranks of other
    intermediates. ``recomp_cnt``: how often it would be recomputed, once for itself and once for each recomputation
    that has it as a source. ``can_recompute``: whether all of it may run again.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.policies import mu_two
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> (found,) = next(mu_two.states(graph, ackpt.profile(graph))).candidates
        >>> found.memory_size, found.recomp_cnt, found.total_recomp_time == found.recomp_time
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
        """Bytes that are freed for each unit of time."""
        return self.memory_size / max(self.total_recomp_time, 1e-12)

    def replace_source(self, dropped: Intermediate) -> None:
        """Algorithms E and F: `dropped` will not be there; what it is made from is read instead."""
        self.recomp_srcs = (self.recomp_srcs - {dropped.rank}) | dropped.recomp_srcs
        self.recomp_nodes |= dropped.recomp_nodes
        self.__post_init__()


def intermediates(known: Facts, plain: Schedule, run_time, swap_seconds) -> dict[int, Intermediate]:
    """What the step without checkpointing, `plain`, saves for backward, by rank; nothing has been chosen yet.

    Args:
        known: facts of the graph.
        plain: its schedule that saves everything.
        run_time: by node.
        swap_seconds: by storage, None without a link.
    """
    graph = known.graph
    begins = list(accumulate(run_time, initial=0.0))
    rank_of = {storage: graph.storages[storage].producer for storage in plain.saved}
    stays = known.held | known.pinned
    live = {*known.given, *(known.cover[s] for s in stays.union(plain.saved) if s in known.cover)}
    found = {}
    for rank in sorted(set(rank_of.values())):
        mine = frozenset(storage for storage in plain.saved if rank_of[storage] == rank) - known.held
        if not mine:
            continue
        own = {known.cover[storage] for storage in known.born[rank] if storage in known.cover}
        nodes = frozenset(node for s in mine for node in missing(known, known.cover[s], live - own))
        made = {s for node in nodes for s in known.storages(node, again=True) if s in known.born.get(node, ())}
        read = {source for node in nodes for source in known.reads(node, again=True)} & (live - own)
        lasts, firsts, ends = (
            [at for s in mine if (at := getattr(graph.storages[s], name)) is not None]
            for name in ("last_fw_access", "first_bw_access", "last_bw_access")
        )
        last, first = max(lasts, default=rank), min(firsts, default=len(graph.nodes) - 1)
        found[rank] = Intermediate(
            rank=rank,
            storages=mine,
            memory_size=sum(known.bytes[storage] for storage in mine),
            last_fw_access=last,
            first_bw_access=first,
            last_bw_access=max(ends, default=first),
            inactive_time=begins[first] - begins[last + 1],
            swap_time=None if swap_seconds is None else sum(swap_seconds[storage] for storage in mine),
            can_recompute=not (nodes & known.fixed.keys() or stays & made),
            recomp_nodes=nodes,
            recomp_srcs={rank_of[s] for source in read for s in graph.nodes[source].storages if s in rank_of} - {rank},
            run_time=run_time,
        )
    return found


def drop(chosen: Intermediate, recomps: list[Intermediate], kept: list[Intermediate]) -> None:
    """Algorithms E and F: `chosen` goes from `kept` to `recomps`, and all attributes are what that makes of them.

    What comes along anyway, since what makes it runs again on the way to `chosen`, goes with it: of a batch norm the
    saved mean, once its result is needed again.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.policies import mu_two
        >>> layers = (layer for _ in range(3) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh()))
        >>> graph = ackpt.trace(torch.nn.Sequential(*layers), torch.ones(64, 8))
        >>> kept, recomps = list(next(mu_two.states(graph, ackpt.profile(graph))).kept), []
        >>> first, second = kept[:2]
        >>> drop(first, recomps, kept)
        >>> first in kept, first in recomps, first.recomp_nodes < second.recomp_nodes
        (False, True, True)
    """
    for gone in [each for each in kept if each is chosen or each.rank in chosen.recomp_nodes]:
        kept.remove(gone)
        for other in (*recomps, *kept):
            if gone.rank in other.recomp_srcs:
                other.replace_source(gone)
        recomps.append(gone)
    uses = Counter(source for recomp in recomps for source in recomp.recomp_srcs)
    for other in (*recomps, *kept):
        other.recomp_cnt = 1 + uses[other.rank]


class Link:
    """Run time that is left to hide copies behind, by node (algorithm C)."""

    def __init__(self, run_time, boundary: int):
        self.left = list(run_time)
        self.boundary = boundary

    def overhead(self, wanted: Intermediate, spend: bool = False) -> float:
        """Seconds for which the copies of `wanted` are not hidden, never below 0; `spend` takes the time they hide in.

        The copy out may last from where it is made to the end of the forward, the copy in from the beginning of
        backward to its first use there.
        """
        assert wanted.swap_time is not None
        out = self._left_of(wanted.swap_time, range(wanted.rank + 1, self.boundary), spend)
        back = self._left_of(wanted.swap_time, range(wanted.first_bw_access - 1, self.boundary - 1, -1), spend)
        return out + back

    def _left_of(self, seconds: float, nodes, spend: bool) -> float:
        for node in nodes:
            if seconds <= 0:
                break
            hidden = min(seconds, self.left[node])
            seconds -= hidden
            if spend:
                self.left[node] -= hidden
        return seconds
