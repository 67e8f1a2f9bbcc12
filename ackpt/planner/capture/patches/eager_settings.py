"""Make a capture match eager mode: enter all patches and change the settings of AOTAutograd.

Operations with effects, such as the check for errors in ``linalg.inv``, get no effect tokens, because tokens would be
inputs of the step; a schedule runs each of these operations once. Custom operations that return nothing, or whose
results nothing reads, are not dropped.

Torch: ``backward_pass_autocast``, ``donated_buffer`` and ``guess_tangent_strides_as_outputs`` in
``torch/_functorch/config.py``, ``MemoryFormatMeta.from_tensor`` in ``torch/_functorch/_aot_autograd/schemas.py``,
``has_effects`` in ``torch/_higher_order_ops/effects.py``, and ``is_impure`` in ``torch/_library/utils.py``.
Versions: 2.11 to 2.13; of these, 2.13 has both rules for strides by itself.
Test: ``tests/planner/capture/test_eager.py``.
"""

import contextlib
from unittest import mock

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta
from torch._higher_order_ops import effects
from torch._library import utils as library_utils
from torch.nn import functional as F

from ackpt.checkpointing.reachable import FUSED
from ackpt.core.errors import TraceError
from ackpt.planner.capture.in_place import in_place_as_eager
from ackpt.planner.capture.operations import has_effect, may_draw

from .kernels import LOCK, true_results
from .python_kernels import eager_kernels

# Backward runs without the forward's autocast, as it does when the user calls it, and leaves what it was given alone.
# Incoming gradients keep their strides, so that sums over them run in eager's order: the default from torch 2.13 on.
_FUNCTORCH = {"backward_pass_autocast": "off", "donated_buffer": False, "guess_tangent_strides_as_outputs": True}


@contextlib.contextmanager
def like_eager(fake_mode=None):
    """Inside, a model is captured and compiled as eager computes it; `fake_mode`: of the inputs, if they are fake."""
    with LOCK, functorch_config.patch(_FUNCTORCH):
        with in_place_as_eager(), eager_kernels(), true_results(fake_mode):
            with _strides_that_gradients_can_have(), _effects_without_tokens():
                with mock.patch.object(F, "_no_grad_embedding_renorm_", _renormalized):
                    yield


# In place, as in eager; otherwise AOTAutograd makes a new table that has a gradient of its own.
_renormalized = torch.no_grad()(getattr(F, "_no_grad_embedding_renorm_"))  # noqa: B009 (pyright does not know it)


@contextlib.contextmanager
def _effects_without_tokens():
    is_impure = library_utils.is_impure

    def acts(operation, **kwargs):
        is_range = getattr(operation, "namespace", "") == "profiler"  # of record_function, around the capture only
        is_effect = has_effect(operation) or may_draw(operation, *kwargs.get("args", ()))
        return not is_range and (is_effect or is_impure(operation, **kwargs))

    with mock.patch.object(library_utils, "is_impure", acts):
        with mock.patch.object(effects, "has_effects", lambda operation: False):
            yield


@contextlib.contextmanager
def _strides_that_gradients_can_have():
    """Gradients of outputs that overlap themselves, as expanded ones do, are contiguous: so in torch from 2.13 on."""
    strides_of = MemoryFormatMeta.from_tensor

    def from_tensor(output, *args, **kwargs):
        if torch._debug_has_internal_overlap(output) != 1:
            return strides_of(output, *args, **kwargs)
        with functorch_config.patch(guess_tangent_strides_as_outputs=False):
            return strides_of(output, *args, **kwargs)

    with mock.patch.object(MemoryFormatMeta, "from_tensor", staticmethod(from_tensor)):
        yield


# Torch's attention modules are refused in eval mode if eager would run a fused kernel, which a capture cannot record
# and which rounds differently. ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call that kernel if nothing
# records gradients, unless a tensor has ``__torch_function__``, as every tensor has during a capture.
#
# Torch: ``why_not_fast_path`` in ``MultiheadAttention.forward``, ``torch/nn/modules/activation.py``, and the like in
# ``torch/nn/modules/transformer.py``. Test: ``test_the_fused_kernel_of_attention_in_evaluation_is_refused_or_off`` in
# ``tests/planner/capture/test_python_kernels.py``.


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
