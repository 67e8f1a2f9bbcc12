"""Where a graph can be cut into blocks: single tensors that all of the forward behind them depends on alone.

These are the articulation points of the forward graph, as in Chen et al. 2016 (arXiv:1604.06174). Only what carries
the gradient from the inputs to the outputs counts: masks, positional tables and casts of weights cross blocks freely.
"""

from __future__ import annotations

from ackpt.capture.analysis import facts
from ackpt.capture.joint_graph import FORWARD, JointGraph


def cut_points(graph: JointGraph, beside: frozenset[int] = frozenset()) -> list[int]:
    """Ids of the storages at which the forward can be cut, in their order.

    `beside`: storages that cross blocks freely as well; where nothing else crosses, one of them is the cut.
    """
    life = lifetimes(graph)
    by_birth = sorted(life, key=lambda storage: life[storage][0])
    places = sorted(_between_inputs_and_outputs(graph))
    cuts: list[int] = []
    current: list[int] = []
    index = 0
    for place in places:
        while index < len(by_birth) and life[by_birth[index]][0] <= place:
            current.append(by_birth[index])
            index += 1
        current = [storage for storage in current if life[storage][1] > place]
        crossing = [storage for storage in current if storage not in beside] or current[-1:]
        if len(crossing) == 1 and crossing[0] not in cuts[-1:]:
            cuts.append(crossing[0])
    return cuts


def lifetimes(graph: JointGraph) -> dict[int, tuple[int, int]]:
    """``{storage: (node that makes it, last node of the forward that reads it)}`` of those that carry the gradient."""
    known = facts(graph)
    on_path = _between_inputs_and_outputs(graph)
    born: dict[int, int] = {}
    last: dict[int, int] = {}
    for place in sorted(on_path):
        for storage in graph.nodes[place].storages:
            if storage not in known.resident:
                born.setdefault(storage, place)
        for source in graph.nodes[place].inputs:
            if source in on_path:
                last.update({s: place for s in graph.nodes[source].storages if s in born})
    return {s: (born[s], last[s]) for s in born if last.get(s, born[s]) > born[s]}


def _between_inputs_and_outputs(graph: JointGraph) -> set[int]:
    """Forward nodes that depend on both an input and a trained parameter, and that an output depends on."""
    known = facts(graph)
    nodes = graph.nodes
    trained = set(graph.gradients)
    of_input, of_parameter = set(), set()
    for node in nodes:
        if node.phase != FORWARD:
            continue
        what = known.fx[node.id].meta.get("desc") if known.fx[node.id].op == "placeholder" else None
        kind = type(what).__name__
        if kind == "PlainAOTInput" or any(source in of_input for source in node.inputs):
            of_input.add(node.id)
        if getattr(what, "target", None) in trained or any(source in of_parameter for source in node.inputs):
            of_parameter.add(node.id)
    needed: set[int] = set()
    todo = [place for place in known.outputs if place is not None]
    while todo:
        place = todo.pop()
        if place not in needed:
            needed.add(place)
            todo += nodes[place].inputs
    return of_input & of_parameter & needed
