"""`Walk` turns the decisions of a policy for chains (run, save, drop and reverse blocks) into a schedule."""

from __future__ import annotations

from ackpt.capture.analysis import facts
from ackpt.capture.joint_graph import JointGraph
from ackpt.planning.schedule import Schedule, everything, recompute_late, scheduled

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
    """Builds a schedule block by block, forward and back through `chain`, the blocks of `graph`.

    Saving costs nothing before the first backward, since the first forward runs anyway.
    """

    def __init__(self, graph: JointGraph, chain: Chain):
        self.known, self.blocks = facts(graph), chain.blocks
        self.read = set(everything(graph).saved)
        self.saved = {*self.known.given, *(self.known.cover[s] for s in chain.pinned)}
        self.order: list[int] = []
        self.gradients: set[int] = set()  # backward nodes that have run; their results live until they are read

    @property
    def in_first_forward(self) -> bool:
        """Whether no backward has run yet."""
        return not self.gradients

    def save_output(self, block: int) -> None:
        """Run up to the end of `block` and save its output."""
        self.save(self.blocks[block].output)

    def save_all(self, block: int) -> None:
        """Run `block` and save its output and everything else that its backward reads."""
        inside = {s for unit in self.blocks[block].units for s in unit}
        self.save(inside & self.read | self.blocks[block].output)

    def save(self, storages) -> None:
        """Save `storages` until the backward of their block; after the first backward, recompute them for that."""
        bases = {self.known.cover[s] for s in storages}
        if not self.in_first_forward:
            self.order += recompute_late(self.known, sorted(bases), set(self.saved))
        self.saved |= bases

    def drop_output(self, block: int) -> None:
        """Free the output of `block`."""
        self.saved -= {self.known.cover[s] for s in self.blocks[block].output}

    def reverse(self, first: int, last: int) -> None:
        """Run the backward of the blocks `last` to `first`; each missing activation is recomputed once."""
        live = self.saved | self.gradients
        for block in reversed(self.blocks[first : last + 1]):
            self.order += recompute_late(self.known, block.backward, live)
            self.gradients.update(block.backward)
            self.saved -= {self.known.cover[s] for unit in (*block.units, block.output) for s in unit}

    def schedule(self) -> Schedule:
        return scheduled(self.known.graph, None, self.order)
