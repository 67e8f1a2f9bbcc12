"""The bytes per token that one block saves for backward, from shapes alone: why two models of one size differ."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ackpt.metering.gpus import gpu
from ackpt.metering.prediction import predict
from ackpt.models.transformer import RMSNorm

from .reference import UnfusedRMSNorm

TOKENS = 1024
WORKSPACES = 2 * gpu("h100-80g").cublas_workspace_bytes  # of the main thread and of autograd's


def saved_per_token(make: Callable[[], nn.Module], width: int, dtype: torch.dtype, call=nn.Module.__call__) -> int:
    """Bytes per token that a module saves for backward under bf16 autocast.

    Args:
        make: returns the module.
        width, dtype: of its input.
        call: called as ``call(module, x, offsets)``.

    Example:
        >>> import torch
        >>> from experiments.published.block_bytes import saved_per_token
        >>> saved_per_token(lambda: torch.nn.GELU(), 16, torch.float32, lambda module, x, offsets: module(x))
        64
    """
    few, many = (_saved(make, tokens, width, dtype, call) for tokens in (TOKENS, 2 * TOKENS))
    return (many - few) // TOKENS


def _saved(make, tokens, width, dtype, call) -> int:
    with FakeTensorMode():
        module, offsets = make(), torch.empty(2, dtype=torch.int32)
        leaf = torch.empty(tokens, width, dtype=dtype, requires_grad=True)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(module, leaf.clone(), offsets).sum()
        loss.backward()

    timeline = predict(step, resident=(module, leaf, offsets), device="h100-80g").timeline
    return timeline.at(timeline.boundary or 0)["activations"]


def with_fused_norms(module: nn.Module) -> nn.Module:
    """The module with the package's `RMSNorm`, which saves what a fused kernel saves, for each `UnfusedRMSNorm`."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, UnfusedRMSNorm):
                setattr(parent, name, RMSNorm(child.weight.numel(), torch.finfo(torch.float32).eps))
    return module
