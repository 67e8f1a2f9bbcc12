"""BERT: values of transformers' own, checkpointed steps, bytes, bad input, and the experiment on its planned steps."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import raises

from experiments.bert import BertStepConfig, run_bert
from experiments.models import BertConfig, BertForMaskedLM, bert_base, bert_large

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


@pytest.mark.parametrize(("make", "parameters"), [(bert_base, 109_514_298), (bert_large, 335_174_458)])
def test_published_sizes_are_exact(make, parameters):
    with torch.device("meta"):
        model = make()
        reference = oracle(model.config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert shapes == {renamed(name): p.shape for name, p in reference.named_parameters()}
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.config.dropout == 0.1 and make.__defaults__ == (0.1,)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": IDS.float()}, r"input_ids must be int64 of shape \[2, 16\], got torch.float32 \[2, 16\]"),
        ({"input_ids": IDS + 20}, "from 21 to 52, allowed are 0 to 49: vocab_size is 50"),
        ({"input_ids": torch.ones(2, 21, dtype=torch.int64)}, "are 21 tokens long, but positions is 20"),
        ({"attention_mask": MASK.float()}, r"attention_mask must be integers or bools .*; got torch.float32 \[2, 16\]"),
        ({"attention_mask": 1 + MASK}, "from 1 to 2, allowed are 0 to 1: 1 is for a token, 0 for padding"),
        ({"labels": IDS - 2}, r"from -1 to 30, allowed are 0 to 49 \(and -100, to be ignored\): vocab_size is 50"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    raises(ValueError, message, lambda: BertForMaskedLM(TINY)(**{"input_ids": IDS, **arguments}))


FIELDS = {"dim": 32, "ff_dim": 64, "layers": 2, "heads": 2, "vocab_size": 100}
TINY_STEP = BertStepConfig(8, 16, FIELDS, "cpu", "float32", methods=("baseline", "per-block", "auto@0.5"))


@pytest.fixture(scope="module")
def records():
    return next(run_bert(TINY_STEP, "python -m experiments bert", timed_rounds=1))


def test_the_plan_keeps_half_the_peak_and_the_gradients_with_dropout_on(records):
    baseline, per_block, planned = (record.metrics for record in records)
    assert planned["peak_bytes"] == planned["predicted_peak_bytes"]
    assert planned["dynamic_peak_bytes"] <= baseline["dynamic_peak_bytes"] // 2
    assert [metrics["gradients_difference"] for metrics in (baseline, per_block, planned)] == [0, 0, 0]
    assert baseline["flops"] < planned["flops"] < per_block["flops"]


def test_checkpointed_layers_run_their_forward_again(records):
    baseline, per_block, _ = (record.metrics["flops"] for record in records)
    batch, length, dim, ff = 8, 16, 32, 64
    products = 2 * batch * length * (4 * dim * dim + 2 * dim * ff)
    attention = 4 * batch * length * length * dim
    assert per_block - baseline == 2 * (products + attention)


def test_a_predicted_step_as_on_a_gpu_has_its_blocks_of_512_bytes():
    config = BertStepConfig(8, 32, FIELDS, "cuda", "float32", methods=("baseline", "none", "auto@0.7"))
    (group,) = run_bert(config, predict_only=True)
    for record in group:
        assert record.experiment == "bert-predicted" and record.config["device"] == "cuda"
        assert record.metrics["peak_bytes"] % 512 == 0
        assert sum(record.metrics["categories"].values()) == record.metrics["peak_bytes"]
    baseline, none, planned = (record.metrics for record in group)
    assert (baseline["peak_bytes"], baseline["flops"]) == (none["peak_bytes"], none["flops"])
    assert planned["dynamic_peak_bytes"] <= 0.7 * baseline["dynamic_peak_bytes"]
