"""Chen's splits of a chain: the counts of the paper's scheme, and what really runs when a chain is run that way."""

import pytest
import torch
from conftest import raises

import ackpt
from ackpt.checkpointing.sequential import segment_lengths
from experiments.policies import chen


def replay_segments(lengths):
    """Layers run again, and most live outputs, when only boundaries are kept and the last segment is not run again."""
    start, starts = 0, []
    for length in lengths:
        starts.append(start)
        start += length
    boundaries = {begin - 1 for begin in starts[1:]}
    live, peak, again = set(), 0, 0
    for layer in range(start):  # forward: what is not kept lives until the next layer has read it
        live.add(layer)
        peak = max(peak, len(live))
        if layer - 1 not in boundaries and layer - 1 < starts[-1]:
            live.discard(layer - 1)
    for begin, length in reversed(list(zip(starts, lengths))):
        for layer in range(begin, begin + length):
            if layer not in live:
                assert layer == 0 or layer - 1 in live
                live.add(layer)
                again += 1
        peak = max(peak, len(live))
        for layer in reversed(range(begin, begin + length)):
            assert layer in live and (layer == 0 or layer - 1 in live)
            live.discard(layer)
    assert not live
    return again, peak


@pytest.mark.parametrize("n", range(1, 130))
def test_counts_are_those_of_a_replay(n):
    counts = chen.sqrt_counts(n)
    lengths = segment_lengths(n, counts.segments)
    assert replay_segments(lengths) == (counts.extra_forwards, counts.peak)
    assert counts.boundaries == len(lengths) - 1


@pytest.mark.parametrize("n", [16, 25, 30])
def test_checkpointed_segments_are_recomputed_whole(n):
    runs = [0] * n

    def layer(number):
        def run(x):
            runs[number] += 1
            return x.tanh()

        return run

    counts = chen.sqrt_counts(n)
    x = torch.ones(3, requires_grad=True)
    ackpt.checkpoint_sequential([layer(i) for i in range(n)], counts.segments, x).sum().backward()
    assert sum(runs) - n == counts.extra_forwards + counts.boundaries


class Recursion:
    """Reverses layers as the recursion does; counts runs and live outputs."""

    def __init__(self, n):
        self.live, self.peak, self.runs = {-1}, 0, 0  # the input, which is not counted
        self.reverse(0, n)
        assert self.live == {-1}

    def run(self, layer):
        assert layer - 1 in self.live
        self.live.add(layer)
        self.runs += 1

    def back(self, layer):
        assert {layer - 1, layer} <= self.live
        self.peak = max(self.peak, len(self.live) - 1)
        self.live.remove(layer)

    def reverse(self, start, end, then=None):
        """Go back through the layers from `start` up to `end`, and before through `then`, which reads their output."""
        if start == end:
            if then is not None:
                self.back(then)
            return
        middle = start + (end - start - 1) // 2
        for layer in range(start, middle + 1):
            self.run(layer)
            if layer > start:
                self.live.remove(layer - 1)
        self.reverse(middle + 1, end, then)
        self.reverse(start, middle, middle)


@pytest.mark.parametrize("n", [*range(1, 70), 127, 500])
def test_the_recursion_has_its_counts_when_replayed(n):
    found = Recursion(n)
    assert found.peak == chen.recursive_peak(n)
    assert found.runs - n == chen.recursive_extra_forwards(n)


@pytest.mark.parametrize("n", [0, -4, 2.0, True])
@pytest.mark.parametrize("count", [chen.sqrt_counts, chen.recursive_peak, chen.recursive_extra_forwards])
def test_invalid_chains_are_refused(count, n):
    raises(ValueError, "whole number of layers, at least 1", lambda: count(n))
