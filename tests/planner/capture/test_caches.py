"""Models of transformers with their default `use_cache=True`: the cache is an output, put together without a copy."""

import copy

import pytest
import torch
from conftest import measured_step

import ackpt

transformers = pytest.importorskip("transformers")

IDS = torch.arange(32).reshape(2, 16) % 20
TINY = {"vocab_size": 20}


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, **TINY))


def llama():
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32, **TINY
    )
    return transformers.LlamaForCausalLM(config)


def t5():
    config = transformers.T5Config(
        d_model=16, d_ff=32, num_layers=1, num_heads=2, d_kv=8, decoder_start_token_id=0, **TINY
    )
    return transformers.T5ForConditionalGeneration(config)


def keys_and_values(cache):
    parts = (
        [cache.self_attention_cache, cache.cross_attention_cache]
        if hasattr(cache, "cross_attention_cache")
        else [cache]
    )
    return [value for part in parts for layer in part.layers for value in (layer.keys, layer.values)]


@pytest.mark.parametrize("build", [gpt2, llama, t5])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_the_cache_is_returned_and_has_its_planned_bytes(build, policy, one_thread):
    model = build()
    plain = copy.deepcopy(model)
    step = ackpt.compile(model, input_ids=IDS, labels=IDS, policy=policy)
    torch.manual_seed(1)
    expected = plain(input_ids=IDS, labels=IDS)
    expected.loss.backward()
    torch.manual_seed(1)
    found = step(input_ids=IDS, labels=IDS)
    found.loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters()))
    assert type(found.past_key_values) is type(expected.past_key_values)
    assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    pairs = list(zip(keys_and_values(found.past_key_values), keys_and_values(expected.past_key_values)))
    assert len(pairs) >= 2 and all(torch.equal(a, b) for a, b in pairs)
    del found, expected, pairs
    measured = measured_step(model, step, loss=lambda outputs: outputs.loss, input_ids=IDS, labels=IDS)
    assert measured.dynamic_peak_bytes <= step.plan.dynamic_peak_bytes


def test_two_steps_have_caches_of_their_own(one_thread):
    model = gpt2().eval()
    step = ackpt.compile(model, input_ids=IDS, labels=IDS, policy="full")
    first = step(input_ids=IDS, labels=IDS).past_key_values
    kept = [value.clone() for value in keys_and_values(first)]
    second = step(input_ids=IDS.flip(0), labels=IDS).past_key_values
    assert first is not second
    assert all(torch.equal(a, b) for a, b in zip(keys_and_values(first), kept))
    assert not all(torch.equal(a, b) for a, b in zip(keys_and_values(second), kept))
