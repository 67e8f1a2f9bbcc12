"""The operations that a calibration times, with example arguments of the sizes of small models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import ackpt.planner.capture.patches.python_kernels  # noqa: F401 (defines ackpt_graph::dropout_noise)
from ackpt.metering.flops import formula
from ackpt.planner.capture.mask_bits import packed_bytes

from .operation_costs import elements

aten: Any = torch.ops.aten
_ROWS, _COLUMNS = 1024, 512
_IMAGE = (4, 32, 32, 32)
_HEADS = (2, 8, 128, 64)


@dataclass(frozen=True)
class Example:
    """One operation: ``arguments`` makes its positional arguments for a dtype; ``counts_bytes``: as its work."""

    overload: Any
    arguments: Callable[[torch.dtype], tuple]
    keywords: dict[str, Any]
    counts_bytes: bool = False

    @property
    def name(self) -> str:
        return self.overload.overloadpacket.__name__

    @property
    def has_flops(self) -> bool:
        """Whether torch has a formula for its FLOPs."""
        return formula(self.overload.overloadpacket) is not None

    def made(self, dtype: torch.dtype) -> tuple[Callable, tuple, dict[str, Any]]:
        """The operation with arguments and keywords."""
        return self.overload, self.arguments(dtype), self.keywords

    def work(self, arguments, keywords, result) -> int:
        """What its rate counts: FLOPs, or else elements of the largest tensor, or bytes."""
        if self.counts_bytes:
            tensors = [leaf for leaf in tree_leaves((arguments, result)) if isinstance(leaf, Tensor)]
            return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        count = formula(self.overload.overloadpacket)
        return elements(arguments, keywords, result) if count is None else count(*arguments, **keywords, out_val=result)


def _bytes(arguments, result) -> int:
    tensors = [leaf for leaf in tree_leaves((arguments, result)) if isinstance(leaf, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _some(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.full(shape, 0.5, dtype=dtype)


def _example(overload, *arguments, **keywords) -> Example:
    """Arguments that are callable are called with the dtype."""

    def made(dtype: torch.dtype) -> tuple:
        return tuple(argument(dtype) if callable(argument) else argument for argument in arguments)

    return Example(overload, made, keywords)


_rows = _some(_ROWS, _COLUMNS)
_row = _some(_COLUMNS)
_matrix = _some(256, 256)
_column = _some(_ROWS, 1)
_images = _some(*_IMAGE)
_channel = _some(_IMAGE[1])
_kernel = _some(_IMAGE[1], _IMAGE[1], 3, 3)
_heads = _some(*_HEADS)
_log_sums = _some(*_HEADS[:2], _HEADS[2])
_PADDING = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # stride, padding, dilation, transposed, output padding, groups


def _ids(dtype: torch.dtype) -> Tensor:
    return torch.arange(_ROWS) % 16


def _wide_ids(dtype: torch.dtype) -> Tensor:
    return torch.arange(_COLUMNS).expand(_ROWS, -1).contiguous()


def _permuted(dtype: torch.dtype) -> Tensor:
    return _heads(dtype).transpose(1, 2)


def _mask(dtype: torch.dtype) -> Tensor:
    return torch.ones(_ROWS, _COLUMNS, dtype=torch.bool)


def _bits(dtype: torch.dtype) -> Tensor:
    return torch.full((packed_bytes(_ROWS * _COLUMNS),), 85, dtype=torch.uint8)


def _float32_log_sums(dtype: torch.dtype) -> Tensor:
    return _log_sums(torch.float32)


_ELEMENTWISE = [
    *(aten.exp, aten.log, aten.tanh, aten.sigmoid, aten.erf, aten.sin, aten.cos, aten.rsqrt, aten.sqrt, aten.softplus),
    *(aten.gelu, aten.silu, aten.mish, aten.elu, aten.hardswish, aten.log1p, aten.expm1),
]
_BACKWARD = (aten.gelu_backward, aten.silu_backward, aten.hardswish_backward, aten.tanh_backward)

LAUNCH = _example(aten.add.Tensor, _some(1), _some(1))
_many = _some(2048, 1024)
BYTES = Example(aten.add.Tensor, lambda dtype: (_many(dtype), _many(dtype)), {}, counts_bytes=True)
OPERATIONS = (
    _example(aten.mm.default, _matrix, _matrix),
    _example(aten.addmm.default, _some(256), _matrix, _matrix),
    _example(aten.bmm.default, _some(16, 128, 64), _some(16, 64, 128)),
    _example(aten.convolution.default, _images, _kernel, _channel, *_PADDING),
    _example(aten.convolution_backward.default, _images, _images, _kernel, [_IMAGE[1]], *_PADDING, [True, True, True]),
    _example(aten._scaled_dot_product_flash_attention_for_cpu.default, _heads, _heads, _heads),
    _example(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        *(_heads, _heads, _heads, _heads, _heads, _float32_log_sums, 0.0, False),
    ),
    *(_example(packet.default, _rows) for packet in _ELEMENTWISE),
    *(_example(packet.default, _rows, _rows) for packet in _BACKWARD),
    _example(aten.pow.Tensor_Scalar, _rows, 3),
    _example(aten._softmax.default, _rows, -1, False),
    _example(aten._safe_softmax.default, _rows, -1),
    _example(aten._softmax_backward_data.default, _rows, _rows, -1, lambda dtype: dtype),
    _example(aten._log_softmax.default, _rows, -1, False),
    _example(aten._log_softmax_backward_data.default, _rows, _rows, -1, lambda dtype: dtype),
    _example(aten.native_layer_norm.default, _rows, [_COLUMNS], _row, _row, 1e-5),
    _example(
        aten.native_layer_norm_backward.default,
        *(_rows, _rows, [_COLUMNS], _column, _column, _row, _row, [True, True, True]),
    ),
    _example(aten.native_batch_norm.default, _images, _channel, _channel, _channel, _channel, True, 0.1, 1e-5),
    _example(
        aten._native_batch_norm_legit_functional.default,
        *(_images, _channel, _channel, _channel, _channel, True, 0.1, 1e-5),
    ),
    _example(
        aten.native_batch_norm_backward.default,
        *(_images, _images, _channel, _channel, _channel, _channel, _channel, True, 1e-5, [True, True, True]),
    ),
    _example(aten.native_dropout.default, _rows, 0.1, True),
    _example(torch.ops.ackpt_graph.dropout_noise.default, _rows, 0.1),
    _example(torch.ops.ackpt_graph.pack_bits.default, _rows),
    _example(
        torch.ops.ackpt_graph.unpack_bits.default,
        *(_bits, [_ROWS, _COLUMNS], [_COLUMNS, 1], lambda dtype: dtype, 1),
    ),
    _example(aten.bernoulli.p, _rows, 0.9),
    _example(aten.rand_like.default, _rows),
    _example(aten.sum.dim_IntList, _rows, [0]),
    _example(aten.mean.dim, _rows, [-1]),
    _example(aten.var_mean.correction, _rows, [-1]),
    _example(aten.embedding.default, _some(16, _COLUMNS), _ids),
    _example(aten.embedding_dense_backward.default, _rows, _ids, 16, -1, False),
    _example(aten.index_select.default, _rows, 0, _ids),
    _example(aten.gather.default, _rows, 1, _wide_ids),
    _example(aten.scatter_add.default, _rows, 1, _wide_ids, _rows),
    _example(aten.where.self, _mask, _rows, _rows),
    _example(aten.masked_fill.Scalar, _rows, _mask, 0),
    _example(aten.clone.default, _permuted, memory_format=torch.contiguous_format),
    _example(aten.cat.default, lambda dtype: [_images(dtype), _images(dtype)], 1),
    _example(aten.max_pool2d_with_indices.default, _images, [2, 2], [2, 2]),
    _example(aten.avg_pool2d.default, _images, [2, 2], [2, 2]),
    _example(aten.upsample_nearest2d.default, _images, [64, 64]),
)
