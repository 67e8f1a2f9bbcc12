"""The models of the published experiments compute what the originals compute, and their predictions keep the goals."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.metering.timeline import Timeline
from experiments import predicted_curves
from experiments.predicted_curves import BATCHES, POLICIES, BatchCurves, Timelines
from experiments.published import Predictions, reference, rows
from experiments.published.reference import Block, InnerBackward, KeptInput


def predicted(step):
    stored = Predictions()
    return [stored.of(row) for row in rows() if row["step"] == step]


def test_the_language_model_is_predicted_within_the_allocators_remainders():
    found = predicted("reference-language-model")
    assert len(found) == 6 and max(abs(row["error"]) for row in found) < 0.0002


def test_the_synthetic_experiment_is_predicted_to_two_blocks_of_the_allocator():
    found = {
        (row["sizes"]["method"], row["sizes"]["tokens"]): row["predicted"] - row["bytes"]
        for row in predicted("reference-synthetic")
    }
    assert len(found) == 10
    assert max(abs(difference) for (method, _), difference in found.items() if method == "checkpoint") <= 512
    assert max(abs(difference) for difference in found.values()) <= 1024


def test_the_offload_experiment_is_predicted_within_2_percent():
    found = predicted("reference-offload")
    assert len(found) == 4 and max(abs(row["error"]) for row in found) < 0.02


def test_the_resnet_lacks_the_workspaces_of_convolutions():
    found = {row["sizes"]["batch"]: row["error"] for row in predicted("reference-resnet")}
    assert sorted(found) == [4, 8, 16, 32, 64] and all(error < 0 for error in found.values())
    assert min(found.values()) > -0.03 and min(found[batch] for batch in (16, 32, 64)) > -0.01


@pytest.fixture
def short_sequences(monkeypatch):
    monkeypatch.setattr(reference, "LENGTHS", (3, 5))


def test_attention_in_a_loop_attends_within_each_sequence(short_sequences):
    qkv = torch.randn(8, 3, 2, 4)
    parts = [F.scaled_dot_product_attention(*piece.permute(1, 2, 0, 3)).transpose(0, 1) for piece in qkv.split([3, 5])]
    torch.testing.assert_close(reference.attend_in_a_loop(qkv, torch.empty(3)), torch.cat(parts))


@pytest.mark.parametrize("checkpoint", ["inner", "ckpt_classic"])
def test_checkpointed_blocks_have_the_gradients_of_the_block(short_sequences, checkpoint):
    torch.manual_seed(0)
    block = Block(8, 16, 4, reference.attend_in_a_loop)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, offsets = torch.randn(8, 8, requires_grad=True), torch.empty(3)
    block(x, offsets).sum().backward()
    expected = [x.grad, *(parameter.grad for parameter in block.parameters())]
    x.grad = None
    block.zero_grad()
    if checkpoint == "inner":
        InnerBackward.apply(block, x, offsets).sum().backward()
    else:
        KeptInput.apply(block, x, offsets, checkpoint).sum().backward()
    found = [x.grad, *(parameter.grad for parameter in block.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


TINY = reference.Build(width=128, ff=256, layers=3, vocabulary=300, attend=reference.attend_for_real)


@pytest.mark.parametrize("build", [reference.reference_synthetic, reference.reference_language_model])
@pytest.mark.parametrize("method", ["baseline", "checkpoint"])
@pytest.mark.usefixtures("one_thread")
def test_the_published_models_run_and_their_bytes_are_the_predicted_ones(build, method):
    with FakeTensorMode():
        shapes = build(tokens=64, method=method, build=TINY)
    torch.manual_seed(0)
    real = build(tokens=64, method=method, build=TINY)
    predicted = ackpt.predict(shapes.run, resident=shapes.resident, warmup=1)
    measured = ackpt.measure(real.run, resident=real.resident, warmup=1, repeats=0)
    assert predicted.peak_bytes == measured.peak_bytes
    assert all(parameter.isfinite().all() for parameter in real.resident[0].parameters())


def not_stored(*inputs):
    raise AssertionError(f"{inputs} must be predicted again: see the docstring")


def test_the_stored_timelines_show_the_inputs_that_classic_keeps():
    """If they are not stored: run ``nox -s reproduce -- --only 05``."""
    stored = Timelines(predicts=not_stored, peaks=Predictions(predicts=not_stored))
    methods = ("baseline", "ckpt_classic", "ckpt_sync_offload")
    _, classic, sync = records = stored.records("reference-offload", methods)
    assert [record.config["method"] for record in records] == [*methods]
    steps = [Timeline.from_json(record.metrics["timeline"]) for record in (classic, sync)]
    saved = [step.at(step.boundary)["activations"] for step in steps]
    assert saved[0] - saved[1] == reference.LAYERS * reference.TOKENS * reference.WIDTH * 2
    assert steps[0].peak_bytes > steps[1].peak_bytes


def test_plans_of_the_curves_have_the_peak_of_per_block_checkpointing(monkeypatch):
    sizes = {"dim": 32, "ff_dim": 64, "layers": 3, "head_dim": 16, "vocab_size": 32}
    monkeypatch.setitem(predicted_curves.MODELS, "lm", {"seq_len": 64, "fields": sizes})
    found = predicted_curves.predicted_methods("lm", {"batch": 8}, "h100-80g")
    assert [*found] == ["without", "per-block", "mu-two", "auto"]
    assert found["auto"]["peak_bytes"] <= found["per-block"]["peak_bytes"] < found["without"]["peak_bytes"]
    assert found["without"]["seconds"] < found["auto"]["seconds"] <= found["per-block"]["seconds"]


def test_the_stored_curves_are_lines():
    """If they are not stored: run ``nox -s reproduce -- --only 08``."""
    for model, batches in BatchCurves(predicts=not_stored).curves("h100-80g").items():
        assert tuple(batches) == BATCHES[model] and all([*methods] == [*POLICIES] for methods in batches.values())
        large = BATCHES[model][-3:]
        low, middle, high = (batches[batch]["without"]["peak_bytes"] for batch in large)
        assert (high - middle) / (middle - low) == pytest.approx(2, rel=0.03)
        for methods in batches.values():
            assert methods["without"]["seconds"] <= methods["auto"]["seconds"] <= methods["per-block"]["seconds"]
            assert (
                max(methods["auto"]["peak_bytes"], methods["mu-two"]["peak_bytes"])
                <= methods["per-block"]["peak_bytes"]
            )
