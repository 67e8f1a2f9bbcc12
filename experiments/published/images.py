"""Image models of published measurements: the convolutional networks of MONeT's README, and a vision transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.models import resnet50

from .step import PublishedStep, default_dtype
from .training import trained


def resnet50_sum(*, batch: int, image: int) -> PublishedStep:
    """Forward and backward of ResNet-50 from the sum of its outputs."""
    model, images = resnet50(), torch.empty(batch, 3, image, image)
    labels = torch.empty(batch, dtype=torch.int64)
    return PublishedStep(lambda: model(images, labels).backward(), (model, images, labels))


def vgg16_sum(*, batch: int, image: int) -> PublishedStep:
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2, 2))
    layers += [nn.AdaptiveAvgPool2d((7, 7)), nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(True), nn.Dropout()]
    layers += [nn.Linear(4096, 4096), nn.ReLU(True), nn.Dropout(), nn.Linear(4096, 1000)]
    return _summed(nn.Sequential(*layers), torch.empty(batch, 3, image, image))


def unet_sum(*, batch: int, height: int, width: int) -> PublishedStep:
    """U-Net with four levels; average pooling to the size of the upper level replaces upsampling."""
    return _summed(_UNet(height, width), torch.empty(batch, 3, height, width))


def mobilenet_sum(*, batch: int, image: int) -> PublishedStep:
    """MobileNet V2 at width 1."""
    layers: list[nn.Module] = [_convolution(3, 32, 3, 2)]
    channels = 32
    stages = (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)
    for expansion, width, depth, stride in stages:
        for index in range(depth):
            layers.append(_InvertedResidual(channels, width, stride if index == 0 else 1, expansion))
            channels = width
    layers += [_convolution(channels, 1280, 1), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Dropout(0.2)]
    return _summed(nn.Sequential(*layers, nn.Linear(1280, 1000)), torch.empty(batch, 3, image, image))


def vit_large(
    *, batch: int, precision: str, optimizer: str, image: int = 224, accumulation: int = 1, only_loaded: bool = False
) -> PublishedStep:
    """One step of a fine-tuned ViT-L/16 with 10 classes; `precision`: 32, 16-mixed, bf16 or 16.

    With `accumulation`, the step runs several micro-batches and ends with the optimizer's step.
    """
    kind = {"32": torch.float32, "16-mixed": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}[precision]
    with default_dtype(kind):
        model = _VisionTransformer(classes=1000 if only_loaded else 10)
    if only_loaded:
        return PublishedStep(lambda: None, (model,))
    autocast = torch.float16 if precision == "16-mixed" else None
    images = torch.empty(batch, 3, image, image, dtype=kind)
    labels = torch.empty(batch, dtype=torch.int64)

    def loss() -> Tensor:
        return F.cross_entropy(model(images), labels)

    return trained(model, loss, optimizer, (images, labels), accumulation, autocast)


class _VisionTransformer(nn.Module):
    def __init__(self, classes: int, dim: int = 1024, layers: int = 24, heads: int = 16, patches: int = 196):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(torch.empty(1, patches + 1, dim))
        self.layers = nn.ModuleList(_EncoderLayer(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images)
        x = x.reshape(*x.shape[:2], -1).permute(0, 2, 1)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class _EncoderLayer(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.first, self.second = (nn.LayerNorm(dim, eps=1e-6) for _ in range(2))
        self.attention = nn.MultiheadAttention(dim, heads, dropout=0.0, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        x = y + x
        y = self.second(x)
        return x + self.mlp(y)


def _summed(model: nn.Module, images: Tensor) -> PublishedStep:
    def run():
        y = model(images)
        y.sum().backward()

    return PublishedStep(run, (model, images))


def _convolution(channels: int, width: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels, width, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU6(inplace=True))


class _InvertedResidual(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, expansion: int):
        super().__init__()
        hidden = channels * expansion
        wider = [_convolution(channels, hidden, 1)] if expansion != 1 else []
        narrower = nn.Conv2d(hidden, width, 1, bias=False), nn.BatchNorm2d(width)
        self.layers = nn.Sequential(*wider, _convolution(hidden, hidden, 3, stride, hidden), *narrower)
        self.adds = stride == 1 and channels == width

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


def _double(channels: int, width: int, middle: int | None = None) -> nn.Sequential:
    middle = middle or width
    layers: list[nn.Module] = []
    for start, end in ((channels, middle), (middle, width)):
        layers += [nn.Conv2d(start, end, 3, padding=1), nn.BatchNorm2d(end), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class _UNet(nn.Module):
    def __init__(self, height: int, width: int):
        super().__init__()
        self.stem = _double(3, 64)
        widths = (64, 128, 256, 512, 512)
        downs = (nn.Sequential(nn.MaxPool2d(2), _double(a, b)) for a, b in zip(widths, widths[1:], strict=False))
        self.downs = nn.ModuleList(downs)
        ups = (1024, 256, 8), (512, 128, 4), (256, 64, 2), (128, 64, 1)
        self.resizes = nn.ModuleList(nn.AdaptiveAvgPool2d((height // by, width // by)) for _, _, by in ups)
        self.ups = nn.ModuleList(_double(channels, out, channels // 2) for channels, out, _ in ups)
        self.out = nn.Conv2d(64, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = [self.stem(x)]
        for down in self.downs:
            skipped.append(down(skipped[-1]))
        x = skipped.pop()
        for resize, up in zip(self.resizes, self.ups, strict=True):
            x = up(torch.cat([skipped.pop(), resize(x)], dim=1))
        return self.out(x)
