"""Count the FLOPs of an operation or of a complete step.

The rules are those of ``torch.utils.flop_counter``, with formulas for kernels of attention and oneDNN's LSTM that some
versions of torch do not count. Compiled code is counted as it runs, if its compiler runs torch's operations.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from unittest import mock

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    _FlopCounterMode,  # pyright: ignore[reportPrivateUsage]
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from .timeline import MeterError

__all__ = ["UncountedFlops", "count_flops", "formula"]

_INDUCTOR = "torch._inductor.output_code"


class UncountedFlops(MeterError):
    """A step ran code whose FLOPs cannot be counted; the message names it, and what can be counted instead.

    Example:
        >>> import ackpt
        >>> from ackpt.metering.flops import UncountedFlops
        >>> issubclass(UncountedFlops, ackpt.MeterError)
        True
    """


def formula(operator):
    """The FLOP formula of an operator such as ``torch.ops.aten.mm``; call it with its arguments and ``out_val=result``.

    None for operators that are not counted: elementwise operations, views, copies and the like.
    """
    return _OWN.get(str(operator)) or flop_registry.get(operator)


def _attention(query, key, value, *args, out_val=None, **kwargs) -> int:
    return sdpa_flop_count(query.shape, _for_all_heads(key, query), _for_all_heads(value, query))


def _attention_backward(grad, query, key, value, *args, out_val=None, **kwargs) -> int:
    if grad is None:  # torch's kernels then compute nothing
        return 0
    return sdpa_backward_flop_count(grad.shape, query.shape, _for_all_heads(key, query), _for_all_heads(value, query))


def _for_all_heads(tensor, query):
    """The shape of keys or values, [batch, heads, length, dim], with as many heads as the queries."""
    return (tensor.shape[0], query.shape[1], *tensor.shape[2:])


def _rnn_layer(x, input_weights, state_weights, *args, out_val=None, **kwargs) -> int:
    """FLOPs of oneDNN's LSTM: all gates for every element of the sequences ``x``, [length, batch, width]."""
    return 2 * x.shape[0] * x.shape[1] * (input_weights.numel() + state_weights.numel())


def _rnn_layer_backward(*args, out_val=None, **kwargs) -> int:
    return 2 * _rnn_layer(*args)


# Torch counts attention on the CPU from version 2.15, `varlen_attn` (which takes the arguments of flash attention) and
# heads that share keys from 2.13. Keys are names, because `varlen_attn` exists only once its module is imported.
_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_OWN = {
    **{f"aten._scaled_dot_product_{name}": _attention for name in _KERNELS},
    **{f"aten._scaled_dot_product_{name}_backward": _attention_backward for name in _KERNELS},
    "aten.mkldnn_rnn_layer": _rnn_layer,
    "ackpt_graph.rnn_layer": _rnn_layer,  # the same in a captured step
    "aten.mkldnn_rnn_layer_backward": _rnn_layer_backward,
    "torch_attn._varlen_attn": flop_registry[torch.ops.aten._flash_attention_forward],
    "torch_attn._varlen_attn_backward": flop_registry[torch.ops.aten._flash_attention_backward],
}


def count_flops(step_fn: Callable[[], object]) -> int:
    """Return the FLOPs of the matrix products, convolutions and attention in one call of `step_fn`.

    A multiply-add counts as 2. The rules are those of ``torch.utils.flop_counter``, with CPU flash attention added.
    Causal attention counts as full attention, and recomputation counts again. Compiled code is counted as it runs.

    Raises:
        UncountedFlops: after the step, if part of it ran as code that Inductor generated. Matrix products and attention
            need not be torch operations there.

    Example:
        >>> import torch, ackpt
        >>> ackpt.count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
        48
    """
    counter = _Counter()
    with _Mode(counter), _inductor_runs() as runs:
        step_fn()
    if runs:
        raise UncountedFlops(
            f"FLOPs cannot be counted: the step ran code that Inductor generated ({len(runs)} times). Count those of "
            'the model before torch.compile, or compile it with a backend that runs operations, such as "aot_eager" '
            'or "ackpt"'
        )
    return counter.get_total_flops()


class _Counter(FlopCounterMode):
    """The counter for `_Mode`, with our formulas and without torch's tracker of modules."""

    def __init__(self):
        super().__init__(display=False)
        self.flop_registry = _Formulas()
        # The hooks of torch's tracker fail in the backward of a checkpointed region.
        self.mod_tracker = _NoModules()  # pyright: ignore[reportAttributeAccessIssue]


class _NoModules:
    parents = ("Global",)


class _Formulas(dict):
    """Looks up formulas when an operation runs, so that formulas registered during the step count too."""

    def __contains__(self, operator):
        return formula(operator) is not None

    def __getitem__(self, operator):
        return formula(operator)


class _Mode(_FlopCounterMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, so that Dynamo compiles the model and runs compiled code under this mode.

        Under other modes it runs the uncompiled model, before torch 2.15 even after the mode has ended.
        """
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # The counter decomposes operations without a formula. An operation that is one kernel must not be decomposed:
        # it contains no matrix products, and its decomposition would allocate other bytes.
        if _is_one_kernel(func) and formula(func.overloadpacket) is None:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


@functools.cache
def _is_one_kernel(operator) -> bool:
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten":
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CPU")


@contextlib.contextmanager
def _inductor_runs():
    """A context that yields a list with one item for every run of a graph that Inductor compiled."""
    runs: list[None] = []
    if _INDUCTOR not in sys.modules:  # torch.compile imports it
        yield runs
        return
    from torch._inductor.output_code import CompiledFxGraph

    call = CompiledFxGraph.__call__

    def recorded(self, inputs):
        runs.append(None)
        return call(self, inputs)

    with mock.patch.object(CompiledFxGraph, "__call__", recorded):
        yield runs
