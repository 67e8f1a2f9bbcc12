"""Chains that lie on the curves of the theory, and what policies make of graphs."""

import pytest
import torch

import ackpt
from ackpt.experiments.reports.figures import curves_plot, schedule_plot
from ackpt.experiments.sublinear import ChainConfig, lowest, measured, predicted, pyramid, run, within
from ackpt.graph import PlannedStep
from ackpt.metering.timeline import Timeline
from ackpt.policies import revolve

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")


@pytest.mark.parametrize(
    ("blocks", "method", "live", "beside", "runs_again"),
    [
        (20, "plain", 20, 3, 0),
        (16, "sqrt", 7, 3, 12),
        (16, "falling", 6, 4, 13),
        (20, "falling", 6, 4, 18),
        (16, "halves", 4, 6, 32),
        (16, "chen-sqrt", 7, 2, 9),
        (16, "chen-log", 5, 2, 17),
    ],
)
def test_a_chain_takes_what_theory_says(blocks, method, live, beside, runs_again):
    config = ChainConfig(blocks, method)
    found = run(config).metrics
    assert predicted(config) == (live, beside, runs_again)
    assert (found["live"], found["runs_again"]) == (live + beside, runs_again)
    assert found["rest_bytes"] in (0, 8)  # the loss and its gradient
    in_all = found["live"] * config.activation_bytes + found["rest_bytes"] + found["gradient_bytes"]
    assert found["dynamic_peak_bytes"] == in_all


@pytest.mark.parametrize("snapshots", [2, 16])
def test_snapshots_run_again_what_revolve_says(snapshots):
    found = run(ChainConfig(16, "revolve", snapshots)).metrics
    assert found["runs_again"] == revolve.advances(16, snapshots) - 15
    assert snapshots <= found["live"] <= snapshots + 6


def test_a_record_keeps_as_much_of_its_timeline_as_it_is_told():
    config = ChainConfig(16, "plain")
    assert "timeline" not in run(config).metrics
    found = run(config, points=20).metrics
    timeline = Timeline.from_json(found["timeline"])
    assert 10 < len(timeline.live) < 30 and timeline.peak_bytes == found["dynamic_peak_bytes"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"blocks": 15, "method": "plain"}, "at least 16, got 15"),
        ({"blocks": 16, "method": "cubic"}, "'cubic' is not known; there are plain, sqrt"),
        ({"blocks": 17, "method": "sqrt"}, "square number of blocks, got 17"),
        ({"blocks": 25, "method": "chen-log"}, "power of two, got 25"),
        ({"blocks": 16, "method": "revolve"}, "needs a number of them"),
        ({"blocks": 16, "method": "plain", "snapshots": 2}, "snapshots are for the method revolve"),
        ({"blocks": 16, "method": "revolve", "snapshots": 17}, "from 1 to 16"),
        ({"blocks": 16, "method": "plain", "rows": 0}, "rows must be at least 1"),
    ],
)
def test_bad_settings_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        ChainConfig(**config)


def narrowing():
    model, x = pyramid(2, 4, 4), torch.randn(256, 4)
    graph = ackpt.trace(model, x)
    return model, x, graph, ackpt.profile(graph)


def test_a_pyramid_halves_its_activations_and_keeps_its_flops():
    _, _, graph, profile = narrowing()
    kept = [a.bytes for a in ackpt.plan(graph, profile=profile).activations]
    assert kept == 5 * [4096] + 4 * [2048]
    flops = [profile.flops[node.id] for node in graph.nodes[: graph.boundary] if profile.flops[node.id]]
    assert flops == 4 * [8192] + [16384] + 4 * [8192]


def test_policies_within_budgets():
    model, x, graph, profile = narrowing()
    rows = within(graph, profile, (1.0, 0.8, 0.01), ("chen-sqrt", "rotor"))
    assert [(row["policy"], row["budget"]) for row in rows][2:4] == [("chen-sqrt", 0.01), ("rotor", 1.0)]
    for row in rows:
        if row["budget"] == 0.01:
            assert row["peak"] is row["cost"] is None
        else:
            assert row["peak"] <= row["budget"] and (row["cost"] > 0) == (row["budget"] < 1)
    least = lowest(graph, profile, "rotor")
    found = measured(model, PlannedStep(model, lambda graph: ackpt.plan(graph, least.peak_bytes, "rotor")), (x,))
    assert found.dynamic_peak_bytes == least.dynamic_peak_bytes < 0.8 * least.baseline_dynamic_peak_bytes
    with pytest.raises(ackpt.BudgetError):
        ackpt.plan(graph, least.peak_bytes - 1, "rotor", profile=profile)


def test_curves_show_points_and_lines():
    values = {"a": {16: 1, 64: 2}, "b": {16: 3}}
    (axes,) = curves_plot(values, values, "a finding", xlabel="x", ylabel="y", logs=("x", "y")).axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["16", "64"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b", "predicted", "measured"]
    assert axes.get_yscale() == "log" and curves_plot(values, {}, "", xlabel="", ylabel="").axes[0].get_ylim()[0] == 0


def test_a_schedule_is_as_long_as_its_steps():
    (axes,) = schedule_plot(revolve.schedule(4, 2), 4, "a finding").axes
    assert axes.get_xlim() == (0, revolve.advances(4, 2) + 4)
    flat = [line for line in axes.lines if len({*line.get_ydata()}) == 1]
    assert sorted(line.get_ydata()[0] for line in flat) == [0, 2]
