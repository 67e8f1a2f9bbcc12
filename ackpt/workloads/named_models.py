"""What ``ackpt plan`` plans: a model by name and one call of it that returns its loss, from shapes alone."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ackpt.errors import did_you_mean
from ackpt.models import (
    BertForMaskedLM,
    LanguageModel,
    ResNet,
    Transformer,
    TransformerConfig,
    bert_base,
    bert_large,
    resnet18,
    resnet50,
    resnet152,
)

IMAGE_SIZE = 224
TRANSFORMERS = "hf:"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StepRequest:
    """What is asked for: `model` by name, `fields` of its configuration, sizes of a batch, dtype of the parameters."""

    model: str
    batch_size: int = 1
    seq_len: int | None = None
    image_size: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        for name in ("batch_size", "seq_len", "image_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")

    def tokens(self) -> tuple[int, int]:
        """Batch size and sequence length of a model that reads tokens."""
        if self.seq_len is None:
            raise ValueError(f"{self.model} reads tokens: give --seq-len, the tokens of a sequence")
        if self.image_size is not None:
            raise ValueError(f"{self.model} reads tokens, so --image-size says nothing about it: leave it out")
        return self.batch_size, self.seq_len

    def images(self, channels: int, size=IMAGE_SIZE) -> Tensor:
        """A batch of images for a model that reads those; `size` is what --image-size replaces."""
        if self.seq_len is not None:
            raise ValueError(f"{self.model} reads images, so --seq-len says nothing about it: give --image-size")
        size = self.image_size or size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return torch.empty(self.batch_size, channels, height, width, dtype=self.dtype)


@dataclass(frozen=True)
class TrainingStep:
    """A model and the arguments of the call that returns its loss, all on one device."""

    model: nn.Module
    inputs: dict[str, Any]

    @property
    def parameters(self) -> int:
        """Their number; tied ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def training_step(request: StepRequest, device="meta") -> TrainingStep:
    """The model and its inputs; these are allocated on `device`, and not filled.

    Raises:
        ValueError: for an unknown model or field, values that do not fit, and a size that is missing or too much.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(request.dtype)
    try:
        with torch.device(device):
            if request.model.startswith(TRANSFORMERS):
                from .transformers_models import transformers_step

                return transformers_step(request)
            if request.model not in BUILT_IN:
                raise ValueError(
                    f"unknown model {request.model!r}{did_you_mean(request.model, BUILT_IN)}: choose from "
                    f"{', '.join(BUILT_IN)}, or {TRANSFORMERS}<configuration class of transformers, or path of a "
                    "config.json>"
                )
            _, make, inputs = BUILT_IN[request.model]
            model = make(_changed(_published(request.model), request))
            return TrainingStep(model, inputs(model, request))
    finally:
        torch.set_default_dtype(default)


@functools.cache
def _published(name: str):
    """The configuration that --set changes; the model that has it is made without memory."""
    with unset_fake_temporarily(), torch.device("meta"):
        return BUILT_IN[name][0]().config


def require_known(fields, known, model: str) -> None:
    """ValueError for the first of `fields` that is not among `known`, with what it may have meant."""
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(name, known, 3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(sorted(known))}"
            raise ValueError(f"--set {name}: the configuration of {model} has no such field; {hint}")


def require_positions(length: int, positions: int, field: str) -> None:
    """ValueError for a sequence that is longer than the positions in `field` of the configuration."""
    if length > positions:
        raise ValueError(
            f"--seq-len {length} is longer than the {positions} positions of this configuration: give "
            f"--set {field}={length}, or a shorter sequence"
        )


def ids(*shape: int) -> Tensor:
    """Tokens or classes: int64 of `shape`, without values."""
    return torch.empty(shape, dtype=torch.int64)


def _changed(config, request: StepRequest):
    require_known(request.fields, {item.name for item in dataclasses.fields(config)}, request.model)
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in request.fields.items()}
    try:
        return dataclasses.replace(config, **fields)
    except TypeError as error:
        raise ValueError(f"--set: {error}") from error


class Autoencoder(Transformer):
    """The synthetic experiment's step as a call: the mean squared error between output and input."""

    def forward(self, x, cu_seqlens, max_seqlen):
        return F.mse_loss(super().forward(x, cu_seqlens, max_seqlen).float(), x)


def _offsets(batch: int) -> Tensor:
    return torch.empty(batch + 1, dtype=torch.int32)


def _packed_floats(model, request):
    batch, length = request.tokens()
    x = torch.empty(batch * length, model.config.dim, dtype=request.dtype)
    return {"x": x, "cu_seqlens": _offsets(batch), "max_seqlen": length}


def _packed_tokens(model, request):
    batch, length = request.tokens()
    tokens = {"tokens": ids(batch * length), "cu_seqlens": _offsets(batch), "max_seqlen": length}
    return {**tokens, "targets": ids(batch * length)}


def _images(model, request):
    return {"images": request.images(model.config.channels), "labels": ids(request.batch_size)}


def _padded_tokens(model, request):
    batch, length = request.tokens()
    require_positions(length, model.config.positions, "positions")
    return {"input_ids": ids(batch, length), "labels": ids(batch, length)}


# name -> a model with the configuration that --set changes, the model of a configuration, its inputs
BUILT_IN = {
    "transformer": (lambda: Transformer(TransformerConfig()), Autoencoder, _packed_floats),
    "lm": (lambda: LanguageModel(TransformerConfig()), LanguageModel, _packed_tokens),
    "resnet18": (resnet18, ResNet, _images),
    "resnet50": (resnet50, ResNet, _images),
    "resnet152": (resnet152, ResNet, _images),
    "bert-base": (bert_base, BertForMaskedLM, _padded_tokens),
    "bert-large": (bert_large, BertForMaskedLM, _padded_tokens),
}


def autocast(device_type: str, dtype: str):
    """fp32 weights with matrix products in `dtype`; nothing for float32."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose from {', '.join(DTYPES)}")
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device_type, DTYPES[dtype])
