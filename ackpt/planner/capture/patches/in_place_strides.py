"""Give a tensor that was changed in place the strides that it has in eager mode.

When captured, ``x.relu_()`` becomes ``relu(x)``, whose result is contiguous where `x` has gaps, as the parts of a split
tensor have, or where `x` is channels last with sizes of 1. Strides decide how later operations round: a vectorized
loop runs over a row or over all elements, and convolutions and resizing take the memory format from them.

Torch: functionalization keeps the strides of the functional result (``aten/src/ATen/FunctionalTensorWrapper.cpp``);
loops are in ``aten/src/ATen/native/cpu/Loops.h``. Versions: 2.11 to 2.13.
Test: ``tests/planner/capture/test_in_place_strides.py``.
"""

from __future__ import annotations

import contextlib
from functools import cache
from unittest import mock

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._pytree import tree_leaves

from ackpt.metering.autograd_engine import is_dense

_LOOP_BYTES = 128  # a multiple of the bytes of one iteration of a vectorized loop, two registers of at most 64 bytes
# The same bits in a vectorized loop and in one over single elements, whatever the strides. Not: a * b + c, which one
# of them rounds once, and functions such as exp.
_EXACT = {
    *("add", "sub", "mul", "div", "neg", "abs", "relu", "clamp", "clamp_min", "clamp_max", "maximum", "minimum"),
    *("fill", "zero", "copy", "masked_fill", "where", "sqrt", "reciprocal", "floor", "ceil", "round", "sign"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "clone", "_to_copy", "threshold"),
}

torch.library.define("ackpt_graph::with_strides", "(Tensor x, SymInt[] strides) -> Tensor")


@torch.library.impl("ackpt_graph::with_strides", "CompositeExplicitAutograd")
def _with_strides(x, strides):
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


@torch.library.register_fake("ackpt_graph::with_strides")
def _strided_shape(x, strides):
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


@contextlib.contextmanager
def eager_strides():
    """Inside, a capture restores the strides of tensors that are changed in place."""
    dispatch = FunctionalTensorMode.__torch_dispatch__

    def with_eager_strides(self, func, types, args=(), kwargs=None):
        kind = _kind(func)
        if kind != "exact":
            _restore_gaps(kind, args, kwargs)
        result = dispatch(self, func, types, args, kwargs)
        if changes_its_first_argument(func):
            _restore_format(args[0])
        return result

    with mock.patch.object(FunctionalTensorMode, "__torch_dispatch__", with_eager_strides):
        yield


def changes_its_first_argument(func) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.name.endswith("_") or not schema.arguments:
        return False
    return schema.arguments[0].alias_info is not None and schema.arguments[0].alias_info.is_write


def _restore_gaps(kind: str, args, kwargs) -> None:
    """Before an operation reads them: tensors that have gaps in eager mode, where gaps change how it rounds."""
    for x in tree_leaves((args, kwargs)):
        if not isinstance(x, FunctionalTensor) or x.device.type != "cpu" or x.layout != torch.strided:
            continue
        torch._sync(x)
        value = torch._from_functional_tensor(x.elem)
        if _at_example(x.stride()) == _at_example(value.stride()) or x.dim() != value.dim():
            continue
        if not _is_dense(value) or _is_dense(x) or (kind == "loop" and _is_whole_iterations(x)):
            continue
        torch._functionalize_replace(x.elem, torch.ops.ackpt_graph.with_strides(value, _short_gaps(x)))


def _restore_format(x) -> None:
    """After an operation in place: the memory format that `x` has in eager mode."""
    if not isinstance(x, FunctionalTensor) or x.dim() not in (4, 5) or x.layout != torch.strided:
        return
    value = torch._from_functional_tensor(x.elem)
    if value.dim() != x.dim() or suggest_memory_format(value) == suggest_memory_format(x):
        return
    sizes, eagers, captured = (_at_example(each) for each in (x.shape, x.stride(), value.stride()))
    if all(size == 1 or stride == own for size, stride, own in zip(sizes, eagers, captured)):
        value = torch.ops.aten.as_strided.default(value, x.shape, x.stride())
    elif _is_dense(x):
        value = torch.ops.ackpt_graph.with_strides(value, x.stride())
    else:
        return
    torch._functionalize_replace(x.elem, value)


@cache
def _kind(func) -> str:
    """``"exact"``: strides do not change the result's bits; ``"loop"``: they do in a vectorized loop; else ``""``."""
    schema = getattr(func, "_schema", None)
    if schema is None or func in FunctionalTensor.metadata_fns:
        return "exact"
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.arguments)
    if is_view or schema.name.removeprefix("aten::").removesuffix("_") in _EXACT:
        return "exact"
    return "loop" if torch.Tag.pointwise in func.tags else ""


def _is_whole_iterations(x) -> bool:
    """Whether every contiguous run of `x` is a multiple of what a vectorized loop takes at once."""
    return x.stride(-1) == 1 and _at_example(x.shape)[-1] * x.element_size() % _LOOP_BYTES == 0


def _is_dense(x) -> bool:
    return is_dense(torch.empty_strided(_at_example(x.shape), _at_example(x.stride()), device="meta"))


def _short_gaps(x) -> list[int]:
    """Strides for which loops run as over `x`: in the same order, with gaps at the same places, but short ones."""
    sizes, eagers = _at_example(x.shape), _at_example(x.stride())
    strides, was, now = [0] * x.dim(), 1, 1  # the next stride without a gap, in `x` and in the result
    for at in sorted(range(x.dim()), key=eagers.__getitem__):
        if sizes[at] != 1:
            now = now + int(eagers[at] != was)
            strides[at], was, now = now, eagers[at] * sizes[at], now * x.shape[at]
    return strides


def _at_example(sizes) -> list[int]:
    """`sizes` as numbers; symbols have those of the example inputs, so that no guard on them arises."""
    return [size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes]
