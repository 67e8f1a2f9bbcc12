"""What the blocks of a BERT keep for backward, and what plans do with each of these activations."""

from __future__ import annotations

import re
from collections import defaultdict

from ackpt.planning.plan import SAVED, Activation, Plan

_BLOCK = re.compile(r"(?:.*\.)?blocks\.(\d+)(?:\.|$)")


def of_blocks(plan: Plan) -> dict[int, list[Activation]]:
    """``{block: its activations}``, in the order of the forward."""
    found = defaultdict(list)
    for activation in plan.activations:
        if block := _BLOCK.match(activation.module):
            found[int(block[1])].append(activation)
    return dict(found)


def saved_in(plans: dict[str, Plan]) -> list[dict]:
    """One row per activation of a block: its ``bytes``, and under every name the number of blocks that save it.

    Raises:
        ValueError: if the blocks do not keep the same.
    """
    rows: list[dict] = []
    for name, plan in plans.items():
        blocks = of_blocks(plan).values()
        try:
            places = list(zip(*blocks, strict=True))
        except ValueError as error:
            raise ValueError("the blocks keep different numbers of activations: they are not of one kind") from error
        if not rows:
            rows = [{"bytes": place[0].bytes} for place in places]
        if not places or any(a.bytes != row["bytes"] for row, place in zip(rows, places, strict=True) for a in place):
            raise ValueError("the blocks keep activations of different sizes: they are not of one kind")
        for row, place in zip(rows, places):
            row[name] = sum(activation.fate == SAVED for activation in place)
    return rows
