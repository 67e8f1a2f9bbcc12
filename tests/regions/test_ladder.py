"""Combinations of options, on plain numbers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ackpt.regions.ladder import PLANNED, REGION, Choices, Option, hull, ladder, needed_bytes, peak_bytes


def block(path, children=(), size=100, cost=4.0):
    return Choices(path, [Option(REGION, size, cost)], children, bytes=size + 10)


def model(*blocks):
    return Choices("", [], blocks, bytes=sum(each.bytes for each in blocks))


def test_equal_blocks_are_recomputed_one_after_the_other():
    found = hull(model(block("0"), block("1"), block("2")), 100)
    assert [(each.bytes, list(each.options)) for each in found] == [
        (0, []),
        (100, ["0"]),
        (200, ["0", "1"]),
        (300, ["0", "1", "2"]),
    ]


def test_the_last_block_is_not_recomputed():
    blocks = model(block("0"), block("1"), block("2"))
    found = ladder(blocks)
    assert [(peak_bytes(blocks, each.options), list(each.options)) for each in found] == [
        (330, []),
        (230, ["0"]),
        (130, ["0", "1"]),
    ]


def test_a_region_of_the_whole_model_is_no_use():
    blocks = [block(f"body.{i}") for i in range(4)]
    body = Choices("body", [Option(REGION, 430, 16.0)], blocks, bytes=440)
    root = Choices("", [], [body], bytes=440)
    assert [each.options.keys() for each in ladder(root)] == [{f"body.{i}" for i in range(n)} for n in range(4)]
    assert [list(each.options) for each in hull(root, 430)] == [[], ["body"]]


def test_the_cheapest_byte_comes_first():
    inner = Choices("0.mlp", [Option(PLANNED, 60, 0.6, 0.5), Option(REGION, 80, 3.0)])
    found = hull(Choices("", [], [Choices("0", [Option(REGION, 100, 5.0)], [inner])]), 100)
    assert [(each.bytes, {path: o.fate for path, o in each.options.items()}) for each in found] == [
        (0, {}),
        (60, {"0.mlp": PLANNED}),
        (100, {"0": REGION}),
    ]


def test_no_options():
    assert [each.options for each in ladder(Choices("", [], [Choices("0")]))] == [{}]


options = st.lists(st.builds(Option, st.just(REGION), st.integers(1, 9), st.integers(0, 9).map(float)), max_size=2)


@given(st.lists(st.tuples(options, options, options), max_size=3))
def test_no_combination_beats_one_on_the_ladder(drawn):
    root = Choices("", [], [
        Choices(str(i), own, [Choices(f"{i}.a", a), Choices(f"{i}.b", b)]) for i, (own, a, b) in enumerate(drawn)
    ])  # fmt: skip
    every = [(0, 0.0)]
    for module in root.children:
        mine = [(option.bytes, option.cost) for option in module.options]
        inner = [[(0, 0.0), *((o.bytes, o.cost) for o in child.options)] for child in module.children]
        mine += [(a[0] + b[0], a[1] + b[1]) for a, b in itertools.product(*inner)]
        every = [(a[0] + b[0], a[1] + b[1]) for a, b in itertools.product(every, mine)]
    found = hull(root, 9)
    assert [each.bytes for each in found] == sorted({each.bytes for each in found})
    for combination in found:
        assert (combination.bytes, combination.cost) in every
        assert not any(size >= combination.bytes and cost < combination.cost - 1e-6 for size, cost in every)
        paths = list(combination.options)
        assert not any(a != b and b.startswith(f"{a}.") for a in paths for b in paths)


def test_needed_bytes_leave_room_for_what_follows():
    choices = model(block("0"), block("1"), block("2"))
    (_, first, *_) = hull(choices, 100)
    # The last module needs what it saves; the one before also what the last one saves as a region, and recomputes.
    needed = [(module.path, size) for module, size in needed_bytes(choices, first.options)]
    assert needed == [("2", 110), ("1", 110 + 10 + 100)]
