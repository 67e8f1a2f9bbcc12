"""The U-Net that Stable Diffusion XL trains: Podell et al. 2023, arXiv:2307.01952; the default sizes are SDXL's.

A step predicts the noise in a batch of latent images, from the time and the text that belongs to each. Residual
blocks with convolutions alternate with transformer blocks that attend to the image and to the text. The way up
concatenates what the way down computed, so those activations live through most of the step.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ackpt.models.transformer import require_positive

__all__ = ["UNet", "UNetConfig"]

NORM_GROUPS = 32
TIME_IDS, TIME_ID_WIDTH = 6, 256  # original size, crop and target size of an image, each as that many sines


@dataclasses.dataclass(frozen=True)
class UNetConfig:
    """Sizes of a U-Net; the defaults are those of Stable Diffusion XL.

    ``widths``: channels at each resolution, each half of the one before. ``depths``: transformer blocks that follow
    each residual block there. ``residuals``: residual blocks at each resolution on the way down; the way up has one
    more. ``text_tokens`` vectors of ``text_dim`` describe an image, and one of ``pooled_dim`` all of it.

    Example:
        >>> UNetConfig(widths=(64, 128), depths=(0, 1)).time_dim
        256
    """

    widths: tuple[int, ...] = (320, 640, 1280)
    depths: tuple[int, ...] = (0, 2, 10)
    residuals: int = 2
    head_dim: int = 64
    channels: int = 4
    text_tokens: int = 77
    text_dim: int = 2048
    pooled_dim: int = 1280

    def __post_init__(self) -> None:
        names = "residuals", "head_dim", "channels", "text_tokens", "text_dim", "pooled_dim"
        require_positive(self, *names)
        if len(self.widths) < 2 or len(self.widths) != len(self.depths):
            raise ValueError(
                f"widths and depths must name the same two or more resolutions, got {self.widths} and {self.depths}"
            )
        if any(width < 1 or width % math.lcm(NORM_GROUPS, self.head_dim) for width in self.widths):
            raise ValueError(f"widths must be multiples of {NORM_GROUPS} and of head_dim, got {self.widths}")

    @property
    def time_dim(self) -> int:
        """The width of the embedding of time, size and text that every residual block reads."""
        return 4 * self.widths[0]


def sines(values: Tensor, width: int) -> Tensor:
    """Cosines and sines of `values` [...] at falling frequencies: [..., width], in float32."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half, device=values.device, dtype=torch.float32) * (-math.log(10000) / half))
    angles = values[..., None].float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class Residual(nn.Module):
    """Two convolutions, between them the embedding of the time: [b, channels, h, w] -> [b, out, h, w]."""

    def __init__(self, channels: int, out: int, time_dim: int) -> None:
        super().__init__()
        self.norm1: nn.GroupNorm = nn.GroupNorm(NORM_GROUPS, channels, eps=1e-5)
        self.conv1: nn.Conv2d = nn.Conv2d(channels, out, 3, padding=1)
        self.time: nn.Linear = nn.Linear(time_dim, out)
        self.norm2: nn.GroupNorm = nn.GroupNorm(NORM_GROUPS, out, eps=1e-5)
        self.conv2: nn.Conv2d = nn.Conv2d(out, out, 3, padding=1)
        self.shortcut: nn.Module = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        out = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(out)))


class Attention(nn.Module):
    """Attention of the image's positions [b, n, width] to those of `context` [b, m, context_dim]."""

    def __init__(self, width: int, context_dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.query: nn.Linear = nn.Linear(width, width, bias=False)
        self.key: nn.Linear = nn.Linear(context_dim, width, bias=False)
        self.value: nn.Linear = nn.Linear(context_dim, width, bias=False)
        self.out: nn.Linear = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        parts = self.query(x), self.key(context), self.value(context)
        heads = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention to the image, attention to the text, and a gated feed-forward network, each with a residual."""

    def __init__(self, width: int, text_dim: int, head_dim: int) -> None:
        super().__init__()
        self.norm1: nn.LayerNorm = nn.LayerNorm(width)
        self.to_image: Attention = Attention(width, width, head_dim)
        self.norm2: nn.LayerNorm = nn.LayerNorm(width)
        self.to_text: Attention = Attention(width, text_dim, head_dim)
        self.norm3: nn.LayerNorm = nn.LayerNorm(width)
        self.gated: nn.Linear = nn.Linear(width, 8 * width)
        self.down: nn.Linear = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.to_image(normed, normed)
        x = x + self.to_text(self.norm2(x), text)
        hidden, gate = self.gated(self.norm3(x)).chunk(2, dim=-1)
        return x + self.down(hidden * F.gelu(gate))


class Transformers(nn.Module):
    """Transformer blocks on the positions of an image: [b, width, h, w] -> [b, width, h, w]."""

    def __init__(self, width: int, depth: int, config: UNetConfig) -> None:
        super().__init__()
        self.norm: nn.GroupNorm = nn.GroupNorm(NORM_GROUPS, width, eps=1e-6)
        self.inner: nn.Linear = nn.Linear(width, width)
        self.blocks: nn.ModuleList = nn.ModuleList(
            TransformerBlock(width, config.text_dim, config.head_dim) for _ in range(depth)
        )
        self.outer: nn.Linear = nn.Linear(width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        positions = self.inner(self.norm(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            positions = block(positions, text)
        return x + self.outer(positions).transpose(1, 2).reshape(x.shape)


class Block(nn.Module):
    """A residual block and the transformer blocks that follow it, if there are any."""

    def __init__(self, channels: int, width: int, depth: int, config: UNetConfig) -> None:
        super().__init__()
        self.residual: Residual = Residual(channels, width, config.time_dim)
        self.transformers: Transformers | None = Transformers(width, depth, config) if depth else None

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.residual(x, time)
        return x if self.transformers is None else self.transformers(x, text)


class UNet(nn.Module):
    """Predicts the noise in latent images [batch, channels, h, w], or returns the mean squared error against `noise`.

    ``times`` [batch]: the time of each image in the diffusion. ``text`` [batch, tokens, text_dim] and ``pooled``
    [batch, pooled_dim]: the embeddings of its description. ``time_ids`` [batch, 6]: its original size, crop and target
    size. h and w must be multiples of 2 for every resolution but the first. `ackpt.apply_activation_checkpointing`
    finds the members of ``down`` and ``up``.

    Source: Podell et al. 2023, arXiv:2307.01952, with the sizes of its checkpoint: 2 567 463 684 parameters.

    Example:
        >>> import torch
        >>> config = UNetConfig(widths=(64, 128), depths=(0, 1), text_dim=32, pooled_dim=16)
        >>> model = UNet(config)
        >>> given = torch.ones(2), torch.ones(2, 77, 32), torch.ones(2, 16), torch.ones(2, 6)
        >>> model(torch.randn(2, 4, 8, 8), *given).shape
        torch.Size([2, 4, 8, 8])
    """

    def __init__(self, config: UNetConfig = UNetConfig()) -> None:  # noqa: B008
        super().__init__()
        self.config = config
        first, last = config.widths[0], config.widths[-1]
        time_dim, added = config.time_dim, config.pooled_dim + TIME_IDS * TIME_ID_WIDTH
        self.time: nn.Sequential = nn.Sequential(nn.Linear(first, time_dim), nn.SiLU(), nn.Linear(time_dim, time_dim))
        self.added: nn.Sequential = nn.Sequential(nn.Linear(added, time_dim), nn.SiLU(), nn.Linear(time_dim, time_dim))
        self.conv_in: nn.Conv2d = nn.Conv2d(config.channels, first, 3, padding=1)
        stages = list(zip(config.widths, config.depths))
        skips = [first]  # channels of what the way up concatenates
        self.down: nn.ModuleList = nn.ModuleList()
        self.halve: nn.ModuleDict = nn.ModuleDict()  # by the number of the block before
        for width, depth in stages:
            if len(self.down):
                self.halve[str(len(self.down) - 1)] = nn.Conv2d(skips[-1], skips[-1], 3, stride=2, padding=1)
                skips.append(skips[-1])
            for _ in range(config.residuals):
                self.down.append(Block(skips[-1], width, depth, config))
                skips.append(width)
        self.middle: nn.ModuleList = nn.ModuleList(Block(last, last, depth, config) for depth in (config.depths[-1], 0))
        self.up: nn.ModuleList = nn.ModuleList()
        self.enlarge: nn.ModuleDict = nn.ModuleDict()
        channels = last
        for width, depth in reversed(stages):
            if len(self.up):
                self.enlarge[str(len(self.up) - 1)] = nn.Conv2d(channels, channels, 3, padding=1)
            for _ in range(config.residuals + 1):
                self.up.append(Block(channels + skips.pop(), width, depth, config))
                channels = width
        self.norm: nn.GroupNorm = nn.GroupNorm(NORM_GROUPS, first, eps=1e-5)
        self.conv_out: nn.Conv2d = nn.Conv2d(first, config.channels, 3, padding=1)

    def forward(
        self,
        latents: Tensor,
        times: Tensor,
        text: Tensor,
        pooled: Tensor,
        time_ids: Tensor,
        noise: Tensor | None = None,
    ) -> Tensor:
        multiple, dtype = 2 ** len(self.halve), latents.dtype
        channels = self.config.channels
        if latents.ndim != 4 or latents.shape[1] != channels or any(size % multiple for size in latents.shape[2:]):
            raise ValueError(
                f"latents must be [batch, {channels}, height, width], height and width multiples of {multiple}, got "
                f"{list(latents.shape)}"
            )
        added = torch.cat([pooled, sines(time_ids, TIME_ID_WIDTH).flatten(1).to(dtype)], dim=-1)
        time = self.time(sines(times, self.config.widths[0]).to(dtype)) + self.added(added)
        x = self.conv_in(latents)
        skips = [x]
        for number, block in enumerate(self.down):
            x = block(x, time, text)
            skips.append(x)
            if str(number) in self.halve:
                x = self.halve[str(number)](x)
                skips.append(x)
        for block in self.middle:
            x = block(x, time, text)
        for number, block in enumerate(self.up):
            x = block(torch.cat([x, skips.pop()], dim=1), time, text)
            if str(number) in self.enlarge:
                x = self.enlarge[str(number)](F.interpolate(x, scale_factor=2.0))
        predicted = self.conv_out(F.silu(self.norm(x)))
        return predicted if noise is None else F.mse_loss(predicted.float(), noise.float())
