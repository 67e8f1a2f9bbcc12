"""The models of the experiment ``frontier``: a module, the arguments of a call that returns its loss, its blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ackpt.core.errors import did_you_mean
from experiments.models import BertConfig, BertForMaskedLM, ResNet, ResNetConfig
from experiments.steps.settings import LOSS_SCALE
from experiments.steps.workload import Workload, transformer

TRANSFORMER = {"batch_size": 2, "seq_len": 512, "layers": 6, "dim": 256, "heads": 4, "ff_dim": 1024, "vocab_size": 1024}
BERT = {"batch_size": 4, "seq_len": 128, "layers": 6, "dim": 256, "heads": 4, "ff_dim": 1024, "vocab_size": 1024}
RESNET50 = {"batch_size": 8, "image_size": 128, "width": 64, "num_classes": 1000}
UNET = {"batch_size": 4, "image_size": 64, "width": 32, "num_classes": 8}


def workload(model: str, sizes: dict[str, int], seed: int, device: str = "cpu", dtype: str = "float32") -> Workload:
    """The model of that name with `sizes`, on a device, its weights and batch drawn from `seed` on the CPU.

    In float16 its loss is scaled by `LOSS_SCALE`, as a gradient scaler would.
    """
    torch.manual_seed(seed)
    made = replace(MODELS[model].build(**sizes), dtype=dtype)
    if dtype == "float16":
        made = replace(made, model=_Scaled(made.model))
    if device == "cpu":
        return made
    return replace(made, model=made.model.to(device), args=tuple(each.to(device) for each in made.args))


def checked_sizes(model: str, changes: dict[str, int]) -> dict[str, int]:
    """The model's default sizes with `changes`.

    Raises:
        ValueError: for an unknown model, a size that it does not have, and one that is no positive whole number.
    """
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}{did_you_mean(model, MODELS)}: choose from {', '.join(MODELS)}")
    sizes = MODELS[model].sizes
    for name, value in changes.items():
        if name not in sizes:
            raise ValueError(f"{model} has no size {name!r}: it has {', '.join(sizes)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive whole number, got {value!r}")
    sizes = sizes | changes
    if model == "unet" and sizes["image_size"] % 4:
        size = sizes["image_size"]
        raise ValueError(f"image_size of unet must be a multiple of 4, since it halves images twice, got {size}")
    if "heads" in sizes and sizes["dim"] % sizes["heads"]:
        raise ValueError(f"dim must be a multiple of heads, got {sizes['dim']} and {sizes['heads']}")
    return sizes


def _resnet50(batch_size, image_size, width, num_classes) -> Workload:
    model = ResNet(ResNetConfig(width=width, num_classes=num_classes))
    images = torch.randn(batch_size, 3, image_size, image_size)
    stages = (model.layer1, model.layer2, model.layer3, model.layer4)
    labels = torch.randint(num_classes, (batch_size,))
    return Workload(model, (images, labels), tuple(block for stage in stages for block in stage))


class _Convolutions(nn.Sequential):
    """Twice convolution, group norm and SiLU: [batch, channels, h, w] -> [batch, width, h, w]."""

    def __init__(self, channels: int, width: int):
        layers = []
        for inputs in (channels, width):
            layers += [nn.Conv2d(inputs, width, 3, padding=1, bias=False)]
            layers += [nn.GroupNorm(math.gcd(8, width), width), nn.SiLU()]
        super().__init__(*layers)


class _UNet(nn.Module):
    """Segments images: two scales down, two up, with a skip connection at each scale.

    Source: Ronneberger et al. 2015, arXiv:1505.04597, with padded convolutions, and norms as in diffusion models.
    """

    def __init__(self, width: int, num_classes: int):
        super().__init__()
        self.down1, self.down2 = _Convolutions(3, width), _Convolutions(width, 2 * width)
        self.middle = _Convolutions(2 * width, 4 * width)
        self.up2, self.up1 = _Convolutions(6 * width, 2 * width), _Convolutions(3 * width, width)
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        fine = self.down1(images)
        coarse = self.down2(F.max_pool2d(fine, 2))
        x = self.middle(F.max_pool2d(coarse, 2))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2.0), coarse], 1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2.0), fine], 1))
        return F.cross_entropy(self.head(x), labels)


def _unet(batch_size, image_size, width, num_classes) -> Workload:
    model = _UNet(width, num_classes)
    images = torch.randn(batch_size, 3, image_size, image_size)
    labels = torch.randint(num_classes, (batch_size, image_size, image_size))
    return Workload(model, (images, labels), (model.down1, model.down2, model.middle, model.up2, model.up1))


class _Bert(nn.Module):
    """BERT with dropout, called with tokens and labels by position."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.model = BertForMaskedLM(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(tokens, labels=labels)


def _bert(batch_size, seq_len, **sizes) -> Workload:
    model = _Bert(BertConfig(positions=seq_len, **sizes))
    tokens = torch.randint(sizes["vocab_size"], (batch_size, seq_len))
    return Workload(model, (tokens, tokens.clone()), tuple(model.model.bert.blocks))


class _Scaled(nn.Module):
    """A model whose loss is multiplied by `LOSS_SCALE`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        return self.model(*args) * LOSS_SCALE


@dataclass(frozen=True)
class _Model:
    sizes: dict[str, int]
    build: Callable[..., Workload]


MODELS = {
    "transformer": _Model(TRANSFORMER, transformer),
    "bert": _Model(BERT, _bert),
    "resnet50": _Model(RESNET50, _resnet50),
    "unet": _Model(UNET, _unet),
}
