"""Attention over packed sequences that never materialises an attention matrix.

Every path is a flash or memory-efficient kernel, also for meta and fake tensors, so that the memory of a
step can be predicted from its shapes. `cu_seqlens` (int32, sequences + 1 offsets, from 0 to tokens) says
where each sequence begins.
"""

import contextlib
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.nn.attention import SDPBackend

__all__ = ["attention", "is_readable"]

HALF = (torch.float16, torch.bfloat16)
_choice = torch._fused_sdp_choice  # pyright: ignore[reportPrivateImportUsage]


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool = False) -> Tensor:
    """Softmax attention within each packed sequence: q, k, v [tokens, heads, head_dim] -> the same shape.

    CUDA in fp16 or bf16 from compute capability 8.0 on runs `varlen_attn`. Elsewhere each sequence is one
    call of a flash or memory-efficient kernel, and sequences that all have `max_seqlen` tokens share one.
    The device is never read, except for unequal lengths on a GPU without `varlen_attn` (one sync). Raises
    ValueError for shapes, dtypes or offsets that do not fit (offsets are checked on CPU), and where only a
    materialised attention matrix would do. Source: Dao 2023, FlashAttention-2, arXiv:2307.08691.

    Example:
        >>> q = torch.randn(6, 2, 8)
        >>> attention(q, q, q, torch.tensor([0, 2, 6], dtype=torch.int32), max_seqlen=4).shape
        torch.Size([6, 2, 8])
    """
    lengths = _check_attention(q, k, v, cu_seqlens, max_seqlen)
    if _varlen_runs(q):
        from torch.nn.attention.varlen import varlen_attn  # pulls in torch._dynamo

        window = (-1, 0) if causal else (-1, -1)  # from torch 2.11 on this is how it spells causal
        without_a_gpu = q.is_cuda and not torch.cuda.is_available()
        with _without_cudnn() if without_a_gpu else contextlib.nullcontext():
            out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window_size=window)
        return cast(Tensor, out)
    tokens, sequences = q.shape[0], cu_seqlens.numel() - 1
    if tokens == sequences * max_seqlen:  # no sequence is longer than max_seqlen, so all are as long
        q, k, v = (x.unflatten(0, (sequences, max_seqlen)) for x in (q, k, v))
        return _flash(q, k, v, causal).flatten(0, 1)
    if lengths is None:
        if not is_readable(cu_seqlens):
            raise ValueError(
                "unequal sequence lengths cannot be read off a meta or fake cu_seqlens: "
                f"{tokens} tokens must be {sequences} sequences x max_seqlen {max_seqlen}. Give equal lengths, "
                "or half precision on a GPU, whose kernel reads the offsets itself"
            )
        lengths = cu_seqlens.diff().tolist()
    pieces = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([_flash(a[None], b[None], c[None], causal)[0] for a, b, c in pieces if len(a)])


def _check_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> list[int] | None:
    """The lengths of the sequences where reading them is free (CPU), else None."""
    if q.ndim != 3 or not q.shape == k.shape == v.shape:
        raise ValueError(
            "q, k and v must have one shape [tokens, heads, head_dim], "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            "cu_seqlens must be int32 of shape [sequences + 1], "
            f"got {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
        )
    if max_seqlen < 1:
        raise ValueError(f"max_seqlen must be at least 1, got {max_seqlen}")
    if cu_seqlens.device.type != "cpu" or not is_readable(cu_seqlens):
        return None
    offsets = cu_seqlens.tolist()
    lengths = [end - start for start, end in zip(offsets, offsets[1:], strict=False)]
    if offsets[0] != 0 or offsets[-1] != q.shape[0] or min(lengths) < 0:
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens, {q.shape[0]}; "
            f"it goes from {offsets[0]} to {offsets[-1]}" + (" and falls between" if min(lengths) < 0 else "")
        )
    if max(lengths) > max_seqlen:
        raise ValueError(f"max_seqlen {max_seqlen} is less than the longest sequence, {max(lengths)} tokens")
    return lengths


def is_readable(x: Tensor) -> bool:
    """Whether the values of x exist, as they do not for meta and fake tensors and while compiling."""
    return detect_fake_mode(x) is None and x.device.type != "meta" and not torch.compiler.is_compiling()


@contextlib.contextmanager
def _without_cudnn():
    """From torch 2.15 on varlen_attn asks the GPU whether cuDNN fits, also for fake tensors, unless cuDNN is off."""
    was = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)


def _varlen_runs(q: Tensor) -> bool:
    if q.dtype not in HALF or q.shape[-1] % 8 or q.shape[-1] > 256:
        return False
    if q.device.type == "cuda" and torch.cuda.is_available():
        flash = torch.backends.cuda.is_flash_attention_available()
        return flash and torch.cuda.get_device_capability(q.device) >= (8, 0)
    return q.device.type in ("cuda", "meta")  # "cuda" without a GPU: a fake tensor


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """[sequences, length, heads, head_dim] x 3 -> the same shape, by one kernel without an attention matrix.

    The ops are named because `scaled_dot_product_attention` falls back to its math backend for meta and for
    fake CUDA tensors, and because `sdpa_kernel`, which excludes that backend, does so for all threads.
    """
    # the kernels read a head as one run of memory, and the named CPU op does not check
    q, k, v = ((x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2) for x in (q, k, v))
    if q.device.type in ("cpu", "meta"):
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)[0]
    elif q.device.type == "cuda" and not torch.cuda.is_available():
        out = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[0]
    elif is_readable(q) and _choice(q, k, v, is_causal=causal) == SDPBackend.MATH.value:
        raise ValueError(
            f"no flash or memory-efficient attention kernel on {q.device} for {q.dtype} with head_dim {q.shape[-1]}: "
            "use float32 or float16 (bfloat16 needs compute capability 8.0) and a head_dim that is a multiple of 8"
        )
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return out.transpose(1, 2)
