"""What a planned step returns: of which outputs it keeps the gradient, and what it refuses to be asked for."""

from __future__ import annotations

import torch

from .joint import TraceError

_DIFFERENTIATE = ("loss", "all")


def check_differentiate(differentiate) -> str:
    if differentiate not in _DIFFERENTIATE:
        raise ValueError(f"differentiate must be 'loss' or 'all', got {differentiate!r}")
    return differentiate


def without_gradient(found, differentiate) -> tuple[int, ...]:
    """Outputs beside the loss: if exactly one of the differentiable ones is a scalar, the others get no gradient."""
    places = [place for place, value in enumerate(found) if isinstance(value, torch.Tensor) and value.requires_grad]
    scalars = [place for place in places if found[place].dim() == 0]
    return tuple(p for p in places if p not in scalars) if differentiate == "loss" and len(scalars) == 1 else ()


def refuse_overlaps(found, inputs, without=()) -> None:
    """Torch would add up the gradient of an output that overlaps itself in memory twice.

    Args:
        found: what the model returns; `without`: places in it that get no gradient.
        inputs: of the model; autograd itself makes views of these, and of what is returned too.
    """
    storages, given = [_storage(value) for value in found], {_storage(value) for value in inputs}
    for place, (value, storage) in enumerate(zip(found, storages)):
        if storage is None or place in without or storage in given or storages.count(storage) > 1:
            continue
        if value.requires_grad and _overlaps(value):
            raise TraceError(
                f"output {place} of the model, of shape {tuple(value.shape)} and strides {value.stride()}, overlaps "
                "itself in memory, as after unfold or as_strided: torch gives wrong gradients for such an output of a "
                "captured step. Return output.clone()."
            )


def _storage(value) -> int | None:
    is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if is_dense else None


def _overlaps(value) -> bool:
    """Whether elements lie in one another's place, other than by ``expand``."""
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape)):
        if stride and size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


class _NoGradient(torch.autograd.Function):
    """The identity, for an output whose gradient nobody planned for."""

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(
            "backward reaches an output other than the loss, which this step was planned without: it keeps nothing "
            'for that gradient. Plan it with differentiate="all", or detach what you compute from that output.'
        )


def no_gradient(value):
    """`value` as an output that requires grad, though its gradient ends in an error."""
    return _NoGradient.apply(value.requires_grad_())


def differentiable_once(outputs) -> None:
    """Refuse ``create_graph=True`` for the step that has returned the tensors `outputs`, where it is asked for."""
    for value in outputs:
        node = value.grad_fn if isinstance(value, torch.Tensor) else None
        if node is not None and type(node).__name__ == "CompiledFunctionBackward":
            node.register_prehook(_refuse_create_graph)
            return  # the step is one node of autograd's graph


def _refuse_create_graph(gradients) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: a planned step cannot be differentiated twice, its backward is no part of a graph. "
            "For such a step call the model itself."
        )
