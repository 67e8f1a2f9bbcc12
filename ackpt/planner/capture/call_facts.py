"""The key by which captures are looked up: everything about a call that a capture depends on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils._pytree import TreeSpec, tree_flatten

from ackpt.planner.capture.aot import given_places
from ackpt.planner.capture.dynamic_sizes import Layout, is_sized, layout
from ackpt.planner.capture.inspection.attributes import plain
from ackpt.planner.capture.inspection.model_checks import is_tensor, public_attributes, require_no_arrays

from .model_facts import ModelFacts, Shared, WatchedModel, shared, storages

Sizes = tuple[Layout, ...]


class Call(NamedTuple):
    """One call of a model.

    ``facts``: everything that a capture depends on except the sizes of the call's tensors, which are in ``sizes``: the
    layout of each, and the integers among the arguments. ``modules``: the model's by their paths;
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
    """The facts of a call, in a form that compares and hashes.

    ``shared``: as of `ackpt.planner.capture.model_facts`, of the model's tensors followed by the call's, if one of the
    latter shares its storage. ``settings``: the values of `_SETTINGS`.
    """

    model: ModelFacts
    spec: TreeSpec
    leaves: tuple[Any, ...]
    first_places: tuple[int, ...]
    shared: Shared
    autocast: tuple[Any, ...]
    settings: tuple[Any, ...]


def call_of(watched: WatchedModel, args, kwargs) -> Call:
    """The call ``model(*args, **kwargs)`` as it is now."""
    model = watched.facts()
    leaves, spec = tree_flatten((args, kwargs))
    if any(isinstance(leaf, numpy.ndarray) for leaf in leaves):
        require_no_arrays(args, kwargs)
    tensors = list(filter(is_tensor, leaves))
    given = storages(tensors)
    is_shared = len(set(given)) < len(given) or not set(given).isdisjoint(watched.storages)
    facts = Facts(
        model,
        spec,
        tuple(map(_leaf, leaves)),
        given_places(leaves),
        shared([*watched.own_tensors(), *tensors]) if is_shared else (),
        _autocast(),
        tuple([read() for read in _SETTINGS.values()]),
    )
    sizes = tuple(map(layout, filter(is_sized, leaves)))
    return Call(args, kwargs, watched.modules, leaves, spec, facts, sizes)


def _leaf(leaf):
    """The part of an argument that a capture depends on, without the sizes of a tensor and without an integer."""
    if is_tensor(leaf):
        names = public_attributes(leaf) if vars(leaf) else ()
        return type(leaf), leaf.dim(), leaf.dtype, leaf.device, leaf.requires_grad, leaf.is_conj(), leaf.is_neg(), names
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


def _autocast():
    devices = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    return (*devices, torch.is_autocast_cache_enabled())


_HOOKS_OF_ALL = (
    global_hooks._global_forward_pre_hooks,
    global_hooks._global_forward_hooks,
    global_hooks._global_backward_pre_hooks,
    global_hooks._global_backward_hooks,
)


def _precision() -> str:
    """The precision of float32 products; empty where the program sets it by ``fp32_precision`` as well."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return ""


_CPU = torch.device("cpu")


def _default_device() -> torch.device:
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU  # which is a mode of functions


# Settings for the whole process on which the kernels of a step, their workspace or its operations depend.
_SETTINGS: dict[str, Callable[[], Any]] = {
    "torch.get_num_threads()": torch.get_num_threads,
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_default_device()": _default_device,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.get_float32_matmul_precision()": _precision,
    "torch.backends.cudnn.benchmark": torch._C._get_cudnn_benchmark,
    "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": torch.backends.cuda.mem_efficient_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.math_sdp_enabled,
    "torch.backends.cuda.cudnn_sdp_enabled()": torch.backends.cuda.cudnn_sdp_enabled,
    "a hook of all modules": lambda: _users_hooks() if any(_HOOKS_OF_ALL) else (),
}


def _users_hooks() -> tuple[int, ...]:
    """The keys of hooks of all modules, without those of torch, by which a ``FlopCounterMode`` follows modules."""
    hooks = chain.from_iterable(each.items() for each in _HOOKS_OF_ALL)
    return tuple(key for key, hook in hooks if not (getattr(hook, "__module__", "") or "").startswith("torch."))


def changed_setting(was: Facts, now: Facts) -> str:
    """The first setting of torch that differs between two calls, in words; empty if none does."""
    pairs = zip(_SETTINGS, was.settings, now.settings)
    return next((f"{name} changed" for name, before, after in pairs if before != after), "")
