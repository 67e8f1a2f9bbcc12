"""Small models of transformers, built from the configuration classes alone: no weights and no network are needed.

A configuration keeps its defaults, except that `SIZES`, `LISTS` and `TOKENS` replace the fields that it has. The batch
has every argument that the model's forward takes and `_batch` knows.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

HIDDEN, LAYERS, HEADS, WORDS, LENGTH, IMAGE, PATCH, MELS = 32, 2, 2, 64, 16, 32, 8, 16
IMAGE_TOKEN = WORDS - 3

#: The value of a field -> the names that configurations give to it.
SIZES = (
    (
        HIDDEN,
        """
        hidden_size d_model n_embd dim embed_dim hidden_dim embedding_size emb_dim encoder_hidden_dim
        word_embed_proj_dim projection_dim encoder_hidden_size decoder_hidden_size d_embed trunk_size lstm_dim
        proj_dim feature_size fpn_feature_size mask_feature_size reassemble_hidden_size fusion_hidden_size
        neck_hidden_size out_hidden_size output_hidden_size conv_dim lru_width attention_hidden_size
        decoder_embed_dim encoder_embed_dim embed_proj_dim channels output_dim feature_dim text_hidden_size
        image_hidden_size cross_attention_hidden_size dim_model embedding_dim decoder_dim d_latents d_inner
        mlp_hidden_size tdnn_out xvector_output_dim qk_channels v_channels num_conv_pos_embeddings d_cross
        conv_channels decoder_channels audio_hidden_size codevector_dim time_embed_dim
        """,
    ),
    (
        LAYERS,
        """
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers num_blocks depth num_self_attends_per_block encoder_num_layers decoder_num_layers
        encoder_num_hidden_layers decoder_num_hidden_layers num_blocks_per_stage num_hidden_groups decoder_depth
        mask_decoder_layers perceiver_layers num_encoder_blocks
        """,
    ),
    (
        HEADS,
        """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads num_key_value_heads decoder_num_attention_heads
        encoder_num_attention_heads num_self_attention_heads num_cross_attention_heads num_kv_heads attention_heads
        linear_num_key_heads linear_num_value_heads conv_groups num_conv_pos_embedding_groups
        """,
    ),
    (
        2 * HIDDEN,
        """
        intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim dim_feedforward n_inner ffn_hidden_size
        moe_intermediate_size shared_expert_intermediate_size encoder_intermediate_size decoder_intermediate_size
        inner_dim ff_dim mlp_dim encoder_feedforward_dim intermediate_dim feedforward_size hidden_dim_ff
        moe_shared_expert_intermediate_size mamba_d_inner expert_ffn_hidden_size mask_decoder_dim_feedforward
        """,
    ),
    (
        HIDDEN // HEADS,
        """
        head_dim d_kv attention_head_size qk_rope_head_dim qk_nope_head_dim v_head_dim qk_head_dim d_head
        linear_key_head_dim linear_value_head_dim attention_head_dim kv_lora_rank q_lora_rank kv_channels
        attention_key_size
        """,
    ),
    (
        WORDS,
        """
        vocab_size encoder_vocab_size decoder_vocab_size text_vocab_size max_position_embeddings n_positions n_ctx
        max_source_positions max_target_positions max_seq_len sliding_window attention_window local_attention
        vocab_size_per_layer_input num_codes hash_bucket max_sequence_length seq_length codebook_size
        """,
    ),
    (
        IMAGE,
        """
        image_size img_size input_size pretrain_image_size patch_image_size
        """,
    ),
    (
        PATCH,
        """
        patch_size patch_stride window_size num_queries num_mel_patches query_length num_query_tokens d_state
        ssm_state_size mamba_d_state state_size num_latents mamba_n_groups window_length num_prompt_tokens
        """,
    ),
    (
        4,
        """
        num_experts num_local_experts n_routed_experts moe_num_experts num_labels prompt_num n_experts
        """,
    ),
    (
        2,
        """
        num_experts_per_tok top_k moe_top_k num_experts_per_token moe_topk encoder_n_points decoder_n_points
        """,
    ),
    (
        MELS,
        """
        num_mel_bins input_feat_per_channel mel_bins n_mels
        """,
    ),
    (
        1,
        """
        first_k_dense_replace n_group topk_group n_shared_experts num_feature_levels embed_dim_per_stage
        """,
    ),
)
NAMES = {name: size for size, names in SIZES for name in names.split()}
#: Fields that are lists, one entry per stage.
LISTS = {
    **dict.fromkeys("depths layer_depths depth".split(), 1),
    **dict.fromkeys("num_attention_heads num_heads".split(), 2),
    **dict.fromkeys(
        "hidden_sizes embed_dims neck_hidden_sizes dims conv_dim embed_dim channels num_channels".split(), 16
    ),
    **dict.fromkeys("encoder_hidden_sizes decoder_hidden_sizes tdnn_dim".split(), 16),
}
TOKENS = {
    "pad": 0,
    "bos": 1,
    "eos": 2,
    "decoder_start": 1,
    "cls": 1,
    "sep": 2,
    "mask": 3,
    "unk": 4,
    "start": 1,
    "end": 2,
}
OTHERS = {"mask_time_length": 2, "mask_feature_length": 2, "use_timm_backbone": False, "use_pretrained_backbone": False}
#: Fields of single model types.
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1] * 4,
    "layer_type": "basic",
    "out_features": ["stage4"],
}
_SWIN = {"image_size": 32, "patch_size": 4, "window_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]}
SPECIAL: dict[str, dict[str, Any]] = {
    "detr": {"backbone_config": _RESNET},
    "conditional_detr": {"backbone_config": _RESNET},
    "table-transformer": {"backbone_config": _RESNET},
    "deformable_detr": {"backbone_config": _RESNET},
    "swin": _SWIN,
    "swinv2": _SWIN,
    "donut-swin": _SWIN,
    "swin2sr": _SWIN,
    "maskformer-swin": _SWIN,
    "mask2former": {
        "num_feature_levels": 3,
        "backbone_config": {
            **_SWIN,
            "model_type": "swin",
            "depths": [1] * 4,
            "num_heads": [2] * 4,
            "out_features": [f"stage{number}" for number in range(1, 5)],
        },
    },
    "sam": {
        "vision_config": {
            **dict.fromkeys(("hidden_size", "output_channels"), HIDDEN),
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "mlp_dim": 2 * HIDDEN,
            "window_size": 2,
            "image_size": IMAGE,
            "patch_size": PATCH,
            "global_attn_indexes": [1],
            "num_pos_feats": HIDDEN // 2,
        },
        "prompt_encoder_config": {"hidden_size": HIDDEN, "image_size": IMAGE, "patch_size": PATCH},
        "mask_decoder_config": {"hidden_size": HIDDEN, "mlp_dim": 2 * HIDDEN, "iou_head_hidden_dim": HIDDEN},
    },
}
#: What a task's labels are.
TASKS = (
    ("SEQ_TO_SEQ_CAUSAL_LM", "words"),
    ("SPEECH_SEQ_2_SEQ", "words"),
    ("MASKED_LM", "words"),
    ("CAUSAL_LM", "words"),
    ("IMAGE_TEXT_TO_TEXT", "words"),
    ("CTC", "short"),
    ("IMAGE_CLASSIFICATION", "class"),
    ("SEMANTIC_SEGMENTATION", "map"),
    ("OBJECT_DETECTION", "boxes"),
    ("UNIVERSAL_SEGMENTATION", None),
    ("VIDEO_CLASSIFICATION", "class"),
    ("AUDIO_CLASSIFICATION", "class"),
    ("DEPTH_ESTIMATION", None),
    ("SEQUENCE_CLASSIFICATION", "class"),
    ("TIME_SERIES_PREDICTION", None),
    ("PRETRAINING", None),
    ("IMAGE", None),
    (None, None),
)

#: The model types that are tried.
TYPES = """
albert apertus arcee bart beit bert bert-generation biogpt blenderbot blenderbot-small bloom camembert canine
chinese_clip clip clipseg cohere cohere2 conditional_detr convbert cpmant ctrl data2vec-text data2vec-vision dbrx
deberta deberta-v2 deepseek_v2 deepseek_v3 deformable_detr deit depth_anything detr diffllama dinov2
dinov2_with_registers dinov3_vit distilbert doge donut-swin dots1 dpr dpt efficientnet electra ernie ernie4_5
ernie4_5_moe esm exaone4 falcon falcon_h1 flaubert flava florence2 fnet focalnet fsmt funnel gemma gemma2 gemma3_text
git glm glm4 glm4_moe glpn gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granitemoe
granitemoehybrid granitemoeshared groupvit helium hgnet_v2 hiera hunyuan_v1_dense ibert idefics3 ijepa internvl jetmoe
layoutlm layoutlmv3 led levit lfm2 lilt llama llama4_text llava longformer longt5 luke lxmert m2m_100 marian markuplm
mask2former maskformer mbart megatron-bert mgp-str mimi minimax ministral mistral mixtral mllama mobilebert
mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 modernbert modernbert-decoder moonshine mpnet mpt mra mt5 mvp nemotron
nllb-moe nystromformer olmo olmo2 olmoe opt paligemma patchtsmixer patchtst pegasus pegasus_x perceiver persimmon phi
phi3 phimoe pix2struct plbart poolformer prophetnet pvt pvt_v2 qwen2 qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_next
recurrent_gemma reformer regnet rembert resnet roberta roberta-prelayernorm roc_bert roformer rt_detr sam seed_oss
segformer siglip smollm3 speech_to_text splinter squeezebert stablelm starcoder2 superglue swiftformer swin swin2sr
swinv2 switch_transformers t5 table-transformer tapas time_series_transformer timesformer trocr tvp udop umt5 upernet
videomae vilt vision-encoder-decoder vit vit_mae vit_msn vitdet vivit whisper xglm xlm xlm-roberta xlm-roberta-xl
xlnet xmod yolos yoso big_bird bigbird_pegasus data2vec-audio falcon_mamba hubert jamba mamba mamba2 musicgen rwkv
seamless_m4t sew sew-d speecht5 unispeech unispeech-sat voxtral wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm xlstm
zamba zamba2
""".split()


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """``(model, batch)`` of a model type in `TYPES`."""
    from transformers.models.auto import modeling_auto

    for task, labels in TASKS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES")
        if name in mapping:
            return _built(name, mapping[name], labels)
    raise LookupError(f"transformers has no model class for {name!r}")


def _built(name: str, found: str | tuple[str, ...], labels: str | None) -> tuple[nn.Module, dict[str, Any]]:
    """A model of the class `found`, or of the first one, with a batch."""
    import transformers

    cls = getattr(transformers, found if isinstance(found, str) else found[0])
    changes = _changes(cls.config_class()) | SPECIAL.get(name, {})
    model = cls(cls.config_class(**changes)).float()
    batch = _batch(model, model.config, labels)
    if "input_ids" in batch and "pixel_values" in batch:
        _put_image_tokens(model, batch)
    return model, batch


def _put_image_tokens(model: nn.Module, batch: dict[str, Any]) -> None:
    """Put as many image tokens in front of the words as the model expects; it says how many in an error."""
    for _ in range(2):
        try:
            with torch.no_grad():
                model(**batch)
            return
        except ValueError as error:
            found = re.search(r"tokens: (\d+), features:? (\d+)", str(error))
            if found is None:
                raise
            count = int(found[2]) // 2
            count //= HIDDEN if count >= 16 * HIDDEN or count % HIDDEN == 0 else 1
        words = torch.cat([torch.full((2, count), IMAGE_TOKEN), batch["input_ids"]], 1)
        batch |= {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}


def _changes(config: Any) -> dict[str, Any]:
    """The fields of a configuration that must change, in sub-configurations as well."""
    subs = {name for name in getattr(config, "sub_configs", {}) if getattr(config, name, None) is not None}
    changes: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name in subs:
            sub = _changes(value)
            changes[name] = {"model_type": value.model_type, **sub} if value.model_type else sub
        elif isinstance(value, (list, tuple)) and name in LISTS and value and isinstance(value[0], int):
            changes[name] = [LISTS[name]] * len(value)
        elif name.endswith("layer_types") and value:
            changes[name] = _mixed(value)
        elif name in NAMES and isinstance(value, (int, type(None))) and not isinstance(value, bool):
            changes[name] = value if value is None else NAMES[name]
        elif (token := re.fullmatch(r"(\w+)_token_id", name)) and (value is not None or token[1] == "pad"):
            changes[name] = TOKENS.get(token[1], IMAGE_TOKEN)
        elif name in OTHERS and value is not None:
            changes[name] = OTHERS[name]
        elif re.fullmatch(r"image_token_index|video_token_index|audio_token_index", name):
            changes[name] = IMAGE_TOKEN
    if hasattr(config, "use_cache"):
        changes["use_cache"] = False
    if getattr(config, "is_encoder_decoder", False):
        changes.setdefault("decoder_start_token_id", 1)
    return changes


def _mixed(kinds: Sequence[str]) -> list[str]:
    """Two layers, of both kinds if there are two."""
    rest = [kind for kind in kinds if kind != kinds[0]]
    return [kinds[0], (rest or kinds)[0]]


def _batch(model: nn.Module, config: Any, labels: str | None) -> dict[str, Any]:
    """Inputs and labels that the model's forward takes."""
    takes = inspect.signature(model.forward).parameters
    image = getattr(config, "vision_config", None) or config
    side = getattr(image, "image_size", IMAGE)
    side = side if isinstance(side, int) else IMAGE
    channels = getattr(image, "num_channels", 3)
    channels = channels if isinstance(channels, int) else 3
    words = torch.randint(5, IMAGE_TOKEN, (2, LENGTH))
    known: dict[str, Any] = {
        "input_ids": lambda: words,
        "attention_mask": lambda: torch.ones_like(words) if "input_ids" in takes else None,
        "decoder_input_ids": lambda: words[:, : LENGTH // 2].contiguous(),
        "pixel_values": lambda: torch.randn(2, channels, side, side),
        "pixel_values_videos": lambda: None,
        "input_values": lambda: torch.randn(2, 1600),
        "input_features": lambda: torch.randn(2, getattr(config, "num_mel_bins", MELS), 2 * WORDS),
    }
    if model.main_input_name == "pixel_values" and {"mask_labels", "class_labels"} <= set(takes):
        known["mask_labels"] = lambda: [torch.rand(2, side, side).round() for _ in range(2)]
        known["class_labels"] = lambda: [torch.tensor([0, 1]) for _ in range(2)]
    batch = {name: value for name in takes if name in known and (value := known[name]()) is not None}
    label = {
        "words": lambda: batch.get("decoder_input_ids", words),
        "short": lambda: torch.randint(5, IMAGE_TOKEN, (2, 3)),
        "class": lambda: torch.randint(2, (2,)),
        "map": lambda: torch.randint(2, (2, side, side)),
        "boxes": lambda: [
            {"class_labels": torch.tensor([0, 1]), "boxes": torch.rand(2, 4) * 0.4 + 0.3} for _ in range(2)
        ],
    }
    if labels in label and "labels" in takes:
        batch["labels"] = label[labels]()
    if "decoder_input_ids" in batch and labels == "words":
        del batch["decoder_input_ids"]  # the model shifts its labels
    return batch
