"""The training steps of the study's models, added to those that the planner knows by name."""

from __future__ import annotations

import torch

from ackpt.planner.workloads.step_request import BUILT_IN, ids, require_positions

from .bert import BertForMaskedLM, bert_base, bert_large
from .resnet import ResNet, resnet18, resnet50, resnet152
from .unet import TIME_IDS, UNet

SDXL_PIXELS = 1024


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


BUILT_IN |= {
    "resnet18": (resnet18, ResNet, _images),
    "resnet50": (resnet50, ResNet, _images),
    "resnet152": (resnet152, ResNet, _images),
    "bert-base": (bert_base, BertForMaskedLM, _padded_tokens),
    "bert-large": (bert_large, BertForMaskedLM, _padded_tokens),
    "sdxl-unet": (UNet, UNet, _latents),
}
