"""What can be done with one block: which of its results to save, and what each choice takes and costs.

The choices are found by dropping, again and again, the unit that frees most bytes per added cost.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from ackpt.capture.analysis import Facts
from ackpt.capture.joint_graph import BACKWARD, FORWARD
from ackpt.planning.schedule import missing_for, recompute_late

from .blocks import Block


@dataclass(frozen=True)
class Option:
    """One choice for one block.

    ``saved``: storages of its inside that its forward leaves for its backward; ``saved_bytes`` of them;
    ``forward_peak``, ``backward_peak``: most bytes that live beside what the block is given, while it runs;
    ``cost``: of what its backward runs again.
    """

    saved: frozenset[int]
    saved_bytes: int
    forward_peak: int
    backward_peak: int
    cost: float


class Local:
    """One block's forward and backward, walked for a choice of what is saved."""

    def __init__(self, known: Facts, block: Block, pinned, costs, workspace):
        self.known, self.block, self.costs, self.workspace = known, block, costs, workspace
        nodes = known.graph.nodes
        inside = set(block.forward)
        reads = {source for place in (*block.forward, *block.backward) for source in nodes[place].inputs}
        # What comes from other blocks: their outputs, which live beside this block, and gradients, which it uses up.
        own = {s for place in inside for s in known.born.get(place, ())}
        others = {
            s for s in reads if nodes[s].phase == FORWARD and s not in inside and not own & set(nodes[s].storages)
        }
        self.given = {*known.given, *(known.cover[s] for s in pinned), *others}
        self.given |= {cover for place in others for cover in _covers(known, place)}
        gradients = {s for s in reads if nodes[s].phase != FORWARD} - set(block.backward) - set(known.given)
        self.free = {s for place in self.given for s in nodes[place].storages}
        self.incoming = {s for place in gradients for s in nodes[place].storages} - self.free
        self.given |= gradients
        self.needed_later = _read_later(known, block)

    def option(self, saved: frozenset[int]) -> Option:
        """What saving `saved` means, less those that come along anyway when their siblings are recomputed."""
        known, block = self.known, self.block
        order: list[int] = []
        again: set[int] | None = None
        while again is None or again & saved:
            saved = saved - (again or set())
            order = self._order(saved)
            runs = [node for node in order if known.graph.nodes[node].phase == FORWARD]
            again = {s for node in runs for s in known.born.get(node, ())}
        cost = sum(self.costs[node] for node in runs)
        backward_peak = self._peak(order, saved | block.output | self.incoming, self.needed_later, True)
        forward_peak = self._peak(list(block.forward), frozenset(), saved | block.output, False)
        return Option(saved, sum(known.bytes[s] for s in saved), forward_peak, backward_peak, cost)

    def _order(self, saved) -> list[int]:
        """The backward, each missing value recomputed right before it is read."""
        live = self.given | {self.known.cover[s] for s in saved | self.block.output}
        return recompute_late(self.known, self.block.backward, live)

    def _peak(self, order, start, kept, is_backward: bool) -> int:
        """Most live bytes while `order` runs, `start` being there and `kept` staying."""
        known, nodes = self.known, self.known.graph.nodes
        touched = known.touched[BACKWARD if is_backward else FORWARD]
        last = {storage: at for at, place in enumerate(order) for storage in touched[place]}
        live = {s for s in start if s in last or s in kept}
        total = peak = sum(known.bytes[s] for s in live)
        for at, place in enumerate(order):
            again = is_backward and nodes[place].phase == FORWARD
            for storage in known.storages(place, again):
                if storage not in live and storage not in self.free and storage not in known.resident:
                    live.add(storage)
                    total += known.bytes[storage]
            peak = max(peak, total + self.workspace[place])
            for storage in touched[place]:
                if last[storage] == at and storage in live and storage not in kept:
                    live.discard(storage)
                    total -= known.bytes[storage]
        return peak

    def runs_again(self, kept: frozenset[int], wanted: frozenset[int]) -> list[int]:
        """Nodes of the forward that run again for the output and for `wanted`, `kept` being there."""
        live = self.given | {self.known.cover[s] for s in kept}
        return missing_for(self.known, [self.known.cover[s] for s in self.block.output | wanted], live)

    def run_cost(self, kept: frozenset[int], wanted: frozenset[int]) -> float:
        return sum(self.costs[node] for node in self.runs_again(kept, wanted))

    def brings_along(self, kept: frozenset[int], wanted: frozenset[int]) -> frozenset[int]:
        """What of `kept` would be there twice then: its siblings run again."""
        again = {s for node in self.runs_again(kept, wanted) for s in self.known.born.get(node, ())}
        return kept & again

    def stays(self, option: Option) -> Option:
        """`option` without what the block's output, when it runs again, brings along anyway."""
        while twice := self.brings_along(option.saved, frozenset()):
            option = self.option(option.saved - twice)
        return option

    @property
    def incoming_bytes(self) -> int:
        """Gradients that the backward begins with."""
        return sum(self.known.bytes[s] for s in self.incoming)

    @property
    def left_bytes(self) -> int:
        """Gradients of parameters that the backward leaves."""
        held = {s for s in self.needed_later if s in self.known.held}
        return sum(self.known.bytes[s] for s in held)

    def options(self) -> list[Option]:
        """Choices from saving all that the backward reads to saving nothing, none worse than another in everything."""
        known, block = self.known, self.block
        read = {
            s
            for place in block.backward
            for source in known.graph.nodes[place].inputs
            for s in known.graph.nodes[source].storages
        }
        unit_of = {storage: unit for unit in block.units for storage in unit}
        units = {unit_of[s] for s in read if s in unit_of}
        current = frozenset(s for unit in units for s in unit if s in read)
        found = [self.option(current)]
        queue: list[tuple[float, int, frozenset[int]]] = []
        for number, unit in enumerate(sorted(units, key=min)):
            heapq.heappush(queue, (self._worth(found[-1], current - unit)[0], number, unit))
        while queue:
            _, number, unit = heapq.heappop(queue)
            if not unit & current:
                continue
            worth, option = self._worth(found[-1], current - unit)
            if queue and worth > queue[0][0] * (1 - 1e-9 if queue[0][0] < 0 else 1 + 1e-9):
                heapq.heappush(queue, (worth, number, unit))
                continue
            current = option.saved
            found.append(option)
        return pareto(found)

    def _worth(self, before: Option, saved: frozenset[int]) -> tuple[float, Option]:
        """Minus the bytes that are freed for each added cost, and the option."""
        option = self.option(saved)
        added = max(option.cost - before.cost, 1e-3)
        return -(before.saved_bytes - option.saved_bytes) / added, option


def pareto(options: list[Option]) -> list[Option]:
    """Those that no other beats in saved bytes, both peaks and cost at once."""

    def values(o):
        return (o.saved_bytes, o.forward_peak, o.backward_peak, o.cost)

    kept: list[Option] = []
    for option in sorted(set(options), key=lambda o: (*values(o), sorted(o.saved))):
        if not any(all(a <= b for a, b in zip(values(other), values(option))) for other in kept):
            kept.append(option)
    return kept


def _covers(known: Facts, place: int):
    return [known.cover[s] for s in known.graph.nodes[place].storages if s in known.cover]


def _read_later(known: Facts, block: Block) -> set[int]:
    """Storages born in the block's backward that something after it needs: gradients."""
    graph = known.graph
    inside = set(block.backward)
    born = {s for place in block.backward for s in known.born.get(place, ())}
    found = {s for p in known.bw_outputs if p is not None for s in graph.nodes[p].storages}
    for node in graph.nodes[graph.boundary :]:
        if node.id not in inside:
            found.update(s for source in node.inputs for s in graph.nodes[source].storages)
    return born & found
