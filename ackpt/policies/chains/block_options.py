"""The options of one block: which of its activations to save, and the peaks and the cost of each choice.

`BlockStep.options` finds them greedily: it starts from saving everything that the block's backward reads, and drops one
unit (the activations of one operation) after the other, always the one that frees most bytes per added cost.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from ackpt.capture.analysis import Analysis
from ackpt.capture.joint_graph import BACKWARD, FORWARD
from ackpt.planning.schedule import missing_for, recompute_late
from ackpt.policies.search.frontier import undominated

from .blocks import Block


@dataclass(frozen=True)
class Option:
    """One choice for one block; sizes in bytes.

    ``saved``: storages inside the block that its forward saves for its backward, ``saved_bytes`` of them.
    ``forward_peak``, ``backward_peak``: the dynamic peak of each pass without the activations of other blocks.
    ``cost``: of what its backward recomputes.
    """

    saved: frozenset[int]
    saved_bytes: int
    forward_peak: int
    backward_peak: int
    cost: float


class BlockStep:
    """The forward and backward of one block, simulated for any choice of what is saved."""

    def __init__(self, analysis: Analysis, block: Block, pinned, costs, workspace):
        self.analysis, self.block, self.costs, self.workspace = analysis, block, costs, workspace
        nodes = analysis.graph.nodes
        inside = set(block.forward)
        reads = {source for node in (*block.forward, *block.backward) for source in nodes[node].inputs}
        # Other blocks give it their outputs, which live while this block runs, and gradients, which it uses up.
        allocated = {s for node in inside for s in analysis.allocated.get(node, ())}
        others = {
            node
            for node in reads
            if nodes[node].phase == FORWARD and node not in inside and not allocated & set(nodes[node].storages)
        }
        self.given = {*analysis.sources, *_bases(analysis, pinned), *others}
        self.given |= {base for node in others for base in _bases(analysis, nodes[node].storages)}
        gradients = (
            {node for node in reads if nodes[node].phase != FORWARD} - set(block.backward) - set(analysis.sources)
        )
        self.outside = {s for node in self.given for s in nodes[node].storages}
        self.incoming = {s for node in gradients for s in nodes[node].storages} - self.outside
        self.given |= gradients
        self.gradients = _read_later(analysis, block)

    def option(self, saved: frozenset[int]) -> Option:
        """The option that saves `saved`, except storages that recomputing their siblings allocates anyway."""
        analysis, block = self.analysis, self.block
        order: list[int] = []
        reallocated: set[int] | None = None
        while reallocated is None or reallocated & saved:
            saved = saved - (reallocated or set())
            order = recompute_late(analysis, block.backward, self.given | _bases(analysis, saved | block.output))
            runs = [node for node in order if analysis.graph.nodes[node].phase == FORWARD]
            reallocated = {s for node in runs for s in analysis.allocated.get(node, ())}
        cost = sum(self.costs[node] for node in runs)
        backward_peak = self._peak(order, saved | block.output | self.incoming, self.gradients, True)
        forward_peak = self._peak(list(block.forward), frozenset(), saved | block.output, False)
        return Option(saved, sum(analysis.bytes[s] for s in saved), forward_peak, backward_peak, cost)

    def _peak(self, order: list[int], start, end, is_backward: bool) -> int:
        """The peak while `order` runs; the storages `start` are live before it and `end` after it."""
        analysis, nodes = self.analysis, self.analysis.graph.nodes
        touched = analysis.accessed[BACKWARD if is_backward else FORWARD]
        last = {storage: at for at, node in enumerate(order) for storage in touched[node]}
        live = {s for s in start if s in last or s in end}
        total = peak = sum(analysis.bytes[s] for s in live)
        for at, node in enumerate(order):
            is_recomputed = is_backward and nodes[node].phase == FORWARD
            for storage in analysis.storages(node, is_recomputed):
                if storage not in live and storage not in self.outside and storage not in analysis.resident:
                    live.add(storage)
                    total += analysis.bytes[storage]
            peak = max(peak, total + self.workspace[node])
            for storage in touched[node]:
                if last[storage] == at and storage in live and storage not in end:
                    live.discard(storage)
                    total -= analysis.bytes[storage]
        return peak

    def _recomputed(self, saved: frozenset[int], wanted: frozenset[int]) -> list[int]:
        """Forward nodes that are recomputed for the block's output and the storages `wanted` if `saved` are saved."""
        live = self.given | _bases(self.analysis, saved)
        return missing_for(self.analysis, _bases(self.analysis, self.block.output | wanted), live)

    def recompute_cost(self, saved: frozenset[int], wanted: frozenset[int]) -> float:
        """The cost of recomputing the block's output and the storages `wanted` if `saved` are saved."""
        return sum(self.costs[node] for node in self._recomputed(saved, wanted))

    def allocated_twice(self, saved: frozenset[int], wanted: frozenset[int]) -> frozenset[int]:
        """The storages of `saved` that recomputing the output and `wanted` allocates again, with their siblings."""
        recomputed = self._recomputed(saved, wanted)
        return saved & {s for node in recomputed for s in self.analysis.allocated.get(node, ())}

    def without_duplicates(self, option: Option) -> Option:
        """`option` without the storages that recomputing the block's output allocates anyway."""
        while duplicates := self.allocated_twice(option.saved, frozenset()):
            option = self.option(option.saved - duplicates)
        return option

    @property
    def incoming_bytes(self) -> int:
        """Bytes of the gradients that the backward begins with."""
        return sum(self.analysis.bytes[s] for s in self.incoming)

    @property
    def parameter_gradient_bytes(self) -> int:
        """Bytes of the gradients of parameters that the backward leaves."""
        return sum(self.analysis.bytes[s] for s in self.gradients & self.analysis.live_to_end)

    def options(self) -> list[Option]:
        """The options from saving everything that the backward reads to saving nothing, without dominated ones."""
        nodes, block = self.analysis.graph.nodes, self.block
        read = {s for node in block.backward for source in nodes[node].inputs for s in nodes[source].storages}
        unit_of = {storage: unit for unit in block.units for storage in unit}
        units = {unit_of[s] for s in read if s in unit_of}
        saved = frozenset(s for unit in units for s in unit if s in read)
        options = [self.option(saved)]
        queue: list[tuple[float, int, frozenset[int]]] = []
        for number, unit in enumerate(sorted(units, key=min)):
            heapq.heappush(queue, (self._rank(options[-1], saved - unit)[0], number, unit))
        while queue:
            _, number, unit = heapq.heappop(queue)
            if not unit & saved:
                continue
            rank, option = self._rank(options[-1], saved - unit)
            # The rank may have changed since it was queued; the margin ignores rounding.
            if queue and rank > queue[0][0] * (1 - 1e-9 if queue[0][0] < 0 else 1 + 1e-9):
                heapq.heappush(queue, (rank, number, unit))
                continue
            saved = option.saved
            options.append(option)
        return undominated(sorted(set(options), key=lambda option: sorted(option.saved)), _values)

    def _rank(self, before: Option, saved: frozenset[int]) -> tuple[float, Option]:
        """Minus the freed bytes per added cost, and the option that saves only `saved`."""
        option = self.option(saved)
        added = max(option.cost - before.cost, 1e-3)
        return -(before.saved_bytes - option.saved_bytes) / added, option


def _values(option: Option) -> tuple[float, ...]:
    return option.saved_bytes, option.forward_peak, option.backward_peak, option.cost


def _bases(analysis: Analysis, storages) -> set[int]:
    """The base tensors of `storages`, as node ids."""
    return {analysis.base_of[s] for s in storages if s in analysis.base_of}


def _read_later(analysis: Analysis, block: Block) -> set[int]:
    """Storages allocated in the block's backward that something after it reads: gradients."""
    graph = analysis.graph
    inside = set(block.backward)
    allocated = {s for node in block.backward for s in analysis.allocated.get(node, ())}
    read = {s for node in analysis.bw_outputs if node is not None for s in graph.nodes[node].storages}
    for node in graph.nodes[graph.boundary :]:
        if node.id not in inside:
            read.update(s for source in node.inputs for s in graph.nodes[source].storages)
    return allocated & read
