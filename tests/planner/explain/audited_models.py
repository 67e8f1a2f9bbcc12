"""A network of blocks that any tool may checkpoint, small models of libraries, and what an audit of them finds."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ackpt

WIDTH = 32


class Block(nn.Module):
    def __init__(self, *middle, width=WIDTH):
        super().__init__()
        self.up, self.middle = nn.Linear(width, 4 * width), nn.Sequential(*(middle or (nn.GELU(),)))
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.middle(self.up(x)))


class Net(nn.Module):
    """Blocks, each called by ``run(block, x)``."""

    def __init__(self, run, blocks=4, make=Block):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 8)
        self.run = run

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x).square().mean()


def plain(block, x):
    return block(x)


by_torch = functools.partial(checkpoint, use_reentrant=False)

by_reentrant = functools.partial(checkpoint, use_reentrant=True)


def batch(rows=64):
    return torch.randn(rows, WIDTH)


def kinds(*args, **kwargs):
    return [finding.kind for finding in ackpt.audit(*args, compare_budget=False, **kwargs).findings]


def only(*args, **kwargs):
    """The only finding."""
    (finding,) = ackpt.audit(*args, compare_budget=False, **kwargs).findings
    return finding


class Custom(nn.Module):
    """As a library wraps a function that it makes: neither a module nor a method of one."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        def forward_of(block):
            return lambda *inputs: block(*inputs)

        for block in self.blocks:
            x = checkpoint(forward_of(block), x, use_reentrant=False)
        return x.square().mean()


def llama(**options):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, attention_dropout=0.1, **options)
    return transformers.LlamaForCausalLM(config).train()


def tokens():
    ids = torch.randint(64, (2, 16))
    return {"input_ids": ids, "labels": ids}


def lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)).train()
