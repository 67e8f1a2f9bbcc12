"""Refuse torch's attention modules in eval mode if eager would run a fused kernel that a capture cannot record.

``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call that kernel if nothing records gradients, unless a
tensor has ``__torch_function__``, as every tensor has during a capture. The kernel rounds differently.

Torch: ``why_not_fast_path`` in ``MultiheadAttention.forward``, ``torch/nn/modules/activation.py``, and the like in
``torch/nn/modules/transformer.py``. Versions: 2.11 to 2.13.
Test: ``test_the_fused_kernel_of_attention_in_evaluation_is_refused_or_off`` in ``tests/planner/capture/test_whole.py``.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch import nn

from ackpt.checkpointing.reachable import FUSED
from ackpt.core.errors import TraceError


@contextlib.contextmanager
def fused_attention_refused():
    """Inside, a module that eager would run by the fused kernel raises a TraceError."""
    with contextlib.ExitStack() as stack:
        for kind in FUSED:
            stack.enter_context(mock.patch.object(kind, "forward", _checked(kind.forward)))
        yield


def _checked(forward):
    def checked(self, *args, **kwargs):
        if _takes_fused_kernel(self, (*args, *kwargs.values())):
            raise TraceError(
                f"a torch.nn.{type(self).__name__} runs in evaluation mode without gradients, where eager PyTorch uses "
                "a fused kernel that cannot be captured and rounds differently. Call "
                "torch.backends.mha.set_fastpath_enabled(False): then the model and its plan compute the same."
            )
        return forward(self, *args, **kwargs)

    return checked


def _takes_fused_kernel(module, args) -> bool:
    attention = module if isinstance(module, nn.MultiheadAttention) else module.self_attn
    if module.training or not torch.backends.mha.get_fastpath_enabled() or not attention.batch_first:
        return False
    if not attention._qkv_same_embed_dim or attention.num_heads % 2 or attention.in_proj_bias is None:
        return False
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if attention is module and any(tensor is not tensors[0] for tensor in tensors[:3]):
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *module.parameters())))
