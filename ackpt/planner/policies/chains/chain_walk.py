"""`Walk` builds a schedule from decisions about blocks (run, save, free, reverse)."""

from __future__ import annotations

from ackpt.planner.capture.joint_graph import JointGraph, once_per_graph
from ackpt.planner.schedule.late_orders import LateOrders
from ackpt.planner.schedule.schedule import Schedule, everything, recompute_late, scheduled

from .blocks import BlockChain


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
        self._late_orders, self._own_bases = _late_orders(graph, chain), _own_bases(graph, chain)
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
        live = self._live
        freed: set[int] = set()
        for block in reversed(self.blocks[first : last + 1]):
            order = self._late_orders[block.index].order(live)
            freed.update(set(order).difference(live, block.backward), self._own_bases[block.index])
            live.update(order)
            self.order += order
            self.in_first_forward &= not block.backward
        self.saved -= freed
        live -= freed

    def schedule(self) -> Schedule:
        """The schedule of everything so far."""
        return scheduled(self.analysis.graph, None, self.order)


@once_per_graph
def _late_orders(graph: JointGraph, chain: BlockChain) -> list[LateOrders]:
    """Of the backward of every block."""
    return [LateOrders(graph.analysis, block.backward) for block in chain.blocks]


@once_per_graph
def _own_bases(graph: JointGraph, chain: BlockChain) -> list[frozenset[int]]:
    """The base tensors of the storages of every block, as node ids."""
    base_of = graph.analysis.base_of
    return [frozenset(base_of[s] for unit in (*block.units, block.output) for s in unit) for block in chain.blocks]
