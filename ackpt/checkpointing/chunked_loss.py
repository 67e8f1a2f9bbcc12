"""``chunked_cross_entropy``: the loss of a language model without ever allocating all logits.

The loss needs only a few rows of logits at a time. The gradient with respect to the logits is softmax minus one-hot,
times a scalar that backward provides. So the forward computes the gradients of the hidden states and of the weight
chunk by chunk, and saves only these two; nothing is recomputed. With a loss for each row, backward provides a factor
for each, and computes the logits of each chunk a second time.
"""

from typing import Literal

import torch
from torch import Tensor

from ackpt.core.errors import CheckpointError

_REDUCTIONS = ("mean", "sum", "none")


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunks: int = 8,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy of ``hidden @ weight.T`` against `targets`, computed in chunks of rows.

    Args:
        hidden: final hidden states, ``[N, D]``, floating point.
        weight: vocabulary head, ``[V, D]``, same dtype as `hidden` (under autocast, matrix products run in the autocast
            dtype, like ``F.linear``).
        targets: class indices, ``[N]``, int64; `ignore_index` marks rows to ignore.
        chunks: the number of chunks; the largest temporary has ``ceil(N / chunks) * V``
            elements, in fp32 (fp64 for fp64 inputs), and in 16 bits a second one in that dtype.
        reduction: ``"mean"`` over the rows that are not ignored, ``"sum"``, or ``"none"``: a loss for each row, 0 for
            ignored ones, whose backward computes the logits a second time.
        ignore_index: the target of rows to ignore.
        label_smoothing: the part of each target that is spread over all classes, from 0 to 1.

    Returns:
        The loss, a scalar (``[N]`` with ``reduction="none"``) in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError, TypeError: for inconsistent shapes, wrong dtypes or unknown options.
        IndexError: for a target outside the rows of `weight` (on a GPU torch stops the program instead).
        CheckpointError: in a backward with ``create_graph=True``.

    Loss and gradients equal those of ``F.cross_entropy`` up to the order of summation (about 1e-6 relative in fp32).
    Checkpointing the head chunk by chunk would have the same peak and cost one more forward of the head.

    Example:
        >>> import torch, ackpt
        >>> hidden, weight = torch.zeros(4, 2, requires_grad=True), torch.zeros(8, 2, requires_grad=True)
        >>> ackpt.chunked_cross_entropy(hidden, weight, torch.arange(4), chunks=2)
        tensor(2.0794, grad_fn=<_ChunkedCrossEntropyBackward>)
    """
    _check(hidden, weight, targets, chunks, reduction, label_smoothing)
    dtype = hidden.dtype
    if hidden.device.type != "meta" and torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    elif weight.dtype != hidden.dtype:
        raise TypeError(f"hidden is {hidden.dtype} but weight is {weight.dtype}; cast one of them or use autocast")
    if not torch.is_grad_enabled():  # so that no gradient is computed
        hidden, weight = hidden.detach(), weight.detach()
    return _ChunkedCrossEntropy.apply(hidden, weight, targets, chunks, reduction, ignore_index, label_smoothing, dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, chunks, reduction, ignore_index, smoothing, dtype):
        counted = targets != ignore_index
        ctx.weight_dtype, ctx.arguments = weight.dtype, (chunks, smoothing, dtype)
        ctx.has_losses = reduction == "none"
        if ctx.has_losses:
            ctx.save_for_backward(hidden, weight, targets, counted)
            return _in_chunks(hidden, weight, targets, counted, (False, False), *ctx.arguments, is_summed=False)[0]
        needed = ctx.needs_input_grad[:2]
        total, *gradients = _in_chunks(hidden, weight, targets, counted, needed, *ctx.arguments)
        # The gradients are saved without the 1/N of the mean, with which small probabilities would underflow in fp16.
        rows_counted = counted.sum().to(total.dtype) if reduction == "mean" else torch.ones_like(total)
        scale = rows_counted.clamp(min=1).reciprocal()  # if all rows are ignored, torch's gradients are 0
        ctx.save_for_backward(scale, *(each for each in gradients if each is not None))
        return total / rows_counted

    @staticmethod
    def backward(ctx, grad_loss):
        if torch.is_grad_enabled():
            raise CheckpointError(
                "backward with create_graph=True reached chunked_cross_entropy, which has no second derivative; use "
                "F.cross_entropy on the full logits where you need one."
            )
        needed = ctx.needs_input_grad[:2]
        if ctx.has_losses:
            hidden, weight, targets, counted = ctx.saved_tensors
            _, *gradients = _in_chunks(hidden, weight, targets, counted, needed, *ctx.arguments, grad_losses=grad_loss)
        else:
            scale, *gradients = ctx.saved_tensors
            scale = scale * grad_loss
            # Both are as large as their tensors, so they are scaled in place unless a second backward may follow.
            keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
            gradients = [grad * scale if keep_graph else grad.mul_(scale) for grad in gradients]
        grads = iter(each for each in gradients if each is not None)
        grad_hidden, grad_weight = (next(grads) if need else None for need in needed)
        grad_weight = None if grad_weight is None else grad_weight.to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _in_chunks(hidden, weight, targets, counted, needed, chunks, smoothing, dtype, is_summed=True, grad_losses=None):
    """The losses of all rows, or their sum; and the gradients of `hidden` and `weight`, None if not `needed`."""
    precise = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    losses = torch.zeros(() if is_summed else hidden.shape[:1], dtype=precise, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if needed[0] else None
    grad_weight = torch.zeros_like(weight, dtype=precise) if needed[1] else None
    head = weight.to(dtype)
    rows = max(1, -(-hidden.shape[0] // chunks))
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        inputs = hidden[part].to(dtype)
        loss, grad_logits = _chunk(inputs, head, targets[part], counted[part], precise, smoothing, is_summed)
        if is_summed:
            losses += loss
        else:
            losses[part] = loss
        if grad_losses is not None:
            grad_logits *= grad_losses[part].unsqueeze(1)
        if grad_hidden is not None:
            grad_hidden[part] = grad_logits @ head
        if grad_weight is not None and dtype == precise:
            torch.addmm(grad_weight, grad_logits.T, inputs, out=grad_weight)
        elif grad_weight is not None:
            grad_weight += grad_logits.T @ inputs
        del grad_logits  # otherwise it would be live together with the next chunk's
    return losses, grad_hidden, grad_weight


def _chunk(inputs, head, targets, counted, precise, smoothing, is_summed):
    """The losses of a chunk, or their sum; and the gradient of the sum with respect to the logits, in `inputs`' dtype.

    The logits become the probabilities in place; torch.logsumexp would make a copy.
    """
    logits = (inputs @ head.T).to(precise)
    logits -= logits.amax(dim=1, keepdim=True)
    index = targets.where(counted, 0).unsqueeze(1)  # gather raises for any other index outside the vocabulary
    try:
        of_targets = logits.gather(1, index).squeeze(1)
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        raise IndexError(
            f"targets holds classes from {int(targets[counted].min())} to {int(targets[counted].max())}, outside of "
            f"the {head.shape[0]} rows of weight; rows that do not count hold ignore_index"
        ) from error
    if smoothing:
        of_targets = of_targets * (1 - smoothing) + logits.mean(dim=1) * smoothing
    probabilities = logits.exp_()
    sums = probabilities.sum(dim=1, keepdim=True)
    losses = sums.squeeze(1).log() - of_targets
    probabilities /= sums
    probabilities.scatter_add_(1, index, torch.full_like(index, smoothing - 1, dtype=precise))
    if smoothing:
        probabilities -= smoothing / head.shape[0]
    probabilities.mul_(counted.unsqueeze(1))
    losses = torch.where(counted, losses, 0)
    return losses.sum() if is_summed else losses, probabilities.to(inputs.dtype)


def _check(hidden, weight, targets, chunks, reduction, label_smoothing):
    if hidden.dim() != 2 or weight.dim() != 2 or targets.dim() != 1 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden [N, D], weight [V, D], targets [N]; got {list(hidden.shape)}, {list(weight.shape)}, "
            f"{list(targets.shape)}; flatten batch and sequence first: hidden.flatten(0, 1), targets.flatten()"
        )
    if hidden.shape[0] != targets.shape[0]:
        raise ValueError(f"hidden has {hidden.shape[0]} rows but there are {targets.shape[0]} targets")
    if not hidden.is_floating_point() or targets.dtype != torch.int64:
        raise TypeError(f"hidden must be floating point and targets int64; got {hidden.dtype} and {targets.dtype}")
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks must be a whole number of at least 1, got {chunks!r}")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing!r}")
