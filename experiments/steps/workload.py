"""The Transformer of the experiment ``frontier``, and a model with its batch and blocks as all its steps take it."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ackpt.planner.workloads.step_request import autocast


@dataclass(frozen=True)
class Workload:
    """A model, the tensors it is called with, and the blocks that a user would checkpoint one by one.

    ``dtype``: that of autocast around the forward; none with float32.
    """

    model: nn.Module
    args: tuple[Tensor, ...]
    blocks: tuple[nn.Module, ...]
    dtype: str = "float32"

    @property
    def device(self) -> str:
        return self.args[0].device.type

    def autocast(self):
        """The autocast context for the forward and for its capture."""
        return autocast(self.device, self.dtype)

    def step(self, call, seed: int) -> None:
        """Run one forward and backward through `call`, which takes the arguments and returns the loss."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        with self.autocast():
            loss = call(*self.args)
        loss.backward()


def difference(mine, wanted) -> float:
    """The largest difference of two lists of tensors, relative to each tensor's largest element; 0.0: to the bit."""
    worst = 0.0
    for one, other in zip(mine, wanted, strict=True):
        other = other.to(one.device)
        if not torch.equal(one, other):
            one, other = one.double(), other.double()
            off = float((one - other).abs().max() / other.abs().max().clamp_min(1e-300))
            worst = max(worst, off if math.isfinite(off) else sys.float_info.max)
    return worst


class _Block(nn.Module):
    """One pre-norm layer of causal attention and MLP: [batch, tokens, dim] -> the same shape."""

    def __init__(self, dim: int, heads: int, ff_dim: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, ff_dim), nn.Linear(ff_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class _Transformer(nn.Module):
    """A Transformer of torch's own modules; its loss reads all logits at once."""

    def __init__(self, layers: int, dim: int, heads: int, ff_dim: int, vocab_size: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(_Block(dim, heads, ff_dim) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def transformer(batch_size: int, seq_len: int, vocab_size: int, **sizes: int) -> Workload:
    """A language model and its batch; `sizes`: layers, dim, heads and ff_dim."""
    model = _Transformer(vocab_size=vocab_size, **sizes)
    tokens = torch.randint(vocab_size, (batch_size, seq_len))
    return Workload(model, (tokens, tokens.roll(-1, 1)), tuple(model.blocks))
