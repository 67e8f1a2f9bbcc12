"""``checkpoint_sequential`` and the segment lengths with the smallest peak."""

import pytest
import torch
from conftest import Case, assert_same, assert_same_step, raises, run_step
from torch import nn

import ackpt
from ackpt.checkpointing.sequential import segment_lengths


def batch():
    return torch.randn(5, 4)


def chain(length=7):
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)) for _ in range(length)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("segments", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("listed", [False, True])
def test_checkpoint_sequential(segments, listed):
    def build():
        layers = chain()
        functions = list(layers) if listed else layers
        return Case(lambda x: layers(x), (batch().requires_grad_(),), {"functions": functions}, also=layers)

    def plain(function, x, functions):
        return function(x)

    def sequential(function, x, functions):
        return ackpt.checkpoint_sequential(functions, segments, x)

    assert_same(run_step(build, plain), run_step(build, sequential))


def test_checkpoint_sequential_with_functions_of_all_kinds_and_no_grad():
    layer = nn.Linear(4, 4)
    functions = [torch.sin, layer, lambda x: (x, x * 2), lambda pair: pair[0] + pair[1], layer.forward]

    def plain(x):
        for function in functions:
            x = function(x)
        return x

    x = batch().requires_grad_()
    assert_same_step(lambda: Case(plain, (x.detach().requires_grad_(),)))
    y = ackpt.checkpoint_sequential(functions, input=x)
    y.sum().backward()
    expected, x.grad = x.grad, None
    plain(x).sum().backward()
    assert torch.equal(expected, x.grad) and torch.equal(y, plain(x))
    with torch.no_grad():
        assert torch.equal(ackpt.checkpoint_sequential(functions, 2, x), y)


SEQUENTIAL_ERRORS = [
    (lambda: ackpt.checkpoint_sequential([], None, batch()), ValueError, "got no functions"),
    (lambda: ackpt.checkpoint_sequential(chain(), 2), TypeError, "needs an input"),
    (lambda: ackpt.checkpoint_sequential(torch.ones(2), 2, chain()), TypeError, "functions come first"),
    (lambda: ackpt.checkpoint_sequential(chain(), 0, batch()), ValueError, "from 1 to 7 .* got 0"),
    (lambda: ackpt.checkpoint_sequential(chain(), 8, batch()), ValueError, "from 1 to 7 .* got 8"),
    (lambda: ackpt.checkpoint_sequential(chain(), 2.0, batch()), ValueError, "got 2.0"),
    (lambda: ackpt.checkpoint_sequential(chain(), True, batch()), ValueError, "got True"),
    (lambda: ackpt.checkpoint_sequential(chain(), 2, batch(), offload="x"), ValueError, "offload='x'"),
]


@pytest.mark.parametrize(("call", "error", "message"), SEQUENTIAL_ERRORS)
def test_errors_of_checkpoint_sequential(call, error, message):
    raises(error, message, call)


def peak_of(lengths) -> int:
    """The peak in activations: while a segment is recomputed, the inputs of the segments before it are live too."""
    return max(place + length for place, length in enumerate(lengths))


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7, 10, 16, 20, 21, 22, 64, 100, 1000])
def test_segment_lengths(layers):
    best = segment_lengths(layers)
    assert sum(best) == layers and min(best) >= 1
    peak = peak_of(best)
    assert peak * (peak - 1) // 2 < layers <= peak * (peak + 1) // 2
    for segments in range(1, min(layers, 40) + 1):
        equal = segment_lengths(layers, segments)
        assert len(equal) == segments and sum(equal) == layers and max(equal) - min(equal) <= 1
        assert peak <= peak_of(equal)


@pytest.mark.parametrize("layers", range(1, 13))
def test_no_other_split_has_a_lower_peak_or_recomputes_less(layers):
    def splits(left):
        if left == 0:
            yield []
        for first in range(1, left + 1):
            for rest in splits(left - first):
                yield [first, *rest]

    least = min((peak_of(lengths), layers - lengths[-1]) for lengths in splits(layers))
    best = segment_lengths(layers)
    assert (peak_of(best), layers - best[-1]) == least
