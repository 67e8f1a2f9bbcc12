"""The front of tiny models: predicted to the byte, counted to the FLOP, refusals recorded, one line per bad input."""

import copy
import dataclasses
import io
import json

import pytest
from PIL import Image

from experiments.cli.command_line import main
from experiments.frontier import FrontierConfig, run_frontier
from experiments.reports import frontier as report
from experiments.reports.plots import png
from experiments.results import Record
from experiments.steps.frontier_models import RESNET50, TRANSFORMER, UNET, checked_sizes, workload

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


def test_a_peer_with_fewer_flops_or_wrong_results_is_named(record):
    changed = copy.deepcopy(record)
    blocks, selective = changed.metrics["peers"]
    tight = int(0.5 * changed.metrics["baseline"]["measured_peak_bytes"])
    blocks |= {"measured_peak_bytes": tight, "auto_recompute_flops": None}
    selective["gradients_difference"] = 30 * changed.metrics["rounding"]["gradients_difference"]
    found = report.comparison(changed)
    assert (found["ahead"], found["wrong"], found["at_checkpoint"]) == (["checkpoint"], ["selective"], None)
    assert found["peer_least"] == tight / changed.metrics["baseline"]["measured_peak_bytes"]
    assert "BETTER than auto at or below 0.6: checkpoint" in report.text_table(changed)


def test_times_are_the_only_thing_that_differs_between_two_runs(record):
    def timeless(rows):
        return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]

    assert all(row["seconds_ratio"]["median"] > 0 for row in (*report.measured(record), *record.metrics["peers"]))
    again = run_frontier(dataclasses.replace(TINY, policies=("full",), peers=()))
    assert again.metrics["points"] == timeless(points(record, "full"))


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


def test_points_beyond_the_axis_are_named_at_the_edge(record):
    changed = copy.deepcopy(record)
    base = record.metrics["baseline"]["measured_peak_bytes"]
    for point in points(changed, "full"):
        point["recompute_flops"] = 3 * changed.metrics["baseline"]["flops"]
    (axes,) = report.frontier_plot(changed).axes
    above = [
        f"per-block 300% at {p['measured_peak_bytes'] / base:.2f}"
        for p in report.measured(changed)
        if p["policy"] == "full"
    ]
    (text,) = axes.texts
    assert set(text.get_text().splitlines()) == {"above the edge:", *above} and axes.get_ylim()[1] < 1
    assert len(report.frontier_plot(record).axes[0].texts) == 0


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
        (["--model", "vgg"], "unknown model 'vgg': choose from transformer, bert, resnet50, unet"),
        (["--model", "resnet50", "--layers", "2"], "resnet50 has no size 'layers': it has batch_size, image_size"),
        (["--dim", "0"], "dim must be a positive whole number, got 0"),
        (["--dim", "30", "--heads", "4"], "dim must be a multiple of heads, got 30 and 4"),
        (["--policy", "best"], "'best' is not a policy of this experiment: choose from full, auto"),
        (["--peer", "deepspeed"], "'deepspeed' is not a peer of this experiment: choose from checkpoint"),
        (["--budget", "0.5", "0"], "a budget is a fraction of the baseline's dynamic peak, in (0, 1], got 0.0"),
        (["--budget", "nan"], "in (0, 1], got nan"),
        (["--setting", "1.5"], "a setting of memory-budget is a number between 0 and 1, got 1.5"),
        (["--costs", "time"], "'time' is not a kind of costs of this experiment: choose from counted, rates"),
        (["--model", "unet", "--image-size", "18"], "image_size of unet must be a multiple of 4"),
        (["--compiler", "gcc"], "unknown compiler 'gcc': choose from eager, inductor"),
        (["--times", "-1"], "--times must be at least 0, got -1"),
    ],
)
def test_bad_input_prints_one_line_before_any_work(arguments, message, capsys):
    assert main(["frontier", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("python -m experiments frontier: ") and message in err and err.count("\n") == 1


def test_the_help_names_the_default_sizes(capsys):
    with pytest.raises(SystemExit):
        main(["frontier", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "{layers} layers, {batch_size} x {seq_len} tokens".format(**TRANSFORMER) in told
    assert "{batch_size} images of {image_size} x {image_size}".format(**RESNET50) in told
    assert "{batch_size} images of {image_size} x {image_size}".format(**UNET) in told
    assert FrontierConfig().sizes == TRANSFORMER and FrontierConfig("resnet50").sizes == RESNET50


def test_the_resnet_has_its_blocks_and_the_same_numbers_every_time():
    sizes = checked_sizes("resnet50", {"width": 2, "image_size": 32, "num_classes": 3})
    one, two = (workload("resnet50", sizes, 0) for _ in range(2))
    assert len(one.blocks) == 3 + 4 + 6 + 3
    one.step(one.model, 0), two.step(two.model, 0)
    pairs = zip(one.model.parameters(), two.model.parameters(), strict=True)
    assert all(a.grad.equal(b.grad) for a, b in pairs)
