"""Binomial checkpointing: the fewest forward steps that reverse a chain of equal steps with so many snapshots.

Griewank and Walther 2000, "Algorithm 799: revolve" (doi:10.1145/347837.347846). A snapshot is the state before a step,
from which the step and all after it can be run again; **the state before the first step counts as one of them**
(others do not count it). To reverse a step is to run it from the state before it and to go back at once.

Optimal where all steps cost the same, all states are of one size, the length is known, and what a step leaves for its
own backward need not be kept: it lives only while that step is reversed. For chains whose steps differ, or where a
step's activations may be kept, see `rotor`.
"""

from __future__ import annotations

from math import comb


def beta(snapshots: int, repeats: int) -> int:
    """The most steps that `snapshots` snapshots can reverse with no step run forward more than `repeats` times.

    The run that belongs to a step's reversal is not one of them. Proposition 1 of the paper.

    Example:
        >>> beta(2, 2)
        6
    """
    return comb(snapshots + repeats, snapshots) if repeats >= 0 else 0


def advances(steps: int, snapshots: int) -> int:
    """Least number of plain forward steps that reverse `steps` steps; every step's reversal runs it once more.

    The least of ``j + advances(steps - j, snapshots - 1) + advances(j, snapshots)`` over the place j of the next
    snapshot, in closed form.

    Example:
        >>> advances(4, 2), advances(1000, 10)
        (4, 3636)
    """
    _check(steps, snapshots)
    repeats = _repeats(steps, snapshots)
    return repeats * steps - beta(snapshots + 1, repeats - 1)


def schedule(steps: int, snapshots: int) -> list[tuple[str, int] | tuple[str, int, int]]:
    """The actions that reverse `steps` steps, in order; states are numbered from 0, the state before the first step.

    ``("save", i)``: keep state i, which is at hand; it replaces a snapshot that is not loaded again. ``("load", i)``:
    take state i from its snapshot. ``("advance", i, j)``: run from state i to state j. ``("step", i)``: run step i
    from state i - 1 and reverse it.

    Example:
        >>> schedule(2, 1)
        [('save', 0), ('advance', 0, 1), ('step', 2), ('load', 0), ('step', 1)]
    """
    _check(steps, snapshots)
    actions: list[tuple[str, int] | tuple[str, int, int]] = [("save", 0)]
    at_hand: int | None = 0
    todo = [(0, steps, snapshots)]  # stretches from a saved state, and how many snapshots they have, that one included
    while todo:
        start, end, free = todo.pop()
        if at_hand != start:
            actions.append(("load", start))
        if end - start == 1:
            actions.append(("step", end))
            at_hand = None
            continue
        middle = start + _furthest(end - start, free)
        actions.append(("advance", start, middle))
        at_hand = middle
        if end - middle > 1:
            actions.append(("save", middle))
        todo += [(start, middle, free), (middle, end, free - 1)]
    return actions


def _furthest(steps: int, snapshots: int) -> int:
    """The longest of the first stretches with which the number of advances is least."""
    if snapshots == 1:
        return steps - 1
    repeats = _repeats(steps, snapshots)
    return min(beta(snapshots, repeats - 1), steps - beta(snapshots - 1, repeats - 1))


def _repeats(steps: int, snapshots: int) -> int:
    """How often some step must run forward."""
    repeats = 0
    while beta(snapshots, repeats) < steps:
        repeats += 1
    return repeats


def _check(steps, snapshots) -> None:
    for what, number in (("steps", steps), ("snapshots", snapshots)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{what} must be a whole number, at least 1; got {number!r}")
