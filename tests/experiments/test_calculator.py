"""The memory calculator: its formulas against plans of whole models, and what the committed grid holds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import raises

from ackpt.planner.costs.devices import DEVICES
from experiments.calculator import choices, settings
from experiments.calculator import grid as grids
from experiments.calculator.measured import Measured
from experiments.calculator.polynomials import NotExact, Point, Points, terms
from experiments.calculator.presets import PRESETS, Preset
from experiments.calculator.sample import difference, drawn, rows_of
from experiments.calculator.settings import Setting, by_formula, by_plan

FOLDER = Path(__file__).parent.parent.parent / "results" / "calculator"
POINTS = Points(Point(4, 1), Point(12, 4), Point(2, 2))
TINY = Preset(
    "tiny",
    "a tiny Llama",
    "hf:LlamaConfig",
    {
        "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 4096,
    },
    longest=4096,
)  # fmt: skip


def committed(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("values", "coefficients"),
    [
        ((20, 240, 20), {3: 5}),  # batch and length
        ((4, 12, 2), {1: 1}),
        ((7, 112, 28), {4: 7}),  # the square of the length
        ((512, 512, 512), {0: 512}),
        ((4608, 49664, 4608), {0: 512, 3: 1024}),  # and one block more
        ((-4608, -49664, -4608), {0: -512, 3: -1024}),
        ((4128, 49248, 4112), {1: 8, 3: 1024}),  # and one column more
    ],
)
def test_terms_are_those_of_monomials(values, coefficients):
    found = terms([[value] for value in values], POINTS)[0]
    assert {place: value for place, value in enumerate(found.tolist()) if value} == coefficients


@pytest.mark.parametrize("values", [(20, 240, 21), (20, 100, 20), (5, 60, 5), (0, 7, 0)])
def test_sizes_that_no_monomial_reproduces_are_refused(values):
    raises(NotExact, "event 0 has", lambda: terms([[value] for value in values], POINTS))


@pytest.fixture(scope="module")
def tiny():
    """The grid of a tiny model, computed here from two of its eight blocks' kinds of windows."""
    preset, mode = TINY, choices.SINGLE
    measured = Measured.of(preset, mode, "8.0")
    assert measured.layers == 4
    single, sharded = measured.formulas()
    assert measured.formulas() == (single, sharded)
    resident = grids.resident(preset, mode)
    of_rank = grids.sharded_resident(preset, mode, mode, resident)
    entry = {
        "name": preset.name,
        "formulas": [single, sharded[mode]],
        "modes": {mode: {**resident, "inputs": measured.inputs(), "formulas": {"8.0": 0}}},
        "sharded": {mode: {**of_rank, "inputs": measured.inputs(), "formulas": {"8.0": 1}}},
    }
    return {**grids.header(), "presets": [entry]}


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": choices.NONE, "batch": 5, "length": 256},
        {"policy": choices.NONE, "batch": 1, "length": 1920, "optimizer": "sgd-momentum"},
        {"policy": choices.FIRST_BLOCKS, "blocks": 2},
        {"policy": choices.FIRST_BLOCKS, "blocks": 6, "batch": 1},
        {"policy": choices.PER_BLOCK, "optimizer": "adamw-8bit"},
        {"policy": choices.NONE, "ranks": 8},
        {"policy": choices.PER_BLOCK, "ranks": 2, "batch": 6, "length": 512},
    ],
    ids=str,
)
@pytest.mark.usefixtures("captured_once")
def test_formulas_equal_plans_of_the_whole_model(tiny, monkeypatch, changes):
    monkeypatch.setattr(settings, "PRESETS", (TINY,))
    setting = replace(Setting("tiny", "a100-80g", choices.SINGLE, "adamw", 3, 1024), **changes)
    formula, plan = by_formula(tiny, setting), by_plan(setting)
    assert formula["peak_bytes"] == pytest.approx(plan["peak_bytes"], abs=64 * 512)
    assert (formula["flops"], formula["recompute_flops"]) == (plan["flops"], plan["recompute_flops"])
    assert difference(tiny, {"setting": vars(setting), "planned": plan}) < 0.001


def test_the_grid_has_its_models_and_gpus():
    data = committed("grid")
    counts = [entry["modes"]["half"]["count"] for entry in data["presets"]]
    assert len(counts) >= 29 and min(counts) < 0.2e9 and max(counts) > 70e9
    assert set(data["gpus"]) == set(DEVICES)
    assert {key: data[key] for key in grids.header()} == json.loads(json.dumps(grids.header()))
    assert (FOLDER / "grid.json").stat().st_size < 700_000
    assert data["made"]["command"] == "nox -s calculator" and data["made"]["environment"]["torch"]


@pytest.mark.parametrize("optimizer", [name for name in grids.MADE_BY if name != "adamw-8bit"])
def test_the_code_to_paste_runs(optimizer):
    model, batch = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)), torch.ones(4, 8)
    code = grids.CALL.replace("OPTIMIZER", grids.MADE_BY[optimizer]).replace("BUDGET", "0.5GiB")
    names = {"torch": torch, "model": model, "batch": batch}
    exec(code, names)
    before = model[0].weight.detach().clone()
    model(batch).sum().backward()
    names["optimizer"].step()
    assert not torch.equal(model[0].weight, before)


def test_the_grid_is_of_the_presets():
    presets = {preset.name: preset for preset in PRESETS}
    for entry in committed("grid")["presets"]:
        preset = presets[entry["name"]]
        assert (entry["model"], entry["fields"], entry["longest"]) == (preset.model, preset.fields, preset.longest)
        assert f"{preset.label}" == entry["label"]


def test_the_committed_sample_agrees_with_the_formulas():
    data, sample = committed("grid"), committed("sample")
    rows = rows_of(sample)
    assert max(difference(data, row) for row in rows) < 0.005
    for group in sample["samples"]:
        presets = [preset for preset in data["presets"] if preset["name"] in group["presets"]]
        drawn_again = [setting for setting, _ in zip(drawn({**data, "presets": presets}), group["rows"])]
        assert [row["setting"] for row in group["rows"]] == [vars(setting) for setting in drawn_again]
    policies = {row["setting"]["policy"] for row in rows}
    assert {choices.NONE, choices.PER_BLOCK} <= policies <= set(choices.POLICIES)
    assert {1} < {row["setting"]["ranks"] for row in rows}


def test_cheap_settings_of_the_sample_are_planned_as_committed():
    rows = sorted(rows_of(committed("sample")), key=lambda row: row["planned"]["flops"])
    for row in rows[:2]:
        assert by_plan(Setting(**row["setting"])) == row["planned"]
    assert torch.get_default_dtype() == torch.float32
