"""The step of Llama 3 8B that the chapters share."""

import json
from pathlib import Path

import pytest

from experiments.calculator.choices import HALF, NONE, PER_BLOCK
from experiments.calculator.settings import Setting, by_formula
from experiments.running_model import BATCH, GPU, LENGTH, OPTIMIZER, PRESET, compute, record

GRID = Path(__file__).parents[2] / "results" / "calculator" / "grid.json"


@pytest.mark.parametrize(("chapter", "policy"), [(1, NONE), (2, PER_BLOCK)])
def test_the_record_agrees_with_the_formulas_of_the_calculator(chapter, policy):
    setting = Setting(PRESET, GPU, HALF, OPTIMIZER, BATCH, LENGTH, policy=policy)
    formula = by_formula(json.loads(GRID.read_text()), setting)
    row = next(row for row in record()["rows"] if row["chapter"] == chapter)
    assert row["peak_bytes"] == pytest.approx(formula["peak_bytes"], rel=0.005)
    assert row["recompute_flops"] == pytest.approx(formula["recompute_flops"], rel=0.005)


def test_every_bar_adds_up_to_its_peak():
    small = list(compute(layers=2))
    assert [row["chapter"] for row in small] == [row["chapter"] for row in record()["rows"]]
    for row in (*small, *record()["rows"]):
        assert sum(row["at_peak"].values()) == row["peak_bytes"]
