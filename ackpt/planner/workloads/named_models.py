"""The training steps of `ackpt.models`, by name, and the entry to those of transformers: `training_step`."""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ackpt.models import (
    BertForMaskedLM,
    LanguageModel,
    ResNet,
    Transformer,
    TransformerConfig,
    UNet,
    bert_base,
    bert_large,
    resnet18,
    resnet50,
    resnet152,
)
from ackpt.models.unet import TIME_IDS

from .step_request import TRANSFORMERS, StepRequest, TrainingStep, ids, require_known, require_positions, unknown_model
from .transformers_models import transformers_step


def training_step(request: StepRequest, device="meta") -> TrainingStep:
    """The model and its inputs, allocated on `device`; the inputs are not filled.

    Raises:
        ValueError: for an unknown model or field, values that do not fit, and a missing or superfluous size.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(request.dtype)
    try:
        with torch.device(device):
            if request.model.startswith(TRANSFORMERS):
                return transformers_step(request)
            if request.model not in BUILT_IN:
                raise unknown_model(request.model, BUILT_IN)
            _, make, inputs = BUILT_IN[request.model]
            model = make(_changed(_published(request.model), request))
            return TrainingStep(model, inputs(model, request))
    finally:
        torch.set_default_dtype(default)


@functools.cache
def _published(name: str):
    """The configuration that --set changes, from a model on the meta device."""
    with unset_fake_temporarily(), torch.device("meta"):
        return BUILT_IN[name][0]().config


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


def _latents(model, request):
    """Inputs of a diffusion step; each latent pixel represents 8 by 8 pixels of --image-size."""
    config, options = model.config, {"dtype": request.dtype}
    batch, channels, height, width = request.images(config.channels, SDXL_PIXELS).shape
    if height % (multiple := 8 * 2 ** (len(config.widths) - 1)):
        raise ValueError(f"--image-size {height}: {request.model} reads images whose size is a multiple of {multiple}")
    latents = torch.empty(batch, channels, height // 8, width // 8, **options)
    return {
        "latents": latents,
        "times": ids(batch),
        "text": torch.empty(batch, config.text_tokens, config.text_dim, **options),
        "pooled": torch.empty(batch, config.pooled_dim, **options),
        "time_ids": ids(batch, TIME_IDS),
        "noise": torch.empty_like(latents),
    }


SDXL_PIXELS = 1024
# name -> a model with the configuration that --set changes, the model of a configuration, its inputs
BUILT_IN = {
    "transformer": (lambda: Transformer(TransformerConfig()), Autoencoder, _packed_floats),
    "lm": (lambda: LanguageModel(TransformerConfig()), LanguageModel, _packed_tokens),
    "resnet18": (resnet18, ResNet, _images),
    "resnet50": (resnet50, ResNet, _images),
    "resnet152": (resnet152, ResNet, _images),
    "bert-base": (bert_base, BertForMaskedLM, _padded_tokens),
    "bert-large": (bert_large, BertForMaskedLM, _padded_tokens),
    "sdxl-unet": (UNet, UNet, _latents),
}
