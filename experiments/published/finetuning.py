"""Training steps of published measurements with models of transformers: LoRA, a BERT classifier and GPT-2."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention import SDPBackend, sdpa_kernel

from .step import PublishedStep
from .training import trained


def lora_causal_lm(
    *,
    layers: int,
    dim: int,
    heads: int,
    kv_heads: int,
    ff: int,
    vocabulary: int,
    tied: bool,
    batch: int,
    length: int,
    rank: int,
    attention: str,
    family: str = "llama",
    **fields: Any,
) -> PublishedStep:
    """AdamW on fp32 LoRA adapters of a frozen fp16 model, with every layer checkpointed by transformers."""
    sizes = {"layers": layers, "dim": dim, "heads": heads, "kv_heads": kv_heads, "ff": ff, "vocabulary": vocabulary}
    base, model = _decoder(family, torch.float16, rank, 2 * rank, length, tied, attention, **sizes, **fields)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)
    tokens: list[Tensor] = []

    def setup():
        tokens.append(torch.randint(vocabulary, (batch, length)))

    def run():
        optimizer.zero_grad(set_to_none=True)
        with _keys_for_all_heads() if attention == "sdpa" else contextlib.nullcontext():
            out = model(input_ids=tokens[0], labels=tokens[0])
            out.loss.backward()
            optimizer.step()

    # The base model is loaded before the adapters exist, in the order of its modules.
    frozen = [parameter for parameter in base.parameters() if not parameter.requires_grad]
    return PublishedStep(run, (*frozen, model, optimizer), setup)


def causal_lm(
    *,
    batch: int,
    length: int,
    tied: bool,
    family: str = "llama",
    rank: int | None = None,
    mixed: bool = False,
    checkpointed: bool = False,
    attention: str = "sdpa",
    **sizes: Any,
) -> PublishedStep:
    """AdamW on all weights or on LoRA adapters, in bfloat16, or in float32 with autocast; gradients are not freed.

    Attention that is not written out gets a mask, which transformers 4.57 makes even for one sequence without padding
    (``find_packed_sequence_indices`` in masking_utils.py never returns None).
    """
    kind = torch.float32 if mixed else torch.bfloat16
    base, model = _decoder(family, kind, rank, rank, length, tied, attention, **sizes)
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-5, foreach=True)
    tokens: list[Tensor] = []

    def setup():
        tokens.append(torch.randint(sizes["vocabulary"], (batch, length)))

    def mask() -> Tensor | None:
        return torch.ones(batch, 1, length, length, dtype=torch.bool) if attention == "sdpa" else None

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            out = model(input_ids=tokens[0], labels=tokens[0], attention_mask=mask(), use_cache=False)
            loss = out.loss
        loss.backward()
        del out, loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    frozen = [parameter for parameter in base.parameters() if not parameter.requires_grad]
    return PublishedStep(run, (*frozen, model, optimizer), setup)


def _decoder(
    family: str,
    dtype: torch.dtype,
    rank: int | None,
    alpha: int | None,
    length: int,
    tied: bool,
    attention: str,
    *,
    layers: int,
    dim: int,
    heads: int,
    kv_heads: int,
    ff: int,
    vocabulary: int,
    **fields: Any,
) -> tuple[Any, Any]:
    """A model of transformers, and the same with LoRA adapters on its attention unless `rank` is None."""
    import peft
    import transformers

    config_class: Any = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[family]
    config = config_class(
        num_hidden_layers=layers,
        hidden_size=dim,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ff,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=max(length, 2048),
        attn_implementation=attention,
        use_cache=False,
        **fields,
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    with torch.device("meta"), unset_fake_temporarily():  # peft moves parameters, which fake tensors do not support
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        base = model
        if rank is not None:
            adapters = peft.LoraConfig(r=rank, lora_alpha=alpha or rank, lora_dropout=0.0, target_modules=targets)
            model = peft.get_peft_model(base, adapters)
    allocated(model)
    return base, model


def bert_classifier(
    *,
    layers: int,
    dim: int,
    heads: int,
    vocabulary: int,
    batch: int,
    length: int,
    accumulation: int = 1,
    checkpointed: bool = False,
    mixed: bool = False,
    optimizer: str = "loop-adamw",
    only_loaded: bool = False,
) -> PublishedStep:
    """A Trainer's step of BERT with two labels, in float32 or with float16 autocast."""
    import transformers

    sizes = {"num_hidden_layers": layers, "hidden_size": dim, "num_attention_heads": heads, "vocab_size": vocabulary}
    config_class: Any = transformers.BertConfig
    config = config_class(**sizes, intermediate_size=4 * dim, attn_implementation="eager")
    model: Any = transformers.BertForSequenceClassification(config)
    if only_loaded:
        return PublishedStep(lambda: None, (model,))
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tokens, labels = torch.empty(batch, length, dtype=torch.int64), torch.empty(batch, dtype=torch.int64)

    def loss() -> Tensor:
        scores = model(input_ids=tokens).logits
        return F.cross_entropy(scores.view(-1, 2), labels)

    autocast = torch.float16 if mixed else None
    return trained(model, loss, optimizer, (tokens, labels), accumulation, autocast, 1.0, keeps_gradients=True)


def gpt2_trainer(*, batch: int, length: int) -> PublishedStep:
    """A Trainer's step of GPT-2 small in float32, by AdamW."""
    import transformers

    model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))
    model.train()
    tokens, labels = (torch.empty(batch, length, dtype=torch.int64) for _ in range(2))
    return trained(model, lambda: model(input_ids=tokens, labels=labels).loss, "adamw", (tokens, labels), clip=1.0)


@contextlib.contextmanager
def _keys_for_all_heads():
    """Inside, attention is memory-efficient, with keys and values repeated for all heads of the queries."""
    attend = F.scaled_dot_product_attention

    def repeated(query, key, value, *args, enable_gqa=False, **kwargs):
        if (groups := query.shape[1] // key.shape[1]) > 1:
            key, value = (each.repeat_interleave(groups, dim=-3) for each in (key, value))
        return attend(query, key, value, *args, **kwargs)

    kernel = sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    with kernel, mock.patch.object(F, "scaled_dot_product_attention", repeated):
        yield


def allocated(model: nn.Module) -> None:
    """Replace the parameters and buffers of `model`, which are on the meta device, by new tensors, in place."""
    memo: dict[int, Tensor] = {}

    def new(tensor: Tensor) -> Tensor:
        if id(tensor) not in memo:
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
            memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        return memo[id(tensor)]

    for module in model.modules():
        owned: Any = (module._parameters, module._buffers)
        for members in owned:
            members.update({name: new(tensor) for name, tensor in members.items() if tensor is not None})
