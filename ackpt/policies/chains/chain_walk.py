"""What policies for chains decide, as an order of the graph's nodes: blocks are run, kept, dropped and reversed."""

from __future__ import annotations

from ackpt.capture.analysis import facts
from ackpt.capture.joint_graph import JointGraph
from ackpt.planning.schedule import Schedule, everything, missing, scheduled

from .blocks import Chain, cut_at, inner_cuts


def steps(graph: JointGraph, most: int | None = None) -> Chain:
    """`graph` cut at its single-tensor cut points; a block without an inside goes with one before it that has one.

    More than `most` blocks are joined, equally many neighbours at a time.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.policies.chains import chain_walk
        >>> layers = (layer for _ in range(4) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh()))
        >>> graph = ackpt.trace(torch.nn.Sequential(*layers), torch.ones(64, 8))
        >>> len(chain_walk.steps(graph).blocks), len(chain_walk.steps(graph, most=2).blocks)
        (8, 2)
    """
    cuts = inner_cuts(graph)
    found = cut_at(graph, cuts).blocks
    cuts = [cut for at, cut in enumerate(cuts) if found[at + 1].units or not found[at].units]
    joined = 1 if most is None else -(-(len(cuts) + 1) // most)
    return cut_at(graph, cuts[joined - 1 :: joined])


class Walk:
    """One way through a chain of blocks and back. What is kept before the first reversal costs nothing: it runs anyway.

    ``found``: the blocks of `graph`, from `steps`.
    """

    def __init__(self, graph: JointGraph, found: Chain):
        self.known, self.blocks = facts(graph), found.blocks
        self.read = set(everything(graph).saved)
        self.kept = {*self.known.given, *(self.known.cover[s] for s in found.pinned)}
        self.order: list[int] = []
        self.gradients: set[int] = set()  # backward nodes that have run; what they return stays until it is read

    def keep_output(self, block: int) -> None:
        """Run up to the end of `block` and keep what it hands on."""
        self._keep(self.blocks[block].output)

    def keep_all(self, block: int) -> None:
        """Run `block` and keep everything that its backward reads, its output too."""
        inside = {s for unit in self.blocks[block].units for s in unit}
        self._keep(inside & self.read | self.blocks[block].output)

    def drop_output(self, block: int) -> None:
        self.kept -= {self.known.cover[s] for s in self.blocks[block].output}

    def reverse(self, first: int, last: int) -> None:
        """Go back through the blocks `last` to `first`, from what is kept; what is computed again is so once."""
        if not self.gradients:
            self.keep_all(last)
        at_hand = self.kept | self.gradients
        for block in reversed(self.blocks[first : last + 1]):
            for place in block.backward:
                self._run(place, at_hand)
                self.gradients.add(place)
            self.kept -= {self.known.cover[s] for unit in (*block.units, block.output) for s in unit}

    def schedule(self) -> Schedule:
        return scheduled(self.known.graph, None, self.order)

    def _keep(self, storages) -> None:
        covers = {self.known.cover[s] for s in storages}
        if self.gradients:
            at_hand = set(self.kept)
            for cover in sorted(covers):
                self._run(cover, at_hand)
        self.kept |= covers

    def _run(self, place: int, at_hand: set[int]) -> None:
        for node in missing(self.known, place, at_hand):
            self.order.append(node)
            at_hand.add(node)
