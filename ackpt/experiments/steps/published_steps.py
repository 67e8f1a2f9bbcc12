"""The training steps of published measurements, built from their sizes on fake tensors; `STEPS` by name.

Each function takes the sizes of a row of ``results/reference/published-peaks.json`` and returns a `PublishedStep`.
Operators follow the shapes that the benchmark scripts of Liger-Kernel describe: every tensor that lives during the
measured call is resident, and a step that passes ``retain_graph=True`` there does so here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ackpt.models import resnet50

from .published_finetuning import PublishedStep, lora_causal_lm


def cross_entropy(*, rows: int, vocabulary: int) -> PublishedStep:
    logits, targets = torch.empty(rows, vocabulary, requires_grad=True), torch.empty(rows, dtype=torch.int64)
    return PublishedStep(lambda: F.cross_entropy(logits, targets).backward(), (logits, targets))


def gated_mlp(*, batch: int, length: int, dim: int, ff: int, activation: str, dtype: str) -> PublishedStep:
    """A SwiGLU or GeGLU layer; the gradient of its output is drawn after the forward."""
    kind = getattr(torch, dtype)
    x = torch.empty(batch, length, dim, dtype=kind, requires_grad=True)
    gate, up = (nn.Linear(dim, ff, bias=False, dtype=kind) for _ in range(2))
    down = nn.Linear(ff, dim, bias=False, dtype=kind)

    def run():
        hidden = F.silu(gate(x)) if activation == "silu" else F.gelu(gate(x), approximate="tanh")
        y = down(hidden * up(x))
        del hidden
        y.backward(torch.randn_like(y), retain_graph=True)

    return PublishedStep(run, (x, gate, up, down))


def rope(*, length: int, dim: int, heads: int, kv_heads: int, dtype: str) -> PublishedStep:
    """Rotary embeddings of queries and keys as in transformers, and the gradients of both."""
    width, kind = dim // heads, getattr(torch, dtype)
    query = torch.empty(1, length, heads, width, dtype=kind, requires_grad=True).transpose(1, 2)
    key = torch.empty(1, length, kv_heads, width, dtype=kind, requires_grad=True).transpose(1, 2)
    query_grad, key_grad = torch.empty_like(query), torch.empty_like(key)
    frequencies, positions = torch.empty(1, width // 2, 1), torch.empty(1, length, dtype=torch.int64)
    cos, sin = torch.empty(1, length, width, dtype=kind), torch.empty(1, length, width, dtype=kind)

    def half_turned(x: Tensor) -> Tensor:
        first, second = x[..., : width // 2], x[..., width // 2 :]
        return torch.cat((-second, first), dim=-1)

    def run():
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        turned = (query * c) + (half_turned(query) * s), (key * c) + (half_turned(key) * s)
        torch.autograd.grad(turned, (query, key), (query_grad, key_grad), retain_graph=True)

    def setup() -> Tensor:  # cos and sin are computed from this product
        return frequencies @ positions[:, None].float()

    return PublishedStep(run, (query, key, query_grad, key_grad, frequencies, positions, cos, sin), setup)


def layer_norm(*, rows: int, dim: int, dtype: str) -> PublishedStep:
    x, norm = torch.empty(rows, dim, dtype=getattr(torch, dtype), requires_grad=True), nn.LayerNorm(dim)
    return _given_gradient(norm, x, nn.LayerNorm(dim))


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
    return _given_gradient(LlamaRMSNorm(dim), x, LlamaRMSNorm(dim))


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


def kl_divergence(*, rows: int, vocabulary: int) -> PublishedStep:
    leaf = torch.empty(rows, vocabulary, requires_grad=True)
    log_p, target = leaf.log_softmax(-1), torch.empty(rows, vocabulary)
    loss = nn.KLDivLoss(reduction="batchmean")
    return _of_retained_graph(lambda: loss(log_p, target), leaf, log_p, target)


def jensen_shannon(*, rows: int, vocabulary: int) -> PublishedStep:
    leaf = torch.empty(rows, vocabulary, requires_grad=True)
    log_q, log_p = leaf.log_softmax(-1), torch.empty(rows, vocabulary)
    divergence = nn.KLDivLoss(reduction="batchmean", log_target=True)

    def loss():
        mixture = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
        return 0.5 * divergence(torch.log(mixture), log_p) + 0.5 * divergence(torch.log(mixture), log_q)

    return _of_retained_graph(loss, leaf, log_q, log_p)


def total_variation(*, rows: int, vocabulary: int) -> PublishedStep:
    leaf = torch.empty(rows, vocabulary, requires_grad=True)
    p, q = leaf.softmax(-1), torch.empty(rows, vocabulary)

    def loss():
        distance = torch.abs(p - q) / 2.0
        return torch.sum(distance) / p.size(0)

    return _of_retained_graph(loss, leaf, p, q)


def resnet50_sum(*, batch: int, image: int) -> PublishedStep:
    """Forward and backward of ResNet-50 from the sum of its outputs."""
    model, images = resnet50(), torch.empty(batch, 3, image, image)
    labels = torch.empty(batch, dtype=torch.int64)
    return PublishedStep(lambda: model(images, labels).backward(), (model, images, labels))


def cosine_distillation(*, rows: int, dim: int, vocabulary: int, dtype: str) -> PublishedStep:
    """Cross-entropy of a student's logits and their cosine distance to a teacher's, which get no gradient."""
    kind = getattr(torch, dtype)
    student, teacher, *others = (
        nn.Linear(width, vocabulary, bias=False, dtype=kind) for width in (dim // 2, dim, dim // 2, dim)
    )
    source, x, unused = (torch.empty(rows, dim // 2, dtype=kind) for _ in range(3))
    y, targets = torch.empty(rows, dim, dtype=kind), torch.empty(rows, dtype=torch.int64)
    x.requires_grad_()

    def run():
        outputs = x @ student.weight.t()
        with torch.no_grad():
            teacher_outputs = y @ teacher.weight.t()
        logits, teacher_logits = outputs.float(), teacher_outputs.float()
        del outputs, teacher_outputs
        hard = F.cross_entropy(logits, targets)
        logits /= 1.0
        teacher_logits /= 1.0
        direction, teacher_direction = F.normalize(logits, dim=-1), F.normalize(teacher_logits, dim=-1)
        soft = (1 - F.cosine_similarity(direction, teacher_direction, dim=-1)).mean()
        loss = 0.5 * hard + 0.5 * soft
        del logits, teacher_logits, hard, direction, teacher_direction, soft
        loss.backward()

    return PublishedStep(run, (student, teacher, *others, source, x, unused, y, targets))


def mixture_of_experts(*, tokens: int, experts: int, dim: int, ff: int, top: int, dtype: str) -> PublishedStep:
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

    def run():
        y = forward()
        y.backward(torch.randn_like(y), retain_graph=True)

    return PublishedStep(run, (x, up_leaf, down_leaf, up, down, index, weights))


def _given_gradient(module: nn.Module, x: Tensor, *others: nn.Module) -> PublishedStep:
    """`others`: layers that the benchmark builds as well."""
    grad = torch.empty_like(x)

    def run():
        y = module(x)
        y.backward(grad, retain_graph=True)

    return PublishedStep(run, (module, x, grad, *others))


def _of_retained_graph(loss, *tensors: Tensor) -> PublishedStep:
    def run():
        y = loss()
        y.backward(retain_graph=True)

    return PublishedStep(run, tensors)


STEPS: dict[str, Callable[..., PublishedStep]] = {
    step.__name__.replace("_", "-"): step
    for step in (
        cross_entropy,
        gated_mlp,
        rope,
        layer_norm,
        llama_rms_norm,
        add_rms_norm,
        torch_rms_norm,
        split_swiglu,
        kl_divergence,
        jensen_shannon,
        total_variation,
        cosine_distillation,
        mixture_of_experts,
        resnet50_sum,
        lora_causal_lm,
    )
}
