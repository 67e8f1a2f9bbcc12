"""Layers of published measurements, built from their sizes on fake tensors.

They follow the shapes that the benchmark scripts of Liger-Kernel describe: every tensor that lives during the measured
call is resident, and a step that passes ``retain_graph=True`` there does so here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .step import PublishedStep, given_gradient, in_mode


def gated_mlp(
    *, batch: int, length: int, dim: int, ff: int, activation: str, dtype: str, mode: str = "full", parts: int = 1
) -> PublishedStep:
    """A SwiGLU or GeGLU layer; the gradient of its output is drawn after the forward.

    `parts`: the sequence runs in so many parts, which are recomputed one after the other in backward.
    """
    kind = getattr(torch, dtype)
    x = torch.empty(batch, length, dim, dtype=kind, requires_grad=True)
    gate, up = (nn.Linear(dim, ff, bias=False, dtype=kind) for _ in range(2))
    down = nn.Linear(ff, dim, bias=False, dtype=kind)

    def layer(x: Tensor) -> Tensor:
        hidden = F.silu(gate(x)) if activation == "silu" else F.gelu(gate(x), approximate="tanh")
        return down(hidden * up(x))

    def forward() -> Tensor:
        return layer(x) if parts == 1 else _InParts.apply(layer, parts, x)  # pyright: ignore[reportReturnType]

    return in_mode(mode, forward, x, gate, up, down)


class _InParts(torch.autograd.Function):
    """The tiled MLP of DeepSpeed (``TiledMLP`` in runtime/sequence_parallel/ulysses_sp.py)."""

    @staticmethod
    def forward(ctx, layer, parts: int, x: Tensor) -> Tensor:
        ctx.layer, ctx.parts = layer, parts
        ctx.save_for_backward(x)
        with torch.no_grad():
            outputs = [layer(part) for part in torch.chunk(x, chunks=parts, dim=-2)]
        return torch.cat(outputs, dim=-2)

    @staticmethod
    def backward(ctx, *grads):
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_().view(-1, saved.shape[-1])
        given, gradient = grads[0].view(-1, saved.shape[-1]), torch.zeros_like(x)
        step = -(-x.shape[0] // ctx.parts)
        for number, part in enumerate(torch.chunk(x.detach(), chunks=ctx.parts, dim=0)):
            part.requires_grad_()
            part.grad = gradient.narrow(0, number * step, part.shape[0]).view_as(part)
            with torch.enable_grad():
                output = ctx.layer(part)
            torch.autograd.backward(output, given.narrow(0, number * step, part.shape[0]))
        return None, None, gradient.view(saved.shape)


def softmax(*, elements: int, dtype: str) -> PublishedStep:
    x = torch.empty(elements, dtype=getattr(torch, dtype), requires_grad=True)
    return in_mode("full", lambda: torch.softmax(x, -1), x, fill=torch.ones_like)


def relu_squared(*, elements: int, dtype: str) -> PublishedStep:
    x = torch.empty(elements, dtype=getattr(torch, dtype), requires_grad=True)
    return in_mode("full", lambda: torch.square(F.relu(x)), x, fill=torch.ones_like)


def sparsemax(*, rows: int, dim: int, dtype: str) -> PublishedStep:
    """The projection onto the simplex by sorting."""
    x = torch.empty(rows, dim, dtype=getattr(torch, dtype), requires_grad=True)
    return given_gradient(_Function(_sparsemax), x)


def _sparsemax(x: Tensor) -> Tensor:
    dim = x.shape[-1]
    ordered, _ = torch.sort(x, dim=-1, descending=True)
    sums = torch.cumsum(ordered, dim=-1)
    counts = torch.arange(1, dim + 1, dtype=x.dtype).view(1, dim)
    bound = 1 + counts * ordered
    inside = bound > sums
    size = inside.sum(dim=-1, keepdim=True).clamp(min=1)
    total = (ordered * inside).sum(dim=-1, keepdim=True)
    threshold = (total - 1) / size
    return torch.clamp(x - threshold, min=0)


def group_norm(*, batch: int, channels: int, length: int, group: int) -> PublishedStep:
    norms = [nn.GroupNorm(channels // group, channels, eps=1e-6) for _ in range(2)]
    return given_gradient(norms[0], torch.empty(batch, channels, length, requires_grad=True), norms[1])


def neighborhood_attention(*, batch: int, length: int, dim: int, heads: int) -> PublishedStep:
    """Attention with a mask of neighbors on the full matrix of scores; the fused layer is live during the step, too."""
    query, key, value, out, *others = (nn.Linear(dim, dim) for _ in range(8))
    x = torch.empty(batch, length, dim, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        q, k, v = query(x), key(x), value(x)
        q, k, v = (each.view(batch, length, heads, dim // heads).transpose(1, 2) for each in (q, k, v))
        scores = torch.matmul(q, k.transpose(-2, -1)) * (dim // heads) ** -0.5
        mask = torch.zeros(length, length, dtype=torch.bool)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        mixed = torch.matmul(weights, v)
        mixed = mixed.transpose(1, 2).contiguous().view(batch, length, dim)
        return out(mixed)

    return given_gradient(_Function(attend, query, key, value, out), x, *others)


def layer_alone(*, layer: str, shape: list[int], dtype: str) -> PublishedStep:
    """Forward and backward of a layer with nothing else live, from a gradient that is drawn after the forward."""
    kind = getattr(torch, dtype)
    x = torch.empty(shape, dtype=kind, requires_grad=True)
    module, *others = _LAYERS[layer](x)
    return in_mode("full", lambda: module(x), x, module, *others)


class _DynamicTanh(nn.Module):
    def __init__(self, dim: int, shifted: bool):
        super().__init__()
        self.alpha, self.gamma = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(dim))
        self.beta = nn.Parameter(torch.zeros(dim)) if shifted else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.gamma * torch.tanh(x * self.alpha)
        return y if self.beta is None else y + self.beta


class _PolyNorm(nn.Module):
    """A weighted sum of the normed first three powers, in float32."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        powers = x**3, x**2, x**1
        third, second, first = (p * torch.rsqrt(p.pow(2).mean(-1, keepdim=True) + 1e-6) for p in powers)
        return (self.weight[0] * third + self.weight[1] * second + self.weight[2] * first + self.bias).to(dtype)


def _added_norm(x: Tensor) -> tuple:
    residual, norm = torch.empty_like(x, requires_grad=True), LlamaRMSNorm(x.shape[-1])
    return _Function(lambda x: norm(x, residual)[0], norm), residual


_LAYERS = {
    "softmax": lambda x: (nn.Softmax(dim=-1),),
    "sparsemax": lambda x: (_Function(_sparsemax),),
    "layer-norm": lambda x: (nn.LayerNorm(x.shape[-1], dtype=x.dtype),),
    "group-norm": lambda x: (nn.GroupNorm(x.shape[1] // 4, x.shape[1], dtype=x.dtype),),
    "add-rms-norm": _added_norm,
    "poly-norm": lambda x: (_PolyNorm(),),
    "dynamic-tanh": lambda x: (_DynamicTanh(x.shape[-1], shifted=False),),
    "shifted-dynamic-tanh": lambda x: (_DynamicTanh(x.shape[-1], shifted=True),),
}


class _Function(nn.Module):
    """A function as a module that owns `parts`."""

    def __init__(self, function, *parts: nn.Module):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def complex_rope(
    *, length: int, dim: int, heads: int, kv_heads: int, dtype: str, only_query: bool = False
) -> PublishedStep:
    """Rotary embeddings as products of complex numbers, as in transformers' Llama 4, and the gradients of both."""
    width, kind = dim // heads, getattr(torch, dtype)
    query, key = (torch.empty(1, length, n, width, dtype=kind, requires_grad=True) for n in (heads, kv_heads))
    grads = torch.empty_like(query), torch.empty_like(key)
    frequencies, positions = torch.empty(1, width // 2, 1), torch.empty(1, length, dtype=torch.int64)
    turns = torch.empty(1, length, width // 2, dtype=torch.complex64)

    def turned() -> tuple[Tensor, Tensor]:
        q, k = (torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) for x in (query, key))
        q_turned, k_turned = (torch.view_as_real(x * turns[:, :, None, :]).flatten(3) for x in (q, k))
        return q_turned.type_as(query), k_turned.type_as(key)

    def angles() -> Tensor:
        return frequencies @ positions[:, None].float()

    if only_query:
        return _of_query(turned, query, key, turns)

    def run():
        torch.autograd.grad(turned(), (query, key), grads, retain_graph=True)

    return PublishedStep(run, (query, key, *grads, frequencies, positions, turns), angles)


def rope(
    *, length: int, dim: int, heads: int, kv_heads: int, dtype: str, only_query: bool = False, parts: int = 1
) -> PublishedStep:
    """Rotary embeddings of queries and keys as in transformers, and the gradients of both.

    `parts`: the number of kinds of positions, 3 in Qwen2-VL, whose `cos` and `sin` are put together in every call.
    """
    width, kind = dim // heads, getattr(torch, dtype)
    query = torch.empty(1, length, heads, width, dtype=kind, requires_grad=True).transpose(1, 2)
    key = torch.empty(1, length, kv_heads, width, dtype=kind, requires_grad=True).transpose(1, 2)
    query_grad, key_grad = torch.empty_like(query), torch.empty_like(key)
    frequencies, positions = torch.empty(1, width // 2, 1), torch.empty(1, length, dtype=torch.int64)
    cos, sin = (torch.empty(*(parts,)[: parts > 1], 1, length, width, dtype=kind) for _ in range(2))

    def half_turned(x: Tensor) -> Tensor:
        first, second = x[..., : width // 2], x[..., width // 2 :]
        return torch.cat((-second, first), dim=-1)

    def turned() -> tuple[Tensor, Tensor]:
        c, s = (each if parts == 1 else _put_together(each) for each in (cos, sin))
        c, s = c.unsqueeze(1), s.unsqueeze(1)
        return (query * c) + (half_turned(query) * s), (key * c) + (half_turned(key) * s)

    def angles() -> Tensor:
        return frequencies @ positions[:, None].float()

    if only_query:
        return _of_query(turned, query, key, cos, sin)

    def run():
        torch.autograd.grad(turned(), (query, key), (query_grad, key_grad), retain_graph=True)

    return PublishedStep(run, (query, key, query_grad, key_grad, frequencies, positions, cos, sin), angles)


def _put_together(x: Tensor) -> Tensor:
    """Of three kinds of positions: each has its part of the width, as in transformers' Qwen2-VL."""
    side = x.shape[-1] * 3 // 16
    sizes = 2 * [x.shape[-1] // 2 - 2 * side, side, side]
    return torch.cat([part[number % 3] for number, part in enumerate(x.split(sizes, dim=-1))], dim=-1)


def _of_query(turned, query: Tensor, *others: Tensor) -> PublishedStep:
    """Forward of both, backward of the queries alone; what the angles are the product of does not live."""
    step = in_mode("full", lambda: turned()[0], query, *others)
    return step._replace(setup=lambda: torch.empty(4, 1) @ torch.empty(1, 4))


def layer_norm(*, rows: int, dim: int, dtype: str) -> PublishedStep:
    x, norm = torch.empty(rows, dim, dtype=getattr(torch, dtype), requires_grad=True), nn.LayerNorm(dim)
    return given_gradient(norm, x, nn.LayerNorm(dim))


class LlamaRMSNorm(nn.Module):
    """RMSNorm as in transformers' Llama: in float32, then cast; with `residual`, of their sum, which it returns too."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, residual: Tensor | None = None):
        dtype = x.dtype
        x = x.to(torch.float32)
        if residual is not None:
            x = residual = x + residual.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        y = self.weight * x.to(dtype)
        return y if residual is None else (y, residual.to(dtype))


def llama_rms_norm(*, rows: int, dim: int, dtype: str) -> PublishedStep:
    x = torch.empty(rows, dim, dtype=getattr(torch, dtype), requires_grad=True)
    return given_gradient(LlamaRMSNorm(dim), x, LlamaRMSNorm(dim))


def add_rms_norm(*, rows: int, dim: int, dtype: str) -> PublishedStep:
    kind, norm = getattr(torch, dtype), LlamaRMSNorm(dim)
    x, residual = (torch.empty(rows, dim, dtype=kind, requires_grad=True) for _ in range(2))
    grads, others = (torch.empty_like(x), torch.empty_like(x)), tuple(LlamaRMSNorm(dim) for _ in range(3))

    def run():
        y, summed = norm(x, residual)
        torch.autograd.backward((y, summed), grads)

    return PublishedStep(run, (norm, x, residual, *grads, *others))


def torch_rms_norm(*, length: int, batch: int, dim: int, dtype: str) -> PublishedStep:
    kind = getattr(torch, dtype)
    norm, x = nn.RMSNorm(dim, eps=1e-6, dtype=kind), torch.empty(length, batch, dim, dtype=kind, requires_grad=True)

    def run():
        y = norm(x)
        y.sum().backward()

    return PublishedStep(run, (norm, x))


def split_swiglu(*, length: int, batch: int, ff: int, dtype: str) -> PublishedStep:
    x = torch.empty(length, batch, 2 * ff, dtype=getattr(torch, dtype), requires_grad=True)

    def run():
        x.grad = None
        gate, up = torch.chunk(x, 2, -1)
        y = F.silu(gate) * up
        y.sum().backward()

    return PublishedStep(run, (x,))


def mixture_of_experts(
    *, tokens: int, experts: int, dim: int, ff: int, top: int, dtype: str, mode: str = "full"
) -> PublishedStep:
    """SwiGLU experts in a loop; every expert gets the same number of tokens, as it does on average."""
    kind = getattr(torch, dtype)
    x = torch.empty(tokens, dim, dtype=kind, requires_grad=True)
    up_leaf = torch.empty(experts, 2 * ff, dim, dtype=kind, requires_grad=True)
    down_leaf = torch.empty(experts, dim, ff, dtype=kind, requires_grad=True)
    up, down = up_leaf * 0.02, down_leaf * 0.02
    index, weights = torch.empty(tokens, top, dtype=torch.int32), torch.empty(tokens, top, dtype=kind)
    weights.requires_grad_()

    def forward():
        final = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(index.long(), num_classes=experts).permute(2, 1, 0)
            torch.greater(mask.sum(dim=(-1, -2)), 0)
        for expert in range(experts):
            position, token = torch.empty(2, tokens * top // experts, dtype=torch.int64).unbind()
            current = x[token]
            gate, value = F.linear(current, up[expert]).chunk(2, dim=-1)
            current = F.silu(gate) * value
            current = F.linear(current, down[expert])
            current = current * weights[token, position, None]
            final.index_add_(0, token, current.to(final.dtype))
        return final

    return in_mode(mode, forward, x, up_leaf, down_leaf, up, down, index, weights)
