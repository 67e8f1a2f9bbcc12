"""The steps of peft's ``method_comparison``: adapters of many kinds on FLUX.2-klein.

They follow ``image-gen/run.py`` there; its figures are the reserved bytes of training, without evaluation.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .finetuning import allocated
from .step import PublishedStep, default_dtype

SIDE, CHANNELS, LENGTH, WIDTH = 32, 128, 512, 7680  # of latents for images of 512 x 512, and of embedded prompts
IMAGES, BATCH = 14, 2  # 20 images less those for evaluation
TARGETS = (
    *("add_k_proj", "add_q_proj", "add_v_proj", "linear_in", "linear_out", "to_add_out", "to_k", "to_out.0", "to_q"),
    *("to_qkv_mlp_proj", "to_v"),
)
EVALUATOR = 86_580_480  # parameters of DINOv2-base, in float32 on the GPU


def flux2_adapters(*, adapter: dict[str, Any] | None) -> PublishedStep:
    """A step of AdamW on float32 adapters of a bfloat16 FLUX.2-klein with checkpointed blocks; None: on all weights."""
    import diffusers  # pyright: ignore[reportMissingImports]
    import peft

    sizes: dict[str, Any] = {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24}
    with torch.device("meta"), unset_fake_temporarily():
        with default_dtype(torch.bfloat16):
            model: Any = diffusers.Flux2Transformer2DModel(**sizes, joint_attention_dim=WIDTH, guidance_embeds=False)
        model.enable_gradient_checkpointing()
        if adapter is not None:
            config = peft.get_peft_config({"target_modules": list(TARGETS), **adapter})
            model = peft.get_peft_model(model, config)
    allocated(model)
    model.train()
    allocator: Any = getattr(getattr(model, "base_model", None), "rankallocator", None)
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-4)
    evaluator = torch.empty(EVALUATOR)
    half = partial(torch.empty, dtype=torch.bfloat16)
    prompts, latents = half(IMAGES, LENGTH, WIDTH), half(IMAGES, CHANNELS, SIDE, SIDE)
    text_places = torch.empty(IMAGES, LENGTH, 4, dtype=torch.int64)
    last: dict[str, Tensor] = {}
    # A number that some adapters draw on the CPU, and compare with the probability of dropping the whole layer, 0.
    drawn = mock.patch.object(torch, "rand", lambda *sizes: 1.0)

    def run():
        chosen = torch.empty(BATCH, dtype=torch.int64)
        last["clean"] = latents.index_select(0, chosen)
        last["prompts"] = prompts.index_select(0, chosen)
        last["text_places"] = text_places.index_select(0, chosen)
        last["places"] = torch.empty(BATCH, SIDE * SIDE, 4, dtype=torch.int64)
        last["noise"] = torch.randn_like(last["clean"])
        last["times"], last["sigmas"] = torch.empty(BATCH), half(BATCH, 1, 1, 1)
        last["noisy"] = (1.0 - last["sigmas"]) * last["clean"] + last["sigmas"] * last["noise"]
        last["packed"] = last["noisy"].reshape(BATCH, CHANNELS, SIDE * SIDE).permute(0, 2, 1)
        stepper.zero_grad(set_to_none=True)
        with drawn:
            last["predicted"] = model(
                hidden_states=last["packed"],
                timestep=last["times"] / 1000,
                guidance=None,
                encoder_hidden_states=last["prompts"],
                txt_ids=last["text_places"],
                img_ids=last["places"],
                return_dict=False,
            )[0]
        last["predicted"] = last["predicted"][:, : SIDE * SIDE]
        last["predicted"] = torch.stack([_unpacked(*each) for each in zip(last["predicted"], last["places"])])
        last["weighting"] = torch.ones_like(last["sigmas"])
        last["target"] = last["noise"] - last["clean"]
        squares = last["weighting"].float() * (last["predicted"].float() - last["target"].float()) ** 2
        last["loss"] = torch.mean(squares.reshape(BATCH, -1), 1)
        del squares
        last["loss"] = last["loss"].mean()
        with drawn:
            last["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
        if (
            allocator is not None
        ):  # of AdaLoRA's ranks, whose importance `update_and_allocate` follows from step to step
            allocator.update_ipt(model.base_model.model)
        last["loss"] = last["loss"].detach()

    return PublishedStep(run, (evaluator, prompts, text_places, latents, model, stepper))


def _unpacked(tokens: Tensor, places: Tensor) -> Tensor:
    numbers = places[:, 1] * SIDE + places[:, 2]
    out = torch.zeros(SIDE * SIDE, CHANNELS, dtype=tokens.dtype)
    out.scatter_(0, numbers.unsqueeze(1).expand(-1, CHANNELS), tokens)
    return out.view(SIDE, SIDE, CHANNELS).permute(2, 0, 1)
