"""The batch-size experiment: measured peaks are the predicted ones, the largest batch is the largest."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import raises
from hypothesis import given
from hypothesis import strategies as st

from ackpt.core.budget import readable
from ackpt.planner.workloads.step_request import training_step
from experiments import batch_size as experiment
from experiments.batch_size import SIZES, BatchSizeConfig, configuration, predicted, run_batch_size
from experiments.cli.command_line import main
from experiments.reports import batch_size as report
from experiments.steps.gradients import GradientsDiffer, require_equal
from experiments.steps.largest_batch import Largest, largest_on_cpu, search
from experiments.steps.named_steps import Method, RunStep, method

FIELDS = {"dim": 32, "ff_dim": 64, "layers": 2, "head_dim": 16}
TINY = BatchSizeConfig(
    "transformer", (4, 8), seq_len=16, fields=FIELDS, methods=("baseline", "per-block", "auto@0.7", "auto")
)
SCRATCH = 64 * 1024  # bytes of CPU flash attention, which shapes do not show


@pytest.fixture(scope="module")
def records():
    return list(itertools.chain(*run_batch_size(TINY, "python -m experiments batch-size", timed_rounds=1)))


def steps(records):
    return {
        (r.config["batch_size"], r.config["method"]): r.metrics for r in records if r.experiment.startswith("batch")
    }


def largest(records):
    return {r.config["method"]: r.metrics for r in records if r.experiment.startswith("largest")}


def test_every_batch_and_method_is_measured_and_its_peak_was_predicted(records):
    found = steps(records)
    assert list(found) == [(batch, name) for batch in (4, 8) for name in ("baseline", "per-block", "auto@0.7")]
    assert {r.experiment for r in records} == {"batch-size", "largest-batch"}
    for (_, name), metrics in found.items():
        beyond = metrics["peak_bytes"] - metrics["predicted_peak_bytes"]
        assert beyond == 0 if name == "auto@0.7" else 0 <= beyond < SCRATCH
        assert metrics["gradients_difference"] == 0 and "seconds_step" in metrics


def test_plans_keep_their_share_of_the_plain_step(records):
    found = steps(records)
    for batch in (4, 8):
        baseline, planned = found[batch, "baseline"], found[batch, "auto@0.7"]
        assert planned["dynamic_peak_bytes"] <= 0.7 * baseline["dynamic_peak_bytes"]
        assert baseline["flops"] < planned["flops"] < found[batch, "per-block"]["flops"]


def test_the_limit_is_the_baseline_peak_at_the_middle_batch(records):
    (limit,) = {r.config["limit_bytes"] for r in records}
    assert limit == steps(records)[8, "baseline"]["peak_bytes"]
    found = largest(records)
    assert found["baseline"]["largest_batch"] == 8 and found["baseline"]["peak_bytes"] == limit
    assert list(found) == ["baseline", "per-block", "auto"]
    assert 8 < found["per-block"]["largest_batch"] <= found["auto"]["largest_batch"]
    assert all(metrics["peak_bytes"] <= limit for metrics in found.values())


def test_sizes_beyond_the_machine_are_predicted_and_marked(records, monkeypatch):
    monkeypatch.setattr("experiments.steps.step_shapes.free_bytes", lambda device: 1000)
    config = replace(TINY, batches=(4,), methods=("baseline", "auto@0.7"))
    (group, _) = run_batch_size(config)
    measured = steps(records)
    for record in group:
        assert record.experiment == "batch-size-predicted"
        assert "of free memory" in record.metrics["not_measured"] and "seconds_step" not in record.metrics
        beyond = measured[4, record.config["method"]]["peak_bytes"] - record.metrics["peak_bytes"]
        assert abs(beyond) < SCRATCH  # the plan that runs knows of the scratch, and may be another


def test_predictions_depend_on_the_batch_alone(records):
    found = predicted(replace(TINY, methods=("baseline", "auto")))
    assert [(r.experiment, r.config["batch_size"]) for r in found] == [("batch-size-predicted", b) for b in (4, 8)]
    wanted = steps(records)[8, "baseline"]["predicted_peak_bytes"]
    assert found[1].metrics["peak_bytes"] == wanted and "not_measured" in found[1].metrics


def test_a_method_that_cannot_keep_its_budget_says_why():
    config = replace(TINY, batches=(1,), methods=("auto@0.01",))
    ((record,),) = run_batch_size(config, timed_rounds=0)
    assert list(record.metrics) == ["not_run"] and "smallest feasible budget" in record.metrics["not_run"]
    assert "not run: auto@0.01 at 1" in report.text_table([record])


def test_gradients_that_differ_are_refused():
    run = RunStep(TINY.setting(1))
    wanted = run.gradients(Method("baseline"))
    assert require_equal("again", run.gradients(Method("per-block")), wanted, exact=True) == 0
    name = next(iter(wanted))
    wrong = {**wanted, name: wanted[name] * 1.001}
    raises(GradientsDiffer, "last bit", lambda: require_equal("wrong", wrong, wanted, exact=True))
    assert 0 < require_equal("close", wrong, wanted, exact=False) < 2e-3
    with pytest.raises(GradientsDiffer, match="may differ by"):
        require_equal("wrong", {**wanted, name: -wanted[name]}, wanted, exact=False)
    raises(GradientsDiffer, "other parameters have gradients", lambda: require_equal("none", {}, wanted, exact=False))


@given(st.integers(0, 80), st.integers(-3, 100), st.integers(1, 70))
def test_the_search_finds_the_largest_from_any_guess(wanted, guess, at_most):
    asked = []
    found = search(lambda n: asked.append(n) or n <= wanted, guess, at_most)
    assert found == min(wanted, at_most)
    assert len(asked) == len(set(asked)) and all(1 <= n <= at_most for n in asked)


def test_few_batches_run_where_measured_peaks_exceed_the_limit(monkeypatch):
    run = []

    def measured(setting, method):
        run.append(setting.batch_size)
        return 1000 + 120 * setting.batch_size

    predicted = Largest(40, 1000 + 100 * 40, None)
    monkeypatch.setattr("experiments.steps.largest_batch.largest_predicted", lambda *arguments: predicted)
    monkeypatch.setattr("experiments.steps.largest_batch._peak_on_cpu", measured)
    shapes = lambda batch: SimpleNamespace(setting=TINY.setting(batch), least_bytes=lambda _: 1000 + 100 * batch)  # noqa: E731
    found = largest_on_cpu(Method("baseline"), 5000, shapes, (4, 8))
    assert found == Largest(33, 4300, 1000 + 120 * 33)
    assert 34 in run and len(run) <= 5
    assert largest_on_cpu(Method("baseline"), 1000, shapes, (4, 8)) == Largest(0, None, None, one_peak_bytes=1120)


@pytest.mark.parametrize("name", ["magic", "auto@", "auto@2.0", "auto@six", "manual"])
def test_unknown_methods_are_refused(name):
    raises(ValueError, "unknown method|budget|size in bytes", lambda: method(name))


@pytest.mark.parametrize("tier", list(SIZES))
@pytest.mark.parametrize("model", experiment.MODELS)
def test_every_model_has_sizes_in_every_tier(tier, model):
    config = configuration(tier, model)
    assert config.device == {"cpu": "cpu", "gpu": "cuda"}[tier] and config.batches == (4, 8, 16, 32, 64)
    assert training_step(config.setting(2).request()).parameters > 0


COMMAND = ["batch-size", "--model", "transformer", "--seq-len", "8", "--set", *(f"{k}={v}" for k, v in FIELDS.items())]


def test_the_command_predicts_without_running(tmp_path, capsys):
    arguments = [*COMMAND, "--predict", "--batches", "2,4", "--methods", "baseline,per-block", "--limit", "384KiB"]
    assert main([*arguments, "--out", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {record["experiment"] for record in printed} == {"batch-size-predicted", "largest-batch-predicted"}
    assert all(record["config"]["limit_bytes"] == 384 * 2**10 for record in printed)
    names = [f"batch-size-predicted-transformer-B{b}-{m}.json" for b in (2, 4) for m in ("baseline", "per-block")]
    names += [f"largest-batch-predicted-transformer-{m}.json" for m in ("baseline", "per-block")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_limit_below_batch_size_one_names_its_peak():
    sizes = {"batches": (1,), "methods": ("baseline",), "seq_len": 8, "fields": FIELDS}
    config = configuration(model="transformer", limit="20KiB", **sizes)
    records = list(itertools.chain(*run_batch_size(config, predict_only=True)))
    step, largest = (record.metrics for record in records)
    assert largest["largest_batch"] == 0 and largest["one_peak_bytes"] == step["peak_bytes"] > 20 * 2**10
    text = report.text_table(records)
    assert f"no batch fits: baseline needs at least {readable(step['peak_bytes'])} for a batch of 1" in text
    assert "transformer changed to " in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "resnet5"], "unknown model 'resnet5' (did you mean 'resnet50'?): choose from resnet18"),
        (["--batches", "four"], "not a list of whole numbers"),
        (["--limit", "much"], "is not a budget: write bytes with a unit"),
        (["--methods", "autp@0.5"], "unknown method 'autp@0.5' (did you mean 'auto'?): choose baseline"),
        (["--device", "cuda"], "CUDA GPU"),
        (["--timed-rounds", "-1"], "at least 0"),
        (["--set", "width=2"], "no such field"),
    ],
)
def test_bad_options_print_one_line(capsys, monkeypatch, options, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        status = main([*COMMAND, "--predict" if "--set" in options else "--json", *options])
    except SystemExit as error:
        status = error.code
    out, err = capsys.readouterr()
    assert status == 2 and words in err and err.count("\n") == 1 and out == ""
