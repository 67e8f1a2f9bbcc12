"""The theory side by side: no policy is cheaper than one that covers it."""

import pytest
from hypothesis import given, settings
from test_rotor import chains, equal, replay

from experiments.policies import chen, revolve, rotor


@pytest.mark.parametrize("n", [2, 5, 9, 16])
def test_rotor_is_not_slower_than_binomials(n):
    # Beside the snapshots, of which the start is the caller's, live a gradient and two states while one is passed.
    for snapshots in range(1, n + 1):
        binomial = revolve.advances(n, snapshots) + 2 * n
        assert rotor.solve(equal(n), snapshots + 2).time <= binomial


@pytest.mark.parametrize("n", [4, 9, 16, 30])
def test_rotor_is_not_slower_than_segments_and_halves(n):
    segments = chen.sqrt_counts(n)
    assert rotor.solve(equal(n), segments.peak + 2).time <= segments.extra_forwards + segments.boundaries + 2 * n
    assert rotor.solve(equal(n), chen.recursive_peak(n) + 2).time <= chen.recursive_extra_forwards(n) + 2 * n


@settings(max_examples=60, deadline=None)
@given(chains(stages=6))
def test_the_frontier_of_rotor_has_the_fastest_schedule_of_every_budget(chain):
    found = [(replay(chain, solution.operations), solution.time) for solution in rotor.frontier(chain)]
    assert all(time == promised for (time, _), promised in found)
    for (_, peak), _ in found:
        if peak:
            assert rotor.solve(chain, peak).time == min(time for (time, taken), _ in found if taken <= peak)
    peaks = [peak for (_, peak), _ in found]
    assert peaks == sorted(peaks, reverse=True)
    everything = sum(chain.forward) + sum(chain.backward)
    assert found[0][1] == everything
