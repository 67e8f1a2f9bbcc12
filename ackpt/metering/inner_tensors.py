"""The tensors that a tensor holds besides its own data: the scales of a quantized weight, the parts of a wrapper."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

# Classes of weights whose operations also read the tensors and plain values of one attribute.
_STATES = {"bitsandbytes.nn.modules.Params4bit": "quant_state"}


def state_name(tensor: torch.Tensor) -> str | None:
    """The attribute with the state of a quantized weight; None for other tensors and weights that have none yet."""
    kind = type(tensor)
    is_fake = isinstance(tensor, FakeTensor)  # of a parameter, without its class
    names = _STATES.values() if is_fake else (_STATES.get(f"{kind.__module__}.{kind.__qualname__}"),)
    return next((name for name in names if name and vars(tensor).get(name) is not None), None)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data of its own, but is made of others; torch invents a storage for it."""
    return hasattr(tensor, "__tensor_flatten__")


def state_values(tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """(path of attributes, value) of the tensors and plain values in the state of a quantized weight."""
    name = state_name(tensor)
    left = [] if name is None else [(name, vars(tensor)[name])]
    for path, value in left:
        if _has_attributes(value):
            left += [(f"{path}/{name}", each) for name, each in vars(value).items()]
        else:
            yield path, value


def inner_tensors(tensor: Any) -> dict[str, torch.Tensor]:
    """The tensors in the state of a quantized weight, or of which a wrapper is made, by path; mostly none."""
    if is_wrapper(tensor):
        return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    return {path: value for path, value in state_values(tensor) if isinstance(value, torch.Tensor)}


def tensor_at(tensor: Any, path: str) -> torch.Tensor:
    """The tensor at a path of `inner_tensors`."""
    return functools.reduce(getattr, path.split("/"), tensor)


def with_state(new: torch.Tensor, tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`new` with the attributes of a quantized weight, and in its state `change` of every tensor."""
    if (name := state_name(tensor)) is not None:
        vars(new).update({**vars(tensor), **vars(new), name: _changed(vars(tensor)[name], change)})
    return new


def quantize_on_meta(parameters: Iterable[torch.Tensor | None]) -> None:
    """Quantize the weights on the meta device that their class quantizes when it moves them to a device with data."""
    tables = getattr(sys.modules.get("bitsandbytes.functional"), "name2qmap", {})
    with mock.patch.dict(tables, clear=True):  # a table of the library that the first weight fills, and all share
        for each in parameters:
            if each is not None and each.is_meta and f"{type(each).__module__}.{type(each).__qualname__}" in _STATES:
                if state_name(each) is None:
                    each._quantize("meta")  # pyright: ignore[reportAttributeAccessIssue]


def _changed(value, change):
    if isinstance(value, torch.Tensor):
        return change(value)
    if _has_attributes(value):
        value = copy.copy(value)
        vars(value).update({name: _changed(each, change) for name, each in vars(value).items()})
    return value


def _has_attributes(value) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, torch.nn.Module, type))
