"""The resident memory of a step: storages of modules, optimizers and input tensors, each counted once.

They include the tensors that a quantized weight or a wrapper holds in addition to its own data.
"""

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

_Holder: TypeAlias = torch.nn.Module | torch.optim.Optimizer | torch.Tensor
Item: TypeAlias = _Holder | Mapping[str, Any] | list[Any] | tuple[Any, ...]


def storages_of(tensor):
    """The storages of a tensor: one, those of the indices and values of a sparse tensor, and of its `inner_tensors`.

    None has no storage.
    """
    if tensor is None:  # hooks for complete gradients are called for undefined gradients too
        return []
    inner = [storage for each in inner_tensors(tensor).values() for storage in storages_of(each)]
    if is_wrapper(tensor):
        return inner
    if tensor.layout == torch.strided:
        return [tensor.untyped_storage(), *inner]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    return []


class Resident:
    """The modules, optimizers and tensors, also in dicts, that a step works on; TypeError for anything else."""

    def __init__(self, items: Iterable[Item]):
        if isinstance(items, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)):
            raise TypeError("resident must be an iterable of modules, optimizers and tensors, such as (model, batch)")
        self.items = tuple(holder for item in items for holder in _holders(item))

    def tensors(self):
        """``(category, tensor)`` of everything resident now; the first mention decides the category."""
        for item in self.items:
            if isinstance(item, torch.nn.Module):
                yield from (("parameters", tensor) for tensor in item.parameters())
                yield from (("buffers", tensor) for tensor in item.buffers())
        for item in self.items:
            if isinstance(item, torch.optim.Optimizer):
                yield from (("parameters", tensor) for group in item.param_groups for tensor in group["params"])
                for state in item.state.values():
                    leaves = tree_leaves(state)
                    yield from (("optimizer", leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        yield from (("inputs", item) for item in self.items if isinstance(item, torch.Tensor))

    def in_order_of_loading(self, counts):
        """The storages for which `counts(tensor)` holds, as ``module.to(device)`` moves them; gradients last."""
        storages = {}
        tensors = (tensor for item in self.items for tensor in _as_loaded(item))
        for tensor in (*tensors, *(tensor for _, tensor in self.tensors())):
            if counts(tensor):
                storages.update({storage._cdata: storage for storage in storages_of(tensor)})
        storages.update({storage._cdata: storage for _, storage in self.gradients(counts)})
        return storages.values()

    def trainable(self) -> list[torch.Tensor]:
        """All resident leaves that can get a gradient, each once."""
        leaves = {id(tensor): tensor for _, tensor in self.tensors() if tensor.is_leaf and tensor.requires_grad}
        return list(leaves.values())

    def storages(self, counts):
        """``(category, storage)`` of every resident tensor for which `counts(tensor)` holds, each storage once."""
        storages = {}
        for category, tensor in self.tensors():
            if counts(tensor):
                for storage in storages_of(tensor):
                    storages.setdefault(storage._cdata, (category, storage))
        return storages.values()

    def gradients(self, counts):
        """``(gradient, storage)`` of the resident leaves' gradients that exist now."""
        for leaf in self.trainable():
            if leaf.grad is not None and counts(leaf.grad):
                yield from ((leaf.grad, storage) for storage in storages_of(leaf.grad))

    @contextlib.contextmanager
    def gradients_noted(self, counts, key, note):
        """Inside, calls ``note(("mark", key(storage), "gradients"))`` when the gradient of a leaf is complete."""

        def complete(leaf):
            if leaf.grad is not None and counts(leaf.grad):
                for storage in storages_of(leaf.grad):
                    note(("mark", key(storage), "gradients"))

        handles = [leaf.register_post_accumulate_grad_hook(complete) for leaf in self.trainable()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def bytes(self, counts, round_to: int = 1) -> dict[str, int]:
        """Bytes by category, every block rounded up to `round_to`."""
        sizes: dict[str, int] = {}
        for category, storage in self.storages(counts):
            sizes[category] = sizes.get(category, 0) + rounded(storage.nbytes(), round_to)
        return sizes

    def backed(self, counts, key) -> dict[int, str]:
        """``{key(storage): category}`` for all resident tensors and present gradients."""
        resident = {key(storage): category for category, storage in self.storages(counts)}
        return resident | {key(storage): "gradients" for _, storage in self.gradients(counts)}


def _holders(item: Item) -> Iterator[_Holder]:
    """`item`, the items of a list or tuple, or the tensors of a dict."""
    if isinstance(item, Mapping):
        yield from (leaf for leaf in tree_leaves(dict(item)) if isinstance(leaf, torch.Tensor))
    elif isinstance(item, (list, tuple)):
        yield from (holder for each in item for holder in _holders(each))
    elif isinstance(item, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)):
        yield item
    else:
        raise TypeError(f"resident holds a {type(item).__name__}; only modules, optimizers and tensors count")


def _as_loaded(item: _Holder):
    """Tensors of one item; of a module those of its children first, as ``Module._apply`` does."""
    if isinstance(item, torch.nn.Module):
        for child in item.children():
            yield from _as_loaded(child)
        members = (*item._parameters.values(), *item._buffers.values())
        yield from (tensor for tensor in members if tensor is not None)
    elif isinstance(item, torch.Tensor):
        yield item


def rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


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
        parts = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
        return {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}  # a DTensor has a mesh
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
