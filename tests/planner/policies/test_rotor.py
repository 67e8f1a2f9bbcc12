"""rotor: the table, the paper's recursion, a replay of every schedule, and all schedules of short chains."""

import heapq
import re
from functools import cache
from math import inf

import pytest
from conftest import raises
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ackpt import BudgetError
from ackpt.planner.policies import rotor

NOT_PERSISTENT = rotor.Chain((3, 5, 3), (0, 0, 0), (5, 1, 3), (5, 4, 6))
HETEROGENEOUS = rotor.Chain((2, 1, 4, 3), (4, 2, 8, 6), (1, 2, 1, 2), (2, 5, 3, 4))


def equal(stages, backward=1, saved=1):
    return rotor.Chain([1] * stages, [backward] * stages, [1] * stages, [saved] * stages)


TABLE = [
    (equal(4), 3, (13, 10, 8, 8)),
    (equal(8), 3, (43, 26, 22, 20, 19, 18, 16, 16)),
    (equal(4, 2, 2), 4, (18, 15, 14, 14, 13, 12, 12)),
    (equal(8, 2, 2), 4, (52, 37, 33, 31, 30, 29, 28, 28, 27, 27, 26, 26, 25, 24, 24)),
    (HETEROGENEOUS, 8, (38, 36, 36, 33, 33, 31, 31, 31, 30, 30)),
]


def after(chain, held, gradient, operation):
    """What is held after `operation` and the bytes it takes while it runs; None if it cannot run.

    ``held``: pairs of ``"output"`` or ``"saved"`` and a stage; ``gradient``: of the output of which stage it is there.
    """
    kind, stage = operation
    plain = ("output", stage - 1)
    total = sum({"output": chain.output_bytes, "saved": chain.saved_bytes}[what][s] for what, s in held if s >= 0)
    total += chain.output_bytes[gradient] + chain.input_bytes
    if plain not in held and ("saved", stage - 1) not in held:
        return None
    if kind == rotor.BACKWARD:
        if gradient != stage or ("saved", stage) not in held:
            return None
        return held - {("saved", stage), plain}, stage - 1, total + chain.backward_overhead[stage]
    what, sizes = ("saved", chain.saved_bytes) if kind == rotor.FORWARD_ALL else ("output", chain.output_bytes)
    if (what, stage) in held:
        return None
    total += sizes[stage] + chain.forward_overhead[stage]
    if kind == rotor.FORWARD_NONE:
        if plain not in held:
            return None
        held = held - {plain}
    return held | {(what, stage)}, gradient, total


START = frozenset({("output", -1)})


def replay(chain, operations):
    """Time and peak of `operations`."""
    held, gradient, time, peak = START, len(chain.forward) - 1, 0, 0
    for operation in operations:
        assert gradient >= 0
        found = after(chain, held, gradient, operation)
        assert found is not None, f"{operation} cannot run"
        held, gradient, taken = found
        time += (chain.backward if operation.kind == rotor.BACKWARD else chain.forward)[operation.stage]
        peak = max(peak, taken)
    assert gradient == -1 and not held
    return time, peak


def exhaustive(chain, budget):
    """The least time of all schedules, persistent or not, inf if there is none."""
    kinds = (rotor.FORWARD_ALL, rotor.FORWARD_CHECKPOINT, rotor.FORWARD_NONE, rotor.BACKWARD)
    stages = len(chain.forward)
    queue = [(0, 0, START, stages - 1)]
    done = set()
    number = 0
    while queue:
        time, _, held, gradient = heapq.heappop(queue)
        if gradient < 0:
            return time
        if (held, gradient) in done:
            continue
        done.add((held, gradient))
        following = [(time, held - {item}, gradient) for item in held]
        for stage in range(gradient + 1):
            for kind in kinds:
                found = after(chain, held, gradient, rotor.Operation(kind, stage))
                if found is not None and found[2] <= budget:
                    own = (chain.backward if kind == rotor.BACKWARD else chain.forward)[stage]
                    following.append((time + own, *found[:2]))
        for total, kept, left in following:
            number += 1
            heapq.heappush(queue, (total, number, kept, left))
    return inf


def textbook(chain, budget):
    """The recursion as printed, one number at a time."""
    uf, ub, wa, wab = chain.forward, chain.backward, chain.output_bytes, chain.saved_bytes
    of, ob = chain.forward_overhead, chain.backward_overhead

    @cache
    def cost(s, t, m):
        best = inf
        if m >= max(wa[t] + wab[s] + of[s], wa[s] + wab[s] + ob[s]):
            best = uf[s] + ub[s] + (cost(s + 1, t, m - wab[s]) if s < t else 0)
        passing = [wa[t] + wa[j - 1] + wa[j] + of[j] for j in range(s + 1, t)]
        if s < t and m >= max(wa[t] + wa[s] + of[s], *passing, 0):
            for j in range(s + 1, t + 1):
                best = min(best, sum(uf[s:j]) + cost(j, t, m - wa[j - 1]) + cost(s, j - 1, m))
        return best

    return cost(0, len(uf) - 1, budget - chain.input_bytes)


def time_of(chain, budget, slots=500):
    try:
        found = rotor.solve(chain, budget, slots)
    except BudgetError:
        return inf
    time, peak = replay(chain, found.operations)
    assert time == found.time and peak <= budget
    return time


@st.composite
def chains(draw, stages=4, largest=4):
    n = draw(st.integers(1, stages))
    numbers = st.lists(st.integers(0, largest), min_size=n, max_size=n)
    output, beside = draw(numbers), draw(numbers)
    saved = [a + b for a, b in zip(output, beside)]
    overheads = draw(st.sampled_from([((), ()), (draw(numbers), draw(numbers))]))
    return rotor.Chain(draw(numbers), draw(numbers), output, saved, *overheads, draw(st.integers(0, 2)))


@settings(max_examples=150, deadline=None)
@given(chains(), st.integers(1, 24))
def test_the_exhaustive_search_finds_no_faster_schedule(chain, budget):
    assert exhaustive(chain, budget) <= time_of(chain, budget)


@settings(max_examples=300, deadline=None)
@given(chains(stages=7), st.integers(1, 40))
def test_whole_sizes_are_solved_exactly(chain, budget):
    assert time_of(chain, budget) == textbook(chain, budget)


@settings(max_examples=100, deadline=None)
@given(chains(stages=5), st.integers(1, 24))
def test_large_sizes_with_a_common_divisor_are_solved_exactly(chain, budget):
    def scaled(sizes):
        return [4096 * size for size in sizes]

    large = rotor.Chain(
        chain.forward,
        chain.backward,
        *(scaled(getattr(chain, f"{name}_bytes")) for name in ("output", "saved")),
        *(scaled(getattr(chain, f"{name}_overhead")) for name in ("forward", "backward")),
        4096 * chain.input_bytes,
    )
    assert time_of(large, 4096 * budget + 17) == textbook(chain, budget)


@settings(max_examples=150, deadline=None)
@given(chains(stages=6, largest=1000), st.integers(1, 9000), st.integers(1, 40))
def test_rounding_keeps_the_budget(chain, budget, slots):
    exact = textbook(chain, budget)
    assert exact <= time_of(chain, budget, slots)
    assert (exact == inf) == (time_of(chain, budget, slots) == inf)


@settings(max_examples=100, deadline=None)
@given(chains(stages=6, largest=1000))
@example(HETEROGENEOUS)
def test_a_refusal_names_the_smallest_budget(chain):
    try:
        rotor.solve(chain, 0.5)
    except BudgetError as refused:
        least = int(re.search(r"feasible budget is (\d+) bytes", str(refused)).group(1))
        assert time_of(chain, least, 7) < inf
        assert textbook(chain, least - 1) == inf
        raises(BudgetError, f"is {least} bytes", lambda: rotor.solve(chain, least - 0.5))
    else:
        assert textbook(chain, 0) < inf


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


def test_the_best_schedule_need_not_be_persistent():
    assert (exhaustive(NOT_PERSISTENT, 15), time_of(NOT_PERSISTENT, 15)) == (14, 16)


def test_a_budget_that_keeps_everything():
    found = rotor.solve(HETEROGENEOUS, 10**12)
    assert found.time == 30
    forward = [(rotor.FORWARD_ALL, stage) for stage in range(4)]
    assert found.operations == (*forward, *((rotor.BACKWARD, stage) for stage in reversed(range(4))))


@pytest.mark.parametrize(
    "arguments, what",
    [
        (([], [], [], []), "at least one stage"),
        (([1], [1, 2], [1], [1]), "backward has 2 values for a chain of 1 stages"),
        (([1], [1], [1], [1], (1, 2)), "forward_overhead has 2 values"),
        (([1], [-1], [1], [1]), "not negative"),
        (([1, 1], [1, 1], [1, 2], [1, 1]), "stage 1 saves 1 bytes, less than the 2"),
    ],
)
def test_invalid_chains_are_refused(arguments, what):
    raises(ValueError, what, lambda: rotor.Chain(*arguments))


@pytest.mark.parametrize(
    "budget, slots, what", [(0, 5, "budget"), (-3, 5, "budget"), (9, 0, "slots"), (9, 2.5, "slots")]
)
def test_bad_input_is_refused(budget, slots, what):
    raises(ValueError, what, lambda: rotor.solve(HETEROGENEOUS, budget, slots))
