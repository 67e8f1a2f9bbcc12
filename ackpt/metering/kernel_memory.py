"""Memory that a kernel allocates and the shapes of its results do not show, on the CPU and on a GPU.

The `LOSSES` allocate a result with one value per element, and then resize it to a scalar, which does not shrink its
storage (``TORCH_META_FUNC(mse_loss)``, ``soft_margin_loss_out`` in torch's ``aten/src/ATen/native/Loss.cpp``,
``binary_cross_entropy_out_cuda`` in ``cuda/Loss.cu``): a loss occupies as many bytes as the model's output until the
end of the step. Remove that part once ``tests/metering/test_kernel_memory.py`` passes without it.

`Workspaces` runs operations on the CPU. For a GPU, `cuda_temporaries` are the tensors that kernels allocate and free
(sources: torch 2.13), and `MATMULS` use the workspace of cuBLAS (`gpus`). Not included there: workspaces of cuDNN, of
sorting indices (embeddings, indexing), of reductions over several blocks, and of memory-efficient attention.
"""

from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from .autograd_engine import is_dense
from .resident import rounded
from .run_alone import Allocations, in_own_thread, run_operation, signature

aten = torch.ops.aten

LOSSES = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
)
MATMULS = frozenset(
    (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
    )
)
# Arguments of which the kernel makes a contiguous copy first, by position.
_MADE_CONTIGUOUS = {
    aten.native_layer_norm_backward.default: (0, 1),  # layer_norm_backward_cuda in cuda/layer_norm_kernel.cu
    aten._log_softmax_backward_data.default: (0, 1),  # host_softmax_backward in cuda/SoftMax.cu
    aten.embedding_dense_backward.default: (0,),  # embedding_dense_backward_cuda in cuda/Embedding.cu
}
# Losses that allocate tensors with one value per element (Loss.cpp): the position of their argument `reduction`, and
# the number of these tensors without and with a reduction.
_ELEMENTS = {
    aten.mse_loss.default: (2, 0, 1),
    aten.smooth_l1_loss.default: (2, 0, 1),
    aten.huber_loss.default: (2, 0, 1),
    aten.binary_cross_entropy_with_logits.default: (4, 1, 2),
    aten.soft_margin_loss_backward.default: (3, 2, 2),
}
# Reductions that convert their input to the dtype of the result (``make_reduction_from_out_ty`` in ReduceOpsUtils.h).
_REDUCTIONS = (
    *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
    *(aten.prod.default, aten.prod.dim_int, aten.nansum.default),
)
_SCANS = (aten.cumsum.default, aten.cumprod.default)  # so, too (``impl_func_cum_ops`` in ReduceOps.cpp)
SMALL_SORT = 4096  # elements of a slice that one block sorts in place (``should_use_small_sort`` in cuda/Sort.h)
LARGEST = 1 << 26  # bytes of the arguments and results of an operation that runs
SCALAR_BYTES = 16  # of the largest element
FLOATS = (torch.float32, torch.float64)  # in half precision, oneDNN computes some of these
_SIDE = 3  # of the small tensors
_OURS = ("aten", "mkldnn", "ackpt_graph", "bitsandbytes")
_NOTHING = Allocations(0, 0, ())

# Their CPU kernels allocate nothing but results, of contiguous arguments in `FLOATS`.
WITHOUT = (
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten._unsafe_view.default, aten.cat.default, aten.embedding.default, aten.where.self, aten.clone.default),
    *(aten.arange.default, aten.arange.start, aten.new_ones.default, aten.new_zeros.default, aten.full.default),
    *(aten.constant_pad_nd.default, aten.native_layer_norm.default, aten._log_softmax.default, aten._softmax.default),
    *(aten._log_softmax_backward_data.default, aten._softmax_backward_data.default),
    *(aten.nll_loss_forward.default, aten.nll_loss_backward.default, aten.embedding_dense_backward.default),
    *(aten.ones.default, aten.tril.default, aten.sum.dim_IntList),
)
_ONLY_RESULTS = (
    *(aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default),
    *(aten.new_empty_strided.default, aten.zeros.default, aten.zeros_like.default, aten.ones_like.default),
    *(aten.lift_fresh.default, aten._local_scalar_dense.default, aten.set_.source_Storage_storage_offset),
    *(aten.set_.source_Storage, aten.resize_.default),
)
_BY_VALUES = (aten.nanmedian.default, aten.nanmedian.dim, aten._ctc_loss.default, aten._ctc_loss.Tensor)
# Made-up integers end the process if a kernel takes them for offsets. Kernels with these tags and names check them,
# read 0 and 1 as indices, or, as that of oneDNN's LSTM, get the workspace of a forward (`run_alone`).
_SAFE = {torch.Tag.core, torch.Tag.pointwise}
_SAFE_WITH_INTEGERS = frozenset(
    "_embedding_bag _embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_forward_only "
    "_embedding_bag_per_sample_weights_backward _foreach_add_ _grouped_mm _linalg_check_errors _local_scalar_dense "
    "_unsafe_index _unsafe_index_put _unsafe_view adaptive_max_pool2d_backward adaptive_max_pool3d_backward all "
    "aminmax any argsort bincount bucketize copy_ cummax cummin cumprod cumsum dequantize_4bit dequantize_blockwise "
    "diff dot embedding_renorm_ empty_like equal fill_ flip floor_divide fractional_max_pool2d_backward "
    "fractional_max_pool3d_backward gemm_4bit histc index_add index_add_ index_copy index_copy_ index_fill "
    "index_fill_ index_put_ index_reduce index_select_backward kthvalue lift_fresh_copy linalg_ldl_solve "
    "linalg_lu_solve masked_scatter masked_select max max_pool2d_with_indices_backward "
    "max_pool3d_with_indices_backward max_unpool2d max_unpool3d mean median min mkldnn_rnn_layer_backward mode msort "
    "multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_backward multilabel_margin_loss_forward "
    "new_ones nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward one_hot pack_bits put put_ "
    "repeat_interleave roll scatter_ scatter_add_ scatter_reduce_ searchsorted stack sum take tril triu unpack_bits "
    "value_selecting_reduction_backward zero_ zeros_like".split()
)
# Derivatives that torch computes by other operations under a dispatch mode: `prod_backward` and `cumprod_backward` in
# torch's FunctionsManual.cpp.
_UNLIKE = ("ProdBackward0", "ProdBackward1", "CumprodBackward0")
_MATRICES = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def in_whole_memory(result, x, target, *rest):
    """A scalar in memory for all elements, to replace `result` of one of the `LOSSES` called with these arguments."""
    size = torch.broadcast_shapes(x.shape, target.shape)
    if result.dim() or not all(size):
        return result
    whole = torch.empty(size, dtype=result.dtype, device=result.device)
    is_symbolic = any(isinstance(each, torch.SymInt) for each in size)  # then torch refuses to resize
    return whole.as_strided((), ()) if is_symbolic else whole.resize_(())


def cuda_temporaries(func, args, kwargs=None) -> list[int]:
    """Bytes of the blocks that an operation on a GPU allocates in addition to its results, and frees at its end."""
    if func in _REDUCTIONS or func in _SCANS:
        return _converted(func, args[0], (kwargs or {}).get("dtype"))
    if func in (aten.sort.default, aten.sort.stable):
        dim = (kwargs or {}).get("dim", args[1] if len(args) > 1 else -1)
        return _sorting(args[0], dim)
    if func in (aten.native_group_norm.default, aten.native_group_norm_backward.default):
        return _group_norm(func, args)
    if func is aten._softmax_backward_data.default:  # softmax_backward_cuda_out in cuda/SoftMax.cu: grad * output
        return [_bytes(args[1])]
    if func in _MADE_CONTIGUOUS:
        return [_bytes(args[i]) for i in _MADE_CONTIGUOUS[func] if not args[i].is_contiguous()]
    if func in MATMULS:
        tensors = [each for each in args if isinstance(each, torch.Tensor)][-2:]
        return [_bytes(each) for each in tensors if not _blas_takes(each)]
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        return _flash_backward(*args[:4])
    if func in _ELEMENTS:
        at, *number = _ELEMENTS[func]
        x, target = args[1:3] if func is aten.soft_margin_loss_backward.default else args[:2]
        itemsize = torch.promote_types(x.dtype, target.dtype).itemsize
        is_reduced = len(args) <= at or args[at] != 0
        return number[is_reduced] * [prod(torch.broadcast_shapes(x.shape, target.shape)) * itemsize]
    return []


def cuda_results(func, results) -> dict[int, tuple[torch.dtype, int]]:
    """Dtype and bytes of results that are larger on a GPU, by position.

    Layer norm keeps its moments in float32 (``layer_norm_cuda`` in cuda/layer_norm_kernel.cu).
    """
    if func is not aten.native_layer_norm.default:
        return {}
    return {at: (torch.float32, results[at].numel() * 4) for at in (1, 2) if results[at].element_size() < 4}


def _converted(func, x, dtype) -> list[int]:
    """A copy of `x` in the dtype of the result, unless a kernel sums half precision to float32."""
    dtype = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    in_kernel = func in _REDUCTIONS and x.dtype in (torch.float16, torch.bfloat16) and dtype is torch.float32
    return [] if dtype is x.dtype or in_kernel else [x.numel() * dtype.itemsize]


def _sorting(x, dim: int) -> list[int]:
    """``sort_cuda_kernel`` in cuda/Sort.cpp and ``launch_stable_sort_kernel`` in cuda/SortStable.cu.

    CUB's radix sort keeps a copy of keys and of values (``dispatch_radix_sort.cuh``), aligned to 256 bytes.
    Its counters are left out.
    """
    if not x.dim() or not x.numel():
        return []
    slice_size, keys, indices = x.shape[dim], _bytes(x), x.numel() * 8
    if slice_size <= SMALL_SORT:
        return [slice_size * 8]  # of `fillSliceWithIndex`
    sizes = [] if is_dense(x) and x.stride(dim) == 1 else [keys, keys, indices]
    slices = x.numel() // slice_size
    if slices == 1 or slice_size >= 1_000_000:
        return [*sizes, slice_size * 8, (keys + indices) // slices + 255]
    if slices < 128:  # sorted as a whole, by keys and then by slices
        return [*sizes, indices, indices, keys, keys + indices + 255]
    return [*sizes, indices, keys + indices + 255]


def _group_norm(func, args) -> list[int]:
    """``GroupNormKernelImplInternal`` and ``GroupNormBackwardKernelImplInternal`` in cuda/group_norm_kernel.cu.

    Backward makes contiguous copies of gradient and input first (``native_group_norm_backward`` in group_norm.cpp).
    """
    is_forward = func is aten.native_group_norm.default
    x, weight = args[0], args[1 if is_forward else 4]
    batch, channels, length, groups = args[3:7] if is_forward else args[5:9]
    itemsize = max(x.element_size(), 4)
    by_channel, by_group = batch * channels * itemsize, batch * groups * itemsize
    if is_forward:
        sizes = [] if x.element_size() >= 4 else [by_group, by_group]
        return sizes if weight is None or length == 1 else [*sizes, by_channel, by_channel]
    sizes = [_bytes(each) for each in args[:2] if not each.is_contiguous()]
    if length == 1:
        return [*sizes, by_group, by_group]
    return [*sizes, by_channel, by_channel, by_group, by_group, *([] if weight is None else [by_channel])]


def _blas_takes(matrix) -> bool:
    """Whether cuBLAS takes the last two dimensions as they are (``prepare_matrix_for_cublas`` in cuda/Blas.cpp)."""
    if matrix.dim() < 2:
        return True
    (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _flash_backward(grad, query, key, value) -> list[int]:
    """``mha_bwd`` in transformers/cuda/flash_attn/flash_api.cpp, and contiguous gradients for it."""
    batch, heads, length, width = query.shape
    rows = batch * heads * rounded(length, 128)
    sizes = [rows * 4, rows * rounded(width, 32 if width <= 128 else 64) * 4]  # softmax_d, dq_accum
    if key.shape[1] != heads:  # gradients of keys and values for every head of the queries
        sizes += 2 * [batch * key.shape[2] * heads * width * key.element_size()]
    return sizes if grad.transpose(1, 2).is_contiguous() else [_bytes(grad), *sizes]


def _bytes(tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Workspaces:
    """The workspace of the operations of a predicted step on the CPU.

    Each different operation runs once, alone, on made-up data, if that is known to be safe. Operations on more than
    `LARGEST` bytes do not run, so a prediction needs neither the memory nor the time of a large step. An elementwise
    operation on dense tensors of one dtype runs on small ones instead: TensorIterator in ATen then allocates at most
    scalars. The operations in `WITHOUT` have no workspace. ``unknown`` names all others: those of other libraries,
    whose code a prediction must not run, those that are not known to be safe, fail on made-up data or depend on values,
    and some autograd nodes.
    """

    def __init__(self) -> None:
        self.unknown: set[str] = set()
        self._measured: dict[tuple, Allocations | None] = {}

    def of(self, func, args, kwargs, result) -> Allocations:
        """What an operation allocates, called with tensors without data or, on the CPU, with data."""
        call = args, kwargs
        node = torch._C._current_autograd_node()
        if func in _BY_VALUES or (node is not None and node.name() in _UNLIKE):
            self.unknown.add(str(func) if func in _BY_VALUES else node.name())
        values = [leaf for leaf in tree_leaves((call, result)) if isinstance(leaf, torch.Tensor)]
        if not values or func.is_view or func.namespace in ("prim", "profiler") or func in _ONLY_RESULTS:
            return _NOTHING
        if func.namespace not in _OURS or any(value.layout is not torch.strided for value in values):
            return self._without(func)
        if _is_elementwise(func, values):
            small = self._run(func, call, _small)
            if small is not None and small.workspace <= SCALAR_BYTES:
                return Allocations(small.workspace, 0, ())
        size = sum({value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in values}.values())
        if size <= LARGEST:
            return (is_safe(func, call) and self._run(func, call)) or self._without(func)
        dtypes = {value.dtype for value in values if value.is_floating_point() or value.is_complex()}
        contiguous = all(value.is_contiguous() or func in _MATRICES and is_dense(value) for value in values)
        return _NOTHING if func in WITHOUT and contiguous and dtypes.issubset(FLOATS) else self._without(func)

    def _without(self, func) -> Allocations:
        self.unknown.add(str(func))
        return _NOTHING

    def _run(self, func, call, made=None) -> Allocations | None:
        """What an operation allocates, called with ``made(argument)`` for each argument; None if it fails."""
        key = made, signature(func, call)
        if key not in self._measured:
            with _disable_current_modes():
                self._measured[key] = in_own_thread(lambda: _allocations(func, tree_map(made, call) if made else call))
        return self._measured[key]


def is_safe(func, call) -> bool:
    """Whether a kernel reads and writes nothing but its tensors, whichever integers they contain."""
    dtypes = {leaf.dtype for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)}
    has_integers = any(not (d.is_floating_point or d.is_complex or d is torch.bool) for d in dtypes)
    return not has_integers or bool(_SAFE & {*func.tags}) or func.overloadpacket.__name__ in _SAFE_WITH_INTEGERS


def _allocations(func, call) -> Allocations | None:
    try:
        return run_operation(func, call)[0]
    except (RuntimeError, IndexError):
        return None


def _is_elementwise(func, values) -> bool:
    is_one_dtype = len({value.dtype for value in values}) == 1
    return is_one_dtype and torch.Tag.pointwise in func.tags and all(is_dense(v, expanded=True) for v in values)


def _small(value: Any) -> Any:
    """A tensor with the same order of dimensions in memory, and at most `_SIDE` elements in each."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = [min(size, _SIDE) for size in value.shape]
    strides = [0] * len(shape)
    step = 1
    for _, dim in sorted((stride, dim) for dim, stride in enumerate(value.stride()) if stride):
        strides[dim] = step
        step *= shape[dim]
    size = step if prod(shape) else 0
    return torch.empty(size, dtype=value.dtype, device="meta").as_strided(shape, strides)
