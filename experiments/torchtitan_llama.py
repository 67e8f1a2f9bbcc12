"""torchtitan's Llama with the loss of its training loop, for predictions of the peaks that torchtitan published.

Written from the model of pytorch/torchtitan at two dates. Until spring 2024 (``folded``) activations had two
dimensions inside the blocks, and the model returned float32 logits. Later, they have three, and the loop converts the
logits. At both dates, RMSNorm is not fused and rotary embeddings are complex. ``returns_logits``: the loop refers to
the logits during backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ackpt.planner.workloads.step_request import BUILT_IN, ids, require_positions


@dataclass(frozen=True)
class LlamaConfig:
    """Llama 2 7B by default."""

    dim: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 32
    ff_dim: int = 11008
    vocab_size: int = 32000
    positions: int = 65536  # rows of the table of rotary embeddings
    folded: bool = True
    returns_logits: bool = True


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotated(x: Tensor, table: Tensor) -> Tensor:
    """Queries or keys ``[batch, tokens, heads, head]``, rotated by complex numbers ``[tokens, head / 2]``."""
    numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * table[None, :, None]).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config, self.head = config, config.dim // config.heads
        self.wq = nn.Linear(config.dim, config.heads * self.head, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(config.heads * self.head, config.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        tokens, config = table.shape[0], self.config
        rows = x.numel() // (tokens * config.dim)
        q, k, v = (each.view(rows, tokens, -1, self.head) for each in (self.wq(x), self.wk(x), self.wv(x)))
        q, k = rotated(q, table), rotated(k, table)
        if (repeats := config.heads // config.kv_heads) > 1:
            k, v = (each[:, :, :, None].expand(-1, -1, -1, repeats, -1).flatten(2, 3) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()
        return self.wo(out.view(*x.shape[:-1], -1))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ff_dim, bias=False)
        self.w2 = nn.Linear(config.ff_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ff_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.attention, self.feed_forward = Attention(config), FeedForward(config)
        self.attention_norm, self.ffn_norm = RMSNorm(config.dim), RMSNorm(config.dim)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), table)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """The model and the loop's loss; returns the loss, and the logits if the loop refers to them in backward."""

    table: Tensor  # of rotary embeddings

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        half = config.dim // config.heads // 2
        self.register_buffer("table", torch.empty(config.positions, half, dtype=torch.complex64))
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor):
        config, h = self.config, self.tok_embeddings(tokens)
        h = h.view(-1, config.dim) if config.folded else h
        for layer in self.layers:
            h = layer(h, self.table[: tokens.shape[1]])
        h = self.norm(h)
        logits = self.output(h.view(*tokens.shape, config.dim))
        logits = logits.float() if config.folded else logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        return (loss, logits) if config.returns_logits else loss


def _tokens_and_labels(model, request):
    batch, length = request.tokens()
    require_positions(length, model.config.positions, "positions")
    return {"tokens": ids(batch, length), "labels": ids(batch, length)}


BUILT_IN["torchtitan-llama"] = (lambda: Llama(LlamaConfig()), Llama, _tokens_and_labels)
