"""Models of transformers: captured with the attention that eager has, and with caches put together uncopied."""

import pytest
import torch
import transformers
from conftest import Case, assert_as_eager, assert_same_step, measured_step, model_of

import ackpt

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2 = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 20}
DECODERS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=None, **SMALL)),
    "sliding window": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=8, **SMALL)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL)),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=2, **SMALL)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(bos_token_id=0, eos_token_id=0, attn_pdrop=0, **GPT2)
    ),
}


def decoder(name="llama"):
    torch.manual_seed(0)
    return DECODERS[name]().train()


def batch(length=16):
    tokens = torch.randint(20, (1, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def planned(model, *args, **kwargs):
    return ackpt.compile(model, *args, policy="none", **kwargs)(*args, **kwargs)


def attends(model, **kwargs):
    """The attention of the captured step, and whether it was given a mask."""
    for node in ackpt.trace(model, **kwargs).module.graph.nodes:
        if "_scaled_dot_product_flash_attention_for_cpu.default" in str(node.target):
            yield node.kwargs.get("attn_mask") is not None


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_is_captured_as_it_runs(name):
    assert_same_step(lambda: Case(decoder(name), kwargs=batch()), loss=lambda outputs: outputs.loss, call=planned)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_a_packed_step_has_the_bytes_of_eager(name):
    model, kwargs = decoder(name), batch(64)
    eager = measured_step(model, model, loss=lambda outputs: outputs.loss, **kwargs)
    plan = ackpt.plan(ackpt.trace(model, **kwargs), policy="none")
    assert plan.dynamic_peak_bytes == eager.dynamic_peak_bytes


def test_without_position_ids_there_is_no_mask():
    assert list(attends(decoder(), **batch())) == [False]


def packed(positions):
    """Two sequences of 8 in a row; `positions` says so in its own way."""
    return model_of(
        lambda self, **kwargs: self.decoder(position_ids=self.positions(), **kwargs),
        decoder=decoder(),
        positions=positions,
    )


def in_place():
    positions = torch.arange(16).unsqueeze(0)
    positions[:, 8:] -= 8
    return positions


def in_place_by_a_view():
    positions = torch.arange(16)
    row = positions.unsqueeze(0)
    positions[8:].sub_(8)
    return row


@pytest.mark.parametrize(
    "positions",
    [
        in_place,
        in_place_by_a_view,
        lambda: (torch.arange(16) % 8).unsqueeze(0),
        lambda: torch.arange(8).expand(2, 8).reshape(1, 16),
    ],
)
def test_sequences_in_a_row_keep_their_mask(positions):
    assert_same_step(lambda: Case(packed(positions), kwargs=batch()), loss=lambda outputs: outputs.loss, call=planned)
    assert list(attends(packed(positions), **batch())) == [True]


def test_position_ids_of_the_caller_keep_their_mask():
    positions = (torch.arange(16) % 8).unsqueeze(0)
    kwargs = {**batch(), "position_ids": positions}
    assert_same_step(lambda: Case(decoder(), kwargs=kwargs), loss=lambda outputs: outputs.loss, call=planned)
    assert list(attends(decoder(), **kwargs)) == [True]


def test_transformers_is_left_unchanged():
    from transformers import masking_utils

    was = masking_utils.find_packed_sequence_indices
    planned(decoder(), **batch())
    assert masking_utils.find_packed_sequence_indices is was


# Models of transformers with their default `use_cache=True`: the cache is an output, put together without a copy.


IDS = torch.arange(32).reshape(2, 16) % 20
TINY = {"vocab_size": 20}


def cached_gpt2():
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
    both = hasattr(cache, "cross_attention_cache")
    parts = [cache.self_attention_cache, cache.cross_attention_cache] if both else [cache]
    return [value for part in parts for layer in part.layers for value in (layer.keys, layer.values)]


@pytest.mark.parametrize("build", [cached_gpt2, llama, t5])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_the_cache_is_returned_and_has_its_planned_bytes(build, policy, one_thread):
    model = build()
    kwargs = {"input_ids": IDS, "labels": IDS, "loss": lambda outputs: outputs.loss}
    step = ackpt.compile(model, input_ids=IDS, labels=IDS, policy=policy)
    assert_as_eager(model, step, **kwargs)
    torch.manual_seed(1)
    expected = model(input_ids=IDS, labels=IDS).past_key_values
    torch.manual_seed(1)
    found = step(input_ids=IDS, labels=IDS).past_key_values
    assert type(found) is type(expected) and found.get_seq_length() == expected.get_seq_length()
    pairs = list(zip(keys_and_values(found), keys_and_values(expected)))
    assert len(pairs) >= 2 and all(torch.equal(a, b) for a, b in pairs)
    del found, expected, pairs
    measured = measured_step(model, step, **kwargs)
    assert measured.dynamic_peak_bytes <= step.plan.dynamic_peak_bytes


def test_two_steps_have_caches_of_their_own(one_thread):
    model = cached_gpt2().eval()
    step = ackpt.compile(model, input_ids=IDS, labels=IDS, policy="full")
    first = step(input_ids=IDS, labels=IDS).past_key_values
    kept = [value.clone() for value in keys_and_values(first)]
    second = step(input_ids=IDS.flip(0), labels=IDS).past_key_values
    assert first is not second
    assert all(torch.equal(a, b) for a, b in zip(keys_and_values(first), kept))
    assert not all(torch.equal(a, b) for a, b in zip(keys_and_values(second), kept))
