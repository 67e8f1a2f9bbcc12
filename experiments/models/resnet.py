"""ResNet, the convolutional network with identity shortcuts: He et al. 2015, arXiv:1512.03385, table 1.

One departure from the paper: where a bottleneck halves the image, the stride is in its 3x3 convolution, not in its
first 1x1 ("v1.5"), as in nearly every checkpoint in use. Parameters and buffers are named and initialised as in
torchvision, whose checkpoints load.

Every ReLU works in place. That is safe under checkpointing as long as no region begins with one, since it would
overwrite the region's input; the blocks begin with a convolution.
"""

import dataclasses

import torch.nn.functional as F
from torch import Tensor, nn

from ackpt.models.transformer import require_positive

from .checks import IGNORE_INDEX, require_ids

__all__ = ["BasicBlock", "Bottleneck", "ResNet", "ResNetConfig", "resnet18", "resnet50", "resnet152"]


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Sizes of a ResNet; the defaults are those of ResNet-50.

    `block` is "basic" or "bottleneck", `depths` the number of blocks in each of the four stages, `width` the channels
    of the stem: the stages work on 1, 2, 4 and 8 times as many. Raises ValueError for anything else.

    Example:
        >>> ResNetConfig(block="basic", depths=(3, 4, 6, 3)).features  # ResNet-34
        512
    """

    block: str = "bottleneck"
    depths: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    num_classes: int = 1000
    channels: int = 3

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise ValueError(f"block must be one of {', '.join(BLOCKS)}, got {self.block!r}")
        require_positive(self, "width", "num_classes", "channels")
        sizes = self.depths if isinstance(self.depths, tuple) else ()
        if len(sizes) != 4 or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in sizes):
            raise ValueError(f"depths must be a tuple of four positive integers, got {self.depths!r}")

    @property
    def features(self) -> int:
        """Channels that reach the classifier."""
        return 8 * self.width * BLOCKS[self.block].expansion


def _conv3x3(channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)


def _conv1x1(channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, 1, stride, bias=False)


def _shortcut(channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """The projection that makes the input fit the output, None where it already does."""
    if stride == 1 and channels == out_channels:
        return None
    return nn.Sequential(_conv1x1(channels, out_channels, stride), nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and the shortcut: [batch, channels, h, w] -> [batch, width, h / stride, w / stride].

    Example:
        >>> import torch
        >>> BasicBlock(4, 8, stride=2)(torch.randn(2, 4, 6, 6)).shape
        torch.Size([2, 8, 3, 3])
    """

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1: nn.Conv2d = _conv3x3(channels, width, stride)
        self.bn1: nn.BatchNorm2d = nn.BatchNorm2d(width)
        self.relu: nn.ReLU = nn.ReLU(inplace=True)
        self.conv2: nn.Conv2d = _conv3x3(width, width)
        self.bn2: nn.BatchNorm2d = nn.BatchNorm2d(width)
        self.downsample: nn.Sequential | None = _shortcut(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """1x1 down to `width`, 3x3, 1x1 up: [batch, channels, h, w] -> [batch, 4 width, h / stride, w / stride].

    Example:
        >>> import torch
        >>> Bottleneck(16, 8, stride=2)(torch.randn(2, 16, 6, 6)).shape
        torch.Size([2, 32, 3, 3])
    """

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1: nn.Conv2d = _conv1x1(channels, width)
        self.bn1: nn.BatchNorm2d = nn.BatchNorm2d(width)
        self.conv2: nn.Conv2d = _conv3x3(width, width, stride)
        self.bn2: nn.BatchNorm2d = nn.BatchNorm2d(width)
        self.conv3: nn.Conv2d = _conv1x1(width, 4 * width)
        self.bn3: nn.BatchNorm2d = nn.BatchNorm2d(4 * width)
        self.relu: nn.ReLU = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = _shortcut(channels, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


BLOCKS = {"basic": BasicBlock, "bottleneck": Bottleneck}


class ResNet(nn.Module):
    """Image classifier: images [batch, channels, height, width] -> logits [batch, num_classes], or a mean loss.

    With `labels` [batch] int64 (-100: ignored) the result is the mean cross-entropy in nats, a scalar. The blocks are
    the members of `layer1` to `layer4`, where `ackpt.apply_activation_checkpointing` finds them. Raises ValueError
    for images and labels of another shape or dtype, and for labels outside the classes (checked on CPU).

    Source: He et al. 2015, arXiv:1512.03385, with the stride in the 3x3 convolution; weights as in He et al. 2015,
    arXiv:1502.01852, section 2.2 (fan-out).

    Example:
        >>> import torch
        >>> model = ResNet(ResNetConfig(block="basic", depths=(2, 2, 2, 2), width=8, num_classes=10))
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: ResNetConfig = ResNetConfig()) -> None:  # noqa: B008
        super().__init__()
        self.config = config
        self.conv1: nn.Conv2d = nn.Conv2d(config.channels, config.width, 7, stride=2, padding=3, bias=False)
        self.bn1: nn.BatchNorm2d = nn.BatchNorm2d(config.width)
        self.relu: nn.ReLU = nn.ReLU(inplace=True)
        self.maxpool: nn.MaxPool2d = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1: nn.Sequential = self._stage(0)
        self.layer2: nn.Sequential = self._stage(1)
        self.layer3: nn.Sequential = self._stage(2)
        self.layer4: nn.Sequential = self._stage(3)
        self.avgpool: nn.AdaptiveAvgPool2d = nn.AdaptiveAvgPool2d(1)
        self.fc: nn.Linear = nn.Linear(config.features, config.num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def _stage(self, index: int) -> nn.Sequential:
        block = BLOCKS[self.config.block]
        width = self.config.width << index
        channels = width // 2 * block.expansion if index else width
        blocks = [block(channels, width, stride=2 if index else 1)]
        blocks += [block(width * block.expansion, width) for _ in range(1, self.config.depths[index])]
        return nn.Sequential(*blocks)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        channels = self.config.channels
        if images.ndim != 4 or images.shape[1] != channels or not images.numel() or not images.is_floating_point():
            raise ValueError(
                f"images must be floats [batch, {channels}, height, width], got {images.dtype} {list(images.shape)}"
            )
        if labels is not None:
            classes = self.config.num_classes
            require_ids("labels", labels, images.shape[:1], classes, f"num_classes is {classes}", IGNORE_INDEX)
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits = self.fc(self.avgpool(x).flatten(1))
        return logits if labels is None else F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)


def resnet18(num_classes: int = 1000) -> ResNet:
    """ResNet-18: 11 689 512 parameters with 1000 classes.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     sum(parameter.numel() for parameter in resnet18().parameters())
        11689512
    """
    return ResNet(ResNetConfig("basic", (2, 2, 2, 2), num_classes=num_classes))


def resnet50(num_classes: int = 1000) -> ResNet:
    """ResNet-50: 25 557 032 parameters with 1000 classes.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     resnet50(num_classes=10).fc
        Linear(in_features=2048, out_features=10, bias=True)
    """
    return ResNet(ResNetConfig("bottleneck", (3, 4, 6, 3), num_classes=num_classes))


def resnet152(num_classes: int = 1000) -> ResNet:
    """ResNet-152: 60 192 808 parameters with 1000 classes.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = resnet152()
        >>> [len(stage) for stage in (model.layer1, model.layer2, model.layer3, model.layer4)]
        [3, 8, 36, 3]
    """
    return ResNet(ResNetConfig("bottleneck", (3, 8, 36, 3), num_classes=num_classes))
