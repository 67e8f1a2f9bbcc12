"""Train a language model whose logits do not fit: its head runs in chunks of tokens.

python examples/chunked_head.py
"""

import copy

import torch
from torch import nn

import ackpt
from ackpt.metering.meter import memory_format

WORDS, WIDTH = 4096, 64


class LanguageModel(nn.Module):
    """A small language model that returns its loss."""

    def __init__(self, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits = self.head(self.layers(self.embedding(tokens), mask=mask))
        return nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten()
        )


torch.manual_seed(0)
model = LanguageModel()
baseline = copy.deepcopy(model)
tokens, targets = torch.randint(WORDS, (2, 4, 96))

# Without chunks, three tensors as large as the logits are live at once.
try:
    ackpt.apply_budget(model, (tokens, targets), budget=0.45)
except ackpt.BudgetError as error:
    assert error.least_bytes is not None
    print(f"without chunks: {memory_format(error.least_bytes)} at least")
else:
    raise AssertionError("the budget was expected to be infeasible")

step = ackpt.apply_budget(model, (tokens, targets), budget=0.45, chunk_head=True)
print(step.plan.note)


def train():
    model.zero_grad()
    model(tokens, targets).backward()


measured = ackpt.measure(train, resident=[model, tokens, targets], warmup=0, repeats=0)
assert measured.dynamic_peak_bytes <= 0.45 * step.plan.baseline_dynamic_peak_bytes
print(
    f"in chunks: {memory_format(measured.peak_bytes)}, {step.plan.cost:.1%} more time"
)

# The gradients are sums over chunks. They differ from the baseline's by roundings.
baseline(tokens, targets).backward()
largest = 0.0
for one, other in zip(model.parameters(), baseline.parameters()):
    assert one.grad is not None and other.grad is not None
    difference = (one.grad - other.grad).abs().max() / other.grad.abs().max()
    largest = max(largest, difference.item())
assert 0 < largest < 1e-5
print(f"the largest difference of a gradient is {largest:.1e} of its largest element")
