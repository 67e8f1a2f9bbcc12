"""The blocks of a graph as the recursion over the chain sees them: ways to run each, and what may stay of it."""

from __future__ import annotations

from dataclasses import dataclass

from ackpt.capture.analysis import Facts

from .block_options import Local, Option
from .blocks import Chain
from .chain_table import Partial, Stage

# What stays of blocks that are run for a later output: shares of the bytes of all their insides.
_SHARES = (1 / 8, 1 / 4, 1 / 2)
_PRICES = 64  # prices of a byte that are tried for each share


@dataclass(frozen=True)
class _Way:
    """An option as something that stays: its cost is that of running the block again and of its backward."""

    option: Option
    cost: float


def stages(known: Facts, found: Chain, cost, workspace) -> list[Stage]:
    locals_ = [Local(known, block, found.pinned, cost, workspace) for block in found.blocks]
    options = [local.options() for local in locals_]
    ways = [
        [_Way(option, option.cost + local.run_cost(option.saved, frozenset())) for option in map(local.stays, own)]
        for local, own in zip(locals_, options)
    ]
    # Empty results, as batch norms save in evaluation, are saved for nothing, but must not be there twice either.
    rows = [[local.stays(_bare(own)) for local, own in zip(locals_, options)], *_chosen(ways)]
    return [
        Stage(
            partials=tuple(_partial(local, row[index], options[index]) for row in rows),
            output_bytes=sum(known.bytes[s] for s in block.output),
            incoming_bytes=local.incoming_bytes,
            gradient_bytes=local.left_bytes,
        )
        for index, (block, local) in enumerate(zip(found.blocks, locals_))
    ]


def _partial(local: Local, part: Option, options: list[Option]) -> Partial:
    more = [
        option for option in options if option.saved >= part.saved and not local.brings_along(part.saved, option.saved)
    ]
    return Partial(
        option=part,
        options=tuple(more),
        run_costs=tuple(local.run_cost(part.saved, option.saved) for option in more),
        forward_cost=local.run_cost(part.saved, frozenset()),
    )


def _bare(options: list[Option]) -> Option:
    """The option that saves least."""
    return min(options, key=lambda option: (option.saved_bytes, option.backward_peak, option.cost))


def _chosen(ways: list[list[_Way]]) -> list[list[Option]]:
    """For some prices of a byte, the option of every block that is cheapest then; a price for every share."""
    everything = sum(max(way.option.saved_bytes for way in own) for own in ways)
    rows = by_price([[(way.cost, way.option.saved_bytes) for way in own] for own in ways])
    found = [[own[index].option for own, index in zip(ways, row)] for row in rows]
    sizes = [(sum(option.saved_bytes for option in row), row) for row in found]
    picked: dict[int, list[Option]] = {}
    for share in _SHARES:
        size, row = min(sizes, key=lambda pair: abs(pair[0] - share * everything))
        if 0 < size < everything:
            picked[size] = row
    return list(picked.values())


def by_price(ways: list[list[tuple[float, int]]]) -> list[tuple[int, ...]]:
    """For falling prices of a byte the way of every block that is cheapest then, of ways with a cost and bytes."""
    price = max((cost / max(1, size) for own in ways for cost, size in own), default=0.0)
    found: dict[tuple[int, ...], None] = {}
    for _ in range(_PRICES):
        worth = [[(cost + price * size, size, index) for index, (cost, size) in enumerate(own)] for own in ways]
        found.setdefault(tuple(min(own)[-1] for own in worth))
        price *= 2.0 ** (-1 / 2)
    return list(found)
