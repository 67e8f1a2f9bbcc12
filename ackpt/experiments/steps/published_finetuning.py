"""`PublishedStep`, and the fine-tuning step of published measurements: LoRA on a frozen decoder of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention import SDPBackend, sdpa_kernel


class PublishedStep(NamedTuple):
    """One step, the modules, optimizers and tensors that live before and after it, and what runs once before."""

    run: Callable[[], object]
    resident: tuple
    setup: Callable[[], object] | None = None


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
    **fields: Any,
) -> PublishedStep:
    """AdamW on fp32 LoRA adapters of a frozen fp16 Llama, every layer checkpointed by transformers."""
    import peft
    import transformers

    config_class: Any = transformers.LlamaConfig
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
    adapters = peft.LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=targets)
    with torch.device("meta"), unset_fake_temporarily():  # peft moves parameters, which fake tensors do not support
        base: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
        model: Any = peft.get_peft_model(base, adapters)
    allocated(model)
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


@contextlib.contextmanager
def _keys_for_all_heads():
    """Inside, memory-efficient attention runs, on keys and values that are repeated for all heads of the queries."""
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
