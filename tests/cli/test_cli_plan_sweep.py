"""``ackpt plan --sweep``, budgets in reserved bytes, accumulated gradients, and peaks by phase."""

import pytest
from test_cli_plan import GPT2, planned

from ackpt.cli import main, plan_text
from ackpt.cli.plan_text import Sweep
from ackpt.planner.workloads.planned_shapes import PlanConfig, run_plan
from ackpt.planner.workloads.step_request import StepRequest

pytestmark = pytest.mark.usefixtures("captured_once")
MIB = 2**20
KINDS = "adamw-fused", "adamw-for-loop", "adamw-8bit"
SMALL = [each for each in GPT2 if each not in ("--seq-len", "16")]


def config(batch_size=1, **options) -> PlanConfig:
    fields = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}
    return PlanConfig(StepRequest("hf:GPT2Config", batch_size, 512, None, fields), **options)


def test_a_range_doubles_and_then_finds_the_largest_multiple_that_fits(capsys):
    most = planned(capsys, *SMALL, "--seq-len", "96")["peak_bytes"]
    swept = planned(capsys, *SMALL, "--sweep", "seq_len=16:128", "--budget", str(most), "--policy", "none")
    assert [plan["seq_len"] for plan in swept["plans"]] == [16, 32, 64, 96, 112, 128]
    assert swept["largest"] == 96
    assert swept["plans"][3]["peak_bytes"] == most
    assert swept["plans"][-1]["smallest_budget"] > most


def test_the_largest_batch_within_a_slowdown(capsys):
    small = ["hf:GPT2Config", "--set", "n_layer=1", "n_embd=64", "n_head=2", "vocab_size=100", "n_positions=64"]
    small += ["--optimizer", "none", "--seq-len", "64", "--budget", "1.6MiB"]
    swept = planned(capsys, *small, "--largest", "batch_size", "--slowdown", "10%")
    by_size, largest = {plan["batch_size"]: plan for plan in swept["plans"]}, swept["largest"]
    assert 0 < by_size[largest]["cost"] <= 0.1
    assert "slowdown='10%' allows 10.0%" in by_size[largest + 1]["refused"]
    assert planned(capsys, *small, "--batch-size", str(largest + 1))["cost"] > 0.1


def test_the_largest_length_is_that_of_the_models_positions(capsys):
    swept = planned(capsys, *SMALL, "n_positions=256", "--largest", "seq_len", "--budget", "1GiB")
    assert [plan["seq_len"] for plan in swept["plans"]] == [128, 256] and swept["largest"] == 256
    assert main(["plan", *SMALL, "n_positions=256", "--largest", "seq_len", "--budget", "1GiB"]) == 0
    assert capsys.readouterr().out.endswith("largest that fits: seq len 256, and the model takes no larger one\n")


def test_a_row_of_a_sweep_equals_its_own_plan(capsys):
    alone = planned(capsys, *GPT2)
    (row,) = planned(capsys, *SMALL, "--sweep", "seq_len=16")["plans"]
    assert row == {"seq_len": 16, **alone}


def test_the_table_has_one_row_per_value(capsys):
    assert main(["plan", *GPT2, "--sweep", "device_profile=t4,h200"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["device", "profile", "peak", "reserved", "added", "time", "fits"]
    assert [row.split()[0] for row in rows] == ["t4", "h200"] and all("yes" in row for row in rows)


@pytest.mark.parametrize(
    ("text", "values", "step"),
    [
        ("seq_len=1024:16384", (1024, 2048, 4096, 8192, 16384), 1024),
        ("batch_size=3:7", (3, 6, 7), 3),
        ("batch-size=4,8", (4, 8), 0),
        ("image_size=64:64", (64,), 64),
        ("device_profile=t4,l4", ("t4", "l4"), 0),
    ],
)
def test_values_and_ranges_are_parsed(text, values, step):
    assert Sweep.parsed(text) in (Sweep(text.partition("=")[0].replace("-", "_"), values, step),)


@pytest.mark.parametrize("sweep", ["seq_len=512:16384", "seq_len=512,2000"])
def test_all_values_are_validated_before_planning(capsys, monkeypatch, sweep):
    monkeypatch.setattr(plan_text, "run_plan", None)
    assert main(["plan", *SMALL, "--sweep", sweep]) == 2
    assert "longer than the 1024 positions of this configuration" in capsys.readouterr().err
    assert main(["plan", *GPT2, "--sweep", "device_profile=t4,h300"]) == 2
    assert "'h300'" in capsys.readouterr().err


def test_the_table_shows_added_time(capsys):
    """Not FLOPs, of which a plan that recomputes norms and activation functions has hardly any."""
    row = run_plan(config(device="t4", policy="full"))
    line = Sweep("device_profile", ("t4",)).text({"t4": row}).splitlines()[1]
    assert f"{row.plan.cost:.1%}  yes" in line and row.plan.cost > 0


def test_a_budget_in_reserved_bytes_is_kept_where_the_same_number_of_allocated_bytes_is_not():
    free = run_plan(config(8, device="t4"))
    assert free.memory is not None
    most = free.memory.reserved - 20 * MIB  # one segment
    within = run_plan(config(8, device="t4", budget=f"{most}B reserved"))
    assert within.memory is not None and within.memory.reserved <= most
    allocated = run_plan(config(8, device="t4", budget=most))
    assert allocated.plan.recompute_flops == 0 < within.plan.recompute_flops


def test_a_budget_in_reserved_bytes_that_is_too_small_names_what_the_smallest_plan_reserves(capsys):
    options = ["--device-profile", "t4", "--budget", "1MiB reserved"]
    assert main(["plan", *GPT2, *options]) == 2
    assert "no plan was found for which the allocator reserves at most 1.0 MiB" in capsys.readouterr().err


@pytest.mark.parametrize("device", [None, "t4"])
def test_accumulated_gradients_count(device):
    one, more = (run_plan(config(device=device, accumulation=each)) for each in (False, True))
    gradients = one.graph.gradient_bytes
    assert more.plan.resident_bytes - one.plan.resident_bytes == gradients == more.at_peak()["accumulated gradients"]
    if device:
        assert one.memory is not None and more.memory is not None
        assert more.memory.allocated - one.memory.allocated == gradients


def test_phases_have_their_own_peaks():
    for optimizer in ("none", "adamw"):
        done = run_plan(config(device="t4", optimizer=optimizer))
        phases = done.by_phase()
        assert max(phases.values()) == done.plan.peak_bytes
        assert ("optimizer" in phases) == (optimizer == "adamw")
    assert phases["forward"] < phases["backward"]


@pytest.mark.parametrize("device", [None, "t4"])
def test_variants_of_adamw_have_their_bytes(device):
    kinds = {name: run_plan(config(device=device, optimizer=name)).graph for name in ("adamw", *KINDS)}
    state = {name: graph.optimizer_bytes for name, graph in kinds.items()}
    step = {name: graph.optimizer_step_bytes for name, graph in kinds.items()}
    elements = sum(p.numel() for p in run_plan(config()).step.model.parameters())
    assert 8 * elements <= state["adamw"] <= 8.3 * elements
    assert state["adamw-8bit"] < 0.28 * state["adamw"] and step["adamw-8bit"] == 0
    assert step["adamw-fused"] == (0 if device else 12) < step["adamw-for-loop"] <= step["adamw"]  # 12: of numbers
    if device:  # torch's default on a GPU updates all parameters at once
        assert step["adamw-for-loop"] < step["adamw"]
