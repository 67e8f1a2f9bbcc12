"""`Block`: a range of the forward between two cuts, with its backward.

`fine_chain` cuts wherever it can, for the policies that come from papers on chains; `coarse_chain` joins blocks that
leave nothing to decide, for ``auto``, which looks at more choices per block.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ackpt.planner.capture.joint_graph import FORWARD, Analysis, JointGraph
from ackpt.planner.schedule.schedule import needed_forward

from .cut_points import cut_points

_LONG_RUN = 8  # successive blocks of single operations; shorter runs are the beginning or the end of a model
_MOST_BLOCKS = 128  # of a coarse chain of single operations


@dataclass(frozen=True)
class Block:
    """One block of a chain.

    ``forward``, ``backward``: node ids in order. ``output``: the storages that the next block reads: the cut and its
    siblings, other results of the same operation; empty at the end of the chain. ``units``: the storages inside the
    block, grouped by the operation that allocates them; a group is saved or recomputed as a whole.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.policies.chains import blocks
        >>> layers = (layer for _ in range(4) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh()))
        >>> graph = ackpt.trace(torch.nn.Sequential(*layers), torch.ones(64, 8))
        >>> first = blocks.fine_chain(graph).blocks[0]
        >>> first.index, [graph.storages[storage].bytes for storage in first.output]
        (0, [2048])
    """

    index: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    output: frozenset[int]
    units: tuple[frozenset[int], ...]


@dataclass(frozen=True)
class BlockChain:
    """The blocks of a graph; ``pinned``: the storages that every plan saves, since several blocks read them.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.policies.chains import blocks
        >>> layers = (layer for _ in range(4) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh()))
        >>> chain = blocks.fine_chain(ackpt.trace(torch.nn.Sequential(*layers), torch.ones(64, 8)))
        >>> [block.index for block in chain.blocks]
        [0, 1, 2, 3, 4, 5, 6, 7]
    """

    blocks: tuple[Block, ...]
    pinned: frozenset[int]


def fine_chain(graph: JointGraph, most: int | None = None) -> BlockChain:
    """Cut `graph` at all single tensors; a block without an inside joins the block before it if that has one.

    If there are more than `most` blocks, equally many neighbors are joined.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.policies.chains import blocks
        >>> layers = (layer for _ in range(4) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh()))
        >>> graph = ackpt.trace(torch.nn.Sequential(*layers), torch.ones(64, 8))
        >>> len(blocks.fine_chain(graph).blocks), len(blocks.fine_chain(graph, most=2).blocks)
        (8, 2)
    """
    cuts = inner_cuts(graph)
    blocks = cut_at(graph, cuts).blocks
    cuts = [cut for at, cut in enumerate(cuts) if blocks[at + 1].units or not blocks[at].units]
    joined = 1 if most is None else -(-(len(cuts) + 1) // most)
    return cut_at(graph, cuts[joined - 1 :: joined])


def coarse_chain(graph: JointGraph, skips: frozenset[int] = frozenset()) -> BlockChain:
    """Cut `graph` at single tensors; every block without an inside joins the block before it.

    In a long run of such blocks, a chain of single operations, so many are joined that about `_MOST_BLOCKS` remain.
    `skips`: storages that may cross a cut and are always saved.
    """
    cuts = inner_cuts(graph, skips)
    blocks = cut_at(graph, cuts, skips).blocks
    joined = -(-len(blocks) // _MOST_BLOCKS)
    chosen: list[int] = []
    for has_units, run in itertools.groupby(range(len(cuts)), key=lambda index: bool(blocks[index + 1].units)):
        indices = list(run)
        if has_units:
            chosen += indices
        elif len(indices) >= _LONG_RUN:
            chosen += indices[::joined]
    return cut_at(graph, [cuts[index] for index in chosen], skips)


def inner_cuts(graph: JointGraph, skips: frozenset[int] = frozenset()) -> list[int]:
    """The cut points of `graph` that can be recomputed and that are not outputs, in execution order."""
    analysis = graph.analysis
    outputs = _outputs(analysis)
    cuts = (cut for cut in cut_points(graph, skips) if graph.storages[cut].producer not in analysis.not_recomputable)
    return [cut for cut in cuts if cut not in outputs]


def cut_at(graph: JointGraph, cuts: list[int], skips: frozenset[int] = frozenset()) -> BlockChain:
    """The blocks of `graph` between the storages `cuts`, some of its cut points in execution order."""
    analysis = graph.analysis
    births = [graph.storages[cut].producer for cut in cuts]
    block_of = _forward_blocks(analysis, births)
    outputs = [siblings(analysis, birth) - skips for birth in births]
    all_outputs = frozenset(s for group in outputs for s in group)
    pinned = _pinned(analysis, all_outputs, block_of, skips)
    backward = _backward_blocks(analysis, block_of, pinned, len(cuts))
    forward: list[list[int]] = [[] for _ in range(len(cuts) + 1)]
    for node in needed_forward(analysis, analysis.savable):
        forward[block_of[node]].append(node)
    blocks = []
    for index, nodes in enumerate(forward):
        groups = dict.fromkeys(siblings(analysis, node) for node in nodes)
        units = tuple(group for group in groups if group and not group & (pinned | all_outputs))
        output = outputs[index] if index < len(cuts) else frozenset()
        blocks.append(Block(index, tuple(nodes), tuple(backward[index]), output, units))
    return BlockChain(tuple(blocks), pinned)


def siblings(analysis: Analysis, node: int) -> frozenset[int]:
    """The savable storages that recomputing `node` allocates."""
    storages = set(analysis.storages(node, again=True)) & analysis.allocated.get(node, frozenset())
    return frozenset(storages & analysis.savable)


def _forward_blocks(analysis: Analysis, births) -> dict[int, int]:
    """``{forward node: its block}``; a block begins after the node that allocates a cut."""
    block_of, block = {}, 0
    for node in analysis.graph.nodes:
        if node.phase == FORWARD:
            block_of[node.id] = block
            while block < len(births) and births[block] <= node.id:
                block += 1
    return block_of


def _pinned(analysis: Analysis, outputs, block_of, skips) -> frozenset[int]:
    """Storages that are always saved: outputs of the model, `skips`, fixed ones, and those that other blocks read.

    The `outputs` of blocks are not among them.
    """
    graph = analysis.graph
    pinned = {*_outputs(analysis), *skips}
    for node in graph.nodes:
        if node.id in analysis.effects and not node.is_random:
            continue
        for source in node.inputs:
            for storage in set(graph.nodes[source].storages) & analysis.savable:
                crosses = node.phase == FORWARD and block_of[graph.storages[storage].producer] != block_of[node.id]
                if crosses or source in analysis.not_recomputable:
                    pinned.add(storage)
    pinned |= {s for storage in pinned for s in siblings(analysis, graph.storages[storage].producer)}
    return frozenset(pinned - outputs)


def _outputs(analysis: Analysis) -> frozenset[int]:
    """Storages of the model's outputs, which the caller holds during the backward."""
    outputs = [node for node in analysis.outputs if node is not None]
    return frozenset({s for node in outputs for s in analysis.graph.nodes[node].storages} & analysis.savable)


def _backward_blocks(analysis: Analysis, block_of, pinned, last: int) -> list[list[int]]:
    """Backward nodes by block: each belongs to the latest block of which it or a later node reads something."""
    graph = analysis.graph
    latest = 0
    backward: list[list[int]] = [[] for _ in range(last + 1)]
    for backward_node in reversed(analysis.needed_backward):
        for source in graph.nodes[backward_node].inputs:
            node = graph.nodes[source]
            if node.phase == FORWARD and not set(node.storages) <= (pinned | analysis.resident):
                producers = [graph.storages[s].producer for s in node.storages if s not in analysis.resident]
                latest = max([latest, *(block_of[producer] for producer in producers)])
        backward[latest].append(backward_node)
    return [nodes[::-1] for nodes in backward]
