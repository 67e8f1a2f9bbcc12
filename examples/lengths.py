"""Find out from the lengths of a data set which batches fit, before training on it.

python examples/lengths.py
"""

import random
from typing import Any

import torch
from torch import nn

import ackpt
from ackpt.metering.meter import memory_format

BUDGET = "6MiB"


class LanguageModel(nn.Module):
    """A transformer encoder that returns its loss."""

    def __init__(self, words=512, width=64):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.block(self.embedding(tokens))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def batch(size, length):
    """The arguments of the model for so many sequences, padded to one length."""
    return {"tokens": torch.zeros(size, length, dtype=torch.long)}


def measure_peak(step, inputs):
    """The peak of one forward and backward in bytes."""
    model.zero_grad()
    run = lambda: step(**inputs).backward()  # noqa: E731
    resident = [model, *inputs.values()]
    return ackpt.measure(run, resident=resident, warmup=0, repeats=0).peak_bytes


draw = random.Random(0)
lengths = [min(96, int(draw.lognormvariate(3, 0.6)) + 4) for _ in range(1000)]
model = LanguageModel()

found = ackpt.fits(model, lengths, batch_size=8, batch=batch, budget=BUDGET)
print(found)

baseline, plans = found.methods["none"], found.methods["auto"]
print(f"{baseline.random.exceeding} of {len(baseline.random.shapes)} batches exceed it")
assert plans.largest is not None and baseline.largest is not None
assert plans.largest >= baseline.largest  # with a plan, larger batches fit

# The worst batch, measured: the peak of the baseline, and that of the plan.
worst = batch(*baseline.random.worst)
expected = max(baseline.random.bytes)
example: Any = worst
peak = measure_peak(ackpt.compile(model, policy="none", **example), worst)
print(
    f"worst batch: {memory_format(peak)} measured, {memory_format(expected)} expected"
)
assert peak == expected
peak = measure_peak(ackpt.compile(model, budget=BUDGET, **example), worst)
print(f"with the plan: {memory_format(peak)}, within {BUDGET}")
assert peak <= 6 * 2**20
