"""Losses whose scalar result occupies memory for all elements on the CPU, for predictions with the same bytes.

Their CPU kernels allocate a result with one value per element, and then resize it to a scalar, which does not shrink
its storage (``TORCH_META_FUNC(smooth_l1_loss)``, ``binary_cross_entropy_out_cpu`` and others in torch's
``aten/src/ATen/native/Loss.cpp``). So a loss takes as many bytes as the model's output until the end of the step. In a
prediction the same operations return a plain scalar, as they do on a GPU. Remove this module once
``tests/metering/test_cpu_losses.py`` passes without it.
"""

from __future__ import annotations

import torch

from .cuda_choices import imitates_cuda

aten = torch.ops.aten

LOSSES = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
)


def in_whole_memory(result, x, target, *rest):
    """A scalar in memory for all elements, to replace `result` of one of the `LOSSES` called with these arguments."""
    size = torch.broadcast_shapes(x.shape, target.shape)
    if result.dim() or not all(size) or imitates_cuda():
        return result
    whole = torch.empty(size, dtype=result.dtype, device=result.device)
    is_symbolic = any(isinstance(each, torch.SymInt) for each in size)  # then torch refuses to resize
    return whole.as_strided((), ()) if is_symbolic else whole.resize_(())
