"""Normalization as libraries write it: subclasses with their own forward, and functional calls on own buffers."""

import torch
import torch.nn.functional as F
from torch import nn

from .part import WIDTH, Part, part


@part("image")
class BatchNormAct(nn.BatchNorm2d):
    def __init__(self, draw, inner=()):
        momentum = draw.choice([0.1, None])
        super().__init__(WIDTH, momentum=momentum, track_running_stats=draw.random() < 0.8, affine=draw.random() < 0.8)
        self.act = nn.GELU()

    def forward(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.act(super().forward(x))


@part("image")
class BatchNormOwnForward(nn.BatchNorm2d):
    def __init__(self, draw, inner=()):
        super().__init__(WIDTH)
        self.in_place = draw.random() < 0.5

    def forward(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.training:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
        statistics, weights = (self.running_mean, self.running_var), (self.weight, self.bias)
        x = F.batch_norm(x, *statistics, *weights, self.training, self.momentum or 0.0, self.eps)
        return F.relu(x, inplace=self.in_place)


class BatchNormModes(Part, kind="image"):
    """torch's batch norm in the modes that training scripts put it in."""

    def setup(self, draw, inner):
        self.norm = nn.BatchNorm2d(
            WIDTH, momentum=draw.choice([0.1, None, 1.0]), track_running_stats=draw.random() < 0.7
        )
        self.mode = draw.choice(["train", "eval", "frozen"])
        self.norm.requires_grad_(self.mode != "frozen")

    def train(self, mode=True):
        super().train(mode)
        if getattr(self, "mode", "train") != "train":
            self.norm.eval()
        return self

    def forward(self, x):
        return self.norm(x)


class FunctionalBatchNorm(Part, kind="image"):
    def setup(self, draw, inner):
        self.stacked = draw.random() < 0.5
        self.call = draw.choice([F.batch_norm, "torch"])
        if self.stacked:
            self.register_buffer("statistics", torch.stack([torch.zeros(WIDTH), torch.ones(WIDTH)]))
        else:
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x):
        mean, variance = (self.statistics[0], self.statistics[1]) if self.stacked else (self.mean, self.variance)
        if self.call == "torch":
            return torch.batch_norm(x, None, None, mean, variance, self.training, 0.1, 1e-5, True)
        return F.batch_norm(x, mean, variance, training=self.training)


class InstanceNorm(Part, kind="image"):
    def setup(self, draw, inner):
        self.functional = draw.random() < 0.6
        self.norm = nn.InstanceNorm2d(WIDTH, affine=True, track_running_stats=draw.random() < 0.7)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x):
        if self.functional:
            return F.instance_norm(x, self.mean, self.variance, use_input_stats=self.training)
        return self.norm(x)


class GhostBatchNorm(Part, kind="image"):
    """The batch in halves, each through the same batch norm, or through one of its own."""

    def setup(self, draw, inner):
        norms = [nn.BatchNorm2d(WIDTH) for _ in range(draw.choice([1, 2]))]
        self.norms = nn.ModuleList([norms[0], norms[-1]])

    def forward(self, x):
        if not self.training:
            return self.norms[0](x)
        return torch.cat([norm(half) for norm, half in zip(self.norms, x.chunk(2))])


@part("image")
class ReadsItsStatistics(nn.BatchNorm2d):
    def __init__(self, draw, inner=()):
        super().__init__(WIDTH)

    def forward(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        x = super().forward(x)
        assert self.running_var is not None
        return x * (1 + 0.1 * self.running_var.mean())


class ReadsAnothersStatistics(Part, kind="image"):
    """A module that reads the running statistics of a batch norm beside it, before or after that updates them."""

    def setup(self, draw, inner):
        self.norm = nn.BatchNorm2d(WIDTH)
        self.reader = _Reader(self.norm)
        self.first = draw.random() < 0.5

    def forward(self, x):
        return self.norm(self.reader(x)) if self.first else self.reader(self.norm(x))


class _Reader(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.source = [norm]  # no submodule
        self.linear = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x):
        return self.linear(x) - self.source[0].running_mean.view(1, -1, 1, 1)


class FrozenBatchNorm(Part, kind="image"):
    def setup(self, draw, inner):
        for name in ("weight", "bias", "mean", "variance"):
            self.register_buffer(name, torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        buffers = self.weight, self.bias, self.mean, self.variance
        weight, bias, mean, variance = (buffer.reshape(1, -1, 1, 1) for buffer in buffers)
        scale = weight * (variance + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


@part("image")
class LayerNorm2d(nn.LayerNorm):
    def __init__(self, draw, inner=()):
        super().__init__(WIDTH)

    def forward(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class Groups(Part, kind="image"):
    """Group norm, and weight standardization by a batch norm of the weight, as in timm."""

    def setup(self, draw, inner):
        self.norm = nn.GroupNorm(draw.choice([1, 2, 4]), WIDTH)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        weight = self.conv.weight
        flat = weight.reshape(1, WIDTH, -1)
        weight = F.batch_norm(flat, None, None, self.gain, training=True, momentum=0.0).reshape_as(weight)
        return self.norm(F.conv2d(x, weight, self.conv.bias, padding=1))


class BatchNormOverTime(Part, kind="sequence"):
    def setup(self, draw, inner):
        self.norm = nn.BatchNorm1d(WIDTH, momentum=draw.choice([0.1, None]))

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class RootMeanSquare(Part, kind="sequence"):
    """RMS norm: Llama's, which computes in float32, or torch's."""

    def setup(self, draw, inner):
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.own = draw.random() < 0.6

    def forward(self, x):
        if not self.own:
            return F.rms_norm(x, (WIDTH,), self.weight)
        found = x.to(torch.float32)
        found = found * torch.rsqrt(found.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * found.to(x.dtype)


@part("sequence")
class LayerNormOwnForward(nn.LayerNorm):
    def __init__(self, draw, inner=()):
        super().__init__(WIDTH, bias=draw.random() < 0.5)

    def forward(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
