"""What a planned step returns: of which outputs it keeps the gradient, and what it refuses to be asked for."""

from __future__ import annotations

import torch

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
