"""Train on batches of many lengths within one budget in bytes.

python examples/variable_lengths.py
"""

import copy

import torch
from torch import nn

import ackpt
from ackpt.metering.meter import memory_format

BUDGET = "5MiB"


class LanguageModel(nn.Module):
    """A transformer encoder that returns its loss."""

    def __init__(self, words=512, width=64, depth=1):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layers = (
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.1, batch_first=True
            )
            for _ in range(depth)
        )
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(width, words)

    def forward(self, tokens, padding):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padding)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def batch(length, size=8):
    tokens = torch.randint(512, (size, length))
    padding = torch.zeros(size, length, dtype=torch.bool)
    padding[0, length // 2 :] = True
    return tokens, padding


def gradients(model, step, inputs):
    torch.manual_seed(1)
    model.zero_grad()
    step(*inputs).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def measure_peak(model, step, inputs):
    """The peak of one forward and backward in bytes."""

    def run():
        model.zero_grad()
        step(*inputs).backward()

    measurement = ackpt.measure(run, resident=[model, *inputs], warmup=0, repeats=0)
    return measurement.peak_bytes


torch.manual_seed(0)
baseline = LanguageModel()
model = copy.deepcopy(baseline)
batches = [batch(length) for length in (32, 48, 17, 90)] + [batch(48, size=3)]

step = ackpt.compile(model, *batches[0], budget=BUDGET)  # the line to add
for inputs in batches:
    expected = gradients(baseline, baseline, inputs)
    assert all(map(torch.equal, expected, gradients(model, step, inputs)))
    peak = measure_peak(model, step, inputs)
    assert peak <= step.plan.peak_bytes <= 5 * 2**20
    shape, cost = list(inputs[0].shape), step.plan.cost
    print(f"{shape}: {memory_format(peak)}, recomputation costs {cost:.1%} of the step")

for event in step.history:
    print(f"{event.kind}: {event.cause}")
assert [event.kind for event in step.history].count("capture") == 1
print(f"gradients equal the baseline's to the last bit; every peak within {BUDGET}")
