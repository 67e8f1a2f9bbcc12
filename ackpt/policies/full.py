"""Checkpoint every block: keep single tensors between blocks, recompute the inside of each block when it is needed.

What `torch.utils.checkpoint` around every block does, without being told the blocks: they are found as the stretches
between cut points. Which of the cut points are kept is chosen by the byte-threshold sweep of Chen et al. 2016
(arXiv:1604.06174, algorithm 3), each candidate simulated; the lowest peak is taken, then the least recomputation. What
backward reads first is kept as well, as far as that does not raise the peak.
"""

from __future__ import annotations

from ackpt.capture.analysis import facts
from ackpt.planning.schedule import Schedule, everything, lower, recomputed
from ackpt.planning.simulator import peak_of
from ackpt.policies.chains.cut_points import cut_points


def schedule(graph, profile, limit_bytes) -> Schedule:
    def peak(saved):
        return peak_of(graph, lower(graph, saved), profile.workspace_bytes)

    def worth(saved):
        found = lower(graph, saved)
        taken = peak_of(graph, found, profile.workspace_bytes)
        return taken, sum(profile.flops[place] for place in recomputed(graph, found))

    best = min(segmentations(graph), key=worth)
    return lower(graph, _with_the_end(graph, best, peak))


def _with_the_end(graph, saved: frozenset[int], peak) -> frozenset[int]:
    """`saved` and what backward reads first, as far back as that does not raise the peak."""
    limit = peak(saved)
    rest = [s for s in everything(graph).saved if s not in saved]
    rest.sort(key=lambda storage: -graph.storages[storage].producer)
    size = 1
    while rest:  # in growing strides, since every trial is a simulation
        longer = saved | set(rest[:size])
        if peak(longer) <= limit:
            saved, rest, size = longer, rest[size:], 2 * size
        elif size > 1:
            size = 1
        else:
            rest = []
    return saved


def segmentations(graph) -> list[frozenset[int]]:
    """Sets of storages to save, one for each way in which a byte threshold cuts the chain of blocks."""
    known = facts(graph)
    needed = everything(graph).saved
    pinned = {s for place in known.fixed for s in graph.nodes[place].storages if s in known.savable}
    cuts = cut_points(graph)
    births = [graph.storages[cut].producer for cut in cuts]
    sizes = [0] * (len(cuts) + 1)  # bytes that backward needs, between one cut and the next
    own = [graph.storages[cut].bytes if cut in needed else 0 for cut in cuts]
    block_of = {}
    for storage in needed:
        block = sum(birth <= graph.storages[storage].producer for birth in births)
        if storage not in cuts:
            sizes[block] += graph.storages[storage].bytes
        block_of[storage] = block
    found: dict[frozenset[int], None] = {}
    for threshold in _thresholds([*sizes, *own]):
        kept, running = [], 0
        for index in range(len(cuts)):
            running += sizes[index]
            if running > threshold:
                kept.append(index)
                running = 0
            else:  # a cut that is not kept is recomputed with the rest
                running += own[index]
        inside = {s for s, block in block_of.items() if not kept or block > kept[-1]}
        saved = {cuts[index] for index in kept} | pinned
        found[frozenset(saved)] = None
        found[frozenset(saved | inside)] = None
    return list(found)


def _thresholds(sizes) -> list[int]:
    """From the smallest block to all of them, in steps that grow like the number of blocks of a segment."""
    total, least = sum(sizes), min((size for size in sizes if size), default=1)
    steps = [0]
    threshold = least
    while threshold < total:
        steps.append(threshold)
        threshold = max(threshold + 1, int(threshold * 1.25))
    return [*steps, total]
