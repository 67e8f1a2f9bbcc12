"""The algorithm of policy ``revolve``: the fewest forward steps that reverse a chain with a number of snapshots.

From Griewank and Walther 2000, "Algorithm 799: revolve" (doi:10.1145/347837.347846). A snapshot is the state before a
step, from which the step and all later ones can be recomputed. **The state before the first step counts as a snapshot**
(some authors do not count it). To reverse a step means to run it from the state before it and then its backward.

Optimal if all steps cost the same, all states have one size, the length is known, and the activations inside a step are
live only while that step is reversed. For chains whose steps differ, or whose activations may be saved, see `rotor`.
"""

from __future__ import annotations

from math import comb


def beta(snapshots: int, repeats: int) -> int:
    """The most steps that `snapshots` snapshots can reverse if no step runs forward more than `repeats` times.

    The forward run within a step's reversal does not count. Proposition 1 of the paper.

    Example:
        >>> beta(2, 2)
        6
    """
    return comb(snapshots + repeats, snapshots) if repeats >= 0 else 0


def advances(steps: int, snapshots: int) -> int:
    """The least number of forward steps that reverse `steps` steps, without the forward within each reversal.

    This is the minimum of ``j + advances(steps - j, snapshots - 1) + advances(j, snapshots)`` over the position j of
    the next snapshot, in closed form.

    Example:
        >>> advances(4, 2), advances(1000, 10)
        (4, 3636)
    """
    _check(steps, snapshots)
    repeats = _repeats(steps, snapshots)
    return repeats * steps - beta(snapshots + 1, repeats - 1)


def schedule(steps: int, snapshots: int) -> list[tuple[str, int] | tuple[str, int, int]]:
    """The actions that reverse `steps` steps, in order; states are numbered from 0, the state before the first step.

    ``("save", i)``: store the current state i in place of a snapshot that is not loaded again. ``("load", i)``: restore
    state i from its snapshot. ``("advance", i, j)``: run from state i to state j. ``("step", i)``: run step i from
    state i - 1 and reverse it.

    Example:
        >>> schedule(2, 1)
        [('save', 0), ('advance', 0, 1), ('step', 2), ('load', 0), ('step', 1)]
    """
    _check(steps, snapshots)
    actions: list[tuple[str, int] | tuple[str, int, int]] = [("save", 0)]
    current: int | None = 0
    todo = [(0, steps, snapshots)]  # stretches from a saved state, and their number of snapshots with that one
    while todo:
        start, end, free = todo.pop()
        if current != start:
            actions.append(("load", start))
        if end - start == 1:
            actions.append(("step", end))
            current = None
            continue
        middle = start + _furthest(end - start, free)
        actions.append(("advance", start, middle))
        current = middle
        if end - middle > 1:
            actions.append(("save", middle))
        todo += [(start, middle, free), (middle, end, free - 1)]
    return actions


def _furthest(steps: int, snapshots: int) -> int:
    """The length of the longest first stretch that minimizes the number of advances."""
    if snapshots == 1:
        return steps - 1
    repeats = _repeats(steps, snapshots)
    return min(beta(snapshots, repeats - 1), steps - beta(snapshots - 1, repeats - 1))


def _repeats(steps: int, snapshots: int) -> int:
    """The largest number of times that a step must run forward."""
    repeats = 0
    while beta(snapshots, repeats) < steps:
        repeats += 1
    return repeats


def _check(steps, snapshots) -> None:
    for name, number in (("steps", steps), ("snapshots", snapshots)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a whole number, at least 1; got {number!r}")
