"""A graph as a chain of blocks: where it can be cut, the blocks between the cuts, and schedules made block by block.

Cuts are the articulation points of the forward graph, as in Chen et al. 2016 (arXiv:1604.06174). Only tensors on the
path of the gradient from the inputs to the outputs count: masks, positional tables and casts of weights may cross a
cut. So may long skip connections, if they are saved in every plan: `long_skips` finds them. `fine_chain` cuts wherever
it can, for the policies that come from papers on chains; `coarse_chain` joins blocks that leave nothing to decide, for
``auto``, which looks at more choices per block.
"""

import itertools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from ackpt.planner.capture.joint_graph import FORWARD, Analysis, JointGraph
from ackpt.planner.schedule.schedule import Schedule, everything, needed_forward, recompute_late, scheduled, storages_of

_LONG = 40  # storages allocated without a cut between them: more than a block has
_LEAST_SPAN = 8  # a long skip lives for at least one part in so many of such a stretch (not tuned)
_LONG_RUN = 8  # successive blocks of single operations; shorter runs are the beginning or the end of a model
_MOST_BLOCKS = 128  # of a coarse chain of single operations: time and memory of the chain table grow with their square


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


@dataclass(frozen=True)
class Block:
    """One block of a chain.

    ``forward``, ``backward``: node ids in order. ``output``: the storages that the next block reads: the cut and its
    siblings, other results of the same operation; empty at the end of the chain. ``units``: the storages inside the
    block, grouped by the operation that allocates them; a group is saved or recomputed as a whole.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.policies.chains import blocks
        >>> graph = ackpt.trace(torch.nn.Sequential(*[torch.nn.Linear(8, 8), torch.nn.Tanh()] * 4), torch.ones(64, 8))
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
        >>> graph = ackpt.trace(torch.nn.Sequential(*[torch.nn.Linear(8, 8), torch.nn.Tanh()] * 4), torch.ones(64, 8))
        >>> chain = blocks.fine_chain(graph)
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
        >>> graph = ackpt.trace(torch.nn.Sequential(*[torch.nn.Linear(8, 8), torch.nn.Tanh()] * 4), torch.ones(64, 8))
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
    outputs = storages_of(graph, analysis.outputs) & analysis.savable
    cuts = (cut for cut in cut_points(graph, skips) if graph.storages[cut].producer not in analysis.not_recomputable)
    return [cut for cut in cuts if cut not in outputs]


def cut_at(graph: JointGraph, cuts: list[int], skips: frozenset[int] = frozenset()) -> BlockChain:
    """The blocks of `graph` between the storages `cuts`, some of its cut points in execution order."""
    analysis = graph.analysis
    births = [graph.storages[cut].producer for cut in cuts]
    ends = [*itertools.accumulate(births, max)]  # a block begins after the node that allocates a cut
    block_of = {node.id: bisect_left(ends, node.id) for node in graph.nodes[: graph.boundary]}
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


def _pinned(analysis: Analysis, outputs, block_of, skips) -> frozenset[int]:
    """Storages that are always saved: outputs of the model, `skips`, fixed ones, and those that other blocks read."""
    graph = analysis.graph
    pinned = storages_of(graph, analysis.outputs) & analysis.savable | skips
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


class Walk:
    """Builds a schedule block by block, forward and back through `chain`, the blocks of `graph`.

    ``saved``: nodes whose values backward can read. Saving costs nothing before the first backward, since the first
    forward runs anyway; later it recomputes what is missing.
    """

    def __init__(self, graph: JointGraph, chain: BlockChain):
        self.analysis, self.blocks = graph.analysis, chain.blocks
        self.read = set(everything(graph).saved)
        self.saved = {*self.analysis.sources, *(self.analysis.base_of[s] for s in chain.pinned)}
        self.order: list[int] = []
        self._live = set(self.saved)  # and the backward nodes that have run; their results live until they are read
        self.in_first_forward = True

    def save_output(self, block: int) -> None:
        """Run up to the end of `block` and save its output."""
        self.save(self.blocks[block].output)

    def save_all(self, block: int) -> None:
        """Run `block` and save its output and everything else that its backward reads."""
        inside = {s for unit in self.blocks[block].units for s in unit}
        self.save(inside & self.read | self.blocks[block].output)

    def save(self, storages) -> None:
        """Save `storages` until the backward of their block."""
        bases = {self.analysis.base_of[s] for s in storages}
        if not self.in_first_forward:
            self.order += recompute_late(self.analysis, sorted(bases), set(self.saved))
        self.saved |= bases
        self._live |= bases

    def free_output(self, block: int) -> None:
        """Free the output of `block`."""
        bases = {self.analysis.base_of[s] for s in self.blocks[block].output}
        self.saved -= bases
        self._live -= bases

    def reverse(self, first: int, last: int) -> None:
        """Run the backward of the blocks `last` to `first`; each missing activation is recomputed once."""
        freed: set[int] = set()
        for block in reversed(self.blocks[first : last + 1]):
            order = recompute_late(self.analysis, block.backward, self._live)
            freed.update(set(order).difference(block.backward))
            freed.update(self.analysis.base_of[s] for unit in (*block.units, block.output) for s in unit)
            self.order += order
            self.in_first_forward &= not block.backward
        self.saved -= freed
        self._live -= freed

    def schedule(self) -> Schedule:
        """The schedule of everything so far."""
        return scheduled(self.analysis.graph, None, self.order)
