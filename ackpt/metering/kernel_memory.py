"""Memory that a kernel takes and the shapes of its results do not show, on the CPU and on a GPU.

On the CPU, the `LOSSES` allocate a result with one value per element, and then resize it to a scalar, which does not
shrink its storage (``TORCH_META_FUNC(smooth_l1_loss)``, ``binary_cross_entropy_out_cpu`` and others in torch's
``aten/src/ATen/native/Loss.cpp``): a loss takes as many bytes as the model's output until the end of the step. Remove
that part once ``tests/metering/test_kernel_memory.py`` passes without it.

On a GPU, `cuda_temporaries` are the tensors that kernels allocate and free within themselves (sources: torch 2.13), and
`MATMULS` use the workspace of cuBLAS (`gpus`). Not included: workspaces of cuDNN, of sorting (embeddings, indexing,
top-k), of reductions over several blocks, and of memory-efficient attention.
"""

from __future__ import annotations

import torch

from .cuda_choices import imitates_cuda

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
    aten.native_group_norm_backward.default: (0, 1),  # native_group_norm_backward in group_norm.cpp
    aten._log_softmax_backward_data.default: (0, 1),  # host_softmax_backward in cuda/SoftMax.cu
    aten.embedding_dense_backward.default: (0,),  # embedding_dense_backward_cuda in cuda/Embedding.cu
}


def in_whole_memory(result, x, target, *rest):
    """A scalar in memory for all elements, to replace `result` of one of the `LOSSES` called with these arguments."""
    size = torch.broadcast_shapes(x.shape, target.shape)
    if result.dim() or not all(size) or imitates_cuda():
        return result
    whole = torch.empty(size, dtype=result.dtype, device=result.device)
    is_symbolic = any(isinstance(each, torch.SymInt) for each in size)  # then torch refuses to resize
    return whole.as_strided((), ()) if is_symbolic else whole.resize_(())


def cuda_temporaries(func, args) -> list[int]:
    """Bytes of the blocks that an operation on a GPU allocates in addition to its results, and frees at its end."""
    if func is aten._softmax_backward_data.default:  # softmax_backward_cuda_out in cuda/SoftMax.cu: grad * output
        return [_bytes(args[1])]
    if func in _MADE_CONTIGUOUS:
        return [_bytes(args[i]) for i in _MADE_CONTIGUOUS[func] if not args[i].is_contiguous()]
    if func in MATMULS:
        tensors = [each for each in args if isinstance(each, torch.Tensor)][-2:]
        return [_bytes(each) for each in tensors if not _blas_takes(each)]
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        return _flash_backward(*args[:4])
    return []


def _blas_takes(matrix) -> bool:
    """Whether cuBLAS takes the last two dimensions as they are (``prepare_matrix_for_cublas`` in cuda/Blas.cpp)."""
    if matrix.dim() < 2:
        return True
    (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _flash_backward(grad, query, key, value) -> list[int]:
    """``mha_bwd`` in transformers/cuda/flash_attn/flash_api.cpp, and contiguous gradients for it."""
    batch, heads, length, width = query.shape
    rows = batch * heads * _multiple(length, 128)
    sizes = [rows * 4, rows * _multiple(width, 32 if width <= 128 else 64) * 4]  # softmax_d, dq_accum
    if key.shape[1] != heads:  # gradients of keys and values for every head of the queries
        sizes += 2 * [batch * key.shape[2] * heads * width * key.element_size()]
    return sizes if grad.transpose(1, 2).is_contiguous() else [_bytes(grad), *sizes]


def _bytes(tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of
