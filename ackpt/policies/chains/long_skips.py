"""Long skips: values that live beside the chain, so that what lies between their birth and their last use is one too.

The encoder's output in an encoder-decoder, the skips of a U-Net, the features of a dense block: while they live, no
single tensor separates what is before from what is after. Where they are saved whatever is planned, one does.
"""

from __future__ import annotations

from bisect import bisect_right

from ackpt.capture.joint_graph import JointGraph

from .cut_points import cut_points, lifetimes

_LONG = 40  # storages that are born without a cut between them: more than a block has
_SHARE = 8  # a skip lives for at least this part of such a stretch


def long_skips(graph: JointGraph) -> frozenset[int]:
    """Storages that keep long stretches of `graph` from being cut; empty where there is none."""
    life = lifetimes(graph)
    order = sorted(life, key=lambda storage: life[storage])
    births = [life[storage][0] for storage in order]
    place = {storage: number for number, storage in enumerate(order)}
    ends = [0, *sorted(place[cut] for cut in cut_points(graph) if cut in place), len(order)]
    found = set()
    for start, end in zip(ends, ends[1:]):
        if end - start > _LONG:
            for number in range(start, end):
                lives_for = bisect_right(births, life[order[number]][1]) - number
                if lives_for * _SHARE >= end - start:
                    found.add(order[number])
    return frozenset(found)
