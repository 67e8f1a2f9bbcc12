"""Which blocks are saved, from the record of a first step."""

import pytest

from ackpt.planner.parts.regions_plan import BEGINS, ENDS, HELD, RECOMPUTED, Record, Run


@pytest.mark.parametrize(("limit", "saved"), [(250, ["second"]), (289, ["second"]), (290, ["first", "second"])])
def test_among_equal_blocks_the_last_are_saved_first(limit, saved):
    first, second = (Run(path, 0, 0, held_bytes=100, cost=1.0) for path in ("first", "second"))
    events = [(50, first, HELD), (60, second, HELD), (90, second, BEGINS), (190, second, RECOMPUTED)]
    record = Record([*events, (160, second, ENDS), (150, first, BEGINS), (250, first, ENDS)])
    assert sorted(record.chosen(limit)) == saved
