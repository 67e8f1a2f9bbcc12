"""Which method when, from a record whose numbers are made up."""

from __future__ import annotations

import pytest

from experiments.reports import frontier_methods as methods
from experiments.results import Record, environment


def point(policy, peak, again):
    return {"policy": policy, "measured_peak_bytes": peak, "recompute_flops": again}


def peer(name, peak, again, off=0.0, setting=None):
    found = {"peer": name, "setting": setting, "measured_peak_bytes": peak, "recompute_flops": again}
    return {**found, "gradients_difference": off, "buffers_difference": 0.0}


@pytest.fixture
def record():
    metrics = {
        "baseline": {"measured_peak_bytes": 100, "flops": 1000},
        "rounding": {"gradients_difference": 1e-7, "buffers_difference": 0.0},
        "points": [
            point("full", 40, 300),
            point("full", 40, 300),
            point("auto", 60, 0),
            point("rotor", 80, 0),
            point("rotor", 50, 50),
            {"policy": "rotor", "budget": 0.1, "least_bytes": 50},
        ],
        "front": [{"peak_bytes": p, "recompute_flops": f} for p, f in ((100, 0), (60, 0), (30, 200))],
        "peers": [peer("checkpoint", 45, 330), peer("selective", 70, 0), peer("memory-budget", 20, 1, 0.1, 0.5)],
    }
    return Record("frontier", {}, metrics, environment())


def test_correct_points_are_listed_once_and_auto_has_its_frontier(record):
    found = methods.methods(record)
    assert found == {
        "the baseline": [(1.0, 0.0)],
        "full": [(0.4, 0.3)],
        "auto": [(0.3, 0.2), (0.6, 0.0), (1.0, 0.0)],
        "rotor": [(0.5, 0.05), (0.8, 0.0)],
        "torch: checkpoint": [(0.45, 0.33)],
        "torch: selective": [(0.7, 0.0)],
    }


def test_ranges_of_budgets_name_the_cheapest_method(record):
    rows = methods.by_budget(record)
    assert [(row["low"], row["high"]) for row in rows] == [
        (1.0, None),
        (0.8, 1.0),
        (0.7, 0.8),
        (0.6, 0.7),
        (0.5, 0.6),
        (0.45, 0.5),
        (0.3, 0.45),
    ]
    assert rows[0]["best"] == ["the baseline", "auto", "rotor", "torch: selective"]
    assert [row["best"] for row in rows[1:]] == [
        ["auto", "rotor", "torch: selective"],
        ["auto", "torch: selective"],
        ["auto"],
        ["rotor"],
        ["auto"],
        ["auto"],
    ]
    assert rows[4]["again"] == (0.05, 0.05) and rows[-1]["again"] == (0.2, 0.2)
    assert [row["torch_again"] for row in rows] == [0.0, 0.0, 0.0, 0.33, 0.33, 0.33, None]
    assert rows[-1]["torch"] == []


def test_a_range_has_the_extremes_of_recomputation(record):
    record.metrics["front"].append({"peak_bytes": 25, "recompute_flops": 500})
    assert methods.by_budget(record)[-1] == {
        "low": 0.25,
        "high": 0.45,
        "best": ["auto"],
        "again": (0.2, 0.5),
        "torch": [],
        "torch_again": None,
    }


def test_standings_count_the_methods_cheaper_than_auto_and_equal_to_it(record):
    rows = {row.pop("method"): row for row in methods.standings(record)}
    assert rows["rotor"] == {"peak": 0.5, "again": 0.05, "auto": 0.2, "points": 2, "ahead": 1, "level": 1}
    assert rows["full"] == {"peak": 0.4, "again": 0.3, "auto": 0.2, "points": 1, "ahead": 0, "level": 0}
    assert rows["torch: selective"]["level"] == 1 and "auto" not in rows and "torch: memory budget" not in rows


def test_a_budget_infeasible_for_auto_counts_against_it(record):
    record.metrics["points"].append(point("rotor", 10, 900))
    rows = {row["method"]: row for row in methods.standings(record)}
    assert rows["rotor"]["auto"] is None and rows["rotor"]["ahead"] == 2
