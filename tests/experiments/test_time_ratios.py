"""Predicted ratios of published times: their rows, blocks of equal times, and the file that keeps predictions."""

import pytest

from experiments.published import time_ratios
from experiments.published.time_ratios import METHODS, Times, compared, table
from experiments.results import load_reference

LAYER = {"width": 64, "heads": 4, "batch": 2, "length": 32, "ranks": 2}
ROW = {"step": "megatron-layer", "gpu": "a100-80g", "unit": "ms", "method": "checkpointing", "against": "baseline"}
ROW |= {"source": "nobody", "what": "a layer", "figures": [4, 3], "sizes": {**LAYER, "blocks": 1}}


def seconds(method: str, **sizes) -> float:
    return time_ratios._seconds("megatron-layer", "a100-80g", method, {**LAYER, **sizes})


def test_rows_are_complete():
    rows = load_reference(time_ratios.REFERENCE)["rows"]
    assert len(rows) >= 10 and len({row["source"] for row in rows}) >= 3
    for row in rows:
        assert {row["method"], row["against"]} <= set(METHODS) and row["url"]
        assert row["unit"] in ("s", "ms", "tokens/s") and min(row["figures"]) > 0


@pytest.mark.parametrize("method", ["baseline", "checkpointing", "every second layer", "attention core recomputed"])
def test_two_and_four_blocks_give_the_time_of_any_number(method, monkeypatch):
    six = seconds(method, blocks=6)
    monkeypatch.setattr(time_ratios, "MORE", 6)
    assert six == pytest.approx(seconds(method, blocks=6), rel=1e-9)


def test_recomputation_costs_at_most_a_forward():
    baseline, core, every = (seconds(m, blocks=1) for m in ("baseline", "attention core recomputed", "checkpointing"))
    assert baseline < core < every < 1.5 * baseline
    assert seconds("every second layer", blocks=2) == pytest.approx(baseline + every)


def test_repeats_and_copies_that_nothing_overlaps_with():
    assert seconds("baseline", blocks=2, repeats=3) == pytest.approx(3 * seconds("baseline", blocks=2))
    copies = seconds("checkpointing, offload that waits", blocks=3) - seconds("checkpointing", blocks=3)
    one = 2 * LAYER["batch"] * LAYER["length"] * LAYER["width"] / 32e9  # the first input is the caller's
    assert copies == pytest.approx(2 * 2 * one)


def test_a_ratio_and_its_error(tmp_path):
    found = compared(ROW, Times(tmp_path / "times.json"))
    assert found["ratio"] == 4 / 3 and found["error"] == pytest.approx(found["predicted"] / (4 / 3) - 1)
    rates = compared({**ROW, "unit": "tokens/s", "figures": [3, 4]}, Times(tmp_path / "times.json"))
    assert (rates["ratio"], rates["predicted"]) == (4 / 3, found["predicted"])
    large = {**found, "error": -0.2}
    tables = [table([row], "A caption.", "a-name") for row in (large, {**found, "error": 0.1})]
    assert "| **-20.0** |" in tables[0] and "**" not in tables[1]


def test_no_published_ratio_is_far_off():
    """The claim of the chapter; predictions of other code are made again, which takes a minute."""
    times = Times()
    found = [compared(row, times) for row in load_reference(time_ratios.REFERENCE)["rows"]]
    assert sum(abs(row["error"]) <= 0.05 for row in found) >= 0.7 * len(found)
    assert max(abs(row["error"]) for row in found) < 0.25
