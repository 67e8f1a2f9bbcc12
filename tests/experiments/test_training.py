"""The training experiments: what they record, losses that differ are refused, and the rows that the book shows."""

import dataclasses

import pytest
from conftest import raises

from experiments.lm import LMConfig, run_lm
from experiments.reports.figures import losses_plot, stacked_plot
from experiments.reports.plots import MIB
from experiments.reports.training import published_rows
from experiments.results import Record, environment
from experiments.steps import training
from experiments.steps.failures import Failures
from experiments.steps.predicted import predict_experiment
from experiments.steps.training import COMPARED, LossesDiffer, check_losses
from experiments.synthetic import SyntheticConfig, run_synthetic

TINY = {"dim": 32, "ff_dim": 64, "layers": 3, "head_dim": 16, "seq_lens": (48,), "steps": 3}
SYNTHETIC = SyntheticConfig(**TINY)
LM = LMConfig(**{**TINY, "seq_lens": (24,)}, batch_size=2, vocab_size=300, tokenizer_vocab=300, loss_chunks=4)


@pytest.fixture(scope="module")
def lm_records():
    (records,) = run_lm(LM, "python -m experiments lm", timed_rounds=2)
    return {record.config["method"]: record for record in records}


def test_losses_are_equal_to_the_last_bit_and_chunked_ones_close(lm_records):
    losses = {method: record.metrics["losses"] for method, record in lm_records.items()}
    assert losses["checkpoint"] == losses["baseline"]
    assert losses["checkpoint+chunked-loss"] == losses["chunked-loss"]
    assert losses["chunked-loss"] == pytest.approx(losses["baseline"], rel=1e-5)
    assert len(losses["baseline"]) == 3


def test_flops_count_what_backward_reads_of_the_blocks_and_none_of_the_chunked_head(lm_records):
    flops = {method: record.metrics["flops"] for method, record in lm_records.items()}
    sequences, length, dim, ff = 2, 24, 32, 64
    products = 2 * sequences * length * (4 * dim * dim + dim * ff)  # backward reads no result of the last linear
    attention = 4 * sequences * length * length * dim
    assert flops["checkpoint"] - flops["baseline"] == 3 * (products + attention)
    assert flops["chunked-loss"] == flops["baseline"]
    assert flops["checkpoint+chunked-loss"] == flops["checkpoint"]


def test_peaks_fall_and_times_are_in_seconds_fields(lm_records):
    peaks = {method: record.metrics["peak_bytes"] for method, record in lm_records.items()}
    assert peaks["checkpoint+chunked-loss"] <= peaks["checkpoint"] < peaks["baseline"]
    assert peaks["chunked-loss"] < peaks["baseline"]
    metrics = lm_records["checkpoint"].metrics
    assert metrics["seconds_ratio"]["reference"] == "baseline" and metrics["seconds_training"] > 0
    times = {name for name in metrics if name.startswith("seconds")}
    assert times == {"seconds_step", "seconds_ratio", "seconds_training"}


def test_losses_that_differ_are_refused_with_the_step():
    with pytest.raises(LossesDiffer, match="differ at step 1"):
        check_losses({"baseline": [1.0, 2.0], "checkpoint": [1.0, 2.0000002]}, "checkpoint", exact=True)
    with pytest.raises(LossesDiffer, match="more than 0.0001"):
        check_losses({"baseline": [1.0, 2.0], "chunked-loss": [1.0, 2.1]}, "chunked-loss", exact=True)
    found = check_losses({"baseline": [1.0, 2.0], "checkpoint": [1.0, 2.002]}, "checkpoint", exact=False)
    assert found == {"losses_difference": pytest.approx(0.001)}


def test_without_equal_bits_the_first_steps_are_compared_and_the_largest_difference_is_recorded():
    baseline = [1.0] * (COMPARED + 1)
    late, early = [*baseline[1:], 1.5], [1.5, *baseline[1:]]
    found = check_losses({"baseline": baseline, "checkpoint": late}, "checkpoint", exact=False)
    assert found["losses_difference"] == 0.5
    with pytest.raises(LossesDiffer, match="more than 0.01"):
        check_losses({"baseline": baseline, "checkpoint": early}, "checkpoint", exact=False)


def test_offload_and_a_plan_at_the_peak_of_checkpoint_change_no_bit_and_keep_it():
    methods = ("baseline", "checkpoint", "checkpoint+offload", "auto")
    (records,) = run_synthetic(dataclasses.replace(SYNTHETIC, methods=methods), timed_rounds=1)
    metrics = {record.config["method"]: record.metrics for record in records}
    assert all(each["losses"] == metrics["baseline"]["losses"] for each in metrics.values())
    assert metrics["auto"]["peak_bytes"] <= metrics["checkpoint"]["peak_bytes"] < metrics["baseline"]["peak_bytes"]
    assert metrics["auto"]["flops"] <= metrics["checkpoint"]["flops"]
    assert set(metrics["auto"]) - set(metrics["checkpoint"]) == {"predicted_peak_bytes", "cost"}
    raises(ValueError, "give checkpoint before it", lambda: SyntheticConfig(methods=("baseline", "auto")))


def test_a_method_that_fails_leaves_the_others_records(monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("no plan here")

    monkeypatch.setattr(training, "_planned", refuse)
    config = dataclasses.replace(SYNTHETIC, methods=("baseline", "checkpoint", "auto"))
    failures = Failures()
    (records,) = run_synthetic(config, timed_rounds=0, failures=failures)
    assert [record.config["method"] for record in records] == ["baseline", "checkpoint"]
    assert failures.reasons == {"auto": "RuntimeError: no plan here"}
    raises(RuntimeError, "no plan here", lambda: list(run_synthetic(config, timed_rounds=0)))


def test_wrong_gradients_are_reported(monkeypatch):
    """The check is not empty: a checkpoint that scales a gradient ends the experiment."""
    from ackpt.checkpointing import reentrant

    gradients = reentrant._gradients
    monkeypatch.setattr(
        reentrant, "_gradients", lambda *args: tuple(g if g is None else g * 1.001 for g in gradients(*args))
    )
    with pytest.raises(LossesDiffer):
        list(run_synthetic(SYNTHETIC, timed_rounds=0))


def test_a_loss_that_is_not_finite_is_refused():
    with pytest.raises(LossesDiffer, match="not finite at step"):
        list(run_synthetic(dataclasses.replace(SYNTHETIC, learning_rate=1e30, steps=4), timed_rounds=0))


def test_predicted_peak_is_the_measured_one_but_for_attention_scratch(lm_records):
    """On the CPU the only bytes that shapes do not show are flash attention's buffers per thread: never less."""
    (predicted,) = predict_experiment(LM)
    for record in predicted:
        measured = lm_records[record.config["method"]].metrics
        assert record.metrics["resident_bytes"] == measured["resident_bytes"]
        assert record.metrics["flops"] == measured["flops"]
        assert 0 <= measured["peak_bytes"] - record.metrics["peak_bytes"] < 64 * 1024


def test_published_sizes_are_predicted_within_the_goal():
    """Parameters, gradients and Adam states alone are about 3900 MiB; the goal for the whole step is 5200."""
    from experiments.lm import GPU

    config = dataclasses.replace(GPU, seq_lens=(8192,), methods=("checkpoint+chunked-loss",))
    ((record,),) = predict_experiment(config)
    resident = 3 * 4 * 253_949_952
    assert 0 <= record.metrics["resident_bytes"] - resident < 2**20
    assert record.metrics["peak_bytes"] <= 5200 * 2**20


SIZES = {"batch_size": 1, "dim": 64, "ff_dim": 256, "layers": 3}


def record(method, seq_len=128, peak=5 * MIB, **changed):
    config = {**SIZES, "seq_len": seq_len, "method": method, **changed}
    return Record("demo", config, {"peak_bytes": peak, "seconds_training": 9.96}, environment())


def reference():
    rows = [
        {"seq_len": 128, "method": method, "peak": peak, "seconds": seconds}
        for method, peak, seconds in (("baseline", 1234.5, 10.0), ("checkpoint", 4.25, 12.84))
    ]
    return {"rows": rows}


CONFIGURED = [
    {"sizes": {"tokens": 128, "method": "baseline"}, "predicted": 1234 * MIB},
    {"sizes": {"tokens": 128, "method": "checkpoint"}, "predicted": 4 * MIB},
]
PREDICTED = [record("chunked-loss"), record("checkpoint", peak=4 * MIB), record("baseline", peak=2000 * MIB)]


@pytest.mark.parametrize("name", ["seq_len", "batch_size", "dim", "ff_dim", "layers", "dtype"])
def test_a_measurement_of_another_size_or_dtype_is_not_shown(name):
    row, _ = published_rows(reference(), CONFIGURED, PREDICTED, [record("baseline", **{name: 1024})])
    assert row["measured"] is None


def plots():
    return {
        "losses": losses_plot({"128 tokens": {"baseline": [2.0, 1.0], "checkpoint": [2.0, 1.5]}}, "They differ"),
        "stacked": stacked_plot(["a", "a+b"], {"parameters": [MIB, MIB], "logits": [3 * MIB, 0]}, "Logits go"),
    }
