"""Parts that compute with their length as libraries do: windows, patches, fractions, scales, positions, resizing."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .part import WIDTH, Part

_FRACTIONS = (0.1, 0.3, 1 / 3, 0.7, 0.25)


def _resized(x, length, mode="nearest"):
    return F.interpolate(x.transpose(1, 2), size=length, mode=mode).transpose(1, 2)


class Fractions(Part, kind="sequence"):
    """Keeps or pools a fraction of the tokens, and resizes them to the length."""

    def setup(self, draw, inner):
        self.how = draw.choice(["ceil", "floor", "round", "int", "top", "adaptive", "stride", "folded", "scale factor"])
        self.fraction, self.mode = draw.choice(_FRACTIONS), draw.choice(["nearest", "nearest-exact", "linear"])
        self.recomputes = draw.random() < 0.3

    def forward(self, x):
        length, fraction = x.shape[1], self.fraction
        if self.how == "scale factor":
            options = {"scale_factor": fraction, "recompute_scale_factor": self.recomputes or None}
            small = F.interpolate(x.transpose(1, 2), mode=self.mode, **options).transpose(1, 2)
        elif self.how == "adaptive":
            small = F.adaptive_avg_pool1d(x.transpose(1, 2), math.ceil(length * fraction)).transpose(1, 2)
        elif self.how == "top":
            small = x.topk(max(1, int(length * fraction)), 1)[0]
        elif self.how == "stride":
            small = x[:, :: max(1, round(length * fraction / 2))]
        elif self.how == "folded":  # sympy would fold the product to a different number
            small = x[:, : max(1, math.floor((length * fraction) // 0.1) // 5, math.ceil(length * 0.1 * 3))]
        else:
            count = {"ceil": math.ceil, "floor": math.floor, "round": round, "int": int}[self.how](length * fraction)
            small = x[:, : max(count, 1)]
        return x + 0.5 * _resized(small, length, self.mode)


class Windows(Part, kind="sequence"):
    """Pads to windows, patches or chunks, whose number or length follows from the length."""

    def setup(self, draw, inner):
        self.how = draw.choice(["windows", "patches", "chunks", "pieces", "unfold", "pooled", "negative"])
        self.size = draw.choice([2, 3, 5])

    def forward(self, x):
        length, size = x.shape[1], self.size
        if self.how == "chunks":
            return torch.cat([each * (1 + at) for at, each in enumerate(x.chunk(size, 1))], 1)
        if self.how == "pieces":
            return torch.cat([each.flip(1) for each in x.split(math.ceil(length / size), 1)], 1)
        if self.how == "unfold":
            return x + _resized(x.unfold(1, size, 2).mean(-1), length)
        if self.how == "pooled":
            return x + _resized(F.avg_pool1d(x.transpose(1, 2), size, 2, ceil_mode=True).transpose(1, 2), length)
        if self.how == "negative":
            return F.pad(x, (0, 0, 0, -length % size))[:, : -((-length) // size)].mean(1, keepdim=True) + x
        width = size if self.how == "patches" else max(2, round(length / size))
        count = math.ceil(length / width)
        windows = F.pad(x, (0, 0, 0, count * width - length)).unflatten(1, (count, width))
        return (windows - 0.5 * windows.mean(2, keepdim=True)).flatten(1, 2)[:, :length]


class LengthScales(Part, kind="sequence"):
    """Multiplies by numbers that are computed from the length, or branches on them."""

    def setup(self, draw, inner):
        names = "mean root power root.math log sum branch whole remainder noise lerp fill variance double".split()
        self.how, self.fraction = draw.choice(names), draw.choice(_FRACTIONS)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        n, fraction = x.shape[1], self.fraction
        x = x * self.scale
        if self.how == "lerp":
            return torch.lerp(x, x.flip(1), 1 / n)
        if self.how == "fill":
            return x.masked_fill(x > 1, fraction / n) + torch.full((n, 1), n * fraction)
        if self.how == "variance":
            return x / (1 + x.var(1, keepdim=True)) + x.std(1, keepdim=True)
        if self.how == "double":
            return (x.double() * (n * 0.1 + 0.2 + 0.3)).float()
        if self.how == "noise":
            return F.dropout(x, 1 / n, self.training)
        if self.how == "branch":
            return x * 2 if n * 0.3 > 4.2 else x * 3
        factors = {
            "mean": lambda: 1.0 / n * 5,
            "root": lambda: n**-0.5,
            "power": lambda: 2 ** (-8 / n),
            "root.math": lambda: 1 / math.sqrt(n),
            "log": lambda: math.log(n) / math.log(12),
            "sum": lambda: n * fraction + 0.2 + 0.3,
            "whole": lambda: 2 if (n / 2).is_integer() else n // 0.3,
            "remainder": lambda: n % 0.7 + (3 - n) // 4 + round(n * fraction, 2),
        }
        return x * factors[self.how]()


class LengthPositions(Part, kind="sequence"):
    """Positions of the length: rotary ones that are scaled, ALiBi's slopes, T5's buckets, grids with float steps."""

    def setup(self, draw, inner):
        self.how = draw.choice(["rotary", "slopes", "buckets", "step", "linspace"])
        self.bias = nn.Embedding(8, 1)

    def forward(self, x):
        n = x.shape[1]
        if self.how == "rotary":
            base = 10000 * max(1.0, n / 13) ** (WIDTH / (WIDTH - 2))
            angles = torch.outer(torch.arange(n) * (13 / n), 1 / base ** (torch.arange(0, WIDTH, 2) / WIDTH))
            angles = torch.cat([angles, angles], -1)
            return x * angles.cos() + torch.cat([-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], -1) * angles.sin()
        if self.how == "step":
            return x * torch.arange(0, n, 0.5)[:n, None] + torch.arange(0, 1, 1 / n)[:n, None]
        if self.how == "linspace":
            return x * torch.linspace(0, 1 / n, n)[:, None]
        distance = torch.arange(n)[:, None] - torch.arange(n)
        if self.how == "slopes":
            return (-(2 ** (-8 / n)) * distance.abs()).softmax(-1) @ x
        near, distance = distance.abs() < 4, distance.abs()
        far = 4 + (torch.log(distance.clamp(min=1) / 4) / math.log(128 / 4) * 4).long()
        return self.bias(torch.where(near, distance, far.clamp(max=7))).squeeze(-1).softmax(-1) @ x
