"""torch's cache of what operations on tensors without data return, only with results that come back as they were.

From the cache a result has its shape, strides and dtype again, but a storage of just that size, in which it begins at
the start, shared with nothing but the argument of a view. What is anything else is computed anew each time: a copy of
a slice is as large as the whole, and several results may share a storage.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

_MAKE_ENTRY = FakeTensorMode._make_cache_entry
_Bypass = fake_tensor._BypassDispatchCache


@contextlib.contextmanager
def exact_cache(fake_mode=None):
    """Inside, that cache starts empty, as torch's rules and settings may differ from those outside.

    ``fake_mode``: one that exists already, and may have symbols, whose results are kept elsewhere.
    """
    shapes = None if fake_mode is None else fake_mode.shape_env
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(FakeTensorMode, "cache", {}))
        stack.enter_context(mock.patch.object(FakeTensorMode, "_make_cache_entry", _entry))
        if shapes is not None:
            stack.enter_context(mock.patch.object(shapes, "fake_tensor_cache", {}))
        yield


def _entry(self, state, key, func, args, kwargs, output):
    made = [value for value in tree_leaves(output) if isinstance(value, FakeTensor)]
    if not _comes_back(func, args, kwargs, made):
        raise _Bypass("its storage would not come back as it is")
    return _MAKE_ENTRY(self, state, key, func, args, kwargs, output)


def _comes_back(func, args, kwargs, made) -> bool:
    """Whether all of `made`, results of one operation, would have storages as they have now."""
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    if any(value.layout != torch.strided for value in (*given, *made)):
        return False
    if isinstance(func, torch._ops.OpOverload) and func.is_view:
        return len(given) == 1 and all(_storage(value) == _storage(given[0]) for value in made)
    new = [value for value in made if not any(value is arg for arg in args)]
    storages = {_storage(value) for value in new}
    alone = len(storages) == len(new) and storages.isdisjoint(map(_storage, given))
    return alone and all(_fills(value) for value in new)


def _storage(value) -> int:
    return value.untyped_storage()._cdata


def _fills(value) -> bool:
    """Whether a tensor's storage is what such a shape and such strides need."""
    if value.storage_offset():
        return False
    last = sum(stride * (size - 1) for size, stride in zip(value.shape, value.stride()))
    return value.untyped_storage().nbytes() == (value.itemsize * (last + 1) if value.numel() else 0)
