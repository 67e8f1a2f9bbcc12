"""`ackpt.batches`: batches as large as the budget allows, and equal numbers of them on every rank."""

import random

import pytest
import torch
from conftest import raises
from torch import nn

import ackpt

LENGTHS = [random.Random(0).randint(2, 40) for _ in range(60)]


def model():
    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def batch(size, length):
    return torch.zeros(size, length, dtype=torch.long)


def measured(size, length):
    one, inputs = model(), batch(size, length)
    return ackpt.measure(lambda: one(inputs).sum().backward(), resident=[one, inputs], warmup=0).peak_bytes


@pytest.mark.parametrize("recompute", [False, True])
def test_batches_fill_the_budget(recompute):
    made = [*ackpt.batches(model(), LENGTHS, budget="60kB", batch=batch, recompute=recompute)]
    assert sorted(index for each in made for index in each) == [*range(60)]
    shapes = sorted({(len(each), max(LENGTHS[index] for index in each)) for each in made}, key=lambda shape: -shape[1])
    if not recompute:
        assert all(measured(*shape) <= 60_000 for shape in shapes)
        assert all(measured(size + 1, length) > 60_000 for size, length in shapes[:-1])
    without = ackpt.batches(model(), LENGTHS, budget="60kB", batch=batch)
    assert len(made) <= len(without)


def test_every_rank_has_as_many_steps_and_their_tokens():
    ranks = [ackpt.batches(model(), LENGTHS, budget="60kB", batch=batch, ranks=4, rank=rank) for rank in range(4)]
    for epoch in (0, 1):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        steps = [*zip(*ranks, strict=True)]
        assert sorted(index for step in steps for each in step for index in each) == [*range(60)]
        tokens = [sum(LENGTHS[index] for each in step for index in each) for step in steps]
        assert all(sampler.items == tokens and len(sampler) == len(steps) for sampler in ranks)
    assert [*ranks[0]] != [*ackpt.batches(model(), LENGTHS, budget="60kB", batch=batch, ranks=4)]  # of epoch 0


def test_a_loader_takes_it():
    sampler = ackpt.batches(model(), LENGTHS, budget="60kB", batch=batch)
    loader = torch.utils.data.DataLoader(LENGTHS, batch_sampler=sampler, collate_fn=list)
    assert sum(map(sum, loader)) == sum(LENGTHS)


def test_bad_arguments_have_one_error_each():
    raises(
        ackpt.BudgetError,
        "one sequence of length 40 needs",
        lambda: ackpt.batches(model(), [3, 40], budget="9kB", batch=batch),
    )
    raises(ValueError, "each rank needs", lambda: ackpt.batches(model(), [3], budget="9kB", batch=batch, ranks=2))
    loader = torch.utils.data.DataLoader([1, 2])
    for given in (loader, iter(loader)):
        raises(TypeError, r"next\(iter\(loader\)\)", lambda given=given: ackpt.apply_budget(model(), given, budget=0.9))
    for call in (ackpt.trace, ackpt.compile):
        raises(TypeError, r"next\(iter\(loader\)\)", lambda call=call: call(model(), loader))
