"""What a call of a model has in common with another, so that one capture, and perhaps one plan, serves both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten

from ackpt.capture.aot import given_places
from ackpt.capture.dynamic_sizes import is_sized, layout
from ackpt.capture.inspection.attributes import attributes, every_module, plain
from ackpt.capture.inspection.tensors import is_tensor

Sizes = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class Call(NamedTuple):
    """One call of a model.

    ``facts``: everything that a capture depends on except the sizes of the call's tensors, which are in ``sizes``: the
    shape and strides of each, and the integers among the arguments. ``modules``: the model's by their paths;
    ``leaves`` and ``spec``: the call's arguments.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modules: dict[str, nn.Module]
    leaves: list[Any]
    spec: TreeSpec
    facts: Facts
    sizes: Sizes


class Facts(NamedTuple):
    """The facts of a call, in a form that compares and hashes."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    first_places: tuple[int, ...]
    own_tensors: tuple[Any, ...]
    shared_storages: tuple[Any, ...]
    training: tuple[bool, ...]
    attributes: tuple[Any, ...]
    autocast: tuple[Any, ...]


def call_of(model: nn.Module, args, kwargs) -> Call:
    """The call ``model(*args, **kwargs)`` as it is now."""
    modules = every_module(model)
    leaves, spec = tree_flatten((args, kwargs))
    named = (tensors for module in modules.values() for tensors in (module._parameters, module._buffers))
    own = [tensor for tensors in named for tensor in tensors.values() if tensor is not None]
    tensors = list(filter(is_tensor, leaves))
    facts = Facts(
        spec,
        tuple(map(_leaf, leaves)),
        given_places(leaves),
        tuple(map(_meta, own)),
        _shared([*own, *tensors]),
        tuple(module.training for module in modules.values()),
        attributes(modules.values()),
        _autocast(),
    )
    return Call(args, kwargs, modules, leaves, spec, facts, tuple(map(layout, filter(is_sized, leaves))))


def _leaf(leaf):
    """The part of an argument that a capture depends on, without the sizes of a tensor and without an integer."""
    if is_tensor(leaf):
        return type(leaf), leaf.dim(), leaf.dtype, leaf.device, leaf.requires_grad
    if type(leaf) is int:
        return int
    value = plain(leaf)
    if value is None:
        try:
            hash(leaf)
        except TypeError:
            raise TypeError(
                f"an argument of type {type(leaf).__name__} cannot be compared from call to call: pass tensors, "
                "numbers, strings and the like, in lists, tuples and dicts"
            ) from None
        return leaf
    return value


def _meta(tensor):
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _shared(tensors) -> tuple:
    """The tensors that share the storage of an earlier one: (index, index of that one, elements between them)."""
    first: dict[int, int] = {}
    shared = []
    for index, tensor in enumerate(tensors):
        if tensor.layout is torch.strided:
            try:
                storage = tensor.untyped_storage()._cdata
            except NotImplementedError as error:
                raise RuntimeError(
                    f"a planned step takes plain tensors; in torch.func and torch.vmap call the model itself ({error})"
                ) from None
            earlier = first.setdefault(storage, index)
            if earlier != index:
                shared.append((index, earlier, tensor.storage_offset() - tensors[earlier].storage_offset()))
    return tuple(shared)


def _autocast():
    devices = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    return (*devices, torch.is_autocast_cache_enabled())
