"""`STEPS`: the training steps of published measurements by name, as rows of ``published-peaks.json`` name them.

Each function takes the sizes of a row and returns a `PublishedStep` on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable

from . import adapters, finetuning, images, language, layers, losses, reference
from .step import PublishedStep

STEPS: dict[str, Callable[..., PublishedStep]] = {
    step.__name__.replace("_", "-"): step
    for step in (
        losses.cross_entropy,
        losses.kl_divergence,
        losses.jensen_shannon,
        losses.jensen_shannon_by_rows,
        losses.total_variation,
        losses.linear_cross_entropy,
        losses.capped_linear_cross_entropy,
        losses.linear_jensen_shannon,
        losses.cosine_distillation,
        losses.group_relative_policy,
        layers.layer_alone,
        layers.softmax,
        layers.relu_squared,
        layers.sparsemax,
        layers.gated_mlp,
        layers.split_swiglu,
        layers.rope,
        layers.complex_rope,
        layers.layer_norm,
        layers.group_norm,
        layers.llama_rms_norm,
        layers.add_rms_norm,
        layers.torch_rms_norm,
        layers.neighborhood_attention,
        layers.mixture_of_experts,
        images.resnet50_sum,
        images.vgg16_sum,
        images.unet_sum,
        images.mobilenet_sum,
        images.vit_large,
        language.linear_layers,
        language.gpt,
        language.course_transformer,
        reference.reference_synthetic,
        reference.reference_language_model,
        reference.reference_offload,
        reference.reference_resnet,
        finetuning.lora_causal_lm,
        finetuning.causal_lm,
        finetuning.bert_classifier,
        finetuning.gpt2_trainer,
        adapters.flux2_adapters,
    )
}
