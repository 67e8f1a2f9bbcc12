"""Binomial checkpointing: the table, the recursion it solves, and a replay of every schedule."""

from functools import cache

import pytest

from experiments.policies import revolve


@cache
def least(steps, snapshots):
    if steps == 1:
        return 0
    if snapshots == 1:
        return steps * (steps - 1) // 2
    return min(j + least(steps - j, snapshots - 1) + least(j, snapshots) for j in range(1, steps))


@pytest.mark.parametrize("snapshots", range(1, 9))
def test_the_closed_form_is_the_recursion(snapshots):
    for steps in range(1, 60):
        assert revolve.advances(steps, snapshots) == least(steps, snapshots)


def replay(actions, steps):
    """Runs `actions` on numbered states: (advances, most snapshots at once, most advances of one step)."""
    state, reversed_down_to, saved, most, runs = 0, steps, set(), 0, [0] * steps
    for at, (kind, *where) in enumerate(actions):
        if kind == "save":
            assert where == [state]
            loaded_later = {action[1] for action in actions[at:] if action[0] == "load"}
            saved = {snapshot for snapshot in saved if snapshot in loaded_later} | {state}
            most = max(most, len(saved))
        elif kind == "load":
            assert where[0] in saved
            state = where[0]
        elif kind == "advance":
            start, end = where
            assert start == state < end < reversed_down_to
            for step in range(start, end):
                runs[step] += 1
            state = end
        else:
            assert kind == "step" and where == [state + 1] == [reversed_down_to]
            reversed_down_to, state = state, None
    assert reversed_down_to == 0
    return sum(runs), most, max(runs)


@pytest.mark.parametrize("snapshots", range(1, 8))
def test_schedules_have_their_counts_when_replayed(snapshots):
    for steps in range(1, 50):
        advances, most, repeats = replay(revolve.actions(steps, snapshots), steps)
        assert advances == revolve.advances(steps, snapshots)
        assert most <= snapshots
        assert revolve.beta(snapshots, repeats - 1) < steps <= revolve.beta(snapshots, repeats)


@pytest.mark.parametrize("snapshots, repeats, steps", [(1, 5, 6), (2, 2, 6), (3, 2, 10), (10, 3, 286), (4, 0, 1)])
def test_beta_counts_the_steps_in_reach(snapshots, repeats, steps):
    assert revolve.beta(snapshots, repeats) == steps
    # One step more makes one step run once more.
    assert replay(revolve.actions(steps, snapshots), steps)[2] == repeats
    assert replay(revolve.actions(steps + 1, snapshots), steps + 1)[2] == repeats + 1


@pytest.mark.parametrize("steps, snapshots", [(7, 2), (10, 3), (32, 5), (100, 10)])
def test_against_checkpoint_schedules(steps, snapshots):
    oracle = pytest.importorskip("checkpoint_schedules")
    advanced = 0
    found = oracle.Revolve(steps, snapshots)
    for action in found:
        if isinstance(action, oracle.Forward):
            advanced += action.n1 - action.n0
        if isinstance(action, oracle.EndReverse):
            break
    assert advanced - steps == revolve.advances(steps, snapshots)


@pytest.mark.parametrize(
    "steps, snapshots, what", [(0, 1, "steps"), (3, 0, "snapshots"), (2.0, 1, "steps"), (3, True, "")]
)
def test_bad_input_is_refused(steps, snapshots, what):
    for function in (revolve.advances, revolve.actions):
        with pytest.raises(ValueError, match=f"{what} must be a whole number, at least 1"):
            function(steps, snapshots)
