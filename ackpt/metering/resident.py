"""The resident memory of a step: storages of modules, optimizers and input tensors, each counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

from .inner_tensors import inner_tensors, is_wrapper

_Holder: TypeAlias = torch.nn.Module | torch.optim.Optimizer | torch.Tensor
Item: TypeAlias = _Holder | Mapping[str, Any] | Sequence[Any]


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


def on(device_type: str):
    """A predicate for tensors on devices of this type."""
    return lambda tensor: tensor.device.type == device_type
