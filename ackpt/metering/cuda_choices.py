"""Make a step on fake CPU tensors save what the same step saves on a GPU.

If torch has no CUDA, an operation on a fake CUDA tensor that requires grad ends the process:
``InputMetadata::InputMetadata`` (``torch/csrc/autograd/input_metadata.cpp``) asks for the device guard of a device that
is not there. So a predicted step runs on fake *CPU* tensors, with ``torch.autocast("cpu", dtype)`` in place of
``torch.autocast("cuda", dtype)``, and this function mode replaces the calls that save other bytes on a GPU:

- autocast's operations in fp32 (lists ``AT_FORALL_FP32*`` in ``aten/src/ATen/autocast_mode.h``);
- the fused kernels of RMSNorm (``aten/src/ATen/native/layer_norm.cpp``) and dropout (``is_fused_kernel_acceptable`` in
  ``aten/src/ATen/native/Dropout.cpp``);
- softmax of float16 with a result in float32, which makes no copy in float32 (``softmax`` in
  ``aten/src/ATen/native/SoftMax.cpp``);
- attention (`attention_choices`), by default as on a GPU of compute capability 8.0;
- the ``foreach`` default of optimizers (``_default_to_fused_or_foreach`` in ``torch/optim/optimizer.py``).

Remove this module once ``tests/metering/test_predict_cuda.py::test_fake_cuda_tensors_end_the_process`` fails.

The memory that kernels take within themselves is in `kernel_memory`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from .attention_choices import scaled_dot_product_attention
from .autograd_engine import around_backward


def _functions(names: str) -> set:
    """All functions with these names, in torch, torch.nn.functional, torch.special, torch.linalg and as methods."""
    owners = (torch, F, torch.Tensor, torch.special, torch.linalg)
    return {getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)}


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
_imitating = threading.local()


@contextlib.contextmanager
def cuda_choices(capability: tuple[int, int] = (8, 0)):
    """A context in which calls on the CPU save what they would save on a GPU; see the module."""
    mode = functools.partial(CudaChoices, capability)
    # While torch runs a function for a mode, such as `loss.backward()`, it disables the mode. Recomputation needs it.
    with mode(), around_backward(mode), _foreach_by_default():
        yield


@contextlib.contextmanager
def _foreach_by_default():
    """Inside, optimizers without a setting of `foreach` and `fused` choose as for parameters on a GPU."""

    def choose(params, differentiable, use_fused=False):
        return False, not differentiable

    name = "_default_to_fused_or_foreach"
    with contextlib.ExitStack() as stack:
        for module in [module for key, module in sys.modules.items() if key.startswith("torch.optim.")]:
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, choose))
        yield


def imitates_cuda() -> bool:
    """Whether `CudaChoices` is active in this thread."""
    return getattr(_imitating, "depth", 0) > 0


class CudaChoices(TorchFunctionMode):
    """The function mode of `cuda_choices`, for a GPU of this compute capability."""

    def __init__(self, capability: tuple[int, int] = (8, 0)):
        super().__init__()
        self.capability = capability

    def __enter__(self):
        _imitating.depth = getattr(_imitating, "depth", 0) + 1
        return super().__enter__()

    def __exit__(self, *error):
        _imitating.depth -= 1
        return super().__exit__(*error)

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
    """The dimension of a softmax of float16 with a result in float32; None for any other call."""
    if rest:  # F.softmax has one more argument before the dtype
        dtype = rest[-1] if func not in (F.softmax, F.log_softmax) or len(rest) > 1 else dtype
    is_fused = isinstance(input, torch.Tensor) and input.dtype == torch.float16 and dtype == torch.float32
    return dim if is_fused and isinstance(dim, int) else None


def _is_low(tensor) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float16, torch.bfloat16)


def _to_fp32(tensor):
    return tensor.float() if _is_low(tensor) else tensor


def _dropout(func, input, p=0.5, training=True, inplace=False):
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
    """Allocates and saves like CUDA's ``_fused_rms_norm``: the input, the weight and one fp32 element per row."""

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
        return (
            torch.empty_like(input) if wanted[0] else None,
            torch.empty_like(weight) if wanted[1] else None,
            None,
        )
