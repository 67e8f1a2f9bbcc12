"""rotor: the fastest persistent schedule of a chain of stages that differ, within a budget.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019, "Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory" (arXiv:1911.13214), theorem 1, algorithms 1 and 2. A stage is run either with
everything that its backward reads kept, or for the sake of its output alone; a kept output is a checkpoint, from which
the stages after it can be run again.

Optimal among *persistent* schedules: what is kept stays until the backward that reads it. The best of all schedules can
be faster; finding it is NP-hard. Sizes are exact where the budget is at most `slots` units (the unit: the greatest
common divisor of whole sizes); otherwise sizes are rounded up to the budget's `slots`-th part, which keeps the budget
but may miss the fastest schedule; what needs least bytes is always found. A gradient has the size of the output it
belongs to.

It does not choose between several ways to run a stage, as `chain` does for ``policy="auto"``, and knows no gradients of
parameters. O(L^3 slots) time, O(L^2 slots) memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ackpt.errors import BudgetError
from ackpt.policies.search.rotor_table import Least, Table

FORWARD_ALL, FORWARD_CHECKPOINT, FORWARD_NONE = "forward all", "forward checkpoint", "forward none"
BACKWARD = "backward"


@dataclass(frozen=True)
class Chain:
    """One value per stage, first to last.

    ``forward``, ``backward``: times (uf, ub). ``output_bytes``: of the stage's output a (wa). ``saved_bytes``: of all
    that a forward leaves for its backward, the output included (wab). ``forward_overhead``, ``backward_overhead``:
    bytes that live beside this while the stage runs (of, ob). ``input_bytes``: of the chain's input (wa of stage 0).

    Raises:
        ValueError: for sequences of different lengths, no stage, negative values, or an output larger than what is
            saved with it.

    Example:
        >>> chain = Chain(forward=[2, 1], backward=[4, 2], output_bytes=[1, 2], saved_bytes=[2, 5])
        >>> solve(chain, budget=100).time
        9
    """

    forward: Sequence[float]
    backward: Sequence[float]
    output_bytes: Sequence[float]
    saved_bytes: Sequence[float]
    forward_overhead: Sequence[float] = ()
    backward_overhead: Sequence[float] = ()
    input_bytes: float = 0

    def __post_init__(self) -> None:
        stages = len(self.forward)
        for name in ("forward_overhead", "backward_overhead"):
            if not len(getattr(self, name)):
                object.__setattr__(self, name, (0,) * stages)
        for name in ("backward", "output_bytes", "saved_bytes", "forward_overhead", "backward_overhead"):
            if len(getattr(self, name)) != stages:
                raise ValueError(f"{name} has {len(getattr(self, name))} values for a chain of {stages} stages")
        if not stages:
            raise ValueError("a chain has at least one stage")
        if min(*self.forward, *self.backward, *self.sizes()) < 0:
            raise ValueError("times and bytes of a chain are not negative")
        for stage, (output, saved) in enumerate(zip(self.output_bytes, self.saved_bytes)):
            if saved < output:
                raise ValueError(f"stage {stage} saves {saved} bytes, less than the {output} of its output")

    def sizes(self) -> list[float]:
        overheads = (*self.forward_overhead, *self.backward_overhead)
        return [*self.output_bytes, *self.saved_bytes, *overheads, self.input_bytes]


class Operation(NamedTuple):
    """What is done with the stage `stage`, counted from 0.

    ``forward all``: keep what its backward reads; ``forward checkpoint``: keep its input and its output;
    ``forward none``: keep its output, the input is dropped; ``backward``: use up what was kept.

    Example:
        >>> solve(Chain([1], [2], [1], [1]), budget=10).operations
        (Operation(kind='forward all', stage=0), Operation(kind='backward', stage=0))
    """

    kind: str
    stage: int


@dataclass(frozen=True)
class Solution:
    """``time``: of all ``operations``, which are in order.

    Example:
        >>> found = solve(Chain([1] * 4, [1] * 4, [1] * 4, [1] * 4), budget=3)
        >>> found.time, sum(kind.startswith("forward") for kind, stage in found.operations)
        (13, 9)
    """

    time: float
    operations: tuple[Operation, ...]


def solve(chain: Chain, budget: float, slots: int = 500) -> Solution:
    """The fastest persistent schedule of `chain` within `budget` bytes.

    Args:
        chain: times and bytes of its stages.
        budget: bytes for all that lives at once, the chain's input included.
        slots: into how many parts the budget is divided where sizes are not solved exactly.

    Raises:
        BudgetError: if there is no schedule; names the smallest budget for which there is one.
        ValueError: for a budget or a number of slots that is not positive.

    Example:
        >>> found = solve(Chain([1] * 4, [1] * 4, [1] * 4, [1] * 4), 4)
        >>> found.time
        10
    """
    if not budget > 0:
        raise ValueError(f"a budget is a positive number of bytes, got {budget!r}")
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
        raise ValueError(f"slots must be a whole number, at least 1; got {slots!r}")
    least = Least(chain)
    needed = least.bytes + chain.input_bytes
    if budget < needed:
        raise BudgetError(
            f"no persistent schedule of this chain of {len(chain.forward)} stages fits into {budget} bytes; "
            f"the smallest budget that can be kept is {needed} bytes."
        )
    table = Table(chain, budget, slots, least)
    return _unrolled(chain, table.choose, table.capacity)


def front(chain: Chain, slots: int = 500) -> list[Solution]:
    """The fastest schedules for every budget, from the one that keeps everything to the one that needs least bytes.

    Example:
        >>> [found.time for found in front(Chain([1] * 4, [1] * 4, [1] * 4, [1] * 4))]
        [8, 10, 13]
    """
    least = Least(chain)
    table = Table(chain, inf, slots, least)
    times = table.costs[0][-1]
    steps = [left for left in range(table.capacity, -1, -1) if times[left] < (times[left - 1] if left else inf)]
    found = [_unrolled(chain, table.choose, left) for left in steps]
    return list(dict.fromkeys([*found, _unrolled(chain, table.choose, None)]))


def _unrolled(chain: Chain, choose: Callable, left: int | None) -> Solution:
    """What ``choose(first, last, left)`` decides, from the whole chain down to single stages.

    It returns the stage from which the backward of the last stages is made first, or None to keep all that the first
    stage saves, and what is left for the stages after it.
    """
    stages = len(chain.forward)
    operations: list[Operation] = []
    todo: list = [(0, stages - 1, left)]
    while todo:
        item = todo.pop()
        if isinstance(item, Operation):
            operations.append(item)
            continue
        first, last, left = item
        split, left_after = (None, 0) if first == last else choose(first, last, left)
        if split is None:
            operations.append(Operation(FORWARD_ALL, first))
            todo.append(Operation(BACKWARD, first))
            if first < last:
                todo.append((first + 1, last, left_after))
        else:
            operations.append(Operation(FORWARD_CHECKPOINT, first))
            operations += [Operation(FORWARD_NONE, stage) for stage in range(first + 1, split)]
            todo += [(first, split - 1, left), (split, last, left_after)]
    times = {BACKWARD: chain.backward}
    time = sum(times.get(kind, chain.forward)[stage] for kind, stage in operations)
    return Solution(time, tuple(operations))
