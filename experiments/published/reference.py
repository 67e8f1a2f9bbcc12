"""The models and steps whose figures the reference experiments published, written from the facts of their sources.

They differ from the package's own Transformer: separate projections with bias, a norm that torch 2.8 did not fuse, a
copy that stacks queries, keys and values, and a loop that keeps the loss of the last step. The sources are the public
repositories sashaboriskin/activation_checkpointing (synthetic, language model), which ran on torch 2.8 and flash-attn
2.8.3, polkadot21/activation-ckpt-offload (offload, torch 2.8) and MoonetD/CS265-mlsys-project-final (mu-TWO).
"""

# pyright: reportCallIssue=false
# (it cannot count the tensors of ``unbind``)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ackpt.models import attention
from ackpt.offloading.store import host_memory
from experiments.models import ResNet, ResNetConfig

from .step import PublishedStep, default_dtype

WIDTH, FF, LAYERS, VOCABULARY = 1024, 4096, 12, 50257


class UnfusedRMSNorm(nn.Module):
    """``nn.RMSNorm`` of torch 2.8, whose ``rms_norm_symint`` (aten/src/ATen/native/layer_norm.cpp) is not fused: it
    computes in fp32, multiplies with the weight, and casts the product to the input's dtype."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        scale = wide.pow(2).mean(-1, keepdim=True).add_(torch.finfo(torch.float32).eps).rsqrt()
        return wide.mul(scale).mul(self.weight).type_as(x)


class PackedFlashAttention(torch.autograd.Function):
    """Allocates as flash-attn 2.8.3 does for packed queries, keys and values ``[tokens, 3, heads, head_dim]``.

    ``mha_varlen_fwd`` and ``mha_varlen_bwd`` in csrc/flash_attn/flash_api.cpp: the forward saves the log-sum-exp in
    fp32, the backward allocates one fp32 element per head and padded token and fp32 sums of the queries' gradient.
    """

    @staticmethod
    def forward(ctx, qkv: Tensor, offsets: Tensor) -> Tensor:
        tokens, _, heads, width = qkv.shape
        out = qkv.new_empty(tokens, heads, width)
        log_sum_exp = qkv.new_empty(heads, tokens, dtype=torch.float32)
        seed = torch.empty(2, dtype=torch.int64)
        ctx.save_for_backward(qkv, out, log_sum_exp, offsets, seed)
        ctx.longest = torch.diff(offsets).max()  # an attribute, which lives as long as the node does
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        qkv, _, _, offsets, _ = ctx.saved_tensors
        tokens, _, heads, width = qkv.shape
        padded = tokens + 128 * (offsets.numel() - 1)
        grad_qkv = torch.empty_like(qkv)
        sums = qkv.new_empty(heads, padded, dtype=torch.float32)
        queries = qkv.new_empty(padded, heads, width, dtype=torch.float32)
        del sums, queries
        return grad_qkv, None


class Attention(nn.Module):
    """Separate projections, norms per head, one new tensor for all three, and a kernel for packed sequences."""

    def __init__(self, width: int, head_dim: int, attend: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.heads, self.attend = width // head_dim, attend
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.query_norm, self.key_norm = UnfusedRMSNorm(head_dim), UnfusedRMSNorm(head_dim)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        query, key, value = (layer(x) for layer in (self.query, self.key, self.value))
        shape = (*x.shape[:-1], self.heads, -1)
        query = self.query_norm(query.reshape(shape)).type_as(query)
        key = self.key_norm(key.reshape(shape)).type_as(key)
        stacked = torch.stack([query, key, value.reshape(shape)], dim=-3)
        return self.out(self.attend(stacked, offsets).flatten(-2))


class Block(nn.Module):
    """Attention and feed-forward layers without bias, each after a norm and with a residual connection."""

    def __init__(self, width: int, ff: int, head_dim: int, attend: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.attention_norm, self.attention = UnfusedRMSNorm(width), Attention(width, head_dim, attend)
        self.ff_norm = UnfusedRMSNorm(width)
        self.up, self.down = nn.Linear(width, ff, bias=False), nn.Linear(ff, width, bias=False)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), offsets)
        return x + self.down(F.gelu(self.up(self.ff_norm(x))))


class InnerBackward(torch.autograd.Function):
    """Checkpointing by a backward inside of backward: gradients of parameters are accumulated inside."""

    @staticmethod
    def forward(ctx, block: nn.Module, x: Tensor, offsets: Tensor) -> Tensor:
        ctx.block = block
        kind = x.device.type
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        ctx.save_for_backward(x, offsets)
        with torch.no_grad():
            return block(x, offsets)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, offsets = ctx.saved_tensors
        with torch.enable_grad(), torch.autocast(x.device.type, dtype=ctx.dtype, enabled=ctx.dtype is not None):
            copy = x.detach().requires_grad_(x.requires_grad)
            out = ctx.block(copy, offsets)
        torch.autograd.backward(out, grad)
        return None, copy.grad, None


class Autoencoder(nn.Module):
    """Linear, blocks, linear."""

    def __init__(self, width: int, ff: int, layers: int, head_dim: int, attend: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, ff, head_dim, attend) for _ in range(layers))

    def forward(self, x: Tensor, offsets: Tensor, is_checkpointed: bool) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = InnerBackward.apply(block, x, offsets) if is_checkpointed else block(x, offsets)
        return self.last(x)


class LanguageModel(nn.Module):
    """Embedding and head share one weight; one norm runs after every block. The attention is not causal."""

    def __init__(self, vocabulary: int, width: int, ff: int, layers: int, head_dim: int, attend):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, ff, head_dim, attend) for _ in range(layers))
        self.norm, self.head = UnfusedRMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, offsets: Tensor, is_checkpointed: bool) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = InnerBackward.apply(block, x, offsets) if is_checkpointed else block(x, offsets)
            x = self.norm(x)
        return self.head(x)


def parameters_of_language_model() -> int:
    """The number of elements of the published language model; the tied weight counts once."""
    with torch.device("meta"):
        model = LanguageModel(VOCABULARY, WIDTH, FF, LAYERS, 128, PackedFlashAttention.apply)
    return sum(parameter.numel() for parameter in model.parameters())


def attend_for_real(qkv: Tensor, offsets: Tensor) -> Tensor:
    """Attention over one sequence by a kernel of torch, in place of `PackedFlashAttention`, which only allocates."""
    return attention(*qkv.unbind(-3), offsets, len(qkv))


TOKENS, SEQUENCES = 12_000, 48


def packed_lengths() -> list[int]:
    """The lengths of the offload experiment's sequences. Its generator has torch's default seed in every run."""
    bounds = TOKENS // (2 * SEQUENCES), 2 * TOKENS // SEQUENCES
    with _disable_current_modes():
        drawn = torch.randint(*bounds, (SEQUENCES,), generator=torch.Generator()).tolist()
    lengths = [max(1, length * TOKENS // sum(drawn)) for length in drawn]
    return [*lengths[:-1], lengths[-1] + TOKENS - sum(lengths)]


LENGTHS = tuple(packed_lengths())  # drawn once: a captured step cannot follow a draw


@dataclass(frozen=True)
class Build:
    """What a step is built of: by default the published sizes and an attention that only allocates.

    With ``attend=attend_for_real`` it runs, on a CPU or a GPU; `device` is the default device of its tensors. `lengths`
    are those of the offload experiment's sequences, `depths` the blocks in each stage of the ResNet.
    """

    width: int = WIDTH
    ff: int = FF
    layers: int = LAYERS
    vocabulary: int = VOCABULARY
    lengths: tuple[int, ...] = LENGTHS
    depths: tuple[int, ...] = (3, 8, 36, 3)
    image: int = 224
    attend: Callable[[Tensor, Tensor], Tensor] = PackedFlashAttention.apply
    device: str = "cpu"

    def autocast(self):
        return torch.autocast(self.device, dtype=torch.bfloat16)


PUBLISHED = Build()


def reference_synthetic(*, tokens: int, method: str, build: Build = PUBLISHED) -> PublishedStep:
    """A step of the synthetic experiment. The loop's variable keeps the loss of the last step during the forward."""
    with torch.device(build.device):
        model = Autoencoder(build.width, build.ff, build.layers, 128, build.attend)
        x, offsets = torch.randn(tokens, build.width), torch.tensor([0, tokens], dtype=torch.int32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    kept: list[Tensor] = []

    def loss_of_step() -> Tensor:
        with build.autocast():
            y = model(x, offsets, method == "checkpoint")
            return F.mse_loss(y, x.detach())

    def run():
        optimizer.zero_grad(set_to_none=True)
        kept[:] = [loss_of_step()]
        kept[0].backward()
        optimizer.step()

    return PublishedStep(run, (model, optimizer, x, offsets))


def reference_language_model(*, tokens: int, method: str, build: Build = PUBLISHED) -> PublishedStep:
    """A step of the language model. Gradients are never set to zero; the last step's logits are still live."""
    with torch.device(build.device):
        model = LanguageModel(build.vocabulary, build.width, build.ff, build.layers, 128, build.attend)
        ids, targets = (torch.randint(build.vocabulary, (tokens,)) for _ in range(2))
        offsets = torch.tensor([0, tokens], dtype=torch.int32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    kept: dict[str, Tensor] = {}

    def run():
        with build.autocast():
            kept["logits"] = model(ids, offsets, method == "checkpoint")
            kept["loss"] = F.cross_entropy(kept["logits"].float(), targets, reduction="mean")
        kept["loss"].backward()
        optimizer.step()

    return PublishedStep(run, (model, optimizer, ids, targets, offsets))


def attend_in_a_loop(qkv: Tensor, offsets: Tensor, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """Attention of one sequence after the other, written into one tensor in place."""
    tokens, _, heads, width = qkv.shape
    out = qkv.new_empty(tokens, heads, width)
    start = 0
    for length in lengths:
        end = start + length
        query, key, value = (qkv[start:end, part] for part in range(3))
        scores = torch.einsum("lhd,shd->hls", query, key) * width**-0.5
        scores = scores - scores.max(dim=-1, keepdim=True).values
        out[start:end] = torch.einsum("hls,shd->lhd", torch.softmax(scores, dim=-1), value)
        start = end
    return out


@cache
def side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


class Kept:
    """A block's input: in an attribute, which autograd does not release, or on the host.

    The host's memory is pageable, and the copy waits, or it is page-locked, with a stream of its own for the copy. The
    memory for the copy back comes from the device's allocator, and fake tensors are not copied.
    """

    def __init__(self, x: Tensor, method: str):
        self.x = self.host = self.copied = None
        self.shape = x.shape
        if method == "ckpt_classic":
            self.x = x
        elif x.is_cuda and method == "ckpt_async_offload":
            self.host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
            stream = side_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.host.copy_(x, non_blocking=True)
                self.copied = stream.record_event()
            x.record_stream(stream)
        elif x.is_cuda:
            self.host = x.cpu()
        elif not isinstance(x, FakeTensor):
            self.host = host_memory(x.nbytes).view(x.dtype).view(x.shape).copy_(x)

    def on_device(self, grad: Tensor) -> Tensor:
        """The input, next to the gradient of the output."""
        if self.x is not None:
            return self.x
        x = grad.new_empty(self.shape)
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
        return x if self.host is None else x.copy_(self.host, non_blocking=self.copied is not None)


class KeptInput(torch.autograd.Function):
    """Checkpointing that keeps the block's input as `Kept` does."""

    @staticmethod
    def forward(ctx, block: nn.Module, x: Tensor, offsets: Tensor, method: str) -> Tensor:
        with torch.no_grad():
            y = block(x, offsets)
        ctx.block, ctx.offsets, ctx.kept = block, offsets, Kept(x.detach(), method)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x = ctx.kept.on_device(grad).requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x, ctx.offsets)
        torch.autograd.backward(y, grad)
        return None, x.grad, None, None


def reference_offload(*, method: str, build: Build = PUBLISHED) -> PublishedStep:
    """A step of the offload experiment. The loop's variables keep the output and the loss of the last step, and with
    them the inputs of blocks that `KeptInput` keeps."""
    attend, tokens = partial(attend_in_a_loop, lengths=build.lengths), sum(build.lengths)
    with default_dtype(torch.float16), torch.device(build.device):
        model = Autoencoder(build.width, build.ff, build.layers, 64, attend)
        x, target = (torch.randn(tokens, build.width) for _ in range(2))
        offsets = torch.empty(len(build.lengths) + 1, dtype=torch.int32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept: dict[str, Tensor] = {}

    def run():
        optimizer.zero_grad(set_to_none=True)
        y = model.first(x)
        for block in model.blocks:
            y = block(y, offsets) if method == "baseline" else KeptInput.apply(block, y, offsets, method)
        kept["out"] = model.last(y)
        del y
        kept["loss"] = F.mse_loss(kept["out"], target)
        kept["loss"].backward()
        optimizer.step()

    return PublishedStep(run, (model, optimizer, x, target, offsets))


def reference_resnet(*, batch: int, build: Build = PUBLISHED) -> PublishedStep:
    """Forward and backward of ResNet-152 in eval mode, while a copy of the model is resident.

    The source measures before and after it checkpoints the blocks of a deep copy, and the first model stays.
    """
    config = ResNetConfig("bottleneck", build.depths)
    with torch.device(build.device):
        model, images, copy = ResNet(config).eval(), torch.randn(batch, 3, build.image, build.image), ResNet(config)
    return PublishedStep(lambda: model(images).sum().backward(), (model, images, copy))
