"""Restrict torch's cache of fake results to those that it returns correctly.

A cached result has the right shape, strides and dtype, but a new storage of just that size, shared with nothing except
the argument of a view. So results whose storage is larger (a copy of a slice) or shared are computed every time here.

Torch: ``_get_output_tensor_from_cache_entry`` in ``torch/_subclasses/fake_tensor.py``. Versions: 2.11 to 2.13. Without
the patch, sizes are wrong: ``test_a_result_in_the_memory_of_another_is_none_for_the_cache`` and the case "copy of a
slice" in ``tests/planner/capture/test_kernels.py``. Caching nothing would be correct too, but capturing a GPT-2 of 4
layers (815 nodes) then takes 2.4 s of CPU time instead of 1.7 s (torch 2.13). Captures share their results: the next
one of an equal model takes a third less.

For results with symbols, torch takes longer to make an entry of the cache than to compute the result. A capture runs
every forward twice, so only a result that is computed for the third time gets an entry: the dynamic capture of one
encoder layer then takes 1.8 s of CPU time instead of 2.3 s, and that of four layers as long as with all entries.
"""

from __future__ import annotations

import collections
import contextlib
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

_MAKE_ENTRY = FakeTensorMode._make_cache_entry
_Bypass = fake_tensor._BypassDispatchCache
_TOO_EARLY = "it was not computed often enough"
_MOST_RESULTS = 20_000  # about 30 MB
_RESULTS: dict[tuple, dict] = {}


@contextlib.contextmanager
def exact_cache(fake_mode=None):
    """Inside, the cache has only results of such contexts under equal settings, since torch's rules differ outside.

    ``fake_mode``: an existing mode; its results with symbols are not kept.
    """
    shapes = None if fake_mode is None else fake_mode.shape_env
    if sum(map(len, _RESULTS.values())) > _MOST_RESULTS:
        _RESULTS.clear()
    results = _RESULTS.setdefault(_settings(), {})
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(FakeTensorMode, "cache", results))
        stack.enter_context(mock.patch.object(FakeTensorMode, "_make_cache_entry", _entry))
        if shapes is not None:
            stack.enter_context(mock.patch.object(shapes, "fake_tensor_cache", _Recurring()))
        yield


def _settings() -> tuple:
    """What results depend on in addition to operation and arguments."""
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
    )


class _Recurring(dict):
    """Entries for results with symbols, and how often each result was computed before there was one."""

    def __init__(self):
        super().__init__()
        self.computed = collections.Counter()

    def __setitem__(self, key, entry):
        if getattr(entry, "reason", None) != _TOO_EARLY:
            super().__setitem__(key, entry)


def _entry(self, state, key, func, args, kwargs, output):
    symbolic = state.shape_env.fake_tensor_cache if state.cache_on_shape_env() else None
    if isinstance(symbolic, _Recurring):
        symbolic.computed[key] += 1
        if symbolic.computed[key] < 3:
            raise _Bypass(_TOO_EARLY)
    if not isinstance(func, torch._ops.OpOverload):  # a key by the id of a module, which outlives it
        raise _Bypass("it is a higher-order operation")
    made = [value for value in tree_leaves(output) if value is not None]
    if not all(isinstance(value, FakeTensor) for value in made):  # a choice of kernels, which settings may change
        raise _Bypass("its result is no tensor")
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
