"""Take the tensors out of nested arguments and results, and put other tensors in their place.

``strip`` replaces every tensor in dicts, lists, tuples, named tuples and dataclasses by a numbered slot; ``fill`` is
its inverse. A container without tensors is not copied, so a list that the function appends numbers to remains the
caller's list.
"""

import copy
import dataclasses

import torch


class Slot(int):
    """A placeholder for the tensor of this number in a stripped structure."""

    __slots__ = ()


class Tensors(list):
    """A list of distinct tensors in the order of first appearance; a tensor that appears twice has one slot."""

    __slots__ = ("_slots",)

    def __init__(self):
        self._slots: dict[int, Slot] = {}

    def slot(self, tensor: torch.Tensor) -> Slot:
        slot = self._slots.get(id(tensor))
        if slot is None:
            slot = self._slots[id(tensor)] = Slot(len(self))
            self.append(tensor)
        return slot


ATOMS = frozenset((int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size))


def is_plain(item) -> bool:
    """Whether a stripped argument is a slot, a value that cannot contain a tensor, or a tuple of these."""
    return type(item) is Slot or type(item) in ATOMS or (type(item) is tuple and all(map(is_plain, item)))


def strip(obj, tensors: Tensors):
    """Return `obj` with slots in place of its tensors, which are added to `tensors`."""
    return _map(obj, lambda leaf: tensors.slot(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def fill(obj, tensors):
    """Return `obj` with every slot replaced by the tensor of its number."""
    if type(obj) is Slot:
        return tensors[obj]
    return _map(obj, lambda leaf: tensors[leaf] if type(leaf) is Slot else leaf)


def strip_arguments(args, tensors: Tensors) -> tuple[tuple, bool]:
    """`strip` for the items of `args`; return the stripped tuple, and whether a container in it has tensors."""
    stripped, nested = [], False
    for item in args:
        if isinstance(item, torch.Tensor):
            item = tensors.slot(item)
        elif type(item) not in ATOMS:
            old, item = item, strip(item, tensors)
            nested = nested or item is not old
        stripped.append(item)
    return tuple(stripped), nested


_ONLY = Slot(0)


def strip_result(result) -> tuple[list, object]:
    """Return the distinct tensors of a function's result, and the result with slots in their place."""
    if isinstance(result, torch.Tensor):
        return [result], _ONLY
    tensors = Tensors()
    return tensors, strip(result, tensors)


def _map(obj, change):
    """Apply `change` to the leaves of `obj`; return `obj` itself when no leaf changed."""
    if type(obj) in ATOMS:
        return obj
    if type(obj) is Slot or isinstance(obj, torch.Tensor):
        return change(obj)
    if isinstance(obj, (tuple, list)):
        items = [_map(item, change) for item in obj]
        if all(new is old for new, old in zip(items, obj)):
            return obj
        if isinstance(obj, tuple):
            make = getattr(obj, "_make", type(obj))  # a named tuple takes its fields one by one
            return make(items)
        if type(obj) is list:
            return items
        new = copy.copy(obj)
        new[:] = items
        return new
    if isinstance(obj, dict):
        items = {key: _map(value, change) for key, value in obj.items()}
        changed = {key: value for key, value in items.items() if value is not obj[key]}
        if not changed:
            return obj
        if type(obj) is dict:
            return items
        new = copy.copy(obj)
        for key, value in changed.items():
            new[key] = value
        return _map_fields(obj, new, change) if dataclasses.is_dataclass(obj) else new
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return _map_fields(obj, None, change)
    return change(obj)


def _map_fields(obj, new, change):
    """Set the changed fields of dataclass `obj` on `new`, or on a copy, without a second ``__post_init__``."""
    for field in dataclasses.fields(obj):
        if not hasattr(obj, field.name):
            continue
        old = getattr(obj, field.name)
        value = _map(old, change)
        if value is not old:
            if new is None:
                new = copy.copy(obj)
            object.__setattr__(new, field.name, value)
    return obj if new is None else new
