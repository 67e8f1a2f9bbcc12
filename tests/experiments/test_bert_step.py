"""The BERT experiment: plans keep their budgets and gradients on a small BERT; BERT-large is predicted from shapes."""

import pytest

from experiments.bert import CPU, BertStepConfig, run_bert
from experiments.cli.command_line import main
from experiments.reports import bert as bert_report
from experiments.results import DASH, Record
from experiments.steps.named_steps import Method
from experiments.steps.step_shapes import Shapes

FIELDS = {"dim": 32, "ff_dim": 64, "layers": 2, "heads": 2, "vocab_size": 100}
TINY = BertStepConfig(8, 16, FIELDS, "cpu", "float32", methods=("baseline", "per-block", "auto@0.5"))


@pytest.fixture(scope="module")
def records():
    return next(run_bert(TINY, "python -m experiments bert", timed_rounds=1))


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


def test_published_predicted_and_measured_figures_are_in_one_table(records):
    def moved(record, experiment):
        config = {**record.config, "device": "cuda"}
        return Record(experiment, config, record.metrics, record.environment)

    predicted = [moved(record, "bert-predicted") for record in records]
    baseline, switch, planned = bert_report.published_rows(predicted)
    assert [row["published"] for row in (baseline, switch, planned)] == ["9,141", "5,978", DASH]
    assert [row["minutes"] for row in (baseline, switch, planned)] == ["25.3", "33.6", DASH]
    assert [row["published_memory"] for row in (baseline, switch, planned)] == [DASH, "-34.6", DASH]
    assert [row["published_time"] for row in (baseline, switch, planned)] == [DASH, "+33.0", DASH]
    assert baseline["flops"] == DASH and float(switch["flops"]) > float(planned["flops"]) > 0
    assert all(row["measured"] is None and row["measured_time"] is None for row in (baseline, switch, planned))
    measured = [moved(record, "bert") for record in records]
    assert [row["measured"] for row in bert_report.published_rows(predicted, measured[:2])] == [
        round(record.metrics["peak_bytes"] / 2**20, 1) for record in measured[:2]
    ] + [None]
    other = [Record(r.experiment, {**r.config, "batch_size": 9}, r.metrics, r.environment) for r in measured]
    assert bert_report.published_rows(predicted, other)[0]["measured"] is None


def test_the_budgets_of_the_small_tier_are_feasible():
    shapes = Shapes(CPU.setting())
    least = shapes.least_bytes(Method("auto", "auto"))
    baseline = shapes.predicted(Method("none", "none"))
    assert least - baseline["resident_bytes"] < 0.3 * baseline["dynamic_peak_bytes"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--methods", "auto"], "needs a budget"),
        (["--batch-size", "0"], "at least 1"),
        (["--methods", "auto@7.0"], "at most 1, as in"),
    ],
)
def test_bad_options_of_bert_print_one_line(capsys, options, words):
    assert main(["bert", *options]) == 2
    out, err = capsys.readouterr()
    assert words in err and err.count("\n") == 1 and out == ""
