"""Small models of plain torch, torchvision, diffusers, monai, torch_geometric and x-transformers, in `LIBRARIES`.

A builder returns ``(model, args, kwargs)``. It imports its library when it is called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _cross_entropy(model: nn.Module, shape: tuple[int, ...], classes: int = 4) -> Built:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.model(x), labels)

    return Classifier(), (torch.randn(shape), torch.randint(classes, shape[:1])), {}


class _Recurrent(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(20, 32), layer, nn.Linear(32, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layer(self.embedding(ids))[0])
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class _Residual(nn.Module):
    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def _recurrent(layer: Callable[..., nn.Module]) -> Built:
    return _Recurrent(layer(32, 32, num_layers=2, dropout=0.1, batch_first=True)), (torch.randint(20, (2, 8)),), {}


def _mlp() -> Built:
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1)) for _ in range(3)]
    return _cross_entropy(nn.Sequential(*blocks, nn.Linear(16, 4)), (8, 16))


def _cnn() -> Built:
    blocks = [
        nn.Sequential(nn.Conv2d(c, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)) for c in (3, 8)
    ]
    return _cross_entropy(nn.Sequential(*blocks, nn.Flatten(), nn.Linear(8 * 16, 4)), (2, 3, 16, 16))


def _mixer() -> Built:
    class Transposed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mT).mT

    blocks = [
        nn.Sequential(
            _Residual(nn.Sequential(nn.LayerNorm(16), Transposed(8, 8), nn.GELU())),
            _Residual(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())),
        )
        for _ in range(2)
    ]
    return _cross_entropy(nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128, 4)), (2, 8, 16))


def _torch_encoder() -> Built:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return _cross_entropy(nn.Sequential(encoder, nn.Flatten(), nn.Linear(128, 4)), (2, 8, 16))


def _torch_transformer() -> Built:
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
    return model, (torch.randn(2, 8, 16), torch.randn(2, 6, 16)), {}


def _autoencoder() -> Built:
    down = [nn.Sequential(nn.Conv1d(c, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU()) for c in (2, 8)]
    up = [nn.Sequential(nn.ConvTranspose1d(8, c, 4, 2, 1), nn.Tanh()) for c in (8, 2)]
    return nn.Sequential(*down, *up), (torch.randn(2, 2, 16),), {}


def _residual_mlp() -> Built:
    blocks = (_Residual(nn.Sequential(nn.Linear(16, 32), nn.ELU(), nn.Linear(32, 16))) for _ in range(4))
    return nn.Sequential(*blocks), (torch.randn(4, 16),), {}


def _of_tests(name: str) -> Callable[[], Built]:
    def build() -> Built:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
        import small_models

        return small_models.MODELS[name]()

    return build


TORCH: dict[str, Callable[[], Built]] = {
    "MLP": _mlp,
    "residual MLP": _residual_mlp,
    "CNN": _cnn,
    "MLP-Mixer": _mixer,
    "autoencoder": _autoencoder,
    "nn.TransformerEncoder": _torch_encoder,
    "nn.Transformer": _torch_transformer,
    "nn.RNN": lambda: _recurrent(nn.RNN),
    "nn.LSTM": lambda: _recurrent(nn.LSTM),
    "nn.GRU": lambda: _recurrent(nn.GRU),
    "ackpt.models Transformer": _of_tests("transformer"),
    "ackpt.models LanguageModel": _of_tests("language model"),
    "ackpt.models ResNet": _of_tests("resnet"),
    "ackpt.models BERT": _of_tests("bert"),
}


def _diffusers(name: str, options: dict[str, Any], **inputs: tuple[int, ...]) -> Callable[[], Built]:
    """A model of diffusers; an input named ``*_ids`` or ``timestep`` is drawn as whole numbers or fractions."""

    def build() -> Built:
        diffusers = importlib.import_module("diffusers")
        batch: dict[str, Any] = {
            key: torch.randint(10, shape) if key in ("class_labels", "timestep") else torch.randn(shape)
            for key, shape in inputs.items()
        }
        return getattr(diffusers, name)(**options), (), batch

    return build


def _torchvision(path: str, size: int = 32, frames: tuple[int, ...] = (), **options: Any) -> Callable[[], Built]:
    """A model of torchvision for images, or for videos with `frames`."""

    def build() -> Built:
        module, name = path.rsplit(".", 1)
        model = getattr(importlib.import_module(f"torchvision.models.{module}"), name)
        return model(**options), (torch.randn(2, 3, *frames, size, size),), {}

    return build


def _convnext() -> Built:
    convnext = importlib.import_module("torchvision.models.convnext")
    blocks = [convnext.CNBlockConfig(8, 16, 2), convnext.CNBlockConfig(16, None, 1)]
    return convnext.ConvNeXt(blocks, stochastic_depth_prob=0.1, num_classes=4), (torch.randn(2, 3, 32, 32),), {}


TORCHVISION: dict[str, Callable[[], Built]] = {
    "ResNet": _torchvision("resnet.resnet18", num_classes=4),
    "DenseNet": _torchvision("densenet.DenseNet", growth_rate=8, block_config=(2, 2), drop_rate=0.1),
    "GoogLeNet": _torchvision("googlenet.googlenet", 64, num_classes=4, aux_logits=False, init_weights=False),
    "Inception": _torchvision("inception.inception_v3", 96, num_classes=4, aux_logits=False, init_weights=False),
    "MNASNet": _torchvision("mnasnet.mnasnet0_5", num_classes=4),
    "MobileNet V2": _torchvision("mobilenetv2.mobilenet_v2", num_classes=4, width_mult=0.25),
    "MobileNet V3": _torchvision("mobilenetv3.mobilenet_v3_small", num_classes=4),
    "EfficientNet": _torchvision("efficientnet.efficientnet_b0", num_classes=4),
    "RegNet": _torchvision("regnet.regnet_y_400mf", num_classes=4),
    "ShuffleNet": _torchvision("shufflenetv2.shufflenet_v2_x0_5", num_classes=4),
    "SqueezeNet": _torchvision("squeezenet.squeezenet1_1", 64, num_classes=4),
    "ConvNeXt": _convnext,
    "Vision Transformer": _torchvision(
        "vision_transformer.VisionTransformer",
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, dropout=0.1, num_classes=4,
    ),
    "Swin": _torchvision(
        "swin_transformer.SwinTransformer",
        patch_size=[2, 2], embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=[4, 4], num_classes=4,
    ),
    "MaxViT": _torchvision(
        "maxvit.MaxVit",
        64, input_size=(64, 64), stem_channels=8, partition_size=4, block_channels=[8, 16], block_layers=[1, 1],
        head_dim=8, stochastic_depth_prob=0.1, num_classes=4,
    ),
    "FCN": _torchvision("segmentation.fcn_resnet50", num_classes=4, weights_backbone=None),
    "LR-ASPP": _torchvision("segmentation.lraspp_mobilenet_v3_large", 64, num_classes=4, weights_backbone=None),
    "R(2+1)D": _torchvision("video.r2plus1d_18", 16, (2,), num_classes=4),
}  # fmt: skip


_BLOCKS = {"layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 8}
_VAE = {**_BLOCKS, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
DIFFUSERS: dict[str, Callable[[], Built]] = {
    "UNet2DModel": _diffusers(
        "UNet2DModel",
        {**_BLOCKS, "sample_size": 16, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        sample=(2, 3, 16, 16), timestep=(2,),
    ),
    "UNet2DConditionModel": _diffusers(
        "UNet2DConditionModel",
        {**_BLOCKS, "sample_size": 16, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 16, "attention_head_dim": 8},
        sample=(2, 4, 16, 16), timestep=(2,), encoder_hidden_states=(2, 4, 16),
    ),
    "UNet3DConditionModel": _diffusers(
        "UNet3DConditionModel",
        {**_BLOCKS, "sample_size": 8, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
         "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "cross_attention_dim": 16, "attention_head_dim": 8},
        sample=(1, 4, 2, 8, 8), timestep=(1,), encoder_hidden_states=(1, 4, 16),
    ),
    "AutoencoderKL": _diffusers("AutoencoderKL", _VAE, sample=(2, 3, 16, 16)),
    "VQModel": _diffusers("VQModel", {**_VAE, "num_vq_embeddings": 16}, sample=(2, 3, 16, 16)),
    "AsymmetricAutoencoderKL": _diffusers(
        "AsymmetricAutoencoderKL",
        {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
         "down_block_out_channels": (16, 32), "up_block_out_channels": (16, 32), "norm_num_groups": 8},
        sample=(1, 3, 16, 16),
    ),
    "AutoencoderTiny": _diffusers(
        "AutoencoderTiny",
        {"encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16), "num_encoder_blocks": (1, 2),
         "num_decoder_blocks": (2, 1)},
        sample=(2, 3, 16, 16),
    ),
    "DiTTransformer2DModel": _diffusers(
        "DiTTransformer2DModel",
        {**_HEADS, "num_layers": 2, "sample_size": 8, "num_embeds_ada_norm": 10, "norm_num_groups": 8},
        hidden_states=(2, 4, 8, 8), timestep=(2,), class_labels=(2,),
    ),
    "SD3Transformer2DModel": _diffusers(
        "SD3Transformer2DModel",
        {**_HEADS, "num_layers": 2, "sample_size": 8, "joint_attention_dim": 16, "caption_projection_dim": 32,
         "pooled_projection_dim": 16, "in_channels": 4, "out_channels": 4},
        hidden_states=(2, 4, 8, 8), timestep=(2,), encoder_hidden_states=(2, 4, 16), pooled_projections=(2, 16),
    ),
    "FluxTransformer2DModel": _diffusers(
        "FluxTransformer2DModel",
        {**_HEADS, "num_layers": 2, "num_single_layers": 2, "in_channels": 4, "joint_attention_dim": 16,
         "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8)},
        hidden_states=(2, 16, 4), timestep=(2,), encoder_hidden_states=(2, 4, 16), pooled_projections=(2, 16),
        img_ids=(16, 3), txt_ids=(4, 3),
    ),
    "AuraFlowTransformer2DModel": _diffusers(
        "AuraFlowTransformer2DModel",
        {**_HEADS, "num_mmdit_layers": 2, "num_single_dit_layers": 2, "sample_size": 8, "joint_attention_dim": 16,
         "caption_projection_dim": 32, "pos_embed_max_size": 16},
        hidden_states=(2, 4, 8, 8), timestep=(2,), encoder_hidden_states=(2, 4, 16),
    ),
    "PixArtTransformer2DModel": _diffusers(
        "PixArtTransformer2DModel",
        {**_HEADS, "num_layers": 2, "sample_size": 8, "cross_attention_dim": 32, "caption_channels": 16,
         "use_additional_conditions": False},
        hidden_states=(2, 4, 8, 8), timestep=(2,), encoder_hidden_states=(2, 4, 16),
    ),
    "CogVideoXTransformer3DModel": _diffusers(
        "CogVideoXTransformer3DModel",
        {**_HEADS, "num_layers": 2, "in_channels": 4, "out_channels": 4, "text_embed_dim": 16, "time_embed_dim": 8,
         "sample_width": 8, "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 4},
        hidden_states=(1, 2, 4, 8, 8), timestep=(1,), encoder_hidden_states=(1, 4, 16),
    ),
    "WanTransformer3DModel": _diffusers(
        "WanTransformer3DModel",
        {**_HEADS, "num_layers": 2, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32},
        hidden_states=(1, 4, 2, 8, 8), timestep=(1,), encoder_hidden_states=(1, 4, 16),
    ),
    "PriorTransformer": _diffusers(
        "PriorTransformer",
        {**_HEADS, "num_layers": 2, "embedding_dim": 16, "num_embeddings": 4},
        hidden_states=(2, 16), timestep=(2,), proj_embedding=(2, 16), encoder_hidden_states=(2, 4, 16),
    ),
}  # fmt: skip


def _monai(name: str, options: dict[str, Any], *shape: int) -> Callable[[], Built]:
    def build() -> Built:
        nets = importlib.import_module("monai.networks.nets")
        return getattr(nets, name)(**options), (torch.randn(shape or (2, 1, 32, 32)),), {}

    return build


_2D: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
MONAI: dict[str, Callable[[], Built]] = {
    "UNet": _monai("UNet", {**_2D, "channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1, "dropout": 0.1}),
    "AttentionUnet": _monai("AttentionUnet", {**_2D, "channels": (8, 16), "strides": (2,)}),
    "BasicUNet": _monai("BasicUNet", {**_2D, "features": (8, 8, 8, 8, 8, 8)}),
    "SegResNet": _monai("SegResNet", {**_2D, "init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)}),
    "DynUNet": _monai(
        "DynUNet",
        {**_2D, "kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [8, 8, 8]},
    ),
    "VNet": _monai("VNet", {**_2D, "dropout_prob_down": 0.1, "dropout_prob_up": (0.1, 0.1)}),
    "UNETR": _monai(
        "UNETR",
        {**_2D, "img_size": 32, "feature_size": 8, "hidden_size": 24, "mlp_dim": 48, "num_heads": 2},
    ),
    "SwinUNETR": _monai("SwinUNETR", {**_2D, "feature_size": 12, "depths": (2, 1, 1, 1), "num_heads": (1, 1, 1, 1)}),
    "DenseNet": _monai(
        "DenseNet", {**_2D, "init_features": 8, "growth_rate": 4, "block_config": (2, 2)}
    ),
    "ViT": _monai(
        "ViT",
        {"in_channels": 1, "img_size": (16, 16), "patch_size": (8, 8), "hidden_size": 24, "mlp_dim": 48,
         "num_layers": 2, "num_heads": 2, "classification": True, "num_classes": 3, "spatial_dims": 2},
        2, 1, 16, 16,
    ),
    "AutoEncoder": _monai("AutoEncoder", {**_2D, "channels": (8, 16), "strides": (2, 2)}),
    "HighResNet": _monai("HighResNet", _2D, 1, 1, 16, 16),
}  # fmt: skip


def _geometric(name: str, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        geometric = importlib.import_module("torch_geometric.nn")
        edges = torch.randint(10, (2, 30))
        model = getattr(geometric, name)(8, 16, num_layers=2, out_channels=4, dropout=0.1, **options)
        return model, (torch.randn(10, 8), edges), {}

    return build


def _graph_unet() -> Built:
    geometric = importlib.import_module("torch_geometric.nn")

    class Nodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = geometric.GraphUNet(8, 16, 4, depth=2)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            return self.model(x, edges)

    return Nodes(), (torch.randn(10, 8), torch.randint(10, (2, 30))), {}


GEOMETRIC: dict[str, Callable[[], Built]] = {
    "GCN": _geometric("GCN"),
    "GraphSAGE": _geometric("GraphSAGE"),
    "GIN": _geometric("GIN"),
    "GAT": _geometric("GAT", heads=2),
    "EdgeCNN": _geometric("EdgeCNN"),
    "GraphUNet": _graph_unet,
}


def _x_transformers(decoder: bool, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        x_transformers = importlib.import_module("x_transformers")
        layers = x_transformers.Decoder if decoder else x_transformers.Encoder
        attention = layers(dim=16, depth=2, heads=2, attn_dim_head=8, **options)
        model = x_transformers.TransformerWrapper(num_tokens=20, max_seq_len=8, attn_layers=attention)
        return model, (torch.randint(20, (2, 8)),), {}

    return build


X_TRANSFORMERS: dict[str, Callable[[], Built]] = {
    "Decoder": _x_transformers(True, attn_dropout=0.1, ff_dropout=0.1),
    "Decoder, rotary": _x_transformers(True, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True),
    "Decoder, ALiBi": _x_transformers(True, alibi_pos_bias=True, alibi_num_heads=2),
    "Encoder": _x_transformers(False),
    "Encoder, T5 position bias": _x_transformers(False, rel_pos_bias=True),
    "Encoder, gated residual": _x_transformers(False, gate_residual=True),
}

#: The name of a library as it is imported -> its models.
LIBRARIES: dict[str, dict[str, Callable[[], Built]]] = {
    "torch": TORCH,
    "torchvision": TORCHVISION,
    "diffusers": DIFFUSERS,
    "monai": MONAI,
    "torch_geometric": GEOMETRIC,
    "x_transformers": X_TRANSFORMERS,
}
