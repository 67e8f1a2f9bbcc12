"""Binomial checkpointing: the table, the recursion it solves, and a replay of every schedule."""

from functools import cache

import pytest

from experiments.policies import revolve

SNAPSHOTS = (1, 2, 3, 4, 5, 6, 8, 10)
TABLE = {
    4: (6, 4, 3, 3, 3, 3, 3, 3),
    10: (45, 20, 15, 14, 13, 12, 10, 9),
    16: (120, 45, 33, 27, 25, 24, 22, 20),
    32: (496, 140, 93, 75, 68, 60, 54, 52),
    100: (4950, 845, 490, 374, 316, 280, 245, 222),
    1000: (499500, 28820, 12155, 7998, 6284, 5284, 4285, 3636),
}


@pytest.mark.parametrize("steps", TABLE)
def test_advances_of_the_table(steps):
    assert tuple(revolve.advances(steps, snapshots) for snapshots in SNAPSHOTS) == TABLE[steps]


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


def test_a_long_chain_has_its_counts_when_replayed():
    assert replay(revolve.actions(1000, 10), 1000)[:2] == (3636, 10)
    assert replay(revolve.actions(1000, 2000), 1000) == (999, 999, 1)


def test_the_schedule_of_four_steps():
    assert revolve.actions(4, 2) == [
        ("save", 0),
        ("advance", 0, 2),
        ("save", 2),
        ("advance", 2, 3),
        ("step", 4),
        ("load", 2),
        ("step", 3),
        ("load", 0),
        ("advance", 0, 1),
        ("step", 2),
        ("load", 0),
        ("step", 1),
    ]


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
