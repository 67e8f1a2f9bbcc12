"""Measured times of frontiers: of tiny models, one of them with Inductor, and of a record whose numbers are made up."""

import copy
import sys

import pytest
from conftest import raises
from steps import run_boxed
from torch._dynamo.backends.common import aot_autograd

from experiments.frontier import FrontierConfig, run_frontier
from experiments.reports import frontier as report
from experiments.reports import frontier_times as times
from experiments.reports.plots import png
from experiments.results import Record, environment

pytestmark = pytest.mark.usefixtures("one_thread")
UNET = {"batch_size": 2, "image_size": 16, "width": 4, "num_classes": 3}
TOKENS = {"layers": 1, "dim": 16, "heads": 2, "ff_dim": 32, "vocab_size": 20, "seq_len": 24, "batch_size": 2}


@pytest.fixture(scope="module")
def unet():
    config = FrontierConfig(
        "unet", UNET, policies=("auto",), budgets=(0.5,), peers=("checkpoint",), costs=("counted", "rates")
    )
    return run_frontier(config, "python -m experiments frontier", timed_rounds=2)


@pytest.fixture
def made_up():
    """A record of a BERT with round numbers."""
    ratio = {"median": 1.2, "samples": [1.1, 1.2, 1.4]}
    peer = {"peer": "checkpoint", "setting": None, "measured_peak_bytes": 40, "seconds_ratio": ratio}
    peer |= {"auto_peak_bytes": 38, "auto_seconds_ratio": {"median": 1.05, "samples": [1.05]}}
    half = {"policy": "auto, rates", "budget": 0.5, "measured_peak_bytes": 50, "cost": 0.05, "lower_bound": 0.04}
    half |= {"gap_seconds": 0.0012, "seconds_ratio": {"median": 1.03, "samples": [1.02, 1.03, 1.04]}}
    metrics = {"baseline": {"measured_peak_bytes": 100}, "eager": {"seconds_ratio": ratio}}
    metrics |= {"points": [{**half, "policy": "auto", "cost": 9.0}, half], "peers": [peer]}
    config = {"model": "bert", "costs": ["counted", "rates"], "budgets": [0.5]}
    return Record("frontier", config, metrics, environment())


def test_auto_plans_with_every_kind_of_costs_and_within_the_peak_of_blocks(unet):
    assert report.broken_promises(unet) == []
    assert unet.metrics["keeps_freed_memory"] is sys.platform.startswith("linux")
    assert {point["policy"] for point in unet.metrics["points"]} == {"auto", "auto, rates"}
    (blocks,) = unet.metrics["peers"]
    assert blocks["auto_peak_bytes"] <= blocks["measured_peak_bytes"]
    per_block, ours = times.at_the_peak_of_blocks(unet)
    assert per_block == blocks["seconds_ratio"]["median"] - 1
    assert ours == blocks["auto_seconds_ratio"]["median"] - 1


def test_the_gap_is_in_seconds_where_seconds_are_minimized(unet):
    half = times.at_half(unet)
    assert (half["policy"], half["budget"]) == ("auto, rates", 0.5) and half["cost"] > half["lower_bound"]
    step = half["gap_seconds"] / (half["cost"] - half["lower_bound"])  # of the whole step, at the calibrated rates
    assert 0 < half["gap_seconds"] < step
    assert all("gap_seconds" not in point for point in unet.metrics["points"] if point["policy"] == "auto")


def test_the_table_of_models(made_up):
    assert times.times_rows([made_up]) == [
        {"model": "BERT with dropout", "peak": "0.40", "blocks": "20.0", "auto": "5.0", "half": "3.0"}
        | {"cost": "5.0", "bound": "4.0", "gap": "1.0%, 1.2 ms"}
    ]
    made_up.config["compiler"] = "inductor"
    assert times.times_rows([made_up])[0]["auto"] == "5.0"
    made_up.metrics["points"][1]["measured_peak_bytes"] = 39  # the fullest of the plans that fit into 40
    assert times.times_rows([made_up])[0]["auto"] == "3.0"
    made_up.metrics["points"] = [{"policy": "auto, rates", "budget": 0.5, "least_bytes": 60}]
    del made_up.metrics["peers"][0]["auto_seconds_ratio"]
    (row,) = times.times_rows([made_up])
    assert row["model"] == "BERT with dropout, Inductor"
    assert (row["blocks"], row["auto"], row["half"], row["gap"]) == ("20.0", "infeasible", "infeasible", "–")
    made_up.config["budgets"] = [0.8]
    assert times.times_rows([made_up])[0]["half"] == "not run"


def test_times_are_drawn_with_the_names_of_methods_and_an_arrow_to_the_plan(unet, made_up):
    (axes,) = times.time_plot(unet).axes
    names = {"plan (FLOPs)", "plan", "PyTorch: per-block", "baseline"}
    assert names <= {text.get_text() for text in axes.texts}
    figure = times.time_plot(made_up)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts[-1] == "20 % \N{RIGHTWARDS ARROW} 5 %\nwithin this peak"
    assert png(figure) == png(times.time_plot(copy.deepcopy(made_up)))
    made_up.metrics["peers"][0]["auto_seconds_ratio"]["median"] = 1.3
    assert not any("within this peak" in text.get_text() for text in times.time_plot(made_up).axes[0].texts)
    del made_up.metrics["eager"]["seconds_ratio"]
    raises(ValueError, "no times.*--times", lambda: times.time_plot(made_up))


def test_the_memory_budget_is_drawn_only_with_inductor(made_up):
    made_up.metrics["peers"].append({**made_up.metrics["peers"][0], "peer": "memory-budget", "setting": 0.5})
    name = "PyTorch's memory budget"
    for compiler, count in (("eager", 0), ("inductor", 1)):
        made_up.config["compiler"] = compiler
        assert [text.get_text() for text in times.time_plot(made_up).axes[0].texts].count(name) == count


def test_a_plan_is_named_by_what_it_minimizes_if_there_are_several(unet, made_up):
    assert times.label("auto", unet) == "plan (FLOPs)" and times.label("auto, rates", unet) == "plan"
    made_up.config["costs"] = ["counted"]
    assert times.label("auto", made_up) == "plan"
    assert [times.label(name, unet) for name in ("full", "rotor")] == ["per-block", "rotor"]


def test_the_choices_have_the_ranges_over_all_records(made_up):
    higher, compiled = copy.deepcopy(made_up), copy.deepcopy(made_up)
    higher.metrics["baseline"]["measured_peak_bytes"] = 80
    compiled.config["compiler"] = "inductor"
    compiled.metrics["peers"].append({**compiled.metrics["peers"][0], "peer": "memory-budget", "setting": 0.5})
    rows = {row["step"]: (row["peak"], row["time"]) for row in times.choices([made_up, higher, compiled])}
    assert rows["must stay within a budget"] == ("50 to 62", "3")
    assert rows["is compiled by Inductor, without `ackpt`"] == ("40", "20")
    assert rows["cannot be captured"] == ("40 to 50", "20")
    assert rows["cannot be captured, and is slightly too large"] == rows["does not fit with any of these"] == ("–", "–")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, at the import of Inductor
def test_every_step_is_compiled(tmp_path, no_inductor, monkeypatch):
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda gm, inputs: aot_autograd(fw_compiler=run_boxed)(gm, inputs)
    )
    config = FrontierConfig(
        "transformer", TOKENS, ("auto", "full"), (0.9, 0.05), ("checkpoint",), costs=("rates",), compiler="inductor"
    )
    record = run_frontier(config, timed_rounds=1)
    planned, refused, full = record.metrics["points"]
    baseline, (blocks,) = record.metrics["baseline"], record.metrics["peers"]
    limit = int(0.9 * baseline["measured_peak_bytes"])
    assert planned["measured_peak_bytes"] <= planned["limit_bytes"] == limit < baseline["measured_peak_bytes"]
    assert refused["least_bytes"] > baseline["resident_bytes"] + limit / 18 and "measured_peak_bytes" not in refused
    assert full["budget"] is None and full["measured_peak_bytes"] < baseline["measured_peak_bytes"]
    assert blocks["auto_peak_bytes"] <= blocks["measured_peak_bytes"] and "auto_seconds_ratio" in blocks
    assert all(report.is_correct(row, record) for row in (planned, full, blocks))
    assert not any("recompute_flops" in row for row in (planned, full, blocks))
    path = record.save(tmp_path / report.file_name(record))
    assert path.name == "frontier-transformer-inductor.json" and report.broken_promises(record) == []
    assert "refused" in report.text_table(record) and times.name_of(Record.load(path)) == "Transformer, Inductor"
