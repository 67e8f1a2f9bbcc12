"""Make the results of operations on fake tensors those of torch's kernels: dtypes, strides, storages and workspaces.

Four parts: rules for single operations, oneDNN's recurrent layers, elementwise results in general, and the cache of
fake results. Tests: ``tests/planner/capture/test_kernels.py``.
"""

import contextlib
import threading
import types
from unittest import mock

import torch
import torch._prims as prims
from torch import _meta_registrations
from torch._decomp import meta_table
from torch._prims_common import is_contiguous_for_memory_format_or_false, suggest_memory_format
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ackpt.metering.kernel_memory import LOSSES, in_whole_memory

aten = torch.ops.aten
LOCK = threading.RLock()  # torch's tables and settings are the process's


@contextlib.contextmanager
def true_results(fake_mode=None):
    """Inside, operations on fake tensors return the dtypes and storages of the kernels; `fake_mode`: of the inputs."""
    ours = [(table, operation, rule) for table in _TABLES for operation, rule in _OURS.items()]
    with LOCK, replaced(ours), mock.patch.object(prims, "utils", _Utils(_UTILS.__name__)), exact_cache(fake_mode):
        yield


@contextlib.contextmanager
def replaced(entries):
    """Inside, ``table[key]`` is `value` for each of these ``(table, key, value)``, and absent where it is None."""

    def put(entries):
        for table, key, value in entries:
            table.pop(key, None)
            if value is not None:
                table[key] = value

    were = [(table, key, table.get(key)) for table, key, _ in entries]
    put(entries)
    try:
        yield
    finally:
        put(were)


def _corrected(correct, devices=("cpu",)):
    """A rule for operations on these devices: ``correct(results, *args)`` of the results of torch's own rule."""

    def rule(fake_mode, operation, *args, **kwargs):
        with replaced(_TORCHS[operation]), fake_mode:
            results = operation(*args, **kwargs)
            return correct(results, *args) if args[0].device.type in devices else results

    return rule


# Rules for single operations. With half-precision values and float32 weights, the CPU's norms return float32
# statistics. Batch norm returns strides that are contiguous or channels last, and its backward computes no unused
# gradient. Losses, activations, padding and rolling write in an order of their own; some losses leave their scalar in a
# storage for all elements, and `F.fold` its image in one for all columns. Grouped products take every dtype.
#
# Torch: ``op_implementations_dict`` (``torch/_subclasses/fake_impls.py``) and ``meta_table`` (``torch/_decomp``, filled
# by ``_meta_registrations.py`` and ``_refs``) have the rules; the kernels are in ``aten/src/ATen/native``.


def _norm(results, x, *rest):
    """Statistics have the dtype of the first parameter that there is."""
    result, mean, rstd, *others = results
    dtype = next((value.dtype for value in rest if isinstance(value, torch.Tensor)), x.dtype)
    return result, mean.to(dtype), rstd.to(dtype), *others


def _batch_norm(results, x, *rest):
    result, *others = _norm(results, x, *rest)
    return _laid_out(result, x, _preferred(x)), *others


def _batch_norm_with_new_statistics(results, x, weight, bias, mean, variance, *rest):
    *others, new_mean, new_variance = _batch_norm(results, x, weight, bias, mean, variance)
    return *others, new_mean.to(mean.dtype), new_variance.to(variance.dtype)


def _laid_out(result, x, memory_format=None):
    """Several kernels write channels last or contiguously, depending on `x`, which may have any order."""
    shape = torch.empty_like(x, memory_format=memory_format or suggest_memory_format(x))
    return result if result.stride() == shape.stride() else torch.empty_like(shape, dtype=result.dtype)


def _preferred(x):
    """The memory format of `x`; contiguous where it is channels last, too, as images of one pixel are."""
    return torch.contiguous_format if _is_contiguous(x) else suggest_memory_format(x)


def _contiguous_first(results, x, *rest):
    is_both = x.dim() > 3 and _preferred(x) != suggest_memory_format(x)
    return _contiguous(results) if is_both else results


def _is_contiguous(x) -> bool:
    return is_contiguous_for_memory_format_or_false(x, memory_format=torch.contiguous_format)


def _group_norm(results, x, *rest):
    result, *others = _norm(results, x, *rest)
    return _laid_out(result, x), *others


def _batch_norm_backward(results, gradient, x, *rest):
    """The kernel computes no gradient for an input that needs none."""
    *_, mask = rest
    is_alike = suggest_memory_format(gradient) == suggest_memory_format(x)
    return _laid_out(results[0], x, _preferred(x) if is_alike else None) if mask[0] else None, *results[1:]


def _contiguous(results, *args):
    """These kernels write contiguously, whatever the order of their inputs."""

    def written(result):
        return None if result is None else torch.empty_like(result, memory_format=torch.contiguous_format)

    return tree_map(written, results)


def _fold(result, x, *rest):
    """The kernel allocates its result with the size of the columns, which is larger if they overlap."""
    if not x.numel() > result.numel() > 0:
        return result
    return torch.empty(x.numel(), dtype=result.dtype, device=result.device).resize_(result.shape)


def _elementwise(result, gradient, *rest):
    """The order of an elementwise result is that of the first operand which has one: here of the gradient."""
    x = next(value for value in rest if isinstance(value, torch.Tensor))
    return torch.empty_like(torch.add(gradient, x), dtype=result.dtype)


def _with_a_number(fake_mode, operation, x, other, *rest, **kwargs):
    """For one image whose channels are last, the kernels keep the strides of `x`, which are not unique then."""
    is_known = isinstance(x, torch.Tensor) and not x._has_symbolic_sizes_strides and x.device.type == "cpu"
    if not is_known or isinstance(other, torch.Tensor) or x.dim() not in _CHANNELS_LAST or x.shape[0] != 1:
        return NotImplemented  # torch's rule applies
    is_as_it_is = x.is_contiguous() or x.numel() == 0 or not x.is_contiguous(memory_format=_CHANNELS_LAST[x.dim()])
    correct = _corrected(lambda y, *_: y if is_as_it_is else y.new_empty_strided(x.shape, x.stride()))
    return correct(fake_mode, operation, x, other, *rest, **kwargs)


def _view(fake_mode, operation, x, shape):
    """Torch's rule gives dimensions of size 1 other strides than the kernel, and with them another memory format."""
    _, _, rule = _TORCHS[operation][0]
    assert rule is not None
    result = rule(fake_mode, operation, x, shape)
    if x._has_symbolic_sizes_strides or result._has_symbolic_sizes_strides or not x.numel():
        return result
    if result.dim() not in _CHANNELS_LAST or result.shape[0] != 1:
        return result
    with torch._C._DisablePythonDispatcher():  # else the same rule
        strides = torch.empty_strided(x.shape, x.stride(), device="meta").view(result.shape).stride()
    if strides == result.stride():
        return result
    with fake_mode:
        kernels = x.as_strided(result.shape, strides, x.storage_offset())
    # Otherwise torch's strides remain: captures with symbols, which serve other sizes, have the same ones.
    return result if suggest_memory_format(kernels) == suggest_memory_format(result) else kernels


def _grouped_product(fake_mode, operation, a, b, offs=None, bias=None, out_dtype=None):
    """Torch's rule accepts only bfloat16, but the kernels accept other dtypes as well."""
    if a.dtype == torch.bfloat16 or a.dtype != b.dtype:
        return NotImplemented  # torch's rule applies
    with fake_mode:
        return _meta_registrations._create_grouped_mm_output_tensor(a, b, offs, out_dtype)


def _resize_backward(fake_mode, operation, gradient, output_size, input_size, *rest):
    """Torch's rule takes no symbols, so the order of the dimensions is that at the example's sizes."""

    def example(sizes):
        return [size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes]

    strided = torch.empty_strided(example(gradient.shape), example(gradient.stride()), device="meta")
    result = operation(strided, example(output_size), example(input_size), *rest)
    with fake_mode:
        return gradient.new_empty(input_size).to(memory_format=suggest_memory_format(result))


# Recurrent layers are captured as single operations. Torch's Python code for ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``
# leaves out the dropout between layers, rounds differently, and runs oneDNN's LSTM as in inference if the input
# requires no grad; `python_kernels` puts C++ in its place. OneDNN's LSTM saves the tensors for its backward only if
# autograd records. A captured step runs without autograd, so the layer is an operation of ours that saves it.
#
# Torch: ``lstm_impl`` and ``gru_impl`` in ``torch/_decomp/decompositions.py``; ``mkldnn_rnn_layer`` in
# ``aten/src/ATen/native/mkldnn/RNN.cpp``.
_ONEDNN = aten.mkldnn_rnn_layer.default

torch.library.define("ackpt_graph::rnn_layer", str(_ONEDNN._schema).partition("mkldnn_rnn_layer")[2])


def keep_for_backward(graph: torch.fx.Graph) -> None:
    """Make oneDNN's layers in `graph` save what backward needs; under ``no_grad`` another kernel of it runs."""
    for node in graph.find_nodes(op="call_function", target=_ONEDNN):
        node.target = torch.ops.ackpt_graph.rnn_layer.default


def _layer(*args):
    with torch.enable_grad():
        *results, workspace = _ONEDNN(*(arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args))
    return *results, args[0].new_empty(0, dtype=torch.uint8) if workspace is None else workspace


torch.library.impl("ackpt_graph::rnn_layer", "CompositeExplicitAutograd", _layer)


@torch.library.register_fake("ackpt_graph::rnn_layer")
def _shapes(*args):
    return with_workspace(_ONEDNN(*args), *args)


def with_workspace(results, *args):
    """The fake `results` of oneDNN's layer, with a workspace for backward as large as the real one: runs it once."""
    with _disable_current_modes():
        real = [torch.zeros(arg.shape, dtype=arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args]
        size = _layer(*real)[-1].numel()
    return *results[:-1], args[0].new_empty(size, dtype=torch.uint8)


def with_own_biases(results, *args):
    """The `results` of its backward: a gradient for each bias, all float32 (not so in shapes before torch 2.13)."""
    results = (*results[:4], torch.empty_like(results[4]), *results[5:])
    return tuple(r if r.dtype == torch.float32 else torch.empty_like(r, dtype=torch.float32) for r in results)


_RESIZES = (aten.upsample_linear1d_backward, aten.upsample_bilinear2d_backward, aten.upsample_bicubic2d_backward)
_RESIZES += (aten.upsample_trilinear3d_backward, aten.upsample_nearest1d_backward, aten.upsample_nearest3d_backward)
_RESIZES += (aten._upsample_bilinear2d_aa_backward, aten._upsample_bicubic2d_aa_backward)
_RESIZES += (aten._upsample_nearest_exact1d_backward, aten._upsample_nearest_exact2d_backward)
_RESIZES += (aten._upsample_nearest_exact3d_backward,)
_CONTIGUOUS = (aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward)
_CONTIGUOUS += (aten.log_sigmoid_forward, aten._log_softmax_backward_data, aten.native_layer_norm_backward)
_CONTIGUOUS += (aten.glu_backward,)
_ELEMENTWISE = (aten.elu_backward, aten.hardswish_backward, aten.softplus_backward, aten.hardtanh_backward)
_ELEMENTWISE += (aten.hardsigmoid_backward, aten.logit_backward)
_CONTIGUOUS_FIRST = (aten.relu, aten.threshold_backward, aten.clamp, aten._log_softmax, aten.index_add, aten.renorm)
_CONTIGUOUS_FIRST += (aten.tril, aten.triu, aten.silu, aten.sigmoid, aten.clamp_min, aten.clamp_max)
_RESIZED = (aten.upsample_nearest2d, aten._upsample_nearest_exact2d, aten.upsample_bilinear2d, aten.upsample_bicubic2d)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_ARITHMETIC = (aten.add, aten.sub, aten.mul, aten.div)
_OURS = {
    aten.view.default: _view,
    **{operation.Tensor: _with_a_number for operation in _ARITHMETIC},
    **{operation.default: _corrected(_contiguous) for operation in _CONTIGUOUS},
    **{operation.default: _corrected(_elementwise) for operation in _ELEMENTWISE},
    **{operation.default: _corrected(_contiguous_first) for operation in _CONTIGUOUS_FIRST},
    aten.masked_fill.Scalar: _corrected(_contiguous_first),
    aten.masked_fill.Tensor: _corrected(_contiguous_first),
    # Even if the result is channels last and contiguous at once.
    **{
        resize.default: _corrected(lambda y, x, *_: torch.empty_like(y, memory_format=suggest_memory_format(x)))
        for resize in _RESIZED
    },
    # The weight has other strides than `x`, so that the result keeps those of `x`.
    aten._prelu_kernel.default: _corrected(lambda y, x, *_: torch.empty_like(torch.mul(x, 1.0), dtype=y.dtype)),
    # In training, the kernel is the product of noise and gradient, in this order.
    aten.rrelu_with_noise_backward.default: _corrected(
        lambda y, gradient, x, noise, *rest: torch.empty_like(torch.mul(noise, gradient)) if rest[2] else y
    ),
    **{loss: _corrected(in_whole_memory, ("cpu", "cuda")) for loss in LOSSES},
    aten.binary_cross_entropy.default: _corrected(
        lambda y, x, *rest: torch.empty_like(x, dtype=y.dtype) if y.dim() else in_whole_memory(y, x, *rest),
        ("cpu", "cuda"),
    ),
    **{resize.default: _resize_backward for resize in _RESIZES},
    aten._grouped_mm.default: _grouped_product,
    aten.col2im.default: _corrected(_fold),
    aten.roll.default: _corrected(lambda y, x, *_: _laid_out(y, x)),
    aten.reflection_pad2d_backward.default: _corrected(lambda y, gradient, x, *_: _laid_out(y, x)),
    aten.replication_pad2d_backward.default: _corrected(lambda y, gradient, x, *_: _laid_out(y, x)),
    aten.native_layer_norm.default: _corrected(_norm),
    aten.native_group_norm.default: _corrected(_group_norm),
    aten._native_batch_norm_legit_functional.default: _corrected(_batch_norm_with_new_statistics),
    aten._native_batch_norm_legit.no_stats: _corrected(_batch_norm),
    aten._native_batch_norm_legit_no_training.default: _corrected(_batch_norm),
    aten.native_batch_norm_backward.default: _corrected(_batch_norm_backward),
    aten.native_group_norm_backward.default: _corrected(
        lambda all_, gradient, x, *_: (None if all_[0] is None else _laid_out(all_[0].to(x.dtype), x), *all_[1:])
    ),
    aten.mkldnn_rnn_layer.default: _corrected(with_workspace),
    aten.mkldnn_rnn_layer_backward.default: _corrected(with_own_biases),
}
# Rules go into both: torch may decompose an operation without one in `meta_table` before it looks into the other.
_TABLES = fake_impls.op_implementations_dict, meta_table
_TORCHS = {operation: [(table, operation, table.get(operation)) for table in _TABLES] for operation in _OURS}


# Elementwise results where an order of dimensions is not unique: a tensor of images with one pixel or one channel is
# contiguous and channels last at once. If all operands have the same shape and are contiguous, the kernels write a
# contiguous result; torch's rules keep the order of the first operand.
#
# Torch: ``compute_fast_setup_type`` in ``aten/src/ATen/TensorIterator.cpp``, and ``_prim_elementwise_meta`` in
# ``torch/_prims/__init__.py``.
_UTILS = prims.utils


class _Utils(types.ModuleType):
    """What ``torch._prims`` uses of `torch._prims_common`, with another order of elementwise results."""

    def __getattr__(self, name: str):
        return getattr(_UTILS, name)

    @staticmethod
    def compute_elementwise_output_logical_to_physical_perm(*operands, **options):
        if all(isinstance(x, torch.Tensor) and x.dim() > 3 and _is_contiguous(x) for x in operands):
            return list(range(operands[0].dim())), False
        return _UTILS.compute_elementwise_output_logical_to_physical_perm(*operands, **options)


# The cache of fake results. A cached result has the right shape, strides and dtype, but a new storage of just that
# size, shared with nothing except the argument of a view. So results whose storage is larger (a copy of a slice) or
# shared are computed every time here.
#
# Torch: ``_get_output_tensor_from_cache_entry`` in ``torch/_subclasses/fake_tensor.py``. Caching
# nothing would be correct too, but capturing a GPT-2 of 4 layers (815 nodes) then takes 2.4 s of CPU time instead of
# 1.7 s (torch 2.13), and the next capture of an equal model a third more. Results with symbols are not cached, because
# torch takes longer to find an entry than to compute the result.
_MAKE_ENTRY = FakeTensorMode._make_cache_entry
_Bypass = fake_tensor._BypassDispatchCache
_MOST_RESULTS = 20_000  # about 30 MB
_RESULTS: dict[tuple, dict] = {}


@contextlib.contextmanager
def exact_cache(fake_mode=None):
    """Inside, the cache has only results of such contexts under equal settings, and none with symbols."""
    if sum(map(len, _RESULTS.values())) > _MOST_RESULTS:
        _RESULTS.clear()
    results = _RESULTS.setdefault(_settings(), {})
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(FakeTensorMode, "cache", results))
        stack.enter_context(mock.patch.object(FakeTensorMode, "_make_cache_entry", _entry))
        if fake_mode is not None and fake_mode.shape_env is not None:
            stack.enter_context(fake_tensor.disable_fake_tensor_cache(fake_mode))
        yield


def _settings() -> tuple:
    """What results depend on in addition to operation and arguments."""
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
    )


def _entry(self, state, key, func, args, kwargs, output):
    if not isinstance(func, torch._ops.OpOverload):  # a key by the id of a module, which outlives it
        raise _Bypass("it is a higher-order operation")
    made = [value for value in tree_leaves(output) if value is not None]
    if not all(isinstance(value, FakeTensor) for value in made):  # a choice of kernels, which settings may change
        raise _Bypass("its result is no tensor")
    if not _comes_back(func, args, kwargs, made):
        raise _Bypass("its storage would not come back as it is")
    return _MAKE_ENTRY(self, state, key, func, args, kwargs, output)


def _comes_back(func, args, kwargs, made) -> bool:
    """Whether all of `made`, results of one operation, would have storages as they have now."""
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    if any(value.layout != torch.strided for value in (*given, *made)):
        return False
    if isinstance(func, torch._ops.OpOverload) and func.is_view:
        return len(given) == 1 and all(_storage(value) == _storage(given[0]) for value in made)
    new = [value for value in made if not any(value is arg for arg in args)]
    storages = {_storage(value) for value in new}
    alone = len(storages) == len(new) and storages.isdisjoint(map(_storage, given))
    return alone and all(_fills(value) for value in new)


def _storage(value) -> int:
    return value.untyped_storage()._cdata


def _fills(value) -> bool:
    """Whether a tensor's storage is what such a shape and such strides need."""
    if value.storage_offset():
        return False
    last = sum(stride * (size - 1) for size, stride in zip(value.shape, value.stride()))
    return value.untyped_storage().nbytes() == (value.itemsize * (last + 1) if value.numel() else 0)
