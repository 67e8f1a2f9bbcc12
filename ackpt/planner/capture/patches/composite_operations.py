"""Keep C++ implementations of operations that torch's capture would decompose in Python with different rounding.

Some decompositions also return gradients with other strides, drop the dropout between recurrent layers, or read values.

Torch: functions registered with ``py_impl(DispatchKey.CompositeImplicitAutograd)`` or ``DispatchKey.Autograd`` in
``torch/_decomp/decompositions.py`` and ``torch/_refs`` (``lstm_impl``, ``upsample_bilinear2d``, ``hardshrink``, ...).
The C++ of ``upsample_*.vec`` (``aten/src/ATen/native/UpSample*.cpp``) and of ``max_pool1d`` (``Pooling.cpp``) takes no
symbolic sizes: it has Python code here.
Versions: 2.11 to 2.13. Test: ``tests/planner/capture/test_whole.py``; an operation can leave the list when it passes
without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp.decompositions import upsample_compute_output_size

from .python_kernels import put

aten = torch.ops.aten
_KEYS = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd
_RESIZED = (aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_bicubic2d, aten.upsample_trilinear3d)
_RESIZED += (aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa)
# Taken apart into indexing, these have contiguous gradients; eager's keep the order of the incoming ones.
_RESIZED += (aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d)
_RESIZED += (aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d)
_WHOLE = [
    *(packet.default for packet in _RESIZED),
    *(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input),
    aten.hardshrink.default,
    aten.softshrink.default,
    aten.multi_margin_loss.default,
    aten.multilabel_margin_loss_forward.default,
    aten.istft.default,  # reads the values of its window, so that no model with it can be captured
]


def _resizing(packet):
    """The computation of the C++ of ``packet.vec``, for sizes that may be symbols."""

    def vec(x, output_size, *rest):
        *options, factors = rest
        size: Any = upsample_compute_output_size(x.shape, output_size, factors)
        return packet.default(x, size, *options, *(factors or [None] * len(size)))

    return vec


def _max_pool1d_with_indices(x, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False):
    """The computation of the C++, for sizes that may be symbols."""
    sizes = [
        (least, *each) for least, each in zip((1, 1, 0, 1), (kernel_size, stride or kernel_size, padding, dilation))
    ]
    results = aten.max_pool2d_with_indices.default(x.unsqueeze(-2), *sizes, ceil_mode)
    return tuple(result.squeeze(-2) for result in results)


def whole_operations():
    """Inside, capturing leaves these operations to C++, which keeps them or takes them apart as eager does."""
    resizing = {packet.vec: _resizing(packet) for packet in _RESIZED}
    pooling = {
        aten.max_pool1d_with_indices.default: _max_pool1d_with_indices,
        aten.max_pool1d.default: lambda *args, **kwargs: _max_pool1d_with_indices(*args, **kwargs)[0],
    }
    kernels = {**dict.fromkeys(_WHOLE), **resizing, **pooling}
    return put({(operation, key): kernel for operation, kernel in kernels.items() for key in _KEYS})
