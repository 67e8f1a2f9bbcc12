"""Convert blocks to stages of the chain table, with their options and partial savings."""

from __future__ import annotations

from dataclasses import dataclass

from ackpt.planner.capture.joint_graph import Analysis

from .block_options import BlockStep, Option, options_of_blocks
from .blocks import BlockChain
from .chain_table import Partial, Stage

_SHARES = (1 / 8, 1 / 4, 1 / 2)  # of the bytes inside all blocks, which partials save
_PRICES = 64  # prices of a byte that are tried


@dataclass(frozen=True)
class _PartialOption:
    """An option as a partial; ``cost``: of recomputing the block's output and of its backward."""

    option: Option
    cost: float


def stages(analysis: Analysis, chain: BlockChain, cost, workspace) -> list[Stage]:
    """One stage of the chain table for each block of `chain`."""
    steps = [BlockStep(analysis, block, chain.pinned, cost, workspace) for block in chain.blocks]
    options = options_of_blocks(analysis.graph, chain, tuple(cost), tuple(workspace))
    choices = [
        [
            _PartialOption(option, option.cost + step.recompute_cost(option.saved, frozenset()))
            for option in map(step.without_duplicates, step_options)
        ]
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
            incoming_bytes=step.incoming_bytes,
            gradient_bytes=step.parameter_gradient_bytes,
        )
        for index, (block, step) in enumerate(zip(chain.blocks, steps))
    ]


def _partial(step: BlockStep, part: Option, options: list[Option]) -> Partial:
    extending, run_costs = [], []
    for option in options:
        if option.saved >= part.saved and not step.allocated_twice(part.saved, option.saved):
            extending.append(option)
            run_costs.append(step.recompute_cost(part.saved, option.saved))
    return Partial(
        option=part,
        options=tuple(extending),
        run_costs=tuple(run_costs),
        forward_cost=step.recompute_cost(part.saved, frozenset()),
    )


def _least(options: list[Option]) -> Option:
    """The option that saves least."""
    return min(options, key=lambda option: (option.saved_bytes, option.backward_peak, option.cost))


def _rows_by_share(choices: list[list[_PartialOption]]) -> list[list[Option]]:
    """For each share the row of options, one per block, whose saved bytes come closest to it."""
    all_bytes = sum(max(choice.option.saved_bytes for choice in block_choices) for block_choices in choices)
    picks = rows_by_price(
        [[(choice.cost, choice.option.saved_bytes) for choice in block_choices] for block_choices in choices]
    )
    rows = [[block_choices[index].option for block_choices, index in zip(choices, row)] for row in picks]
    sizes = [(sum(option.saved_bytes for option in row), row) for row in rows]
    by_size: dict[int, list[Option]] = {}
    for share in _SHARES:
        size, row = min(sizes, key=lambda pair: abs(pair[0] - share * all_bytes))
        if 0 < size < all_bytes:
            by_size[size] = row
    return list(by_size.values())


def rows_by_price(choices: list[list[tuple[float, int]]]) -> list[tuple[int, ...]]:
    """For falling prices of a saved byte, the index of every block's cheapest choice at that price, without repeats.

    `choices`: for every block its choices as (cost, saved bytes).
    """
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
