"""A loss as ``torch.amp.GradScaler`` scales it: ``scaler.scale(model(**batch).loss).backward()``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def scaled_loss(model: nn.Module) -> Iterator[None]:
    """Inside, the model's scalar output is multiplied by a scale that lives in a buffer, like the growth tracker.

    Both are scalars, of float32 and int32 (``_lazy_init_scale_growth_tracker`` in torch/amp/grad_scaler.py:173, and
    ``scale`` in line 217).

    Raises:
        ValueError: for parameters in float16, whose gradients torch does not unscale (torch/amp/grad_scaler.py:275).
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise ValueError(
                f"--grad-scaler: torch does not unscale the gradient of {name}, which is float16. Train parameters in "
                "float32 under --autocast float16, without --dtype float16"
            )
    device = next(model.parameters()).device
    model.register_buffer(_SCALE, torch.empty((), device=device, dtype=torch.float32))
    model.register_buffer(_TRACKER, torch.empty((), device=device, dtype=torch.int32))
    handle = model.register_forward_hook(_scale)
    try:
        yield
    finally:
        handle.remove()
        del model._buffers[_SCALE], model._buffers[_TRACKER]


_SCALE, _TRACKER = "_loss_scale", "_growth_tracker"


def _scale(model: nn.Module, _, output: Any) -> Any:
    scale = model.get_buffer(_SCALE)
    if isinstance(output, Tensor):
        return output * scale
    if isinstance(output, MutableMapping):  # a ModelOutput of transformers
        output["loss"] = output["loss"] * scale
        return output
    raise ValueError(f"--grad-scaler: {type(model).__name__} returns no loss")
