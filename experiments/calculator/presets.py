"""The models of the memory calculator: published configurations, as ``ackpt plan`` takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LORA_RANK = 16


@dataclass(frozen=True)
class Preset:
    """A model: `name` in addresses, `label` for readers, `model` and `fields` for ``ackpt plan``.

    ``depth``: the field with the number of equal blocks; without one, all blocks are captured;
    ``longest``: the most tokens of a sequence, 0 for images; ``lora``: the modules that get adapters; ``example``: what
    a batch consists of, apart from tokens; ``multiple``: all lengths are multiples of it, since attention
    kernels copy a mask of any other length.
    """

    name: str
    label: str
    model: str
    fields: dict[str, Any]
    depth: str = "num_hidden_layers"
    longest: int = 32768
    lora: tuple[str, ...] = ("q_proj", "v_proj")
    example: str = ""
    multiple: int = 1

    @property
    def repeats(self) -> bool:
        """Whether the model can be a row of equal blocks, whose number is in the field ``depth``."""
        return bool(self.depth)

    @property
    def has_tokens(self) -> bool:
        return self.longest > 0


def _decoder(
    name, label, model, hidden, inner, layers, heads, groups, vocabulary,
    longest=32768, lora=("q_proj", "v_proj"), **fields,
) -> Preset:  # fmt: skip
    """A decoder with the names of fields that Llama introduced."""
    return Preset(
        name,
        label,
        f"hf:{model}",
        {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "vocab_size": vocabulary,
            "max_position_embeddings": 131072,
            **fields,
        },
        longest=longest,
        lora=lora,
    )


def _gpt2(name, label, width, layers, heads) -> Preset:
    fields = {"n_embd": width, "n_layer": layers, "n_head": heads}
    return Preset(name, label, "hf:GPT2Config", fields, "n_layer", 1024, ("c_attn",))


def _bert(name, label, width, layers, heads) -> Preset:
    fields = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    fields |= {"num_attention_heads": heads, "architectures": ["BertForMaskedLM"]}
    return Preset(name, label, "hf:BertConfig", fields, longest=512, lora=("query", "value"))


def _vit(name, label, width, layers, heads) -> Preset:
    fields = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    fields |= {"num_attention_heads": heads}
    return Preset(name, label, "hf:ViTConfig", fields, longest=0, lora=(), example=IMAGES)


def _t5(name, label, width, inner, layers, heads) -> Preset:
    """An encoder and a decoder, whose blocks share the position biases of the first: not a row of equal blocks."""
    fields = {"d_model": width, "d_ff": inner, "num_layers": layers, "num_heads": heads}
    return Preset(name, label, "hf:T5Config", fields, "", 2048, ("q", "v"), "as many in the decoder", 8)


def _whisper(name, label, width, layers, heads, vocabulary) -> Preset:
    fields = {"d_model": width, "vocab_size": vocabulary}
    for half in ("encoder", "decoder"):
        fields |= {f"{half}_layers": layers, f"{half}_attention_heads": heads, f"{half}_ffn_dim": 4 * width}
    return Preset(name, label, "hf:WhisperConfig", fields, "", 448, example="30 s of audio")


IMAGES = "224 × 224 pixels"
_TIED = {"tie_word_embeddings": True}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
PRESETS = (
    _decoder("llama-3-8b", "Llama 3 8B", "LlamaConfig", 4096, 14336, 32, 32, 8, 128256),
    _decoder("llama-3-70b", "Llama 3 70B", "LlamaConfig", 8192, 28672, 80, 64, 8, 128256),
    _decoder("llama-3.2-1b", "Llama 3.2 1B", "LlamaConfig", 2048, 8192, 16, 32, 8, 128256, **_TIED),
    _decoder("llama-3.2-3b", "Llama 3.2 3B", "LlamaConfig", 3072, 8192, 28, 24, 8, 128256, **_TIED),
    _decoder("llama-2-7b", "Llama 2 7B", "LlamaConfig", 4096, 11008, 32, 32, 32, 32000),
    _decoder("smollm2-135m", "SmolLM2 135M", "LlamaConfig", 576, 1536, 30, 9, 3, 49152, **_TIED),
    _decoder("mistral-7b", "Mistral 7B v0.3", "MistralConfig", 4096, 14336, 32, 32, 8, 32768, sliding_window=None),
    _decoder("qwen2.5-0.5b", "Qwen 2.5 0.5B", "Qwen2Config", 896, 4864, 24, 14, 2, 151936, **_TIED),
    _decoder("qwen2.5-1.5b", "Qwen 2.5 1.5B", "Qwen2Config", 1536, 8960, 28, 12, 2, 151936, **_TIED),
    _decoder("qwen2.5-7b", "Qwen 2.5 7B", "Qwen2Config", 3584, 18944, 28, 28, 4, 152064),
    _decoder("qwen2.5-14b", "Qwen 2.5 14B", "Qwen2Config", 5120, 13824, 48, 40, 8, 152064),
    _decoder("qwen2.5-32b", "Qwen 2.5 32B", "Qwen2Config", 5120, 27648, 64, 40, 8, 152064),
    _decoder("qwen3-4b", "Qwen 3 4B", "Qwen3Config", 2560, 9728, 36, 32, 8, 151936, head_dim=128, **_TIED),
    _decoder("qwen3-8b", "Qwen 3 8B", "Qwen3Config", 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    _decoder(
        "mixtral-small", "Mixture of 8 experts, 1.2B, as Mixtral", "MixtralConfig", 1024, 3584, 12, 16, 4, 32000,
        num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
    ),
    _decoder("gemma-2b", "Gemma 2B", "GemmaConfig", 2048, 16384, 18, 8, 1, 256000, 8192, **_GEMMA),
    _decoder("gemma-7b", "Gemma 7B", "GemmaConfig", 3072, 24576, 28, 16, 16, 256000, 8192, **_GEMMA),
    _decoder(
        "phi-3-mini", "Phi-3 mini 3.8B", "Phi3Config", 3072, 8192, 32, 32, 32, 32064,
        lora=("qkv_proj",), pad_token_id=None, sliding_window=None,
    ),
    Preset(
        "phi-2", "Phi-2 2.7B", "hf:PhiConfig",
        {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32, "num_attention_heads": 32,
            "vocab_size": 51200, "max_position_embeddings": 2048, "resid_pdrop": 0.1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4},
        },
        longest=2048,
    ),
    Preset(
        "pythia-1.4b", "Pythia 1.4B", "hf:GPTNeoXConfig",
        {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16,
            "vocab_size": 50304, "max_position_embeddings": 2048,
        },
        longest=2048, lora=("query_key_value",),
    ),
    _gpt2("gpt2", "GPT-2 124M", 768, 12, 12),
    _gpt2("gpt2-medium", "GPT-2 medium 355M", 1024, 24, 16),
    _gpt2("gpt2-xl", "GPT-2 XL 1.6B", 1600, 48, 25),
    _bert("bert-large", "BERT large 335M", 1024, 24, 16),
    _vit("vit-l16", "ViT-L/16 303M", 1024, 24, 16),
    Preset("resnet50", "ResNet-50", "resnet50", {}, "", 0, (), IMAGES),
    _t5("t5-base", "T5 base 223M", 768, 3072, 12, 12),
    _whisper("whisper-base", "Whisper base 74M", 512, 6, 8, 51865),
    Preset("sdxl-unet", "SDXL's U-Net 2.6B", "sdxl-unet", {}, "", 0, (), "1024 × 1024 pixels"),
)  # fmt: skip
