"""Save a smaller activation instead of a larger one that can be recomputed from it without a matrix product.

Examples: instead of a residual sum in float32, the bfloat16 product that it adds, which is half its size; instead of
the result of a norm, its argument, which the norm's backward reads anyway; instead of the mask of a dropout nothing,
since the mask is drawn again from the saved RNG state. The recursion over blocks cannot find these plans, because it
always saves the outputs of blocks.
"""

import functools
import itertools

from ackpt.planner.capture.joint_graph import Analysis, JointGraph, once_per_graph
from ackpt.planner.policies.chains.block_options import options_of_blocks, rows_by_price
from ackpt.planner.policies.chains.blocks import BlockChain
from ackpt.planner.policies.search.frontier import costs, evenly_spaced, pareto
from ackpt.planner.schedule.schedule import Schedule, everything, live_before_backward, lower

# Nodes of all schedules that are tried for one graph, which bounds the time: small graphs get more tries.
_WALKED = 400_000
# Prices of a saved byte, as shares of the highest price that any option of a block pays (not tuned).
_PRICE_SHARES = (1 / 30, 1 / 10, 1 / 3)


def substituted(graph: JointGraph, chain: BlockChain, profile) -> list[Schedule]:
    """Schedules that save, for one price of a byte, the cheapest option of every block, and then `smaller` ones.

    Half of the tries are such schedules. The other half mixes two of them that are neighbors on the frontier: the first
    blocks follow the one, the last blocks the other.
    """
    analysis, cost = graph.analysis, costs(graph, profile)
    options = options_of_blocks(graph, chain, tuple(cost), tuple(profile.workspace_bytes))
    always_saved = chain.pinned.union(analysis.must_be_saved, *(block.output for block in chain.blocks))
    choices = [[(option.cost, option.saved_bytes) for option in block_options] for block_options in options]
    rows = [
        [block_options[index].saved for block_options, index in zip(options, row)] for row in rows_by_price(choices)
    ]
    highest_price = max((cost / size for block_choices in choices for cost, size in block_choices if size), default=0.0)
    read = frozenset(everything(graph).saved)

    @functools.cache  # many prices and rows come to the same
    def lowered(saved: frozenset[int]) -> Schedule:
        return lower(graph, saved)

    @functools.cache
    def substitutes_of(saved: frozenset[int], share: float) -> frozenset[int]:
        return frozenset(smaller(analysis, saved, read, profile.flops, cost, share * highest_price))

    def schedule_of(row, share: float) -> Schedule:
        return lowered(substitutes_of(always_saved.union(*row), share))

    tries = max(1, _WALKED // len(graph.nodes))
    rows = evenly_spaced(rows, tries, 2 * len(_PRICE_SHARES))
    schedules = {(share, index): schedule_of(row, share) for share in _PRICE_SHARES for index, row in enumerate(rows)}
    tries -= len(schedules)
    cost_of = {point.schedule.backward_arrays.key: point.cost for point in pareto(graph, profile, schedules.values())}
    keys = {place: schedule.backward_arrays.key for place, schedule in schedules.items()}
    pairs = []
    for share in _PRICE_SHARES:
        best = [i for i in range(len(rows)) if keys[share, i] in cost_of]
        for i, j in itertools.pairwise(best):
            gap = abs(cost_of[keys[share, i]] - cost_of[keys[share, j]])
            pairs.append((-gap, share, i, j))
    mixed = []
    for _, share, i, j in sorted(pairs):
        step = -(-len(options) // max(1, tries - len(mixed)))
        for count in range(step, len(options), step):
            mixed.append(schedule_of([*rows[j][:count], *rows[i][count:]], share))
    return [*schedules.values(), *mixed]


def smaller(analysis: Analysis, saved, read, flops, cost, price: float) -> set[int]:
    """The storages `saved`, with smaller ones instead wherever recomputation costs at most `price` per freed byte.

    `read`: storages that the baseline's backward reads. A substitute is saved together with those of its siblings.
    """
    graph = analysis.graph
    results = _results(graph, tuple(flops))
    before: set[int] = set()
    saved = set(saved)
    while before != saved:  # a substitute of one activation may serve for another
        before = set(saved)
        live = live_before_backward(analysis, saved)
        for producer in sorted({graph.storages[storage].producer for storage in saved}):
            unit = analysis.allocated[producer] & saved
            substitution = _substitution(analysis, saved, live, unit, results) if unit and not flops[producer] else None
            if substitution is None:
                continue
            recomputed, dropped, added = substitution
            producers = {s: graph.storages[s].producer for s in added}
            added = {sibling for s in added for sibling in analysis.allocated[producers[s]] & (read | {s})} - saved
            freed_bytes = sum(analysis.bytes[s] for s in dropped) - sum(analysis.bytes[s] for s in added)
            recompute_cost = sum(cost[node] for node in sorted(recomputed))
            if freed_bytes > 0 and recompute_cost <= price * freed_bytes:
                saved = (saved - dropped) | added
                live.difference_update(analysis.base_of[s] for s in dropped)
                live.update(analysis.base_of[s] for s in added)
    return saved


def _substitution(analysis: Analysis, saved: set[int], live: set[int], unit, results):
    """The nodes that are recomputed if `unit` is not saved, all storages dropped for it, and those saved instead.

    No recomputed node is a matrix product. None if `unit` needs a product itself, or cannot be recomputed.
    """
    dropped = set(unit)
    while True:
        dropped_bases = {analysis.base_of[storage] for storage in dropped}
        recomputed: set[int] = set()
        added: set[int] = set()
        todo = list(dropped_bases)
        while todo:
            node = todo.pop()
            if node in recomputed or (node in live and node not in dropped_bases):
                continue
            storages, is_recomputed = results[node]
            if not is_recomputed:
                if not storages or storages & dropped:
                    return None
                added |= storages
                continue
            recomputed.add(node)
            todo += analysis.backward_reads[node]
        reallocated = {s for node in recomputed for s in analysis.allocated.get(node, ())} & saved
        if (dropped | reallocated) & (analysis.live_to_end | analysis.must_be_saved):
            return None
        if reallocated <= dropped:
            return recomputed, dropped, added
        dropped = dropped | reallocated


@once_per_graph
def _results(graph: JointGraph, flops: tuple) -> list[tuple[frozenset[int], bool]]:
    """By node of the forward: the storages whose base tensor it is, and whether recomputing them is allowed."""
    analysis, results = graph.analysis, []
    for node in range(graph.boundary):
        storages = frozenset(s for s in analysis.storages(node, again=True) if analysis.base_of.get(s) == node)
        producers = {node, *(graph.storages[s].producer for s in storages)}
        is_recomputed = not any(flops[producer] or producer in analysis.not_recomputable for producer in producers)
        results.append((storages, is_recomputed))
    return results
