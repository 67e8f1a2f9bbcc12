"""The frontier of tiny models: predicted to the byte, counted to the FLOP; its times, and torch's own tools."""

import copy
import io
import json
import sys

import pytest
import torch
from forked import output_of
from PIL import Image
from steps import run_boxed
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config

import ackpt
from experiments.cli.command_line import main
from experiments.frontier import FrontierConfig, run_frontier
from experiments.reports import frontier as report
from experiments.reports import frontier_times as times
from experiments.reports.plots import png
from experiments.results import Record, environment
from experiments.steps.frontier_models import checked_sizes, workload
from experiments.steps.frontier_runs import Runs
from experiments.steps.peers import CHECKPOINT, MEMORY_BUDGET, SELECTIVE, peer

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


TOKENS_PEERS = 2 * 24


@pytest.fixture(scope="module")
def runs():
    work = workload("transformer", checked_sizes("transformer", SIZES), 0)
    found = Runs(work, 0, 0)
    graph = ackpt.trace(work.model, *work.args)
    found.first(ackpt.plan(graph, policy="none"))
    return found


def run(runs, name, setting=None):
    with peer(name, runs.work, setting) as call:
        return runs.of(call, compiles=name == MEMORY_BUDGET)


def test_checkpoint_recomputes_every_block_except_its_last_product(runs):
    found = run(runs, CHECKPOINT)
    x = torch.randn(2, 24, 16)
    with torch.no_grad():
        forward = sum(ackpt.count_flops(lambda block=block: block(x)) for block in runs.work.blocks)
    assert found["recompute_flops"] == forward - 2 * 2 * TOKENS_PEERS * 32 * 16
    assert found["gradients_difference"] == found["buffers_difference"] == 0.0


def test_selective_recomputes_no_product_and_saves_more(runs):
    kept = [parameter.detach().clone() for parameter in runs.work.model.parameters()]
    assert 0 < runs.rounding()["gradients_difference"] < 1e-4
    assert all(map(torch.equal, kept, runs.work.model.parameters()))
    baseline, blocks, found = runs.of(runs.work.model), run(runs, CHECKPOINT), run(runs, SELECTIVE)
    assert found["recompute_flops"] == baseline["recompute_flops"] == 0
    peaks = [row["measured_peak_bytes"] for row in (blocks, found, baseline)]
    assert peaks == sorted(peaks) and len({*peaks}) == 3
    assert found["gradients_difference"] == 0.0


def test_the_model_and_torch_are_as_before(runs):
    run(runs, CHECKPOINT)
    assert not any("forward" in vars(block) for block in runs.work.blocks)
    with peer(SELECTIVE, runs.work) as call, pytest.raises(IndexError):
        call(runs.work.args[0] + 20, runs.work.args[1])
    assert not any("forward" in vars(block) for block in runs.work.blocks)
    with peer(MEMORY_BUDGET, runs.work, 0.5):
        assert config.activation_memory_budget == 0.5
    assert config.activation_memory_budget == 1.0


FAULTS = """
import resource
import torch
from experiments.steps.frontier_runs import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(min(faults() for _ in range(4)))
print(keep_freed_memory())
print(min(faults() for _ in range(4)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sets options of glibc")
def test_memory_that_is_kept_when_freed_causes_no_page_faults(tmp_path):
    """A tensor of 64 MiB has 16384 pages of 4 KiB, or fewer larger ones."""
    (tmp_path / "faults.py").write_text(FAULTS)
    returned, kept_now, kept = output_of(tmp_path / "faults.py", folder=tmp_path).split()
    assert kept_now == "True" and int(returned) > 30 and int(kept) < 10
