"""Layers for images: convolutions, pooling, squeeze and excitation, sampling, memory formats."""

import torch
import torch.nn.functional as F
from torch import nn

from .part import WIDTH, Part, part


@part("image")
class ConvNormAct(nn.Sequential):
    """torchvision's block, a subclass of Sequential with attributes of its own."""

    def __init__(self, draw, inner=()):
        groups = draw.choice([1, 2, WIDTH])
        act = draw.choice([nn.ReLU(True), nn.SiLU(True), nn.ReLU6(True), nn.Hardswish(True)])
        conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(WIDTH), act)
        self.out_channels = WIDTH


class SqueezeExcite(Part, kind="image"):
    def setup(self, draw, inner):
        self.down, self.up = nn.Conv2d(WIDTH, 2, 1), nn.Conv2d(2, WIDTH, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.in_place = draw.random() < 0.4

    def forward(self, x):
        scale = F.hardsigmoid(self.up(F.relu(self.down(self.pool(x)), inplace=True)))
        return (x * 1.0).mul_(scale) if self.in_place else scale * x


class Resampling(Part, kind="image"):
    def setup(self, draw, inner):
        self.how = draw.choice(["unpool", "interpolate", "transposed", "shuffle", "unfold", "grid"])
        self.down = nn.Conv2d(WIDTH, WIDTH, 2, 2)
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 2, 2)

    def forward(self, x):
        if self.how == "unpool":
            found, places = F.max_pool2d(x, 2, return_indices=True)
            return F.max_unpool2d(found, places, 2, output_size=x.shape[-2:])
        if self.how == "interpolate":
            return F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="bilinear", align_corners=False)
        if self.how == "transposed":
            return self.up(self.down(x))
        if self.how == "shuffle":
            return F.pixel_shuffle(F.pixel_unshuffle(x, 2) * 2, 2)
        if self.how == "unfold":
            columns = F.unfold(x, 3, padding=1)
            return F.fold(columns, x.shape[-2:], 3, padding=1) / 9
        grid = F.affine_grid(torch.eye(2, 3).expand(x.shape[0], 2, 3), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)


class ChannelsLast(Part, kind="image"):
    def setup(self, draw, inner):
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.back = draw.random() < 0.5

    def forward(self, x):
        x = F.gelu(self.conv(x.to(memory_format=torch.channels_last)))
        return x.contiguous() if self.back else x


class ScalesLayers(Part, kind="image"):
    """ConvNeXt's block: depthwise convolution, channels last, and a learned scale of the branch."""

    def setup(self, draw, inner):
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x):
        found = self.mlp(self.conv(x).permute(0, 2, 3, 1)) * self.scale
        return x + found.permute(0, 3, 1, 2)


class DenseConnections(Part, kind="image"):
    """DenseNet's block: every layer takes the concatenation of all before it."""

    def setup(self, draw, inner):
        self.layers = nn.ModuleList([nn.Conv2d(WIDTH + 4 * i, 4, 3, padding=1) for i in range(2)])
        self.join = nn.Conv2d(WIDTH + 8, WIDTH, 1)

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(F.relu(layer(torch.cat(features, 1)), inplace=True))
        return self.join(torch.cat(features, 1))


class SplitAttention(Part, kind="image"):
    """Channels split into groups that take different ways, then shuffled (ShuffleNet)."""

    def setup(self, draw, inner):
        self.conv = nn.Conv2d(WIDTH // 2, WIDTH // 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH // 2)

    def forward(self, x):
        left, right = x.chunk(2, dim=1)
        x = torch.cat((left, F.relu(self.norm(self.conv(right)))), dim=1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
