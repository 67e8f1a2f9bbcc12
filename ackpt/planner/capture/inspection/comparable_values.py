"""Values of attributes in a form that compares and hashes, so that a call can tell whether they changed.

Plain values and containers compare by content; tensors, functions and other callables compare by identity.
"""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections import deque
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import torch
from torch.nn.attention import SDPBackend

from ackpt.checkpointing.reachable import LONGEST_CONTAINER

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, Fraction, Decimal, enum.Enum, SDPBackend),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_CONSTANT = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial),
    *(type, range, slice),
)


class Identity:
    """Equals every other `Identity` of the same object.

    It keeps the object alive only if the object does not support weak references. An id alone is not enough: after the
    object is freed, another one may have the same id.
    """

    __slots__ = "_id", "_reference"

    def __init__(self, value):
        self._id, self._reference = id(value), reference(value)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other) -> bool:
        if self is other or not isinstance(other, Identity) or self._id != other._id:
            return self is other
        value = self._reference()
        return value is not None and value is other._reference()


def reference(value):
    """A function that returns `value`, by a weak reference if `value` supports it."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def plain(value):
    """`value` in a form that compares exactly: 0.0 is not -0.0, 1 is not True, nan is nan; None if it is not plain."""
    if not isinstance(value, _PLAIN):
        return None
    return type(value), repr(value) if isinstance(value, (float, complex, Decimal)) else value


def is_plain_type(kind) -> bool:
    """Whether `plain` represents values of this type."""
    return isinstance(kind, type) and issubclass(kind, _PLAIN)


def is_constant(value) -> bool:
    """Whether `comparable` always returns the same for this object, whatever the code that owns it does."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_constant, value))
    return isinstance(value, _PLAIN + _CONSTANT)


def comparable(value):
    """An attribute's value in a form that a call can compare; None if it is an object that no call compares."""
    if type(value) in (int, bool, str):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return Identity(value)
    if isinstance(value, (list, tuple, deque)) and len(value) <= LONGEST_CONTAINER:
        return type(value), tuple(map(comparable, value))
    if type(value) is SimpleNamespace:
        value = vars(value)
    if isinstance(value, dict) and len(value) <= LONGEST_CONTAINER:
        return type(value), tuple((comparable(key), comparable(item)) for key, item in value.items())
    if isinstance(value, (set, frozenset)) and len(value) <= LONGEST_CONTAINER:
        return type(value), frozenset(map(comparable, value))
    if isinstance(value, (range, slice)):
        return type(value), tuple(map(comparable, (value.start, value.stop, value.step)))
    if isinstance(value, types.MethodType):  # every access to a method gives another object
        return types.MethodType, Identity(value.__self__), Identity(value.__func__)
    if (fact := plain(value)) is None and callable(value) and not isinstance(value, weakref.ref):
        return Identity(value)
    return fact
