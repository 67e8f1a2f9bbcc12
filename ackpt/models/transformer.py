"""The Transformer of the reference experiments: pre-norm blocks over packed, variable-length sequences.

A batch is one matrix ``[tokens, dim]`` in which the sequences follow one another; ``cu_seqlens``
(int32, sequences + 1 offsets, from 0 to tokens) says where each begins, so nothing is padded. There is no
position embedding: the language model reads positions off its causal mask.
"""

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ackpt.checkpointing.chunked_loss import chunked_cross_entropy

from .packed_attention import attention, is_readable

__all__ = ["PUBLISHED", "Block", "LanguageModel", "RMSNorm", "Transformer", "TransformerConfig", "attention"]

INIT_STD = 0.02
IGNORE_INDEX = -100  # F.cross_entropy's default


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
