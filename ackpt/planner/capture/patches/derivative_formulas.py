"""Capture gradients that torch computes by another formula for tensor subclasses, as all tensors of a capture are.

The other formulas round differently, and that of ``prod`` needs several times the memory. So each of these gradients is
captured as one operation, which runs autograd on real tensors.

Torch: ``isTensorSubclassLike`` in ``prod_backward``, ``masked_fill_backward`` and
``binary_cross_entropy_with_logits_backward``, ``torch/csrc/autograd/FunctionsManual.cpp``. Versions: 2.11 to 2.13.
Test: ``tests/planner/capture/test_derivative_formulas.py``.
"""

from __future__ import annotations

import contextlib

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .python_kernels import put

aten = torch.ops.aten
_EXTREMES = ("aten.maximum", "aten.minimum")
_KEY = torch._C.DispatchKey.Autograd
# What a dispatch mode excludes for the kernels below it, although formulas need it.
_EXCLUDED = [
    getattr(torch._C.DispatchKey, name)
    for name in ("AutogradFunctionality", "ADInplaceOrView", "Conjugate", "Negative", "ZeroTensor")
]

torch.library.define("ackpt_graph::gradient", "(Tensor gradient, str call, Tensor[] tensors, int place) -> Tensor")


@torch.library.impl("ackpt_graph::gradient", "CompositeExplicitAutograd")
def _gradient(gradient, call: str, tensors, place: int):
    """The gradient of ``tensors[place]`` in `call`, an expression of the list `tensors` as ``t``."""
    with _autograd():
        leaf = tensors[place].detach().requires_grad_()
        given = [leaf if at == place else tensor.detach() for at, tensor in enumerate(tensors)]
        with torch.enable_grad():
            result = eval(call, {"torch": torch, "aten": aten, "t": given})  # noqa: S307
        made = torch.autograd.grad(result, leaf, gradient)[0]
    is_laid_out = call.startswith(_EXTREMES) or made.stride() == leaf.stride()
    return made if is_laid_out else torch.empty_like(leaf).copy_(made)


@contextlib.contextmanager
def _autograd():
    """Records for autograd, also in a kernel that runs below a dispatch mode."""
    with contextlib.ExitStack() as guards:
        for key in _EXCLUDED:
            guards.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        yield


@torch.library.register_fake("ackpt_graph::gradient")
def _shape(gradient, call: str, tensors, place: int):
    if not call.startswith(_EXTREMES):
        return torch.empty_like(tensors[place])
    like = torch.where(tensors[0] == tensors[1], gradient / 2, gradient)
    return like if like.shape == tensors[place].shape else gradient.new_empty(tensors[place].shape)


class _Tensor:
    def __init__(self, place: int):
        self.place = place

    def __repr__(self):
        return f"t[{self.place}]"


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operation, spec, *leaves):
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        names = [_Tensor(places.index(at)) if at in places else leaf for at, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(names, spec)
        named = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
        ctx.call, ctx.places = f"{operation}({named})", places
        ctx.save_for_backward(*(leaves[at] for at in places))
        args, kwargs = tree_unflatten(leaves, spec)
        return operation(*args, **kwargs)

    @staticmethod
    def backward(ctx, gradient):
        gradients = [None] * len(ctx.needs_input_grad)
        for number, at in enumerate(ctx.places):
            if ctx.needs_input_grad[at + 2]:
                given = [*ctx.saved_tensors]
                gradients[at + 2] = torch.ops.ackpt_graph.gradient(gradient, ctx.call, given, number)
        return tuple(gradients)


def _whole(operation, differs):
    """`operation` as one node of autograd, if its gradient `differs`."""

    def kernel(*args, **kwargs):
        if not torch.is_grad_enabled() or not differs(*args, **kwargs):
            with put({(operation, _KEY): None}):
                return operation(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        return _Whole.apply(operation, spec, *leaves)

    return kernel


def _mixes_dtypes(x, target, weight=None, pos_weight=None, reduction=1):
    return x.requires_grad and any(each is not None and each.dtype != x.dtype for each in (target, weight, pos_weight))


def _are_permuted(*tensors):
    """The formula writes in place, in a memory order that a capture loses, and later sums depend on this order."""
    return any(each.requires_grad for each in tensors) and not all(each.is_contiguous() for each in tensors)


_DIFFERS = {
    aten.maximum.default: _are_permuted,
    aten.minimum.default: _are_permuted,
    aten.prod.default: lambda x, **kwargs: x.requires_grad,
    aten.prod.dim_int: lambda x, *args, **kwargs: x.requires_grad,
    aten.masked_fill.Tensor: lambda x, mask, value: value.requires_grad,
    aten.binary_cross_entropy_with_logits.default: _mixes_dtypes,
}


def eager_formulas():
    """Inside, a capture records each of these gradients as one operation."""
    return put({(operation, _KEY): _whole(operation, differs) for operation, differs in _DIFFERS.items()})
