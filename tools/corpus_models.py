"""The models of the corpus: small, one for every kind of graph that the policies have to cope with.

Each builder returns a `Case`; called after the same seed, it returns the same one. They use nothing of ackpt but its
models, so that they outlive every change of the package.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from ackpt.models import LanguageModel, Transformer, TransformerConfig
from experiments.models import BertConfig, BertForMaskedLM, ResNet, ResNetConfig

WORDS, LENGTH, BATCH = 20, 16, 4
OFFSETS = LENGTH * torch.arange(BATCH + 1, dtype=torch.int32)
SIZES = TransformerConfig(dim=16, ff_dim=32, layers=2, head_dim=8, vocab_size=WORDS)
ENDS: dict[str, Any] = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
START: dict[str, Any] = {"decoder_start_token_id": 0}
CLASSES: dict[str, Any] = {"num_labels": 5}


@dataclass
class Case:
    """A model, what it is called with, and what its step is planned with.

    ``around`` wraps the capture and every forward. ``has_ilp``: the integer program is solved within seconds.
    """

    model: nn.Module
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    differentiate: str = "loss"
    optimizer: torch.optim.Optimizer | None = None
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    has_ilp: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of `ackpt.trace` and `ackpt.compile`."""
        return {"differentiate": self.differentiate, "optimizer": self.optimizer}

    @property
    def inputs(self) -> list[Tensor]:
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]


def ids(*shape: int) -> Tensor:
    return torch.randint(WORDS, shape or (BATCH, LENGTH))


def labelled(model: nn.Module, **kwargs: Any) -> Case:
    """A model of transformers that predicts its own input."""
    tokens = ids()
    return Case(model, kwargs={"input_ids": tokens, "labels": tokens, **kwargs})


def images(model: nn.Module) -> Case:
    """A classifier of transformers."""
    return Case(model, kwargs={"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(5, (BATCH,))})


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def perceptron() -> Case:
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.GELU())]
    return Case(nn.Sequential(*layers, Mean()), (torch.randn(128, 8),), has_ilp=True)


def uneven() -> Case:
    """Layers of many widths: which activation to recompute matters."""
    widths = (8, 64, 8, 16, 96, 16, 8, 48, 8)
    layers = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.Tanh())]
    return Case(nn.Sequential(*layers, Mean()), (torch.randn(64, 8),), has_ilp=True)


class Dropouts(nn.Module):
    """Random draws of several kinds, a norm with buffers, and a skip."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 4)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.second(F.alpha_dropout(F.selu(self.first(self.dropout(x))), 0.1, self.training))
        hidden = self.norm(F.rrelu(hidden + x, training=self.training))
        return F.cross_entropy(self.last(hidden + 0.1 * torch.randn_like(hidden)), y)


def dropout() -> Case:
    return Case(Dropouts(), (torch.randn(96, 16), torch.randint(4, (96,))))


class Tied(nn.Module):
    """An autoencoder whose decoder is its encoder, transposed, and whose first layer is frozen."""

    def __init__(self):
        super().__init__()
        self.frozen, self.encoder, self.middle = nn.Linear(8, 32), nn.Linear(32, 64), nn.Linear(64, 64)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x)
        hidden = torch.tanh(self.middle(torch.tanh(self.encoder(x))))
        return F.mse_loss(F.linear(hidden, self.encoder.weight.t()), x)


def tied() -> Case:
    return Case(Tied(), (torch.randn(64, 8),), has_ilp=True)


class Branches(nn.Module):
    """Two outputs that both are differentiated; one is a view of what the other is computed from."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.SiLU())))
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(x)
        return {"first": hidden.chunk(2, 1)[0], "second": self.head(hidden.sigmoid())}


def two_outputs() -> Case:
    return Case(Branches(), (torch.randn(64, 16),), differentiate="all", has_ilp=True)


def language_model() -> Case:
    tokens = ids(BATCH * LENGTH)
    return Case(LanguageModel(SIZES), (tokens, OFFSETS, LENGTH, tokens.roll(-1)))


def with_optimizer() -> Case:
    case = language_model()
    case.optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
    return case


def on_meta() -> Case:
    """The same model from shapes alone; it is planned, but never run."""
    case = language_model()
    case.model.to("meta")
    case.args = tuple(value.to("meta") if isinstance(value, Tensor) else value for value in case.args)
    return case


class Classifier(nn.Module):
    """The Transformer under dropout, with a loss."""

    def __init__(self):
        super().__init__()
        self.dropout, self.body, self.head = nn.Dropout(0.2), Transformer(SIZES), nn.Linear(16, 5)

    def forward(self, x: Tensor, offsets: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.dropout(x), offsets, LENGTH)), labels)


def transformer() -> Case:
    tokens = BATCH * LENGTH
    return Case(Classifier(), (torch.randn(tokens, 16), OFFSETS, torch.randint(5, (tokens,))))


def autocast() -> Case:
    case = transformer()
    case.around = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    return case


def resnet() -> Case:
    model = ResNet(ResNetConfig("basic", (1, 1, 1, 1), width=4, num_classes=5))
    return Case(model, (torch.randn(BATCH, 3, 32, 32), torch.randint(5, (BATCH,))))


def bert() -> Case:
    config = BertConfig(dim=16, layers=2, heads=2, ff_dim=32, vocab_size=WORDS, positions=LENGTH, dropout=0.1)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    return Case(BertForMaskedLM(config), (ids(), mask), {"labels": ids()})


def gpt2(**kwargs: Any) -> Case:
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=LENGTH, **ENDS)
    return labelled(transformers.GPT2LMHeadModel(config), **kwargs)


def llama() -> Case:
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32, **ENDS
    )
    return labelled(transformers.LlamaForCausalLM(config), use_cache=False)


def distilbert() -> Case:
    config = transformers.DistilBertConfig(dim=16, hidden_dim=32, n_layers=2, n_heads=2, **ENDS)
    return labelled(transformers.DistilBertForMaskedLM(config))


def t5() -> Case:
    config = transformers.T5Config(d_model=16, d_ff=32, num_layers=1, num_heads=2, d_kv=8, **ENDS, **START)
    return labelled(transformers.T5ForConditionalGeneration(config), use_cache=False)


def hf_resnet() -> Case:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", **CLASSES
    )
    return images(transformers.ResNetForImageClassification(config))


def convnext() -> Case:
    config = transformers.ConvNextConfig(hidden_sizes=[4, 8, 8, 8], depths=[1, 1, 1, 1], **CLASSES)
    return images(transformers.ConvNextForImageClassification(config))


def convolutions(inside: int, out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in ((inside, out), (out, out)):
        layers += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.down = nn.ModuleList([convolutions(3, width), convolutions(width, 2 * width)])
        self.bottom = convolutions(2 * width, 4 * width)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, 2) for a in (2 * width, width))
        self.join = nn.ModuleList(convolutions(2 * a, a) for a in (2 * width, width))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for up, join in zip(self.up, self.join):
            x = join(torch.cat([up(x), skips.pop()], 1))
        return F.cross_entropy(self.head(x), y)


def unet() -> Case:
    return Case(UNet(), (torch.randn(BATCH, 3, 16, 16), torch.randint(2, (BATCH, 16, 16))))


class DenseNet(nn.Module):
    """Every layer reads all before it."""

    def __init__(self, layers: int = 6, growth: int = 8):
        super().__init__()
        self.stem = nn.Conv2d(3, growth, 3, padding=1)
        self.layers = nn.ModuleList(convolutions(growth * (i + 1), growth) for i in range(layers))
        self.head = nn.Linear(growth * (layers + 1), 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        results = [self.stem(x)]
        for layer in self.layers:
            results.append(layer(torch.cat(results, 1)))
        return F.cross_entropy(self.head(torch.cat(results, 1).mean((2, 3))), y)


def densenet() -> Case:
    return Case(DenseNet(), (torch.randn(BATCH, 3, 16, 16), torch.randint(4, (BATCH,))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, WORDS)
        self.layers = nn.LSTM(32, 32, 2, dropout=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.layers(self.embedding(tokens))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def lstm() -> Case:
    return Case(Recurrent(), (ids(2 * LENGTH, BATCH),))


MODELS: dict[str, Callable[[], Case]] = {
    "perceptron": perceptron,
    "uneven": uneven,
    "dropout": dropout,
    "tied": tied,
    "two-outputs": two_outputs,
    "language-model": language_model,
    "optimizer": with_optimizer,
    "meta": on_meta,
    "transformer": transformer,
    "autocast": autocast,
    "resnet": resnet,
    "bert": bert,
    "hf-gpt2": functools.partial(gpt2, use_cache=False),
    "hf-gpt2-cache": gpt2,
    "hf-llama": llama,
    "hf-distilbert": distilbert,
    "hf-t5": t5,
    "hf-resnet": hf_resnet,
    "hf-convnext": convnext,
    "unet": unet,
    "densenet": densenet,
    "lstm": lstm,
}


def build(name: str) -> Case:
    """The case of a name in `MODELS`, in training mode, the same every time."""
    torch.manual_seed(0)
    case = MODELS[name]()
    case.model.train()
    return case
