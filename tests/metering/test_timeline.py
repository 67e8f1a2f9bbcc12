"""``build_timeline`` on hand-written allocator actions."""

from ackpt.metering.timeline import Timeline, build_timeline

ACTIONS = [
    ("alloc", 1, 100),  # saved
    ("alloc", 2, 10),
    ("free", 2),
    ("backward",),
    ("alloc", 2, 50),  # the address of 2 again: becomes a gradient
    ("mark", 2, "gradients"),
    ("free", 1),
    ("backward",),
    ("free", 9),  # not followed
    ("alloc", 3, 7),
    ("free", 7),
]


def test_categories():
    timeline = build_timeline(ACTIONS, before={7: ("gradients", 5)}, after={3: "optimizer"})
    assert timeline.live == (5, 105, 115, 105, 155, 55, 62, 57)
    assert timeline.boundary == 3
    assert timeline.categories == {
        "gradients": (5, 5, 5, 5, 55, 55, 55, 50),
        "optimizer": (0, 0, 0, 0, 0, 0, 7, 7),
        "activations": (0, 100, 100, 100, 100, 0, 0, 0),
        "temporaries": (0, 0, 10, 0, 0, 0, 0, 0),
    }
    assert (timeline.peak_bytes, timeline.peak_index) == (155, 4)


def test_marks_and_frees_that_were_not_reported():
    timeline = build_timeline([("alloc", 1, 8), ("alloc", 1, 3)])
    assert timeline.live == (0, 8, 3) and timeline.boundary is None
    actions = [("alloc", 1, 8), ("free", 1), ("mark", 1, "gradients"), ("alloc", 1, 3)]
    assert build_timeline(actions).categories == {"temporaries": (0, 8, 0, 3)}  # it marks a block that is free
    empty = build_timeline([])
    assert (empty.live, empty.peak_bytes, empty.peak_index) == ((0,), 0, 0)


def test_a_thinned_timeline_keeps_peak_and_ends():
    live = [(index * 37) % 101 for index in range(1000)]
    live[613] = 1000
    timeline = Timeline(tuple(live), {"temporaries": tuple(live)}, 421)
    thin = timeline.thinned(50)
    assert len(thin.live) <= 54
    assert thin.peak_bytes == 1000 and thin.live[thin.boundary] == live[421]
    assert (thin.live[0], thin.live[-1]) == (live[0], live[-1])
    assert timeline.thinned(5000) == timeline
    assert Timeline.from_json(thin.to_json()) == thin
