"""Losses of published measurements, built from their sizes on fake tensors; see `layers`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .step import PublishedStep, in_mode


def cross_entropy(*, rows: int, vocabulary: int, retained: bool = False) -> PublishedStep:
    """`retained`: the graph is retained, and the gradient of the loss is drawn."""
    logits, targets = torch.empty(rows, vocabulary, requires_grad=True), torch.empty(rows, dtype=torch.int64)
    if retained:
        return in_mode("full", lambda: F.cross_entropy(logits, targets), logits, targets)
    return PublishedStep(lambda: F.cross_entropy(logits, targets).backward(), (logits, targets))


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


def jensen_shannon_by_rows(*, rows: int, vocabulary: int) -> PublishedStep:
    """The divergence summed over each row first."""
    leaf = torch.empty(rows, vocabulary, requires_grad=True)
    log_q, log_p = leaf.log_softmax(-1), torch.empty(rows, vocabulary)
    return _of_retained_graph(lambda: _divergence_by_rows(log_q, log_p), leaf, log_q, log_p)


def _divergence_by_rows(log_q: Tensor, log_p: Tensor) -> Tensor:
    divergence = nn.KLDivLoss(reduction="none", log_target=True)
    mixture = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
    first = 0.5 * divergence(torch.log(mixture), log_p).sum(dim=-1)
    both = first + 0.5 * divergence(torch.log(mixture), log_q).sum(dim=-1)
    return (both / log_q.shape[0]).sum()


def linear_cross_entropy(*, rows: int, dim: int, vocabulary: int, dtype: str) -> PublishedStep:
    """A language model's head and its loss; a second head is live during the step."""
    kind = getattr(torch, dtype)
    head, other = (nn.Linear(dim, vocabulary, bias=False, dtype=kind) for _ in range(2))
    x, targets = torch.empty(rows, dim, dtype=kind, requires_grad=True), torch.empty(rows, dtype=torch.int64)

    def forward() -> Tensor:
        logits = head(x)
        return F.cross_entropy(logits, targets)

    return PublishedStep(lambda: forward().backward(), (head, other, x, targets))


def capped_linear_cross_entropy(
    *, rows: int, dim: int, vocabulary: int, dtype: str, cap: float, backward: bool
) -> PublishedStep:
    """The float32 loss of logits that a tanh caps; the published figure is the memory that the step adds."""
    kind = getattr(torch, dtype)
    x, weight = (torch.empty(n, dim, dtype=kind, requires_grad=True) for n in (rows, vocabulary))
    targets = torch.empty(rows, dtype=torch.int64)

    def forward() -> Tensor:
        logits = x @ weight.T
        logits = torch.tanh(logits / cap) * cap
        return F.cross_entropy(logits.float(), targets)

    def run():
        loss = forward()
        if backward:
            loss.backward()
        x.grad = weight.grad = None

    return PublishedStep(run, (x, weight, targets), added=True)


def linear_jensen_shannon(*, rows: int, dim: int, vocabulary: int, dtype: str, by_rows: bool = False) -> PublishedStep:
    """The divergence of two heads' distributions; both heads get gradients.

    `by_rows`: it is summed over each row first, the graph is retained, and the gradient of the loss is drawn.
    """
    kind = getattr(torch, dtype)
    student, teacher = (nn.Linear(dim, vocabulary, bias=False, dtype=kind) for _ in range(2))
    x, y = torch.empty(rows, dim, dtype=kind, requires_grad=True), torch.empty(rows, dim, dtype=kind)
    divergence = nn.KLDivLoss(reduction="batchmean", log_target=True)

    def compared(log_q: Tensor, log_p: Tensor) -> Tensor:
        log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
        if by_rows:
            return _divergence_by_rows(log_q, log_p).to(kind)
        mixture = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
        loss = 0.5 * divergence(torch.log(mixture), log_p) + 0.5 * divergence(torch.log(mixture), log_q)
        return loss.to(kind)

    def forward() -> Tensor:
        logits, teacher_logits = student(x), teacher(y)
        log_q = torch.log_softmax(logits / 1.0, dim=-1)
        log_p = torch.log_softmax(teacher_logits / 1.0, dim=-1)
        return compared(log_q, log_p)

    if by_rows:
        return in_mode("full", forward, student, teacher, x, y)
    return PublishedStep(lambda: forward().backward(), (student, teacher, x, y))


def group_relative_policy(
    *, batch: int, length: int, dim: int, vocabulary: int, dtype: str, by_sequence: bool, alone: bool = True
) -> PublishedStep:
    """The loss of GRPO in Liger-Kernel's tests: two heads, of which one has no gradients, and the clipped ratio.

    Unless `alone`, two other heads are live, and the graph is not retained.
    """
    kind = getattr(torch, dtype)
    head, reference, *others = (nn.Linear(dim, vocabulary, bias=False, dtype=kind) for _ in range(2 if alone else 4))
    x, y = (torch.empty(batch, length, dim, dtype=kind) for _ in range(2))
    tokens, mask = torch.empty(batch, length, dtype=torch.int64), torch.empty(batch, length)
    advantages = torch.empty(batch, dtype=kind)
    x.requires_grad_()

    def forward() -> Tensor:
        logits = x @ head.weight.t()
        log_probs = F.log_softmax(logits.float(), dim=-1)
        each = log_probs.gather(dim=-1, index=tokens.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            other_logits = y @ reference.weight.t()
            other_probs = F.log_softmax(other_logits.float(), dim=-1)
            other = other_probs.gather(dim=-1, index=tokens.unsqueeze(-1)).squeeze(-1)
        ratio = each - each.detach()
        if by_sequence:
            ratio = ((ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        first = torch.exp(ratio)
        second = torch.clamp(first, 0.8, 1.2)
        loss = -torch.min(first * advantages.unsqueeze(1), second * advantages.unsqueeze(1))
        loss = loss + 0.1 * (torch.exp(other - each) - (other - each) - 1.0)
        return (loss * mask).sum() / torch.clamp(mask.sum(), min=1.0)

    tensors = (head, reference, *others, x, y, tokens, mask, advantages)
    return in_mode("full", forward, *tensors) if alone else PublishedStep(lambda: forward().backward(), tensors)


def _of_retained_graph(loss, *tensors: Tensor) -> PublishedStep:
    def run():
        y = loss()
        y.backward(retain_graph=True)

    return PublishedStep(run, tensors)
