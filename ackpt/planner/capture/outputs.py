"""The outputs of a captured step: which are differentiated or refused, and how they become what a model returns."""

import copy
from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_map

from ackpt.core.autograd_state import version
from ackpt.core.errors import TraceError


def check_choices(differentiate, outputs) -> None:
    """Refuse other values of these keywords than those that `ackpt.trace` takes."""
    if differentiate not in ("loss", "all"):
        raise ValueError(f"differentiate must be 'loss' or 'all', got {differentiate!r}")
    if outputs not in ("drop", "keep"):
        raise ValueError(f"outputs must be 'drop' or 'keep', got {outputs!r}")


def without_gradient(outputs, differentiate) -> tuple[int, ...]:
    """Indices of the outputs that get no gradient: all but the loss, if exactly one that requires grad is a scalar."""
    places = [index for index, value in enumerate(outputs) if isinstance(value, torch.Tensor) and value.requires_grad]
    scalars = [index for index in places if outputs[index].dim() == 0]
    return tuple(p for p in places if p not in scalars) if differentiate == "loss" and len(scalars) == 1 else ()


def refuse_overlaps(outputs, inputs, without) -> None:
    """Refuse outputs that overlap themselves in memory: torch would sum their gradients twice.

    Not those `without` a gradient, nor views of `inputs` or of what is returned too, which autograd itself makes.
    """
    storages, given = [_storage(value) for value in outputs], {_storage(value) for value in inputs}
    for index, (value, storage) in enumerate(zip(outputs, storages)):
        if storage is None or index in without or storage in given or storages.count(storage) > 1:
            continue
        if value.requires_grad and _overlaps(value):
            raise TraceError(
                f"output {index} of the model, of shape {tuple(value.shape)} and strides {value.stride()}, overlaps "
                "itself in memory, as after unfold or as_strided: torch gives wrong gradients for such an output of a "
                "captured step. Return output.clone()."
            )


def refuse_views_of_changed(outputs, inputs) -> None:
    """Refuse views of an input that shares memory with another input, if the model changes one of them in place: torch
    makes them from the wrong part of that memory. `inputs`: tensors and their versions before the call.
    """
    inputs = {id(tensor): (tensor, before) for tensor, before in inputs}
    storages = Counter(_storage(tensor) for tensor, _ in inputs.values())
    changed = {_storage(tensor) for tensor, before in inputs.values() if version(tensor) != before}
    for index, value in enumerate(outputs):
        storage = _storage(value)
        if storage in changed and storages[storage] > 1 and id(value) not in inputs:
            raise TraceError(
                f"output {index} of the model is a view of an input that shares memory with another input, and the "
                "model changes one of them in place: torch returns the wrong part of this memory from a captured "
                "step. Return output.clone(), or pass a clone of one of the inputs."
            )


def _storage(value) -> int | None:
    is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if is_dense else None


def _overlaps(value) -> bool:
    """Whether elements share memory other than by ``expand``."""
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape)):
        if stride and size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


class _NoGradient(torch.autograd.Function):
    """The identity, for an output whose gradient is not part of the plan."""

    @staticmethod
    def forward(ctx, value):
        ctx.set_materialize_grads(False)
        return value.detach()  # torch lets the caller change it in place, unlike a view that is made here

    @staticmethod
    def backward(ctx, *gradients):
        if gradients == (None,):  # of an output that something, such as DDP, has passed on together with the loss
            return None
        raise RuntimeError(
            "backward reaches an output other than the loss, but this step was planned for the loss alone and saves "
            'nothing for that gradient. Plan with differentiate="all", or detach what you compute from that output.'
        )


def no_gradient(value):
    """`value` as an output that requires grad, but whose backward raises an error."""
    if isinstance(value, Withheld):
        return value
    return _NoGradient.apply(value.requires_grad_())


class Withheld(torch.Tensor):
    """An output that a step does not compute: it has a shape and a dtype; reading its elements raises an error."""

    _CONVERSIONS = ("detach", "float", "half", "bfloat16", "to", "cpu", "cuda", "requires_grad_")
    _FACTS = ("__get__", "size", "dim", "numel", "stride", "is_floating_point", "__len__", "__hash__")

    @classmethod
    def like(cls, shape, dtype: torch.dtype) -> "Withheld":
        return torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ in cls._CONVERSIONS:
            return args[0]
        if func.__name__ in cls._FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        shape = next(list(each.shape) for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        if func.__name__ == "__repr__":
            return f"<not computed: shape {shape}, because the head runs in chunks (chunk_head)>"
        raise RuntimeError(
            f"{func.__name__} reads an output of shape {shape} that this step does not compute: its head runs in "
            "chunks (chunk_head), so that all logits never exist at once. Compute what you need of them under "
            "torch.no_grad(), which runs the model itself, or leave chunk_head out."
        )


# The key-value caches that transformers models return are taken apart for a captured step, so that their tensors are
# normal outputs. Torch's pytrees do not look into a cache, and what transformers registers for that copies every tensor
# when it puts one together again.
_PARTS = ("self_attention_cache", "cross_attention_cache")


class _Cache:
    """A cache on its way through a pytree, which gives a real one back."""

    def __init__(self, cache):
        self.tensors = [value for layer in _layers(cache) for value in (layer.keys, layer.values)]
        self.around = _with_tensors(cache, [None] * len(self.tensors))


register_pytree_node(
    _Cache, lambda cache: (cache.tensors, cache.around), lambda tensors, around: _with_tensors(around, list(tensors))
)


def flatten_outputs(outputs):
    """`tree_flatten` of what a model returns; its unflatten puts caches of transformers together again."""
    return tree_flatten(tree_map(lambda value: _Cache(value) if _is_cache(value) else value, outputs))


def _is_cache(value) -> bool:
    """Only of keys and values: a cache that contains more cannot be rebuilt."""
    if type(value).__module__ != "transformers.cache_utils":
        return False
    parts = [getattr(value, name, None) for name in _PARTS if hasattr(value, name)] or [value]
    return all(isinstance(getattr(part, "layers", None), list) for part in parts) and all(
        {name for name, held in vars(layer).items() if isinstance(held, torch.Tensor)} <= {"keys", "values"}
        and hasattr(layer, "keys")
        for layer in _layers(value)
    )


def _layers(cache) -> list[Any]:
    parts = [getattr(cache, name) for name in _PARTS if hasattr(cache, name)] or [cache]
    return [layer for part in parts for layer in part.layers]


def _with_tensors(cache, tensors: list):
    """A cache like `cache`, whose layers hold the next of `tensors`."""
    filled = copy.copy(cache)
    if hasattr(cache, _PARTS[0]):
        for name in _PARTS:
            part = getattr(cache, name)
            count = 2 * len(part.layers)
            setattr(filled, name, _with_tensors(part, tensors[:count]))
            tensors = tensors[count:]
        return filled
    filled.layers = [copy.copy(layer) for layer in cache.layers]
    for number, layer in enumerate(filled.layers):
        layer.keys, layer.values = tensors[2 * number], tensors[2 * number + 1]
    return filled
