"""Chains that lie on the curves of the theory, and what policies make of graphs."""

import pytest
import torch

import ackpt
from ackpt.graph import PlannedStep
from experiments.policies import revolve
from experiments.sublinear import lowest, measured, pyramid, run, within

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")


@pytest.mark.parametrize(("policy", "live", "again"), [("chen-sqrt", 9, 9), ("chen-log", 7, 17)])
def test_a_planned_chain_has_the_peak_of_the_theory(policy, live, again):
    found = run(16, policy)
    assert (found.live, found.recomputed_blocks) == (live, again)
    assert found.rest_bytes in (0, 8)  # the loss and its gradient


@pytest.mark.parametrize("snapshots", [2, 16])
def test_snapshots_recompute_as_revolve_counts(snapshots):
    found = run(16, "revolve", snapshots)
    assert found.recomputed_blocks == revolve.advances(16, snapshots) - 15
    assert snapshots <= found.live <= snapshots + 6


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


def test_policies_keep_their_budgets():
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
