"""The memory bars' data: bytes are the plans' own, and every formula's numbers give them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import ackpt
from ackpt.experiments.widgets import memory_bars
from ackpt.experiments.widgets.memory_bars import MODELS, Bars, value
from ackpt.workloads.named_models import training_step
from ackpt.workloads.planned_shapes import PlanConfig, captured

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")
BLOCKS = {"layers": 1, "dim": 16, "ff_dim": 32, "head_dim": 8}
SMALL = (
    Bars("transformer", "blocks", "seq_len", (32,), 2, BLOCKS),
    Bars("lm", "with a head", "seq_len", (32,), 2, {**BLOCKS, "vocab_size": 20}),
)


@pytest.fixture(scope="module")
def data():
    return memory_bars.memory_bars(SMALL)


def steps(data):
    """Those made here, and those of the page, of which some budgets are kept and some refused."""
    page = json.loads((ROOT / "results" / "explorer" / "01_memory_bars.json").read_text(encoding="utf-8"))
    return [step for model in (*data["models"], *page["models"]) for step in model["steps"]]


def test_the_bytes_are_those_of_the_plans(data):
    config = PlanConfig(SMALL[0].request(32))
    graph = captured(training_step(config.step), config, None)
    profile = ackpt.profile(graph)
    (shown,) = data["models"][0]["steps"]
    with pytest.raises(ackpt.BudgetError) as refused:
        ackpt.plan(graph, 1e-6, profile=profile)
    wanted = {"none": (None, "none"), "full": (None, "full"), "least": (refused.value.least_bytes, "auto")}
    for name, (budget, policy) in wanted.items():
        plan = ackpt.plan(graph, budget, policy, profile=profile)
        assert shown["plans"][name]["peak_bytes"] == plan.peak_bytes
        assert shown["plans"][name]["kept"]["bytes"] == plan.saved_bytes
        assert shown["plans"][name]["recompute_flops"] == plan.recompute_flops


def test_every_formula_gives_the_bytes_beside_it(data):
    for step in steps(data):
        assert value(step["kept"]["numbers"]) == step["kept"]["bytes"] == step["plans"]["none"]["kept"]["bytes"]
        always = value(step["always"]["numbers"])
        for plan in filter(None, step["plans"].values()):
            at_peak, kept = plan["at_peak"], plan["kept"]
            assert sum(at_peak.values()) == plan["peak_bytes"]
            resident = ("parameters", "buffers", "inputs", "optimizer")
            assert sum(at_peak[name] for name in resident) == always == step["always"]["bytes"]
            assert kept["all"] - kept["dropped"] + kept["instead"] == kept["bytes"]
            assert kept["all"] == step["kept"]["bytes"]


def test_a_refused_budget_has_no_bytes(data):
    refused = [step for step in steps(data) if step["plans"]["half"] is None]
    for step in steps(data):
        resident = step["always"]["bytes"]
        half = (step["plans"]["none"]["peak_bytes"] - resident) // 2
        assert (step in refused) == (step["least_bytes"] > half)
        assert step in refused or step["plans"]["half"]["peak_bytes"] <= half + resident
        assert step["plans"]["least"]["peak_bytes"] == step["least_bytes"] + resident
    assert 0 < len(refused) < len(steps(data))


def test_a_formula_of_other_bytes_is_refused():
    assert memory_bars._formula("a b", "2 × (1,000 + 1)", 2002)["bytes"] == 2002
    with pytest.raises(ValueError, match="gives 2002 bytes, and the step has 2003"):
        memory_bars._formula("a b", "2 × (1,000 + 1)", 2003)


def test_the_models_of_the_page_can_be_built():
    assert len({model.label for model in MODELS}) == len(MODELS)
    for model in MODELS:
        for size in model.sizes:
            step = training_step(dataclasses.replace(model.request(size), batch_size=1))
            assert step.parameters > 1e6


def test_the_data_are_plain_and_small(data):
    assert json.loads(json.dumps(data)) == data
    assert data["categories"][0] == "parameters" and set(data["policies"]) == {"none", "full", "half", "least"}
    assert len(json.dumps(data)) < 30_000
