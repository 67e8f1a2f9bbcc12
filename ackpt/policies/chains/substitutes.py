"""Something smaller kept instead: what a saved value can be made of without a product, on the way to backward.

For a residual sum the product that it adds can be kept: half its size where sums are float32 and products bfloat16. For
the result of a norm its argument, which the norm's backward needs anyway. For the mask of a dropout nothing: it is
drawn again. A recursion over blocks sees none of this, since it keeps what they hand on.
"""

from __future__ import annotations

import functools
import itertools

from ackpt.capture.analysis import Facts, facts
from ackpt.capture.joint_graph import JointGraph
from ackpt.planning.schedule import Schedule, at_hand, everything, lower
from ackpt.policies.search.frontier import pareto

from .block_options import Local
from .block_stages import by_price
from .blocks import Chain

_WALKED = 400_000  # nodes that are walked through for a front
# What a byte may cost, as a share of the dearest: the further back one goes, the more runs again for it.
_DEARER = (1 / 30, 1 / 10, 1 / 3)


def standing_in(graph: JointGraph, found: Chain, profile, cost) -> list[Schedule]:
    """Blocks as one price of a byte says, the first ones as a lower price; then smaller values instead.

    Where a price gives nothing that another does not beat, nothing is looked for beside it.
    """
    known = facts(graph)
    options = [Local(known, block, found.pinned, cost, profile.workspace_bytes).options() for block in found.blocks]
    stays = found.pinned.union(*(block.output for block in found.blocks))
    numbers = [[(option.cost, option.saved_bytes) for option in own] for own in options]
    rows = [[own[index].saved for own, index in zip(options, row)] for row in by_price(numbers)]
    dearest = max((cost / size for own in numbers for cost, size in own if size), default=0.0)
    read = frozenset(everything(graph).saved)

    @functools.cache  # many prices and rows come to the same
    def lowered(saved: frozenset[int]) -> Schedule:
        return lower(graph, saved)

    @functools.cache
    def kept(saved: frozenset[int], share: float) -> frozenset[int]:
        return frozenset(smaller(known, saved, read, profile.flops, cost, share * dearest))

    def made(row, share: float) -> Schedule:
        return lowered(kept(stays.union(*row), share))

    tries = max(1, _WALKED // len(graph.nodes))
    rows = rows[:: -(-len(rows) * len(_DEARER) * 2 // tries)]
    whole = {(share, index): made(row, share) for share in _DEARER for index, row in enumerate(rows)}
    tries -= len(whole)
    cost_of = {point.schedule.backward: point.cost for point in pareto(graph, profile, whole.values())}
    pairs = []
    for share in _DEARER:
        best = [i for i in range(len(rows)) if whole[share, i].backward in cost_of]
        for i, j in itertools.pairwise(best):
            gap = abs(cost_of[whole[share, i].backward] - cost_of[whole[share, j].backward])
            pairs.append((-gap, share, i, j))
    between = []
    for _, share, i, j in sorted(pairs):
        step = -(-len(options) // max(1, tries - len(between)))
        for count in range(step, len(options), step):
            between.append(made([*rows[j][:count], *rows[i][count:]], share))
    return [*whole.values(), *between]


def smaller(known: Facts, saved, read, flops, cost, price: float) -> set[int]:
    """The storages `saved`, or smaller ones instead wherever a byte that this frees costs at most `price`.

    `read`: what a backward reads for which all is saved; of what one operation brings along, that is saved together.
    """
    graph = known.graph
    before: set[int] = set()
    saved = set(saved)
    while before != saved:  # what is kept for one value may do for another
        before = set(saved)
        live = at_hand(known, saved)
        for producer in sorted({graph.storages[storage].producer for storage in saved}):
            unit = known.born[producer] & saved
            found = _instead(known, saved, live, unit, flops) if unit and not flops[producer] else None
            if found is None:
                continue
            again, gone, new = found
            new = {born for s in new for born in known.born[graph.storages[s].producer] & (read | {s})} - saved
            freed = sum(known.bytes[s] for s in gone) - sum(known.bytes[s] for s in new)
            if freed > 0 and sum(cost[node] for node in sorted(again)) <= price * freed:
                saved = (saved - gone) | new
                live.difference_update(known.cover[s] for s in gone)
                live.update(known.cover[s] for s in new)
    return saved


def _instead(known: Facts, saved: set[int], live: set[int], unit, flops):
    """What runs again, without a product, if `unit` is not saved; what all is not saved then, and what is instead.

    None if it comes from a product itself, or cannot run again.
    """
    graph = known.graph
    gone = set(unit)
    while True:
        away = {known.cover[storage] for storage in gone}
        again: set[int] = set()
        new: set[int] = set()
        todo = list(away)
        while todo:
            node = todo.pop()
            if node in again or (node in live and node not in away):
                continue
            own = {s for s in known.storages(node, again=True) if known.cover.get(s) == node}
            makers = {node, *(graph.storages[s].producer for s in own)}
            if any(flops[maker] or maker in known.fixed for maker in makers):
                if not own or own & gone:
                    return None
                new |= own
                continue
            again.add(node)
            todo += known.reads(node, again=True)
        along = gone | ({s for node in again for s in known.born.get(node, ())} & saved)
        if along & (known.held | known.pinned):
            return None
        if along == gone:
            return again, gone, new
        gone = along
