"""The recursion over a chain of blocks, against a replayer that knows nothing of it, and against all it can do."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ackpt.planner.policies.chains.block_options import Option
from ackpt.planner.policies.chains.chain_table import BACKWARD, ChainTable, Partial, Stage


@st.composite
def stages(draw, most=5):
    """Blocks whose storages are numbered 10 times the block: first its output, then its two insides."""
    found = []
    for index in range(draw(st.integers(1, most))):
        sizes = [draw(st.integers(1, 6)) for _ in range(2)]
        dear = [draw(st.integers(1, 9)) for _ in range(2)]
        output, room = draw(st.integers(1, 4)), draw(st.integers(0, 3))
        options = []
        for kept in ((0, 1), (1,), (0,), ()):
            saved = frozenset(10 * index + 1 + i for i in kept)
            size = sum(sizes[i] for i in kept)
            cost = float(sum(dear[i] for i in (0, 1) if i not in kept))
            options.append(Option(saved, size, size + output + room, sum(sizes) + output + room, cost))
        bare = options[-1]
        half = options[draw(st.integers(1, 2))]
        partials = tuple(
            Partial(kept, tuple(more), (cost,) * len(more), cost)
            for kept, more, cost in (
                (bare, options, float(sum(dear))),
                (half, [o for o in options if o.saved >= half.saved], float(sum(dear)) / 2),
            )
        )
        found.append(Stage(partials, output, draw(st.integers(0, 3)), draw(st.integers(0, 2))))
    return found


def replay(stages, operations) -> float:
    """The cost of the operations, which run every backward once, in order, with what it reads at hand."""
    there: dict[int, set[int]] = {-1: {0}}  # block -> what there is of it: 0 its output, storages of its inside
    left = list(range(len(stages)))
    cost, ran = 0.0, set()
    for operation in operations:
        if operation.kind == BACKWARD:
            index = left.pop()
            assert operation.first == index and 0 in there[index - 1]
            kept = frozenset(there.pop(index, set()) - {0})
            cost += next(o.cost for partial in stages[index].partials for o in partial.options if o.saved == kept)
            continue
        assert 0 in there[operation.first - 1]
        for index in range(operation.first, operation.last + 1):
            inside = frozenset(s for s in operation.saved if s // 10 == index)
            before = frozenset(there.get(index, set()) - {0})
            partial = next(partial for partial in stages[index].partials if partial.option.saved == before)
            assert inside >= before
            if index not in ran:  # the first forward costs nothing
                assert len(left) == len(stages)
                ran.add(index)
            else:
                cost += partial.forward_cost
            there[index] = set(inside)
        there[operation.last].add(0)
    assert not left
    return cost


@settings(max_examples=150, deadline=None)
@given(stages())
def test_the_operations_of_every_slot_have_the_cost_of_the_table(chain):
    most = sum(stage.output_bytes + sum(o.saved_bytes for o in stage.partials[0].options) for stage in chain) + 40
    table = ChainTable(chain, most, slots=most)  # a slot is a byte: nothing is rounded
    costs = table.costs()
    assert np.isfinite(costs[-1]) and all(a >= b for a, b in itertools.pairwise(costs))
    for slot in np.flatnonzero(np.isfinite(costs)):
        assert replay(chain, table.operations(int(slot))) == pytest.approx(costs[slot])


@settings(max_examples=40, deadline=None)
@given(stages(most=4))
def test_more_options_cost_no_more(chain):
    most = sum(stage.output_bytes + sum(o.saved_bytes for o in stage.partials[0].options) for stage in chain) + 40
    one = [Stage(s.partials[:1], s.output_bytes, s.incoming_bytes, s.gradient_bytes) for s in chain]
    assert (ChainTable(chain, most, slots=most).costs() <= ChainTable(one, most, slots=most).costs()).all()


@settings(max_examples=30, deadline=None)
@given(stages(most=2))
def test_equal_blocks_share_their_solutions(chain):
    """Blocks that agree in all numbers share their solutions; with all of them told apart the table is the same."""
    repeated = chain * 3
    most = sum(stage.output_bytes + sum(o.saved_bytes for o in stage.partials[0].options) for stage in repeated) + 40
    shared = ChainTable(repeated, most, slots=most).costs()

    apart: list[Stage] = [Different(s.partials, s.output_bytes, s.incoming_bytes, s.gradient_bytes) for s in repeated]
    assert len({*apart}) == len(repeated)
    assert (ChainTable(apart, most, slots=most).costs() == shared).all()


class Different(Stage):
    """A block that equals only itself."""

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)
