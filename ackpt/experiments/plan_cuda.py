"""A step as a GPU would run it, captured from tensors that pretend to be on the CPU.

A build of torch without CUDA cannot trace fake CUDA tensors: autograd asks for the device. What `predict_cuda` does to
an eager step, dropout and autocast as on a GPU, is done here while a step is captured, and attention becomes the
kernel that torch chooses there: the operations of the GPU's kernels have shapes everywhere.

Not imitated: the fused RMS norm of ``torch.nn.functional.rms_norm``, taken apart here as on the CPU, and the float32
statistics of norms where values and weights are in half precision (here 2 bytes a row, there 4).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ackpt.predict_cuda import CudaChoices

_HALF = (torch.float16, torch.bfloat16)
_MASK_ALIGNMENT = 16


class CapturedCudaChoices(CudaChoices):
    """Calls as on a GPU while a step is captured; `ampere`: on one of compute capability 8.0 or later.

    Source: ``aten/native/transformers/cuda/sdp_utils.cpp`` and ``attention.cpp`` of torch.
    """

    def __init__(self, ampere: bool):
        super().__init__()
        self.ampere = ampere

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.rms_norm or func is torch.rms_norm:
            if torch.is_autocast_enabled("cpu"):
                args = [_widened(argument) for argument in args]
                kwargs = {name: _widened(argument) for name, argument in kwargs.items()}
            return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def _attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        aten = torch.ops.aten
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        mask = _additive(attn_mask, query)
        grouped = enable_gqa and query.shape[1] != key.shape[1]
        heads = query.dim() == 4
        if heads and self._flash_runs(query, key, value, mask, is_causal):
            width = query.shape[-1]
            if width % 8:  # padding by nothing would be a copy
                query, key, value = (F.pad(tensor, (0, -width % 8)) for tensor in (query, key, value))
            scale = width**-0.5 if scale is None else scale
            found = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
            return found[..., :width]
        if heads and self._efficient_runs(query, value) and not grouped:
            if mask is not None:
                mask = _aligned(mask).expand(*query.shape[:-1], key.shape[-2])
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, True, dropout_p, is_causal, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]

    def _flash_runs(self, query, key, value, mask, is_causal) -> bool:
        widths = {tensor.shape[-1] for tensor in (query, key, value)}
        square = query.shape[-2] == key.shape[-2]
        fits = query.dtype in _HALF and mask is None and len(widths) == 1 and max(widths) <= 256
        return self.ampere and fits and (square or not is_causal)

    def _efficient_runs(self, query, value) -> bool:
        if query.dtype not in (*_HALF, torch.float32):
            return False
        if query.dtype == torch.bfloat16 and not self.ampere:
            return False
        alignment = 8 if query.dtype in _HALF else 4 if self.ampere else 1
        return not query.shape[-1] % alignment and not value.shape[-1] % alignment


def _additive(mask, query):
    """A mask of bools as numbers that are added; torch keeps these for backward."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.where(mask, query.new_zeros(()), query.new_full((), float("-inf")))
    return mask.to(query.dtype)


def _aligned(mask):
    """The rows of a mask begin at multiples of 16 elements."""
    length = mask.shape[-1]
    return F.pad(mask, (0, -length % _MASK_ALIGNMENT))[..., :length] if length % _MASK_ALIGNMENT else mask


def _widened(argument):
    low = isinstance(argument, torch.Tensor) and argument.dtype in _HALF
    return argument.float() if low else argument
