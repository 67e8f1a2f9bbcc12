"""Find the tensors at which a graph can be cut into blocks.

These are the articulation points of the forward graph, as in Chen et al. 2016 (arXiv:1604.06174). Only tensors on the
path of the gradient from the inputs to the outputs count: masks, positional tables and casts of weights may cross a
cut. So may long skip connections, if they are saved in every plan: `long_skips` finds them.
"""

from __future__ import annotations

from bisect import bisect_right

from ackpt.planner.capture.joint_graph import FORWARD, JointGraph

_LONG = 40  # storages allocated without a cut between them: more than a block has
_LEAST_SPAN = 8  # a long skip lives for at least one part in so many of such a stretch


def cut_points(graph: JointGraph, skips: frozenset[int] = frozenset()) -> list[int]:
    """Ids of the storages at which the forward can be cut, in execution order.

    `skips`: storages that may cross a cut. Where nothing else crosses, the last of them is the cut.
    """
    life = lifetimes(graph)
    by_birth = sorted(life, key=lambda storage: life[storage][0])
    cuts: list[int] = []
    live: list[int] = []
    index = 0
    for node in sorted(_on_gradient_path(graph)):
        while index < len(by_birth) and life[by_birth[index]][0] <= node:
            live.append(by_birth[index])
            index += 1
        live = [storage for storage in live if life[storage][1] > node]
        crossing = [storage for storage in live if storage not in skips] or live[-1:]
        if len(crossing) == 1 and crossing[0] not in cuts[-1:]:
            cuts.append(crossing[0])
    return cuts


def long_skips(graph: JointGraph) -> frozenset[int]:
    """Storages that keep a long stretch of `graph` from being cut; empty if there are none.

    Examples are an encoder's output in an encoder-decoder, the skip connections of a U-Net, and the features of a dense
    block. If they are saved in every plan, single tensors separate what comes before them from what comes after.
    """
    life = lifetimes(graph)
    by_life = sorted(life, key=lambda storage: life[storage])
    births = [life[storage][0] for storage in by_life]
    position = {storage: at for at, storage in enumerate(by_life)}
    ends = [0, *sorted(position[cut] for cut in cut_points(graph) if cut in position), len(by_life)]
    skips = set()
    for start, end in zip(ends, ends[1:]):
        if end - start > _LONG:
            for at in range(start, end):
                span = bisect_right(births, life[by_life[at]][1]) - at
                if span * _LEAST_SPAN >= end - start:
                    skips.add(by_life[at])
    return frozenset(skips)


def lifetimes(graph: JointGraph) -> dict[int, tuple[int, int]]:
    """``{storage: (node that allocates it, last forward node that reads it)}`` on the path of the gradient."""
    analysis = graph.analysis
    on_path = _on_gradient_path(graph)
    birth: dict[int, int] = {}
    last: dict[int, int] = {}
    for node in sorted(on_path):
        for storage in graph.nodes[node].storages:
            if storage not in analysis.resident:
                birth.setdefault(storage, node)
        for source in graph.nodes[node].inputs:
            if source in on_path:
                last.update({s: node for s in graph.nodes[source].storages if s in birth})
    return {s: (birth[s], last[s]) for s in birth if last.get(s, birth[s]) > birth[s]}


def _on_gradient_path(graph: JointGraph) -> set[int]:
    """Forward nodes that depend on both an input and a trained parameter, and that an output depends on."""
    analysis = graph.analysis
    trained = set(graph.gradients)
    of_input, of_parameter = set(), set()
    for node in graph.nodes:
        if node.phase != FORWARD:
            continue
        fx = analysis.fx[node.id]
        description = fx.meta.get("desc") if fx.op == "placeholder" else None
        is_input = type(description).__name__ == "PlainAOTInput"
        if is_input or any(source in of_input for source in node.inputs):
            of_input.add(node.id)
        if getattr(description, "target", None) in trained or any(source in of_parameter for source in node.inputs):
            of_parameter.add(node.id)
    return of_input & of_parameter & set(analysis.ancestors(node for node in analysis.outputs if node is not None))
