"""``apply_activation_checkpointing`` on models of the transformers library."""

import copy

import pytest
import torch
import transformers
from conftest import assert_equal, raises_cleanly, seed

import ackpt

SMALL = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 32}


def gpt2(use_cache=False):
    config = transformers.GPT2Config(
        n_layer=3, n_head=2, n_embd=16, n_positions=16, attn_pdrop=0.2, resid_pdrop=0.2, use_cache=use_cache, **SMALL
    )
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(num_attention_heads=2, max_position_embeddings=16, **LAYERS, **SMALL)
    return transformers.BertForMaskedLM(config)


def llama():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.2}
    config = transformers.LlamaConfig(use_cache=False, **heads, **LAYERS, **SMALL)
    return transformers.LlamaForCausalLM(config)


def forward(model, call=None, masked=True):
    tokens = torch.arange(16).view(2, 8) + 3
    mask = torch.ones_like(tokens)
    mask[0, 5:] = 0 if masked else 1
    seed(1)
    return (call or model)(input_ids=tokens, attention_mask=mask, labels=tokens)


def loss_and_gradients(model, call=None, masked=True):
    out = forward(model, call, masked)
    out.loss.backward()
    return out, [out.loss.detach(), out.logits.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("make", [gpt2, bert, llama])
def test_a_model_with_dropout_gives_the_same_bits(make):
    seed()
    model = make().train()
    other = copy.deepcopy(model)
    names = ackpt.apply_activation_checkpointing(other)
    assert len(names) == 3 and all(name[-1] in "012" for name in names)
    _, plain = loss_and_gradients(model)
    out, checkpointed = loss_and_gradients(other)
    assert_equal(plain, checkpointed, "gradient")
    assert isinstance(out, transformers.utils.ModelOutput) and out["loss"] is out.loss


def test_the_cache_of_a_part_of_a_model_is_named():
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.text = gpt2(use_cache=True)

    with pytest.warns(UserWarning, match=r"Set model\.text\.config\.use_cache = False"):
        ackpt.apply_activation_checkpointing(Both(), ["text.transformer.h.0"])


@pytest.mark.parametrize("masked", [True, False])
def test_a_key_value_cache_is_refused_with_the_fix(masked):
    model = gpt2(use_cache=True).train()
    with pytest.warns(UserWarning, match="use_cache"):
        ackpt.apply_activation_checkpointing(model)
    with raises_cleanly(ackpt.CheckpointError, r"changes an object .*DynamicCache.*use_cache=False"):
        forward(model, masked=masked)
    model.config.use_cache = False
    loss_and_gradients(model)
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():  # generating needs no gradient, so the cache works
        assert model.generate(torch.tensor([[3, 4]]), max_new_tokens=3, do_sample=False).shape == (1, 5)
