"""Steps of many sizes, compared with eager: results bit for bit, peaks byte for byte."""

import torch
from conftest import assert_as_eager, measured_step
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel


class Words(nn.Module):
    """Layers with dropout on tokens, and a loss: for tests in which it does not matter what the model computes."""

    def __init__(self, layers: int = 1):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        blocks = [(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(layers)]
        self.blocks = nn.Sequential(*(layer for block in blocks for layer in block))

    def forward(self, ids):
        x = self.blocks(self.embed(ids)) @ self.embed.weight.t()
        return F.cross_entropy(x.flatten(0, 1), ids.flatten())


def gpt2(**options) -> GPT2LMHeadModel:
    """A small GPT-2; `options` of its configuration."""
    config = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 64, **options}
    return GPT2LMHeadModel(GPT2Config(**config, bos_token_id=0, eos_token_id=0, use_cache=False))


def ids(batch, length):
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(batch * length))


def check(step, model, *args):
    """The step is bit-equal to eager and has the planned peak."""
    assert_as_eager(model, step, *args, loss=torch.sum)
    assert measured_step(model, step, *args, loss=torch.sum, warmup=0).peak_bytes == step.plan.peak_bytes
    model.zero_grad()


def kinds(step):
    return [event.kind for event in step.history]
