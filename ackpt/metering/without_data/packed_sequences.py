"""Tell transformers decoders on fake tensors whether their position ids form one sequence, which eager reads itself.

They read the values of the position ids, which fake tensors do not have: they would then use a mask tensor instead of
their attention's causal mask. Positions that the model counts itself have known values, since they depend on no input.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

_COUNTED = ("arange",)
_DERIVED = ("add", "unsqueeze", "expand", "repeat", "view", "reshape", "long")  # what models do to positions


class _Counted(TorchFunctionMode):
    """Records the values of traced tensors that come from ``torch.arange`` alone and were not changed since."""

    def __init__(self):
        super().__init__()
        self._known: dict[int, tuple[weakref.ref, torch.Tensor, int]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _COUNTED or name in _DERIVED:
            self._note(result, func, args, kwargs or {}, counted=name in _COUNTED)
        return result

    def is_one_sequence(self, positions) -> bool:
        value = self._value(positions)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return value is not None and bool((value.diff(dim=-1) == 1).all())

    def _value(self, tensor) -> torch.Tensor | None:
        ref, value, version = self._known.get(id(tensor), (None, None, None))
        return value if ref is not None and ref() is tensor and version == tensor._version else None

    def _note(self, result, func, args, kwargs, counted):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if result.dtype != torch.int64 or bool(tensors) == counted or "out" in kwargs:
            return
        if any(self._value(tensor) is None for tensor in tensors):
            return
        args, kwargs = tree_map_only(torch.Tensor, self._value, (args, kwargs))
        args, kwargs = tree_map_only(torch.SymInt, _of_example, (args, kwargs))
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            value = func(*args, **({**kwargs, "device": "cpu"} if counted else kwargs))
        self._known[id(result)] = weakref.ref(result), value, result._version


def _of_example(size: torch.SymInt) -> int:
    """The size in the example. Positions that count on are one sequence at every length, so this needs no guard."""
    return size.node.hint


@contextlib.contextmanager
def found_packed():
    """Inside, positions that a decoder counted itself are one sequence, if its version of transformers asks."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(masking, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return
    counted = _Counted()

    def found(position_ids):
        return None if counted.is_one_sequence(position_ids) else find(position_ids)

    masking.find_packed_sequence_indices = found
    try:
        with counted:
            yield
    finally:
        masking.find_packed_sequence_indices = find
