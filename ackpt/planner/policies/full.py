"""Policy ``full``, per-block checkpointing: save single tensors between blocks, and recompute the inside of each block.

This is what ``torch.utils.checkpoint`` around every block does, but the blocks are found rather than given: they are
the stretches between cut points. The byte thresholds of Chen et al. 2016 (arXiv:1604.06174, algorithm 3) propose sets
of cut points to save. Every proposal is simulated; the lowest peak wins, then the least recomputation. Activations that
backward reads first are saved as well, as far as that does not raise the peak. Policy ``none``, the baseline, saves
everything that backward reads.
"""

from ackpt.planner.policies.chains.blocks import cut_points
from ackpt.planner.schedule.schedule import Schedule, everything, lower, recomputed
from ackpt.planner.schedule.simulator import peak_of

_THRESHOLD_GROWTH = 1.25  # from one byte threshold to the next (not tuned)


def none(graph, profile, limit_bytes) -> Schedule:
    """The schedule of policy ``none``."""
    return everything(graph)


def schedule(graph, profile, limit_bytes) -> Schedule:
    """The schedule of policy ``full``."""

    def rank(saved):
        candidate = lower(graph, saved)
        peak_bytes = peak_of(graph, candidate, profile.workspace_bytes)
        return peak_bytes, sum(profile.flops[node] for node in recomputed(graph, candidate))

    lowest = min(segmentations(graph), key=rank)
    return lower(graph, _with_the_end(graph, lowest, lambda saved: rank(saved)[0]))


def _with_the_end(graph, saved: frozenset[int], peak) -> frozenset[int]:
    """`saved` and the activations that backward reads first, as many as do not raise the peak."""
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
    """Storages to save: for each byte threshold, the ends of segments, and these with the last segment."""
    analysis = graph.analysis
    needed = everything(graph).saved
    fixed = {s for node in analysis.not_recomputable for s in graph.nodes[node].storages if s in analysis.savable}
    cuts = cut_points(graph)
    births = [graph.storages[cut].producer for cut in cuts]
    block_bytes = [0] * (len(cuts) + 1)  # that backward needs, between one cut and the next
    cut_bytes = [graph.storages[cut].bytes if cut in needed else 0 for cut in cuts]
    block_of = {}
    for storage in needed:
        block = sum(birth <= graph.storages[storage].producer for birth in births)
        if storage not in cuts:
            block_bytes[block] += graph.storages[storage].bytes
        block_of[storage] = block
    proposals: dict[frozenset[int], None] = {}
    for threshold in _thresholds([*block_bytes, *cut_bytes]):
        ends, running = [], 0
        for index in range(len(cuts)):
            running += block_bytes[index]
            if running > threshold:
                ends.append(index)
                running = 0
            else:  # a cut that is not saved is recomputed with the rest
                running += cut_bytes[index]
        last_segment = {s for s, block in block_of.items() if not ends or block > ends[-1]}
        saved = {cuts[index] for index in ends} | fixed
        proposals[frozenset(saved)] = None
        proposals[frozenset(saved | last_segment)] = None
    return list(proposals)


def _thresholds(sizes) -> list[int]:
    """Byte thresholds from the smallest size to their sum, each a fixed ratio above the one before."""
    total, least = sum(sizes), min((size for size in sizes if size), default=1)
    thresholds = [0]
    threshold = least
    while threshold < total:
        thresholds.append(threshold)
        threshold = max(threshold + 1, int(threshold * _THRESHOLD_GROWTH))
    return [*thresholds, total]
