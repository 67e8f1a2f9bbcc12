"""The Transformer of the reference experiments: pre-norm blocks over packed, variable-length sequences.

A batch is one matrix ``[tokens, dim]`` in which the sequences follow one another; ``cu_seqlens``
(int32, sequences + 1 offsets, from 0 to tokens) says where each begins, so nothing is padded. There is no
position embedding: the language model reads positions off its causal mask. Attention never materialises its matrix:
every path is a flash or memory-efficient kernel, also for meta and fake tensors, so that the memory of a step can be
predicted from its shapes.
"""

import contextlib
import dataclasses
import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from ackpt.checkpointing.chunked_loss import chunked_cross_entropy

__all__ = ["PUBLISHED", "Block", "LanguageModel", "RMSNorm", "Transformer", "TransformerConfig", "attention"]

INIT_STD = 0.02
IGNORE_INDEX = -100  # F.cross_entropy's default
HALF = (torch.float16, torch.bfloat16)
_choice = torch._fused_sdp_choice  # pyright: ignore[reportPrivateImportUsage]


def require_positive(config: object, *names: str) -> None:
    """ValueError unless each named attribute of `config` is a positive integer."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a model; the defaults are the published ones. `vocab_size` is read by `LanguageModel` only.

    Raises ValueError for a size that is not a positive integer and for a dim that head_dim does not divide.

    Example:
        >>> TransformerConfig(dim=64, ff_dim=256, layers=2, head_dim=32).heads
        2
    """

    dim: int = 1024
    ff_dim: int = 4096
    layers: int = 12
    head_dim: int = 128
    vocab_size: int = 50257
    eps: float = 1e-6
    causal: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "dim", "ff_dim", "layers", "head_dim", "vocab_size")
        if self.dim % self.head_dim:
            raise ValueError(f"dim must be a multiple of head_dim, got {self.dim} and {self.head_dim}")
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps must be positive and finite, got {self.eps!r}")

    @property
    def heads(self) -> int:
        """Number of attention heads, dim / head_dim."""
        return self.dim // self.head_dim


#: The sizes of the published experiments.
PUBLISHED = TransformerConfig()


class _RMSNormFunction(torch.autograd.Function):
    """Saves its input and one number per row, as the fused CUDA kernel does; composed ops save copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        normed = wide * rstd
        # Under dynamo torch 2.11 loses the gradient of a tensor that was changed in place (pytorch#180642).
        normed = normed * weight if torch.compiler.is_dynamo_compiling() else normed.mul_(weight)
        return normed if normed.dtype == x.dtype else normed.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        normed = x * rstd
        grad = grads[0].to(normed.dtype)
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad = grad * weight
        grad_x = grad.sub_(normed.mul_((grad * normed).mean(-1, keepdim=True))).mul_(rstd)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, [..., dim] -> [..., dim], computed in at least fp32.

    The output has the input's dtype under autocast too, on every device. Differentiable once.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467.

    Example:
        >>> RMSNorm(2, eps=1e-6)(torch.tensor([[3.0, 4.0]])).shape
        torch.Size([1, 2])
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight: nn.Parameter = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda":
            # CUDA's autocast would widen x and keep that copy; a weight of another dtype would unfuse the op
            with torch.autocast("cuda", enabled=False):
                return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        return _RMSNormFunction.apply(x, self.weight, self.eps)  # pyright: ignore[reportReturnType]

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class Block(nn.Module):
    """One pre-norm layer, x [tokens, dim] -> [tokens, dim]: x += attention(norm(x)), then x += mlp(norm(x)).

    Queries and keys are RMS-normalised per head; the MLP is up, GELU, down; no biases.
    The last projection of each branch is named `out` and `down`.

    Example:
        >>> block = Block(TransformerConfig(dim=16, ff_dim=32, layers=1, head_dim=8))
        >>> block(torch.randn(4, 16), torch.tensor([0, 4], dtype=torch.int32), 4).shape
        torch.Size([4, 16])
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_norm: RMSNorm = RMSNorm(config.dim, config.eps)
        self.qkv: nn.Linear = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.q_norm: RMSNorm = RMSNorm(config.head_dim, config.eps)
        self.k_norm: RMSNorm = RMSNorm(config.head_dim, config.eps)
        self.out: nn.Linear = nn.Linear(config.dim, config.dim, bias=False)
        self.mlp_norm: RMSNorm = RMSNorm(config.dim, config.eps)
        self.up: nn.Linear = nn.Linear(config.dim, config.ff_dim, bias=False)
        self.down: nn.Linear = nn.Linear(config.ff_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        x = x + self._attend(x, cu_seqlens, max_seqlen)  # a method of its own: q, k and v die before the MLP
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def _attend(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = qkv.unflatten(-1, (3, self.config.heads, self.config.head_dim)).unbind(1)
        mixed = attention(self.q_norm(q), self.k_norm(k), v, cu_seqlens, max_seqlen, self.config.causal)
        return self.out(mixed.flatten(1))


def _initialise(model: nn.Module, layers: int) -> None:
    """Normal weights of std 0.02, over sqrt(2 layers) for what writes to the residual stream, as in GPT-2."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            residual = name.endswith((".out", ".down"))
            nn.init.normal_(module.weight, std=INIT_STD / math.sqrt(2 * layers) if residual else INIT_STD)


class Transformer(nn.Module):
    """Blocks and a final norm, x [tokens, dim] -> [tokens, dim]; the autoencoder's loss is the MSE to x.

    Weights depend on torch's seed only. Raises ValueError for an input that is not [tokens, dim] floats.

    Example:
        >>> model = Transformer(TransformerConfig(dim=16, ff_dim=32, layers=2, head_dim=8))
        >>> model(torch.randn(4, 16), torch.tensor([0, 1, 4], dtype=torch.int32), max_seqlen=3).shape
        torch.Size([4, 16])
    """

    def __init__(self, config: TransformerConfig = PUBLISHED) -> None:
        super().__init__()
        self.config = config
        self.blocks: nn.ModuleList = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm: RMSNorm = RMSNorm(config.dim, config.eps)
        _initialise(self, config.layers)

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        if x.ndim != 2 or x.shape[1] != self.config.dim or not x.is_floating_point():
            raise ValueError(f"x must be floats [tokens, {self.config.dim}], got {x.dtype} {list(x.shape)}")
        for block in self.blocks:
            x = block(x, cu_seqlens, max_seqlen)
        return self.norm(x)


class LanguageModel(nn.Module):
    """Causal language model: tokens [tokens] int64 -> logits [tokens, vocab_size], or a mean loss.

    With `targets` [tokens] int64 (-100: ignored) the result is the mean cross-entropy in nats, a scalar;
    `loss_chunks=k` computes it by `ackpt.chunked_cross_entropy` in k chunks, so that the logits never exist
    whole. Embedding and head are not tied. Raises ValueError for token ids outside the vocabulary (checked on
    CPU) and for arguments that do not fit.

    Example:
        >>> model = LanguageModel(TransformerConfig(dim=16, ff_dim=32, layers=1, head_dim=8, vocab_size=10))
        >>> model(torch.tensor([1, 2, 3]), torch.tensor([0, 3], dtype=torch.int32), max_seqlen=3).shape
        torch.Size([3, 10])
    """

    def __init__(self, config: TransformerConfig = PUBLISHED) -> None:
        super().__init__()
        config = dataclasses.replace(config, causal=True)
        self.config: TransformerConfig = config
        self.embedding: nn.Embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks: nn.ModuleList = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm: RMSNorm = RMSNorm(config.dim, config.eps)
        self.head: nn.Linear = nn.Linear(config.dim, config.vocab_size, bias=False)
        _initialise(self, config.layers)

    def hidden(self, tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """The normed states under the head, tokens [tokens] -> [tokens, dim]; raises as `forward` does."""
        self._check_ids("tokens", tokens)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cu_seqlens, max_seqlen)
        return self.norm(x)

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        targets: Tensor | None = None,
        loss_chunks: int | None = None,
    ) -> Tensor:
        if targets is None:
            if loss_chunks is not None:
                raise ValueError("loss_chunks splits the loss: it needs targets")
            return self.head(self.hidden(tokens, cu_seqlens, max_seqlen))
        if targets.shape != tokens.shape:
            raise ValueError(f"targets {list(targets.shape)} and tokens {list(tokens.shape)} differ in shape")
        self._check_ids("targets", targets, ignore=IGNORE_INDEX)
        hidden = self.hidden(tokens, cu_seqlens, max_seqlen)
        if loss_chunks is None:
            return F.cross_entropy(self.head(hidden), targets, ignore_index=IGNORE_INDEX)
        return chunked_cross_entropy(hidden, self.head.weight, targets, chunks=loss_chunks)

    def _check_ids(self, name: str, ids: Tensor, ignore: int | None = None) -> None:
        if ids.ndim != 1 or ids.dtype != torch.int64 or ids.numel() == 0:
            raise ValueError(f"{name} must be int64 of shape [tokens], got {ids.dtype} {list(ids.shape)}")
        if ids.device.type != "cpu" or not is_readable(ids):
            return
        if ignore is not None:
            ids = ids[ids != ignore]
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab_size:
            raise ValueError(
                f"{name} holds ids from {int(ids.min())} to {int(ids.max())}, outside the vocabulary: "
                f"vocab_size is {self.config.vocab_size}"
            )


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
