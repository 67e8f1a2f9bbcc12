"""A graph as a chain of blocks: forward nodes between two cuts, and the backward nodes that need them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ackpt.capture.analysis import Facts, facts
from ackpt.capture.joint_graph import FORWARD, JointGraph
from ackpt.planning.schedule import needed_forward

from .cut_points import cut_points

_LONG_RUN = 8  # blocks of single operations that are more than the beginning or the end of a model
_LONGEST = 128  # blocks of a chain of single operations


@dataclass(frozen=True)
class Block:
    """One block of a chain.

    ``forward``, ``backward``: node ids in order. ``output``: the storages it hands to the next block, the cut and what
    the same operation brings along; empty at the end of the chain. ``units``: groups of storages of its inside that
    have one fate each, in order.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.policies.chains import chain_walk
        >>> layers = (layer for _ in range(4) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh()))
        >>> graph = ackpt.trace(torch.nn.Sequential(*layers), torch.ones(64, 8))
        >>> first = chain_walk.steps(graph).blocks[0]
        >>> first.index, [graph.storages[storage].bytes for storage in first.output]
        (0, [2048])
    """

    index: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    output: frozenset[int]
    units: tuple[frozenset[int], ...]


@dataclass(frozen=True)
class Chain:
    """The blocks of a graph, and the storages that several of them read: those are saved whatever is planned.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.policies.chains import chain_walk
        >>> layers = (layer for _ in range(4) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh()))
        >>> chain = chain_walk.steps(ackpt.trace(torch.nn.Sequential(*layers), torch.ones(64, 8)))
        >>> [block.index for block in chain.blocks]
        [0, 1, 2, 3, 4, 5, 6, 7]
    """

    blocks: tuple[Block, ...]
    pinned: frozenset[int]


def chain(graph: JointGraph, beside: frozenset[int] = frozenset()) -> Chain:
    """Cut `graph` at its single-tensor cut points; stretches without anything to decide go with what is before them.

    In a long run of them, a chain of single operations, so many go together that `_LONGEST` blocks remain. `beside`:
    storages that stay beside the chain, saved whatever is planned.
    """
    cuts = inner_cuts(graph, beside)
    blocks = cut_at(graph, cuts, beside).blocks
    together = -(-len(blocks) // _LONGEST)
    kept: list[int] = []
    for has_units, run in itertools.groupby(range(len(cuts)), key=lambda index: bool(blocks[index + 1].units)):
        indices = list(run)
        if has_units:
            kept += indices
        elif len(indices) >= _LONG_RUN:
            kept += indices[::together]
    return cut_at(graph, [cuts[index] for index in kept], beside)


def inner_cuts(graph: JointGraph, beside: frozenset[int] = frozenset()) -> list[int]:
    """The single-tensor cut points of `graph` that can run again and that the caller does not hold, in their order."""
    known = facts(graph)
    held = _outputs(known)
    found = (cut for cut in cut_points(graph, beside) if graph.storages[cut].producer not in known.fixed)
    return [cut for cut in found if cut not in held]


def cut_at(graph: JointGraph, cuts: list[int], beside: frozenset[int] = frozenset()) -> Chain:
    """The blocks of `graph` between the storages `cuts`, some of its cut points in their order."""
    known = facts(graph)
    births = [graph.storages[cut].producer for cut in cuts]
    block_of = _forward_blocks(known, births)
    outputs = [siblings(known, birth) - beside for birth in births]
    handed = frozenset(s for group in outputs for s in group)
    pinned = _shared(known, handed, block_of, beside)
    backward = _backward_blocks(known, block_of, pinned, len(cuts))
    forward: list[list[int]] = [[] for _ in range(len(cuts) + 1)]
    for place in needed_forward(known, known.savable):
        forward[block_of[place]].append(place)
    blocks = []
    for index, places in enumerate(forward):
        groups = dict.fromkeys(siblings(known, place) for place in places)
        units = tuple(group for group in groups if group and not group & (pinned | handed))
        output = outputs[index] if index < len(cuts) else frozenset()
        blocks.append(Block(index, tuple(places), tuple(backward[index]), output, units))
    return Chain(tuple(blocks), pinned)


def siblings(known: Facts, place: int) -> frozenset[int]:
    """The storages that running `place` again brings along."""
    return frozenset(set(known.storages(place, again=True)) & known.born.get(place, frozenset()) & known.savable)


def _forward_blocks(known: Facts, births) -> dict[int, int]:
    """The block of every forward node: that after the last cut before it."""
    found, block = {}, 0
    for node in known.graph.nodes:
        if node.phase == FORWARD:
            found[node.id] = block
            while block < len(births) and births[block] <= node.id:
                block += 1
    return found


def _shared(known: Facts, handed, block_of, beside) -> frozenset[int]:
    """What is there anyway or cannot be recomputed, and what the forward reads outside of its block, cuts apart."""
    graph = known.graph
    found = {*_outputs(known), *beside}
    for node in graph.nodes:
        if node.id in known.effects and not node.is_random:
            continue
        for source in node.inputs:
            for storage in set(graph.nodes[source].storages) & known.savable:
                crosses = node.phase == FORWARD and block_of[graph.storages[storage].producer] != block_of[node.id]
                if crosses or source in known.fixed:
                    found.add(storage)
    found |= {s for storage in found for s in siblings(known, graph.storages[storage].producer)}
    return frozenset(found - handed)


def _outputs(known: Facts) -> frozenset[int]:
    """Storages that the caller holds all through backward anyway."""
    places = [place for place in known.outputs if place is not None]
    return frozenset({s for place in places for s in known.graph.nodes[place].storages} & known.savable)


def _backward_blocks(known: Facts, block_of, pinned, last: int) -> list[list[int]]:
    """Backward nodes by block: each belongs to the highest block that it or a later node still reads."""
    graph = known.graph
    order = known.needed_backward
    highest = 0
    found: list[list[int]] = [[] for _ in range(last + 1)]
    for place in reversed(order):
        for source in graph.nodes[place].inputs:
            node = graph.nodes[source]
            if node.phase == FORWARD and not set(node.storages) <= (pinned | known.resident):
                producers = [graph.storages[s].producer for s in node.storages if s not in known.resident]
                highest = max([highest, *(block_of[p] for p in producers)])
        found[highest].append(place)
    return [places[::-1] for places in found]
