"""Language models of published measurements that are written in plain torch.

`gpt` is the GPT-2 of the repository LLMs-from-scratch, `course_transformer` the Transformer of an assignment of the
course CS336: both run the same operations as the originals.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .step import PublishedStep, default_dtype
from .training import trained


def gpt(
    *,
    batch: int,
    length: int = 1024,
    dim: int = 768,
    layers: int = 12,
    heads: int = 12,
    vocabulary: int = 50257,
    dtype: str = "float32",
    optimizer: str = "adamw",
    stored_mask: bool = True,
    torch_layers: bool = False,
    attention: str = "written-out",
) -> PublishedStep:
    """A step of GPT-2 small; the options are the stages of its optimization."""
    make_block = partial(_Block, dim, heads, length, stored_mask, torch_layers, attention)
    with default_dtype(getattr(torch, dtype)):
        model = _GPT(make_block, dim, layers, vocabulary, length, torch_layers)
    tokens, targets = (torch.empty(batch, length, dtype=torch.int64) for _ in range(2))

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return trained(model, loss, optimizer, (tokens, targets))


class _LayerNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normed = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normed + self.shift


class _Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


class _Attention(nn.Module):
    """Causal attention with dropout on the weights, written out, with the mask in a buffer or made in every call."""

    mask: Tensor | None

    def __init__(self, dim: int, heads: int, length: int, stored_mask: bool):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out, self.dropout = nn.Linear(dim, dim), nn.Dropout(0.1)
        self.register_buffer("mask", self._mask(length) if stored_mask else None)

    @staticmethod
    def _mask(length: int) -> Tensor:
        return torch.triu(torch.ones(length, length), diagonal=1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.query(x), self.key(x), self.value(x)
        q, k, v = (each.view(batch, length, self.heads, dim // self.heads).transpose(1, 2) for each in (q, k, v))
        scores = q @ k.transpose(2, 3)
        mask = self._mask(length) if self.mask is None else self.mask
        scores.masked_fill_(mask.bool()[:length, :length], -torch.inf)
        weights = self.dropout(torch.softmax(scores / (dim // self.heads) ** 0.5, dim=-1))
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, dim))


class _FusedAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, length, dim))


class _Block(nn.Module):
    def __init__(self, dim, heads, length, stored_mask, torch_layers, attention):
        super().__init__()
        norm, gelu = (nn.LayerNorm, nn.GELU(approximate="tanh")) if torch_layers else (_LayerNorm, _Gelu())
        fused = attention == "fused"
        self.attention = _FusedAttention(dim, heads) if fused else _Attention(dim, heads, length, stored_mask)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), gelu, nn.Linear(4 * dim, dim))
        self.first, self.second, self.dropout = norm(dim), norm(dim), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.attention(self.first(x))) + x
        return self.dropout(self.mlp(self.second(x))) + x


class _GPT(nn.Module):
    def __init__(self, make_block, dim: int, layers: int, vocabulary: int, length: int, torch_layers: bool):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(make_block() for _ in range(layers)))
        self.norm = (nn.LayerNorm if torch_layers else _LayerNorm)(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(self.dropout(x))))


def course_transformer(
    *, batch: int, length: int, dim: int, ff: int, layers: int, heads: int, mode: str, dtype: str
) -> PublishedStep:
    """Forward, or forward and backward. The last logits remain between steps, and their graph unless backward ran."""
    model = _CourseTransformer(dim, ff, layers, heads, length, vocabulary=10_000)
    tokens, targets = (torch.empty(batch, length, dtype=torch.int64) for _ in range(2))
    last: list[Tensor] = []

    def forward() -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(tokens)
            return [logits] if mode == "forward" else [logits, _course_loss(logits.flatten(0, 1), targets.flatten())]

    def run():
        last[:] = forward()
        if mode == "full":
            last[1].backward()
            model.zero_grad()

    return PublishedStep(run, (model, tokens, targets))


def _course_loss(logits: Tensor, targets: Tensor) -> Tensor:
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    total = shifted.exp().sum(dim=-1).log()
    return (-(shifted.gather(dim=-1, index=targets.unsqueeze(-1)).squeeze(-1) - total)).mean()


class _CourseNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        root = torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-5)
        return ((x / root) * self.gain).to(dtype)


class _CourseBlock(nn.Module):
    cos: Tensor
    sin: Tensor
    mask: Tensor

    def __init__(self, dim: int, ff: int, heads: int, length: int):
        super().__init__()
        self.heads = heads
        self.first, self.second = _CourseNorm(dim), _CourseNorm(dim)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(dim, ff, bias=False) for _ in range(2))
        self.down = nn.Linear(ff, dim, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(length, dim // heads))
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool))

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = even * cos[..., 0::2] - odd * sin[..., 0::2], even * sin[..., 1::2] + odd * cos[..., 1::2]
        return torch.stack(turned, dim=-1).flatten(start_dim=-2)

    def _attended(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.query(x), self.key(x), self.value(x)
        q, k, v = (each.view(batch, length, self.heads, dim // self.heads).transpose(1, 2) for each in (q, k, v))
        positions = torch.arange(length).unsqueeze(0)
        q, k = self._turned(q, positions), self._turned(k, positions)
        scores = torch.matmul(q, k.transpose(-2, -1)) / (dim // self.heads) ** 0.5
        scores = scores.masked_fill(self.mask[:length, :length] == 0, -torch.inf)
        mixed = torch.matmul(torch.softmax(scores, dim=-1), v)
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, length, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attended(self.first(x))
        y = self.second(x)
        gate = self.gate(y)
        gate = gate * torch.sigmoid(gate)
        return x + self.down(gate * self.up(y))


class _CourseTransformer(nn.Module):
    """Embeds tokens by the product of a one-hot matrix and the weight."""

    def __init__(self, dim: int, ff: int, layers: int, heads: int, length: int, vocabulary: int):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocabulary, dim))
        self.blocks = nn.ModuleList(_CourseBlock(dim, ff, heads, length) for _ in range(layers))
        self.norm, self.head = _CourseNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        count = self.embedding.shape[0]
        x = F.one_hot(tokens.clamp(0, count - 1), num_classes=count).to(self.embedding.dtype) @ self.embedding
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def linear_layers(*, count: int, dim: int) -> PublishedStep:
    """Layers that are created but not run."""
    return PublishedStep(lambda: None, tuple(nn.Linear(dim, dim) for _ in range(count)))
