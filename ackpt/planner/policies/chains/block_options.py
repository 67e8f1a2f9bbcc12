"""The options of one block: which of its activations to save, and the peaks and the cost of each choice.

`BlockStep.options` finds them greedily: it starts from saving everything that the block's backward reads, and drops one
unit (the activations of one operation) after the other, always the one that frees most bytes per added cost. `stages`
makes them the stages of the chain table.
"""

import heapq
from dataclasses import replace
from operator import attrgetter

import numpy as np

from ackpt.core.progress import counted
from ackpt.planner.capture.joint_graph import BACKWARD, FORWARD, Analysis, JointGraph, once_per_graph
from ackpt.planner.policies.chains.blocks import Block, BlockChain
from ackpt.planner.policies.chains.chain_table import Option, Partial, Stage
from ackpt.planner.policies.search.frontier import undominated
from ackpt.planner.schedule.schedule import (
    Uses,
    bases_of,
    missing_for,
    recompute_late,
    storages_of,
    unpacked_at_once,
    uses_of,
)

# Of the bytes inside all blocks, which partials save (not tuned; time grows with their number).
_SHARES = (1 / 8, 1 / 4, 1 / 2)
_PRICES = 64  # prices of a byte that are tried, each lower by the square root of 2: they span a factor of 4e9


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
        self.given = {*analysis.sources, *bases_of(analysis, pinned), *others}
        self.given |= {base for node in others for base in bases_of(analysis, nodes[node].storages)}
        gradients = (
            {node for node in reads if nodes[node].phase != FORWARD} - set(block.backward) - set(analysis.sources)
        )
        self.outside = {s for node in self.given for s in nodes[node].storages}
        self.incoming = {s for node in gradients for s in nodes[node].storages} - self.outside
        self.given |= gradients
        # Results of the block's backward that are read after it.
        returned, storages = storages_of(analysis.graph, analysis.bw_outputs), analysis.graph.storages
        ours = (s for node in block.backward for s in analysis.allocated.get(node, ()))
        self.gradients = {s for s in ours if s in returned or (storages[s].last_bw_access or 0) > block.backward[-1]}
        self._may_be_allocated = np.ones(len(analysis.bytes), dtype=bool)
        self._may_be_allocated[[*self.outside, *analysis.resident]] = False
        self._bytes, self._workspace = np.array(analysis.bytes), np.array(workspace)
        self._forward_uses = uses_of(analysis.graph, block.forward, FORWARD)

    def option(self, saved: frozenset[int]) -> Option:
        """The option that saves `saved`, except storages that recomputing their siblings allocates anyway."""
        analysis, block = self.analysis, self.block
        order: list[int] = []
        boundary = analysis.graph.boundary
        reallocated: set[int] | None = None
        while reallocated is None or reallocated & saved:
            saved = saved - (reallocated or set())
            live = self.given | bases_of(analysis, saved | block.output)
            order = unpacked_at_once(analysis.graph, recompute_late(analysis, block.backward, live))
            runs = [node for node in order if node < boundary]
            reallocated = {s for node in runs for s in analysis.allocated.get(node, ())}
        cost = sum(self.costs[node] for node in runs)
        uses = uses_of(analysis.graph, order, BACKWARD)
        backward_peak = self._peak(uses, order, saved | block.output | self.incoming, self.gradients)
        forward_peak = self._peak(self._forward_uses, list(block.forward), frozenset(), saved | block.output)
        return Option(saved, sum(analysis.bytes[s] for s in saved), forward_peak, backward_peak, cost)

    def _peak(self, uses: Uses, order: list[int], start, end) -> int:
        """The peak while `order` runs; the storages `start` are live before it and `end` after it."""
        size = self._bytes
        last = np.full(len(size), -1)
        last[uses.storages] = uses.positions
        born = np.full(len(size), -1)
        first_results = np.flatnonzero(uses.results & self._may_be_allocated[uses.storages])[::-1]
        born[uses.storages[first_results]] = uses.positions[first_results]
        at_end = np.array(sorted(end), dtype=np.int64)
        last[at_end] = len(order)
        at_start = np.array(sorted(start), dtype=np.int64)
        at_start = at_start[last[at_start] >= 0]
        born[at_start] = 0
        live = np.flatnonzero(born >= 0)
        changes = np.zeros(len(order) + 2, dtype=np.int64)
        np.add.at(changes, born[live], size[live])
        np.subtract.at(changes, last[live] + 1, size[live])
        totals = np.cumsum(changes)[: len(order)] + self._workspace[order]
        return int(max(size[at_start].sum(), totals.max(initial=0)))

    def again(self, saved: frozenset[int], wanted: frozenset[int] = frozenset()) -> tuple[float, frozenset[int]]:
        """The cost of recomputing the output and `wanted` if `saved` are saved; which of these it allocates again."""
        wanted_bases = bases_of(self.analysis, self.block.output | wanted)
        runs = missing_for(self.analysis, wanted_bases, self.given | bases_of(self.analysis, saved))
        producers, storages = set(runs), self.analysis.graph.storages
        return sum(self.costs[node] for node in runs), frozenset(s for s in saved if storages[s].producer in producers)

    def without_duplicates(self, option: Option) -> Option:
        """`option` without the storages that recomputing the block's output allocates anyway."""
        while duplicates := self.again(option.saved)[1]:
            option = self.option(option.saved - duplicates)
        return option

    def structure(self) -> tuple[tuple, tuple[int, ...]]:
        """All that the options depend on, with nodes and storages numbered by rank, and the storages by rank."""
        analysis, block = self.analysis, self.block
        nodes, reads, bases = analysis.graph.nodes, analysis.backward_reads, analysis.base_of
        may_run = sorted({*block.forward, *missing_for(analysis, block.backward, self.given)})
        involved = sorted({*may_run, *(source for node in may_run for source in reads[node])})
        rank = {node: number for number, node in enumerate(involved)}
        used = {s for node in involved for s in (*nodes[node].storages, *analysis.allocated.get(node, ()))}
        used.update(s for table in analysis.accessed.values() for node in may_run for s in table[node])
        storages = tuple(sorted(used))
        number = {storage: at for at, storage in enumerate(storages)}

        def numbers(some) -> tuple[int, ...]:
            return tuple(number[s] for s in some)

        unit_of = {storage: at for at, unit in enumerate(sorted(block.units, key=min)) for storage in unit}
        groups = (block.output, self.outside, self.incoming, self.gradients, analysis.resident)
        rows = [
            (
                nodes[node].phase,
                self.costs[node],
                self.workspace[node],
                tuple(rank[source] for source in reads[node]),
                numbers(analysis.storages(node)),
                numbers(analysis.storages(node, again=True)),
                numbers(sorted(analysis.allocated.get(node, ()))),
                numbers(analysis.accessed[FORWARD][node]),
                numbers(analysis.accessed[BACKWARD][node]),
            )
            for node in may_run
        ]
        structure = (
            tuple(rows),
            tuple((node in self.given, numbers(nodes[node].storages)) for node in involved),
            tuple(rank[node] for node in may_run),
            tuple(rank[node] for node in block.forward),
            tuple(rank[node] for node in block.backward),
            tuple(
                (analysis.bytes[s], rank.get(bases.get(s, -1)), unit_of.get(s), *(s in group for group in groups))
                for s in storages
            ),
        )
        return structure, storages

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
        values = attrgetter("saved_bytes", "forward_peak", "backward_peak", "cost")
        return undominated(sorted(options, key=lambda option: sorted(option.saved)), values)

    def _rank(self, before: Option, saved: frozenset[int]) -> tuple[float, Option]:
        """Minus the freed bytes per added cost, and the option that saves only `saved`."""
        option = self.option(saved)
        added = max(option.cost - before.cost, 1e-3)
        return -(before.saved_bytes - option.saved_bytes) / added, option


@once_per_graph
def options_of_blocks(graph: JointGraph, chain: BlockChain, costs: tuple, workspace: tuple) -> list[list[Option]]:
    """The options of every block of `chain`, found once for all blocks of one structure."""
    solved: dict[tuple, tuple[list[Option], tuple[int, ...]]] = {}
    options = []
    for block in counted(chain.blocks, "searching: block"):
        step = BlockStep(graph.analysis, block, chain.pinned, costs, workspace)
        structure, storages = step.structure()
        if structure not in solved:
            solved[structure] = step.options(), storages
        of_first, storages_of_first = solved[structure]
        storage_of = dict(zip(storages_of_first, storages))
        options.append([replace(option, saved=frozenset(storage_of[s] for s in option.saved)) for option in of_first])
    return options


def stages(analysis: Analysis, chain: BlockChain, cost, workspace) -> list[Stage]:
    """One stage of the chain table for each block of `chain`."""
    steps = [BlockStep(analysis, block, chain.pinned, cost, workspace) for block in chain.blocks]
    options = options_of_blocks(analysis.graph, chain, tuple(cost), tuple(workspace))
    choices = [  # with the cost of recomputing the block's output, too
        [(option.cost + step.again(option.saved)[0], option) for option in map(step.without_duplicates, step_options)]
        for step, step_options in zip(steps, options)
    ]
    # Empty activations, such as those of batch norms in evaluation, cost nothing to save; they must not be saved twice.
    rows = [
        [step.without_duplicates(_least(block_options)) for step, block_options in zip(steps, options)],
        *_rows_by_share(choices),
    ]
    return [
        Stage(
            partials=tuple(_partial(step, row[index], options[index]) for row in rows),
            output_bytes=sum(analysis.bytes[s] for s in block.output),
            incoming_bytes=sum(analysis.bytes[s] for s in step.incoming),
            gradient_bytes=step.parameter_gradient_bytes,
        )
        for index, (block, step) in enumerate(zip(chain.blocks, steps))
    ]


def _partial(step: BlockStep, part: Option, options: list[Option]) -> Partial:
    extending, run_costs = [], []
    for option in options:
        if option.saved >= part.saved:
            cost, twice = step.again(part.saved, option.saved)
            if not twice:
                extending.append(option)
                run_costs.append(cost)
    return Partial(
        option=part, options=tuple(extending), run_costs=tuple(run_costs), forward_cost=step.again(part.saved)[0]
    )


def _least(options: list[Option]) -> Option:
    """The option that saves least."""
    return min(options, key=lambda option: (option.saved_bytes, option.backward_peak, option.cost))


def _rows_by_share(choices: list[list[tuple[float, Option]]]) -> list[list[Option]]:
    """For each share the row of options, one per block, whose saved bytes come closest to it."""
    all_bytes = sum(max(option.saved_bytes for _, option in block_choices) for block_choices in choices)
    picks = rows_by_price([[(cost, option.saved_bytes) for cost, option in block_choices] for block_choices in choices])
    rows = [[block_choices[index][1] for block_choices, index in zip(choices, row)] for row in picks]
    sizes = [(sum(option.saved_bytes for option in row), row) for row in rows]
    by_size: dict[int, list[Option]] = {}
    for share in _SHARES:
        size, row = min(sizes, key=lambda pair: abs(pair[0] - share * all_bytes))
        if 0 < size < all_bytes:
            by_size[size] = row
    return list(by_size.values())


def rows_by_price(choices: list[list[tuple[float, int]]]) -> list[tuple[int, ...]]:
    """For falling prices of a saved byte, the index of every block's cheapest (cost, saved bytes), without repeats."""
    price = max((cost / max(1, size) for block_choices in choices for cost, size in block_choices), default=0.0)
    rows: dict[tuple[int, ...], None] = {}
    for _ in range(_PRICES):
        priced = [
            [(cost + price * size, size, index) for index, (cost, size) in enumerate(block_choices)]
            for block_choices in choices
        ]
        rows.setdefault(tuple(min(block_prices)[-1] for block_prices in priced))
        price *= 2.0 ** (-1 / 2)
    return list(rows)
