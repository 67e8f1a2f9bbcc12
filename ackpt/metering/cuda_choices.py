"""Make a step on fake CPU tensors save what the same step saves on a GPU.

If torch has no CUDA, an operation on a fake CUDA tensor that requires grad ends the process:
``InputMetadata::InputMetadata`` (``torch/csrc/autograd/input_metadata.cpp``) asks for the device guard of a device that
is not there. So a predicted step runs on fake *CPU* tensors, with ``torch.autocast("cpu", dtype)`` in place of
``torch.autocast("cuda", dtype)``, and this function mode replaces the calls that save other bytes on a GPU; the memory
that kernels allocate internally is in `kernel_memory`. Sources are files of torch 2.13, paths without a folder those in
``aten/src/ATen/native``.

Remove this module once ``tests/metering/test_predict_cuda.py::test_fake_cuda_tensors_end_the_process`` fails.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from .autograd_engine import around_backward


def _functions(names: str) -> set:
    """All functions with these names, in torch, torch.nn.functional, torch.special, torch.linalg and as methods."""
    owners = (torch, F, torch.Tensor, torch.special, torch.linalg)
    return {getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)}


# What autocast runs in float32: the lists ``AT_FORALL_FP32*`` in aten/src/ATen/autocast_mode.h.
_FP32 = _functions(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus "
    "layer_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss "
    "kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss "
    "triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp "
    "interpolate upsample"
)
# These take the dtype of their result as an argument.
_FP32_RESULT = _functions("prod softmax log_softmax cumprod cumsum sum norm vector_norm matrix_norm")
_UNTOUCHED = _functions("cat concat concatenate stack index_copy")
_RMS_NORM = _functions("rms_norm")
_DROPOUT = _functions("dropout")
_CROSS_ENTROPY = _functions("cross_entropy")
_SOFTMAX = {
    **dict.fromkeys(_functions("softmax"), torch.ops.aten._softmax),
    **dict.fromkeys(_functions("log_softmax"), torch.ops.aten._log_softmax),
}
_ATTENTION = _functions("scaled_dot_product_attention")


@contextlib.contextmanager
def cuda_choices(capability: tuple[int, int] = (8, 0)):
    """A context in which calls on the CPU save what they would save on a GPU; see the module."""
    mode = functools.partial(CudaChoices, capability)
    # While torch runs a function for a mode, such as `loss.backward()`, it disables the mode. Recomputation needs it.
    with mode(), around_backward(mode), _foreach_by_default():
        yield


@contextlib.contextmanager
def _foreach_by_default():
    """Inside, optimizers without a setting of `foreach` and `fused` choose as for parameters on a GPU.

    They ask ``_default_to_fused_or_foreach`` in torch/optim/optimizer.py.
    """

    def choose(params, differentiable, use_fused=False):
        return False, not differentiable

    name = "_default_to_fused_or_foreach"
    with contextlib.ExitStack() as stack:
        for module in [module for key, module in sys.modules.items() if key.startswith("torch.optim.")]:
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, choose))
        yield


class CudaChoices(TorchFunctionMode):
    """The function mode of `cuda_choices`, for a GPU of this compute capability."""

    def __init__(self, capability: tuple[int, int] = (8, 0)):
        super().__init__()
        self.capability = capability

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        autocast = torch.is_autocast_enabled("cpu")
        if func in _RMS_NORM:
            return _rms_norm(autocast, *args, **kwargs)
        if func in _DROPOUT:
            return _dropout(func, *args, **kwargs)
        if func in _ATTENTION:
            return scaled_dot_product_attention(*args, **kwargs, capability=self.capability)
        if func is F.multi_head_attention_forward:  # a Python function, whose inner calls the mode does not see
            attention = functools.partial(scaled_dot_product_attention, capability=self.capability)
            with mock.patch.object(F, "scaled_dot_product_attention", attention):
                return func(*args, **kwargs)
        if autocast and func in _FP32:
            args, kwargs = tree_map_only(torch.Tensor, _to_fp32, (args, kwargs))
        elif autocast and func in _FP32_RESULT:
            if args and _is_low(args[0]) and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
        elif autocast and func in _CROSS_ENTROPY:
            return _cross_entropy(func, *args, **kwargs)
        elif autocast and func in _UNTOUCHED:
            with torch.autocast("cpu", enabled=False):
                return func(*args, **kwargs)
        if func in _SOFTMAX and (dim := _fused_softmax_dim(func, *args, **kwargs)) is not None:
            return _SOFTMAX[func](args[0] if args else kwargs["input"], dim, True)
        return func(*args, **kwargs)


def _fused_softmax_dim(func, input, dim=None, *rest, dtype=None, _stacklevel=3) -> int | None:
    """The dimension of a softmax of float16 with a result in float32, which makes no copy (``softmax`` in SoftMax.cpp).

    None for any other call.
    """
    if rest:  # F.softmax has one more argument before the dtype
        dtype = rest[-1] if func not in (F.softmax, F.log_softmax) or len(rest) > 1 else dtype
    is_fused = isinstance(input, torch.Tensor) and input.dtype == torch.float16 and dtype == torch.float32
    return dim if is_fused and isinstance(dim, int) else None


def _is_low(tensor) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float16, torch.bfloat16)


def _to_fp32(tensor):
    return tensor.float() if _is_low(tensor) else tensor


def _dropout(func, input, p=0.5, training=True, inplace=False):
    """As ``is_fused_kernel_acceptable`` in Dropout.cpp decides."""
    if not training or p == 0 or inplace:
        return func(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _cross_entropy(func, input, target, *args, **kwargs):
    """Cross-entropy as under CUDA autocast: the softmax in the logits' dtype, the loss in fp32."""
    with torch.autocast("cpu", enabled=False):
        smoothing = kwargs.pop("label_smoothing", 0.0)
        if smoothing or target.is_floating_point() or not _is_low(input):  # the first two run in fp32
            return func(_to_fp32(input), target, *args, label_smoothing=smoothing, **kwargs)
        scores = torch.log_softmax(input, 1 if input.dim() > 1 else 0)
        return F.nll_loss(scores.float(), target, *args, **kwargs)


def _rms_norm(autocast, input, normalized_shape, weight=None, eps=None):
    if autocast:
        input, weight = _to_fp32(input), weight if weight is None else _to_fp32(weight)
    return _FusedRMSNorm.apply(input, weight, len(normalized_shape))


class _FusedRMSNorm(torch.autograd.Function):
    """Allocates and saves like CUDA's ``_fused_rms_norm`` (layer_norm.cpp): input, weight, one fp32 element per row."""

    @staticmethod
    def forward(ctx, input, weight, dims):
        rows = input.shape[: input.dim() - dims]
        scale = input.new_empty((*rows, *(1,) * dims), dtype=torch.float32)
        ctx.save_for_backward(input, weight, scale)
        dtype = input.dtype if weight is None else torch.promote_types(input.dtype, weight.dtype)
        return torch.empty_like(input, dtype=dtype)

    @staticmethod
    def backward(ctx, grad):
        input, weight, _ = ctx.saved_tensors
        grad = grad.contiguous()  # as `_fused_rms_norm_backward_cuda` in layer_norm_kernel.cu does
        wanted = ctx.needs_input_grad
        return (torch.empty_like(input) if wanted[0] else None, torch.empty_like(weight) if wanted[1] else None, None)


# Attention calls the operator of the kernel that a GPU would choose. These operators have shape functions and
# derivatives on every device, so autograd saves the same tensors as on a GPU: queries, keys, values, output and the
# logsumexp of each row. Sources, in torch 2.13: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``
# (``priority_order``, ``can_use_cudnn_attention``, ``can_use_flash_attention``, ``can_use_mem_efficient_attention``, in
# this order) and ``aten/src/ATen/native/transformers/attention.cpp``. cuDNN's kernel takes precedence on Hopper and
# data center Blackwell if cuDNN is newer than 9.15, as in builds for CUDA 13.
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
    is_one_batch = query.shape[0] == key.shape[0] == value.shape[0]
    return packed and is_one_batch and (len(heads) == 1 or is_grouped)


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
