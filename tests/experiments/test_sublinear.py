"""Chains that lie on the curves of the theory, and what policies make of graphs."""

import pytest

from experiments.policies import revolve
from experiments.sublinear import run

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
