"""Policy ``revolve``: binomial checkpointing, the fewest forward steps that reverse a chain with some snapshots.

From Griewank and Walther 2000, "Algorithm 799: revolve" (doi:10.1145/347837.347846). A snapshot is the state before a
step, from which the step and all later ones can be recomputed. **The state before the first step counts as a snapshot**
(some authors do not count it). To reverse a step means to run it from the state before it and then its backward.

In the policy a block is a step. A budget takes the cheapest number of snapshots that fits; without a budget every state
is a snapshot. Optimal for equal blocks of which only one at a time is saved in full. For blocks that differ see
`rotor`.
"""

from __future__ import annotations

from math import comb

from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.policies.chains.blocks import BlockChain, Walk, fine_chain
from ackpt.planner.policies.search.frontier import cheapest
from ackpt.planner.schedule.schedule import Schedule

# Of a block on average: numbers of snapshots that need more are not tried, since the schedules are too long.
_MOST_RUNS = 16
# Up to so many snapshots every number is tried; above, they grow by an eighth: bounds the time of a search.
_ALL_TRIED = 64


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


def actions(steps: int, snapshots: int) -> list[tuple[str, int] | tuple[str, int, int]]:
    """The actions that reverse `steps` steps, in order; states are numbered from 0, the state before the first step.

    ``("save", i)``: store the current state i in place of a snapshot that is not loaded again. ``("load", i)``: restore
    state i from its snapshot. ``("advance", i, j)``: run from state i to state j. ``("step", i)``: run step i from
    state i - 1 and reverse it.

    Example:
        >>> actions(2, 1)
        [('save', 0), ('advance', 0, 1), ('step', 2), ('load', 0), ('step', 1)]
    """
    _check(steps, snapshots)
    taken: list[tuple[str, int] | tuple[str, int, int]] = [("save", 0)]
    current: int | None = 0
    todo = [(0, steps, snapshots)]  # stretches from a saved state, and their number of snapshots with that one
    while todo:
        start, end, free = todo.pop()
        if current != start:
            taken.append(("load", start))
        if end - start == 1:
            taken.append(("step", end))
            current = None
            continue
        middle = start + _furthest(end - start, free)
        taken.append(("advance", start, middle))
        current = middle
        if end - middle > 1:
            taken.append(("save", middle))
        todo += [(start, middle, free), (middle, end, free - 1)]
    return taken


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


def revolve(graph, profile, limit_bytes) -> Schedule:
    """The cheapest number of snapshots within the limit.

    Example:
        >>> import torch, ackpt
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)]
        >>> graph = ackpt.trace(torch.nn.Sequential(*layers), torch.ones(4, 8))
        >>> ackpt.plan(graph, "100%", revolve).recompute_flops
        0
    """
    if limit_bytes is None:
        return candidates(graph, profile)[-1]
    return cheapest(graph, profile, limit_bytes, candidates)


def candidates(graph: JointGraph, profile) -> list[Schedule]:
    """One schedule for every number of snapshots, up to one for each state."""
    chain = fine_chain(graph)
    count = len(chain.blocks)
    tried = [n for n in _growing(count) if advances(count, n) <= _MOST_RUNS * count]
    return [_binomial(graph, chain, snapshots) for snapshots in tried]


def _growing(most: int) -> list[int]:
    """Whole numbers from 1 to `most`: all of the small ones, then in steps of an eighth."""
    numbers = list(range(1, min(most, _ALL_TRIED) + 1))
    while numbers[-1] < most:
        numbers.append(min(most, numbers[-1] * 9 // 8))
    return numbers


def _binomial(graph: JointGraph, chain: BlockChain, snapshots: int) -> Schedule:
    walk = Walk(graph, chain)
    for kind, state, *to in actions(len(chain.blocks), snapshots):
        if kind == "advance":
            walk.save_output(to[0] - 1)
        elif kind == "step":
            if walk.in_first_forward:
                walk.save_all(state - 1)
            walk.reverse(state - 1, state - 1)
            if state > 1:  # no later step starts from the state before this one
                walk.free_output(state - 2)
    return walk.schedule()
