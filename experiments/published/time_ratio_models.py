"""Models of published times that are not in transformers: Megatron-LM's, DenseNet, and the reference experiments'."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .reference import FF, TOKENS, VOCABULARY, WIDTH, Autoencoder, LanguageModel, attend_in_a_loop
from .step import default_dtype


class _Core(nn.Module):
    """Attention with its matrix of weights, which Megatron-LM's selective recomputation does not save."""

    def __init__(self, sequences: int, heads: int):
        super().__init__()
        self.sequences, self.heads, self.dropout = sequences, heads, nn.Dropout(0.1)

    def forward(self, qkv: Tensor) -> Tensor:
        tokens, width = qkv.shape
        heads = qkv.view(self.sequences, tokens // self.sequences, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = heads.flatten(1, 2).unbind(0)
        weights = self.dropout(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1))
        out = torch.bmm(weights, v).view(self.sequences, self.heads, tokens // self.sequences, -1)
        return out.transpose(1, 2).reshape(tokens, width // 3)


class _MegatronLayer(nn.Module):
    """One rank's share of a layer. With `sequence_parallel`, norms, dropout and residuals are divided as well.

    An all-gather becomes a copy of the share, a reduce-scatter a part of the result; an all-reduce is left out.
    """

    def __init__(self, width: int, heads: int, sequences: int, ranks: int, sequence_parallel: bool):
        super().__init__()
        self.shares = ranks if sequence_parallel else 1
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.core = nn.Linear(width, 3 * width // ranks), _Core(sequences, heads // ranks)
        self.out = nn.Linear(width // ranks, width)
        self.up, self.down = nn.Linear(width, 4 * width // ranks), nn.Linear(4 * width // ranks, width)
        self.gelu, self.dropout = nn.GELU("tanh"), nn.Dropout(0.1)

    def gathered(self, x: Tensor) -> Tensor:
        return x.repeat(self.shares, 1) if self.shares > 1 else x

    def scattered(self, x: Tensor) -> Tensor:
        return x.chunk(self.shares)[0] if self.shares > 1 else x

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.core(self.qkv(self.gathered(self.norm1(x)))))
        x = x + self.dropout(self.scattered(y))
        y = self.down(self.gelu(self.up(self.gathered(self.norm2(x)))))
        return x + self.dropout(self.scattered(y))


class _Layers(nn.Module):
    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def megatron_layers(
    count: int, *, width: int, heads: int, batch: int, length: int, ranks: int, sequence_parallel: bool = False
) -> tuple[nn.Module, Tensor]:
    """`count` layers in float16 and their input, on the meta device."""
    with torch.device("meta"):
        layers: list[nn.Module] = [_MegatronLayer(width, heads, batch, ranks, sequence_parallel) for _ in range(count)]
        tokens = batch * length // (ranks if sequence_parallel else 1)
        return _Layers(layers).half(), torch.empty(tokens, width, dtype=torch.float16, requires_grad=True)


class _DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int):
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(channels), nn.ReLU()
        self.conv1 = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(4 * growth), nn.ReLU()
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        return self.conv2(self.relu2(self.norm2(x)))


class _DenseNet(nn.Module):
    """DenseNet-BC with three dense blocks for small images."""

    def __init__(self, depth: int, growth: int):
        super().__init__()
        channels = 2 * growth
        self.first = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.dense, self.between = nn.ModuleList(), nn.ModuleList()
        for number in range(3):
            layers = [_DenseLayer(channels + growth * layer, growth) for layer in range((depth - 4) // 6)]
            self.dense.append(nn.ModuleList(layers))
            channels += growth * len(layers)
            if number < 2:
                norm, conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels // 2, 1, bias=False)
                self.between.append(nn.Sequential(norm, nn.ReLU(), conv, nn.AvgPool2d(2)))
                channels //= 2
        self.norm, self.head = nn.BatchNorm2d(channels), nn.Linear(channels, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.first(images)
        for number, layers in enumerate(self.dense):
            features = [x]
            for layer in layers.children():
                features.append(layer(features))
            x = torch.cat(features, 1)
            x = self.between[number](x) if number < len(self.between) else x
        pooled = torch.relu(self.norm(x)).mean((2, 3))
        return nn.functional.cross_entropy(self.head(pooled), labels)


def dense_net(*, depth: int, growth: int, batch: int, image: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The network, its images and labels, on the meta device."""
    with torch.device("meta"):
        images, labels = torch.empty(batch, 3, image, image), torch.empty(batch, dtype=torch.int64)
        return _DenseNet(depth, growth), images, labels


class _WithLoss(nn.Module):
    """The model and the loss that its experiment computes."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, offsets: Tensor, target: Tensor) -> Tensor:
        y = self.model(x, offsets, False)
        return F.mse_loss(y, target) if target.is_floating_point() else F.cross_entropy(y.float(), target)


def _attend(qkv: Tensor, offsets: Tensor) -> Tensor:
    """Attention within one sequence by a fused kernel, which does the work of flash-attn's packed one."""
    heads = qkv.permute(1, 2, 0, 3).unsqueeze(1)
    return F.scaled_dot_product_attention(heads[0], heads[1], heads[2])[0].transpose(0, 1)


def reference_model(experiment: str, blocks: int, tokens: int) -> tuple[nn.Module, tuple[Tensor, ...], str]:
    """The model of ``synthetic``, ``lm`` or ``offload`` with its loss, its inputs, on meta, and autocast's dtype."""
    with torch.device("meta"):
        offsets = torch.empty(2, dtype=torch.int32)
        if experiment == "lm":
            ids = torch.empty(tokens, dtype=torch.int64)
            model: nn.Module = LanguageModel(VOCABULARY, WIDTH, FF, blocks, 128, _attend)
            return _WithLoss(model), (ids, offsets, ids.clone()), "bfloat16"
        if experiment == "synthetic":
            model = Autoencoder(WIDTH, FF, blocks, 128, _attend)
            x = torch.empty(tokens, WIDTH)
            return _WithLoss(model), (x, offsets, x.clone()), "bfloat16"
        with default_dtype(torch.float16):
            model = Autoencoder(WIDTH, FF, blocks, 64, attend_in_a_loop)
            x = torch.empty(TOKENS, WIDTH)
        return _WithLoss(model), (x, offsets, x.clone()), "float32"
