"""Give elementwise results on fake tensors the kernels' strides where an order of dimensions is not unique.

A tensor of images with one pixel or one channel is contiguous and channels last at once. If all operands have the same
shape and are contiguous, the kernels write a contiguous result; torch's rules keep the order of the first operand.

Torch: ``compute_fast_setup_type`` in ``aten/src/ATen/TensorIterator.cpp``, and ``_prim_elementwise_meta`` in
``torch/_prims/__init__.py``. Versions: 2.11 to 2.13. Test: ``tests/planner/capture/test_one_pixel.py``.
"""

from __future__ import annotations

import types
from unittest import mock

import torch
import torch._prims as prims
from torch._prims_common import is_contiguous_for_memory_format_or_false

_UTILS = prims.utils


class _Utils(types.ModuleType):
    """What ``torch._prims`` uses of `torch._prims_common`, with another order of elementwise results."""

    def __getattr__(self, name: str):
        return getattr(_UTILS, name)

    @staticmethod
    def compute_elementwise_output_logical_to_physical_perm(*operands, **options):
        if all(isinstance(x, torch.Tensor) and x.dim() > 3 and _is_contiguous(x) for x in operands):
            return list(range(operands[0].dim())), False
        return _UTILS.compute_elementwise_output_logical_to_physical_perm(*operands, **options)


def contiguous_elementwise():
    """Inside, elementwise results of contiguous fake tensors are contiguous."""
    return mock.patch.object(prims, "utils", _Utils(_UTILS.__name__))


def _is_contiguous(x) -> bool:
    return is_contiguous_for_memory_format_or_false(x, memory_format=torch.contiguous_format)
