"""Attention as a GPU runs it, for fake tensors on the CPU.

`scaled_dot_product_attention` calls the operator of the kernel that a GPU would choose. These operators have shape
functions and derivatives on every device, so autograd saves the same tensors as on a GPU: queries, keys, values, output
and the logsumexp of each row.

Sources, in torch 2.13: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (``priority_order``,
``can_use_cudnn_attention``, ``can_use_flash_attention``, ``can_use_mem_efficient_attention``, in this order) and
``aten/src/ATen/native/transformers/attention.cpp``. cuDNN's kernel takes precedence on Hopper and data center Blackwell
if cuDNN is newer than 9.15, as in builds for CUDA 13. This module can be removed together with `cuda_choices`, which
uses it and names the test.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F

_HALF = (torch.float16, torch.bfloat16)
_ALIGNMENT = 8  # elements; `mem_eff_alignment` in attention.cpp


def scaled_dot_product_attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    capability: tuple[int, int] = (8, 0),
):
    """`F.scaled_dot_product_attention` as on a GPU of this compute capability."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (_cast(tensor, dtype) for tensor in (query, key, value))
        attn_mask = attn_mask if attn_mask is None else _cast(attn_mask, dtype)
    with torch.autocast("cpu", enabled=False):
        mask = _additive(attn_mask, query)
        kernel = _kernel(query, key, value, mask, dropout_p, is_causal, enable_gqa, capability)
        return kernel(query, key, value, mask, dropout_p, is_causal, scale)


def _kernel(query, key, value, mask, dropout_p, is_causal, enable_gqa, capability) -> Callable:
    if not _is_fusible(query, key, value, enable_gqa):
        return _math
    if _cudnn_runs(query, key, value, dropout_p, capability):
        return _cudnn
    if _flash_runs(query, key, value, mask, dropout_p, is_causal, capability):
        return _flash
    return _efficient if _efficient_runs(query, key, value, capability) else _math


def _is_fusible(query, key, value, enable_gqa) -> bool:
    """Whether both fused kernels can take the inputs: no broadcast batches or heads, one dtype, contiguous rows."""
    tensors = (query, key, value)
    if any(tensor.dim() != 4 or tensor.dtype != query.dtype or not tensor.shape[2] for tensor in tensors):
        return False
    heads = {tensor.shape[1] for tensor in tensors}
    is_grouped = enable_gqa and key.shape[1] == value.shape[1] and not query.shape[1] % key.shape[1]
    packed = all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in tensors)
    return packed and len({tensor.shape[0] for tensor in tensors}) == 1 and (len(heads) == 1 or is_grouped)


def _cudnn_runs(query, key, value, dropout_p, capability) -> bool:
    is_preferred = capability in ((9, 0), (10, 0), (10, 3)) and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    if not is_preferred or not torch.backends.cuda.cudnn_sdp_enabled() or query.dtype not in _HALF:
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    widths = query.shape[-1], value.shape[-1]
    if query.shape[-1] != key.shape[-1] or max(widths) > 128 or any(width % 8 for width in widths):
        return False
    return key.shape[-2] != 1 and (not dropout_p or (query.shape[-2] != 1 and (dropout_p * 16).is_integer()))


def _flash_runs(query, key, value, mask, dropout_p, is_causal, capability) -> bool:
    widths = {tensor.shape[-1] for tensor in (query, key, value)}
    width = max(widths)
    fits = query.dtype in _HALF and mask is None and len(widths) == 1 and width <= 256
    if not fits or capability < (8, 0) or not torch.backends.cuda.flash_sdp_enabled():
        return False
    if (8, 6) <= capability <= (8, 9) or capability[0] == 12:  # less shared memory: backward takes fewer widths
        if _needs_gradient(query, key, value) and width > 192 and (dropout_p or width <= 224):
            return False
    return query.shape[-2] == key.shape[-2] or not is_causal


def _efficient_runs(query, key, value, capability) -> bool:
    ampere = capability >= (8, 0)
    if query.shape[1] != key.shape[1] or not torch.backends.cuda.mem_efficient_sdp_enabled():
        return False
    if query.dtype not in (*_HALF, torch.float32) or (query.dtype == torch.bfloat16 and not ampere):
        return False
    alignment = 8 if query.dtype in _HALF else 4 if ampere else 1
    widths = query.shape[-1], value.shape[-1]
    return query.shape[-1] == key.shape[-1] and not any(width % alignment for width in widths)


def _needs_gradient(*tensors) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _cudnn(query, key, value, mask, dropout_p, is_causal, scale):
    saves = _needs_gradient(query, key, value)
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, mask, saves, dropout_p, is_causal, scale=scale
    )[0]


def _flash(query, key, value, mask, dropout_p, is_causal, scale):
    width = query.shape[-1]
    if width % 8:  # padding by zero elements would still copy
        query, key, value = (F.pad(tensor, (0, -width % 8)) for tensor in (query, key, value))
    scale = width**-0.5 if scale is None else scale
    results = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    return results[0][..., :width]


def _efficient(query, key, value, mask, dropout_p, is_causal, scale):
    if mask is not None:
        mask = _aligned(mask).expand(*query.shape[:-1], key.shape[-2])
    saves = _needs_gradient(query, key, value)
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, saves, dropout_p, is_causal, scale=scale
    )[0]


def _math(query, key, value, mask, dropout_p, is_causal, scale):
    """`_scaled_dot_product_attention_math` with the dropout kernel of a GPU, which saves a boolean mask."""
    dtype = query.dtype
    if dtype in _HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    root = abs(scale) ** 0.5
    query = query * (root if scale >= 0 else -root)
    if is_causal:
        allowed = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        mask = _additive(allowed, query)
    if query.dim() > 2 and query.shape[-3] != key.shape[-3] and key.shape[-3] > 1:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ (key.transpose(-2, -1) * root)
    if mask is not None:
        scores = scores.add_(mask)
    weights = torch.ops.aten._safe_softmax(scores, -1)
    if dropout_p:
        weights = torch.native_dropout(weights, dropout_p, True)[0]
    return (weights @ value).to(dtype)


def _cast(tensor, dtype):
    """Cast an argument as autocast does."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _additive(mask, query):
    """A boolean mask as floats that are added to the scores; torch saves them for backward."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, query.new_zeros(()), query.new_full((), float("-inf")))


def _aligned(mask):
    """The mask, padded so that its rows start at multiples of 8 elements (`preprocess_mask` in attention.cpp)."""
    if mask.stride(-1) == 1 and not any(stride % _ALIGNMENT for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return F.pad(mask, (0, _ALIGNMENT - length % _ALIGNMENT))[..., :length]
