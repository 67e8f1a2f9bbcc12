"""`ackpt.batches`: a sampler whose batches fill a budget by predicted bytes, from the predictions of `ackpt.fits`."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler

from .lengths import AUTO, NONE, TOKENS, check_lengths, quiet, steps_of


class Batches(Sampler[list[int]]):
    """The result of `ackpt.batches`: lists of indices of sequences, in an order that `set_epoch` changes.

    ``items``: for each step of the epoch, the tokens of all ranks, by which to divide a sum of losses; `len` is the
    number of steps, which is the same on every rank.

    Example:
        >>> from ackpt.planner.workloads.batches import Batches
        >>> steps = [[[0, 2], [1]], [[3], [4]]]
        >>> sampler = Batches(steps, lengths=[5, 9, 4, 2, 2], rank=1, seed=0)
        >>> len(sampler), sorted(sampler), sorted(sampler.items)
        (2, [[1], [4]], [4, 18])
    """

    def __init__(self, groups: list[list[list[int]]], lengths: Sequence[int], rank: int, seed: int):
        self._groups, self._lengths, self._rank, self._seed = groups, lengths, rank, seed
        self.items: list[int] = []
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle the steps, as every rank does for this `epoch`."""
        self._steps: list[list[list[int]]] = random.Random(self._seed + epoch).sample(self._groups, len(self._groups))
        self.items = [sum(self._lengths[index] for batch in step for index in batch) for step in self._steps]

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([step[self._rank] for step in self._steps])


def batches(
    model: nn.Module,
    lengths: Sequence[int],
    *,
    budget: int | str,
    batch: Callable[[int, int], Any] | None = None,
    device: str | None = None,
    optimizer: torch.optim.Optimizer | str | None = None,
    accumulation: bool = False,
    recompute: bool = False,
    ranks: int = 1,
    rank: int = 0,
    seed: int = 0,
) -> Batches:
    """Return a sampler of batches, each as large as the budget allows by its predicted peak.

    Sequences of similar length share a batch, padded to the longest.

    Args:
        model, batch, device, optimizer, accumulation: as in `ackpt.fits`.
        lengths: the length of every sequence of the data set, by its index.
        budget: bytes of the whole peak, such as ``"20GiB"``.
        recompute: whether steps are planned within the budget, as with ``ackpt.apply_budget(..., dynamic=True)``;
            batches are then larger, and each step recomputes more.
        ranks, rank: the number of ranks that share the batches, and the rank that this sampler is for. All ranks get
            the same number of batches.
        seed: the seed of the order of steps.

    Raises:
        BudgetError: if one sequence does not fit.
        ValueError, TypeError, TraceError: as `ackpt.fits`; also for fewer sequences than ranks.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 1))
        >>> batch = lambda size, length: torch.zeros(size, length, dtype=torch.long)
        >>> sampler = ackpt.batches(model, [3, 9, 5, 4, 8, 2], batch=batch, budget="4kB")
        >>> sorted(map(sorted, sampler)), sum(sampler.items)
        ([[0, 2, 3], [1], [4], [5]], 31)
    """
    if not 0 <= rank < ranks or len(lengths) < ranks:
        raise ValueError(f"rank={rank} of ranks={ranks} with {len(lengths)} sequences: each rank needs at least one")
    steps, positions = steps_of(model, batch, device, budget, optimizer, accumulation)
    check_lengths(lengths, (TOKENS, max(lengths)), positions, "lengths[{}]".format)
    policy = AUTO if recompute else NONE
    made, rest = [], sorted(range(len(lengths)), key=lambda index: -lengths[index])
    with quiet():
        while rest:
            count = steps.most_sequences(policy, lengths[rest[0]], len(rest))
            made.append(rest[:count])
            rest = rest[count:]
    while len(made) % ranks:  # halves of the largest batches, so that every rank has as many
        at = max(range(len(made)), key=lambda place: len(made[place]))
        middle = len(made[at]) // 2
        made[at : at + 1] = [made[at][:middle], made[at][middle:]]
    return Batches([made[at : at + ranks] for at in range(0, len(made), ranks)], lengths, rank, seed)
