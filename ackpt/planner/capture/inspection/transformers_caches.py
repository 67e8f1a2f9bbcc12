"""Flatten and rebuild the key-value caches that transformers models return, so that their tensors are normal outputs.

Torch's pytrees do not look into a cache, and what transformers registers for that copies every tensor when it puts one
together again. So for a captured step a cache is taken apart here: its tensors, and the objects around them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_map

_PARTS = ("self_attention_cache", "cross_attention_cache")


class _Cache:
    """A cache on its way through a pytree, which gives a real one back."""

    def __init__(self, cache):
        self.tensors = [value for layer in _layers(cache) for value in (layer.keys, layer.values)]
        self.around = _with_tensors(cache, [None] * len(self.tensors))


register_pytree_node(
    _Cache,
    lambda cache: (cache.tensors, cache.around),
    lambda tensors, around: _with_tensors(around, list(tensors)),
)


def flatten_outputs(outputs):
    """`tree_flatten` of what a model returns; its unflatten puts caches of transformers together again."""
    return tree_flatten(tree_map(lambda value: _Cache(value) if _is_cache(value) else value, outputs))


def _is_cache(value) -> bool:
    """Only of keys and values: a cache that contains more cannot be rebuilt."""
    if type(value).__module__ != "transformers.cache_utils":
        return False
    parts = [getattr(value, name, None) for name in _PARTS if hasattr(value, name)] or [value]
    return all(_holds_keys_and_values(part) for part in parts)


def _holds_keys_and_values(cache) -> bool:
    layers = getattr(cache, "layers", None)
    return isinstance(layers, list) and all(
        {name for name, held in vars(layer).items() if isinstance(held, torch.Tensor)} <= {"keys", "values"}
        and hasattr(layer, "keys")
        for layer in layers
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
