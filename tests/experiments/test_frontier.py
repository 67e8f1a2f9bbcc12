"""The front of tiny models: predicted to the byte, counted to the FLOP, refusals recorded, one line per bad input."""

import copy
import io
import json

import pytest
from PIL import Image

from ackpt.metering.plots import png
from experiments.cli.command_line import main
from experiments.frontier import FrontierConfig, run_frontier
from experiments.reports import frontier as report
from experiments.results import Record

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"layers": 2, "dim": 16, "heads": 2, "ff_dim": 32, "vocab_size": 20, "seq_len": 24, "batch_size": 2}
TINY = FrontierConfig(
    sizes=SIZES, policies=("full", "auto", "ilp"), budgets=(0.8, 0.1), peers=("checkpoint", "selective")
)


@pytest.fixture(scope="module")
def record():
    return run_frontier(TINY, "python -m experiments frontier", timed_rounds=1)


def points(record, policy):
    return [point for point in record.metrics["points"] if point["policy"] == policy]


def test_every_budget_has_a_point_or_a_reason(record):
    for policy in ("full", "auto"):
        assert [point["budget"] for point in points(record, policy)] == [0.8, 0.1, None]
    assert points(record, "ilp") == [] and "160 nodes" in record.metrics["not_run"]["ilp"]


@pytest.mark.parametrize("policy", ["full", "auto"])
def test_a_refused_budget_has_the_smallest_peak_of_the_policy(record, policy):
    kept, refused, least = points(record, policy)
    resident = record.metrics["baseline"]["resident_bytes"]
    assert refused == {"policy": policy, "budget": 0.1, "least_bytes": resident + least["measured_peak_bytes"]}
    assert least["measured_peak_bytes"] <= kept["measured_peak_bytes"] <= kept["limit_bytes"]
    assert kept["limit_bytes"] == int(0.8 * record.metrics["baseline"]["measured_peak_bytes"])


def test_plans_have_exact_bytes_flops_and_results(record):
    assert report.broken_promises(record) == []
    for point in report.measured(record):
        assert point["measured_peak_bytes"] == point["predicted_peak_bytes"]
        assert point["recompute_flops"] == point["predicted_recompute_flops"]
        assert point["gradients_difference"] == point["buffers_difference"] == 0.0
    eager, baseline = record.metrics["eager"], record.metrics["baseline"]
    assert eager["gradients_difference"] == eager["recompute_flops"] == 0
    assert eager["measured_peak_bytes"] == baseline["measured_peak_bytes"] == baseline["predicted_peak_bytes"]


def test_no_point_is_below_the_lower_bounds(record):
    bounds = {row["limit_bytes"]: row["recompute_flops"] for row in record.metrics["bounds"]}
    for point in report.measured(record):
        assert point["recompute_flops"] >= bounds[point["limit_bytes"]]
        assert point["cost"] >= point["lower_bound"]
    assert max(bound or 0 for bound in bounds.values()) > 0


def test_auto_is_planned_within_the_peaks_of_the_peers(record):
    for row in record.metrics["peers"]:
        assert row["auto_peak_bytes"] <= row["measured_peak_bytes"]
    found = report.comparison(record)
    blocks = record.metrics["peers"][0]
    assert found["at_checkpoint"] == blocks["auto_recompute_flops"] / blocks["recompute_flops"] < 1
    assert found["least"] < found["peer_least"] and found["ahead"] == found["wrong"] == []
    said = "at the peak of torch's per-block checkpoint, auto recomputes {} of the FLOPs that checkpoint recomputes"
    share = f"{found['at_checkpoint']:.2f}" if found["at_checkpoint"] else "none"
    assert said.format(share) in report.text_table(record)
    free = copy.deepcopy(record)
    free.metrics["peers"][0]["auto_recompute_flops"] = 0
    assert said.format("none") in report.text_table(free)


def test_the_record_is_read_back_and_drawn(record, tmp_path):
    path = record.save(tmp_path / report.file_name(record))
    assert path.name == "frontier-transformer.json" and Record.load(path) == record
    lines = report.text_table(record).splitlines()
    assert sum("refused" in line for line in lines) == 2
    figure = report.frontier_plot(record)
    assert png(figure) == png(report.frontier_plot(Record.load(path)))
    assert Image.open(io.BytesIO(png(figure))).width > 500
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["lower bound", "plan", "per-block", "PyTorch: per-block", "PyTorch: selective"]


def test_bert_with_dropout_is_bit_equal():
    sizes = {"batch_size": 2, "seq_len": 16, "layers": 2, "dim": 16, "heads": 2, "ff_dim": 32, "vocab_size": 20}
    config = FrontierConfig("bert", sizes, policies=("auto",), budgets=(0.6,), peers=("checkpoint",))
    record = run_frontier(config)
    assert report.broken_promises(record) == [] and report.comparison(record)["wrong"] == []


def test_the_command_prints_json_and_exits_with_status_1_for_a_failed_check(record, monkeypatch, tmp_path, capsys):
    changed = copy.deepcopy(record)
    changed.metrics["points"][0]["measured_peak_bytes"] += 1
    found = {}

    def canned(config, command, rounds):
        found.update(config=config, rounds=rounds)
        return changed

    monkeypatch.setattr("experiments.frontier.run_frontier", canned)
    arguments = ["--model", "resnet50", "--width", "4", "--policy", "auto", "--peer", "--times", "2", "--json"]
    assert main(["frontier", *arguments, "--out", str(tmp_path / "new")]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == changed.to_json() and "full 0.8: measured" in err
    assert (tmp_path / "new" / "frontier-transformer.png").is_file()
    assert found["rounds"] == 2 and found["config"].sizes["width"] == 4 and found["config"].peers == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet50", "--layers", "2"], "resnet50 has no size 'layers': it has batch_size, image_size"),
        (["--dim", "30", "--heads", "4"], "dim must be a multiple of heads, got 30 and 4"),
        (["--policy", "best"], "'best' is not a policy of this experiment: choose from full, auto"),
        (["--peer", "deepspeed"], "'deepspeed' is not a peer of this experiment: choose from checkpoint"),
        (["--budget", "0.5", "0"], "a budget is a fraction of the baseline's dynamic peak, in (0, 1], got 0.0"),
        (["--setting", "1.5"], "a setting of memory-budget is a number between 0 and 1, got 1.5"),
        (["--model", "unet", "--image-size", "18"], "image_size of unet must be a multiple of 4"),
        (["--compiler", "gcc"], "unknown compiler 'gcc': choose from eager, inductor"),
    ],
)
def test_bad_input_prints_one_line_before_any_work(arguments, message, capsys):
    assert main(["frontier", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("python -m experiments frontier: ") and message in err and err.count("\n") == 1
