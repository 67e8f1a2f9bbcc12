"""Which blocks are saved, from the record of a first step."""

import pytest

from ackpt.planner.parts.regions_plan import Record, Run, Segment


@pytest.mark.parametrize(("limit", "saved"), [(250, ["second"]), (289, ["second"]), (290, ["first", "second"])])
def test_among_equal_blocks_the_last_are_saved_first(limit, saved):
    first, second = (Run(path, 0, 0, held_bytes=100, cost=1.0) for path in ("first", "second"))
    held = [Segment(50, first, change=100), Segment(60, second, change=100), Segment(90, second, change=-100)]
    backward = [Segment(190, second, None), Segment(160, second), Segment(150, first, change=-100), Segment(250, first)]
    assert sorted(Record([*held, *backward]).chosen(limit)) == saved
