"""Do the pitfalls tell a wrong checkpoint, and a wrong copy, from a correct one?"""

from functools import partial

from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ackpt
from experiments.pitfalls import copies
from experiments.pitfalls.checkpoints import STEPS, plain, verdicts

RAISES = {
    "create_graph=True",
    "parameter changed before backward",
    "input overwritten",
    "recomputation returns another shape",
    "plain Python value changed",
    "constant tensor from a changed value",
}


def test_pitfalls_are_errors_with_ackpt_and_silent_with_torch():
    reentrant = partial(torch_checkpoint, use_reentrant=True)
    rows = verdicts({"plain": plain, "ackpt": ackpt.checkpoint, "reentrant": reentrant})
    assert [row["pitfall"] for row in rows] == list(STEPS)
    expected = {name: "error" if name in RAISES else "right" for name in STEPS}
    assert {row["pitfall"]: row["ackpt"] for row in rows} == expected
    assert {row["pitfall"] for row in rows if row["plain"] != "right"} == {"parameter changed before backward"}
    assert sum(row["reentrant"] == "wrong" for row in rows) > 8


def test_copies_with_the_bug_give_wrong_bytes_and_with_the_fix_correct_ones():
    *races, pinned = copies.outcomes()
    assert [(row["with the bug"], row["with the fix"]) for row in races] == [("wrong bytes", "correct")] * 4
    assert (pinned["with the bug"], pinned["with the fix"]) == ("48 allocations", "8 allocations")
