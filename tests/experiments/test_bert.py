"""BERT: sizes and values of transformers' own, dropout, padding, checkpointed steps, bytes, bad input."""

import contextlib
import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import assert_equal, raises
from torch._subclasses import FakeTensorMode

import ackpt
from experiments.models import BertBlock, BertConfig, BertForMaskedLM, bert_base, bert_large

TINY = BertConfig(dim=32, ff_dim=64, layers=3, heads=4, vocab_size=50, positions=20)
IDS = torch.arange(1, 33).view(2, 16)
MASK = torch.ones(2, 16, dtype=torch.int64)
MASK[1, 10:] = 0
TYPES = (torch.arange(16) > 7).long().expand(2, 16)
LABELS = torch.where(torch.arange(32).view(2, 16) % 3 == 0, IDS, -100)


def oracle(config):
    reference = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=config.ff_dim,
            max_position_embeddings=config.positions,
            type_vocab_size=config.token_types,
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=config.dropout,
        )
    )
    return reference.train()


RENAMED = {
    "bert.embeddings.word_embeddings": "bert.tokens",
    "bert.embeddings.position_embeddings": "bert.positions",
    "bert.embeddings.token_type_embeddings": "bert.token_types",
    "bert.embeddings.LayerNorm": "bert.norm",
    "bert.encoder.layer": "bert.blocks",
    "attention.self.": "",
    "attention.output.dense": "out",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "mlp_norm",
    "cls.predictions.transform.dense": "transform",
    "cls.predictions.transform.LayerNorm": "norm",
    "cls.predictions.bias": "bias",
}


def renamed(name):
    """The name that a parameter of the oracle has here."""
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name


def pair(config, seed=0):
    """The oracle and our model with the same weights, none of them at its special initial value."""
    torch.manual_seed(seed)
    reference, model = oracle(config), BertForMaskedLM(config)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.load_state_dict({renamed(name): value for name, value in reference.named_parameters()})
    return reference, model


# ---------------------------------------------------------------- sizes and weights


@pytest.mark.parametrize(("make", "parameters"), [(bert_base, 109_514_298), (bert_large, 335_174_458)])
def test_published_sizes_are_exact(make, parameters):
    with torch.device("meta"):
        model = make()
        reference = oracle(model.config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert shapes == {renamed(name): p.shape for name, p in reference.named_parameters()}
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.config.dropout == 0.1 and make.__defaults__ == (0.1,)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("mask", [None, MASK, MASK.bool(), MASK.int()], ids=["unpadded", "int64", "bool", "int32"])
@pytest.mark.parametrize("types", [None, TYPES], ids=["one", "two"])
def test_values_and_gradients_are_those_of_transformers(mask, types):
    reference, model = pair(dataclasses.replace(TINY, dropout=0.0))
    logits = model(IDS, mask, types)
    expected = reference(IDS, attention_mask=mask, token_type_ids=types, labels=LABELS)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)
    loss = model(IDS, mask, types, labels=LABELS)
    torch.testing.assert_close(loss, expected.loss)
    assert torch.equal(loss, F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()))
    loss.backward()
    expected.loss.backward()
    grads = {renamed(name): p.grad for name, p in reference.named_parameters()}
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [None, MASK], ids=["unpadded", "padded"])
def test_dropout_is_applied_where_transformers_applies_it(mask):
    reference, model = pair(TINY)
    losses = []
    for call in (lambda: model(IDS, mask, labels=LABELS), lambda: reference(IDS, mask, labels=LABELS).loss):
        torch.manual_seed(1)
        losses.append(call())
    torch.testing.assert_close(losses[0], losses[1])
    assert not torch.equal(losses[0], model(IDS, mask, labels=LABELS))
    assert torch.equal(model.eval()(IDS, mask), model(IDS, mask))


# ---------------------------------------------------------------- checkpointed


@pytest.mark.parametrize("mask", [None, MASK], ids=["unpadded", "padded"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointed_steps_give_the_same_bits(mask, dropout, autocast):
    def steps(model):
        torch.manual_seed(1)
        optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for ids in (IDS, IDS.flip(0)):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(ids, mask, TYPES, LABELS)
            loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
        return [*seen, *model.parameters(), torch.get_rng_state()]

    torch.manual_seed(0)
    baseline = BertForMaskedLM(dataclasses.replace(TINY, dropout=dropout))
    checkpointed = copy.deepcopy(baseline)
    names = ackpt.apply_activation_checkpointing(checkpointed)
    assert names == [f"bert.blocks.{index}" for index in range(3)]
    assert_equal(steps(baseline), steps(checkpointed), "step")


# ---------------------------------------------------------------- bytes


def bytes_of(meter, mode, config, checkpointed, **options):
    with mode:
        model = BertForMaskedLM(config)
        ids, mask = (torch.ones(2, 16, dtype=torch.int64) for _ in range(2))
    if checkpointed:
        ackpt.apply_activation_checkpointing(model, BertBlock)

    def step():
        model(ids, mask, labels=ids).backward()
        model.zero_grad()

    return meter(step, resident=(model, ids, mask), **options)


def boundary(measurement):
    return measurement.timeline.live[measurement.timeline.boundary]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_predicted_bytes_are_the_measured_ones(checkpointed):
    measured = bytes_of(ackpt.measure, contextlib.nullcontext(), TINY, checkpointed, repeats=0)
    for mode in (FakeTensorMode(), torch.device("meta")):
        predicted = bytes_of(ackpt.predict, mode, TINY, checkpointed)
        assert predicted.peak_bytes == measured.peak_bytes
        assert predicted.resident_bytes == measured.resident_bytes
        assert boundary(predicted) == boundary(measured)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        *(
            ({name: 0}, f"{name} must be a positive integer, got 0")
            for name in ("dim", "ff_dim", "layers", "heads", "vocab_size", "positions", "token_types")
        ),
        ({"heads": True}, "heads must be a positive integer, got True"),
        ({"dim": 100}, "dim must be a multiple of heads, got 100 and 12"),
        ({"eps": 0.0}, "eps must be positive and finite, got 0.0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and less than 1, got 1.0"),
    ],
)
def test_bad_sizes_are_named(sizes, message):
    raises(ValueError, message, lambda: BertConfig(**sizes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": IDS.float()}, r"input_ids must be int64 of shape \[2, 16\], got torch.float32 \[2, 16\]"),
        ({"input_ids": IDS[0]}, r"int64 of shape \[batch, length\], got torch.int64 \[16\]"),
        ({"input_ids": IDS + 20}, "from 21 to 52, allowed are 0 to 49: vocab_size is 50"),
        ({"input_ids": torch.ones(2, 21, dtype=torch.int64)}, "are 21 tokens long, but positions is 20"),
        ({"attention_mask": MASK.float()}, r"attention_mask must be integers or bools .*; got torch.float32 \[2, 16\]"),
        ({"attention_mask": 1 + MASK}, "from 1 to 2, allowed are 0 to 1: 1 is for a token, 0 for padding"),
        ({"token_type_ids": TYPES[:1]}, r"token_type_ids must be int64 of shape \[2, 16\], got torch.int64 \[1, 16\]"),
        ({"labels": LABELS[:1]}, r"labels must be int64 of shape \[2, 16\], got torch.int64 \[1, 16\]"),
        ({"labels": IDS - 2}, r"from -1 to 30, allowed are 0 to 49 \(and -100, to be ignored\): vocab_size is 50"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    raises(ValueError, message, lambda: BertForMaskedLM(TINY)(**{"input_ids": IDS, **arguments}))
