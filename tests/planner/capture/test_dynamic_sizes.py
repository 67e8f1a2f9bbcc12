"""A capture whose sizes are expressions is, at any sizes, the capture of these sizes alone."""

import math

import pytest
import torch
from conftest import model_of
from torch import nn
from torch.nn import functional as F

import ackpt
from ackpt.planner.capture.aot import capture
from ackpt.planner.capture.call_facts import WatchedModel, call_of
from ackpt.planner.capture.dynamic_sizes import Dimension, Symbols, expression
from ackpt.planner.capture.optimizer_state import NO_LOOP
from ackpt.planner.step.plans import CapturedStep

_SAME_STORAGE = ("aten.alias.default", "aten.slice.Tensor")  # eager's indexing leaves out slices of everything


def operations(graph):
    return [(n.target, n.phase, n.is_random) for n in graph.nodes if n.target not in _SAME_STORAGE]


def test_an_instance_is_the_capture_of_its_sizes():
    def forward(self, ids):
        length = ids.shape[1]
        x = self.embed(ids) + self.positions[:length]
        scores = (x @ x.transpose(1, 2)).masked_fill(~self.mask[:length, :length], float("-inf"))
        x = torch.cat([F.dropout(scores.softmax(-1), 0.1) @ x, x[:, :1]], 1)[:, 1:]
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    layers = {"embed": nn.Embedding(20, 8), "positions": nn.Parameter(torch.zeros(64, 8)), "head": nn.Linear(8, 20)}
    model = model_of(forward, **layers, mask=nn.Buffer(torch.ones(64, 64).tril().bool()))
    ids = torch.randint(0, 20, (3, 10))
    with capture(model, (ids,), {}, outputs="drop", dynamic=[Dimension(0, 0), Dimension(0, 1)]) as captured:
        step = CapturedStep(captured, call_of(WatchedModel(model), (ids,), {}), model, NO_LOOP)
    for sizes in ((3, 10), (2, 7), (5, 33), (4, 64)):
        alone = ackpt.trace(model, torch.randint(0, 20, sizes))
        graph = step.graph(sizes)
        assert operations(graph) == operations(alone)
        assert [s.bytes for s in graph.storages] == [s.bytes for s in alone.storages]
        assert [s.category for s in graph.storages] == [s.category for s in alone.storages]
        resized = step.sized(sizes)
        assert resized.storages == graph.storages
        assert resized.resident_bytes == graph.resident_bytes
        assert resized.analysis.masks
        for table in ("bytes", "masks"):
            assert getattr(resized.analysis, table) == getattr(graph.analysis, table)


def symbols_of(function, *sizes):
    """The symbols of a capture of `function` called with floats of these sizes, all of them dynamic."""

    def make_model():
        return model_of(
            lambda self, *tensors: (function(*tensors) * self.weight).sum(), weight=nn.Parameter(torch.ones(()))
        )

    tensors = tuple(torch.ones(size) for size in sizes)
    dims = [Dimension(at, dim) for at, tensor in enumerate(tensors) for dim in range(tensor.dim())]
    with capture(make_model(), tensors, {}, dynamic=dims) as captured:
        assert isinstance(captured.symbols, Symbols)
        return captured.symbols


@pytest.mark.parametrize(
    ("function", "sizes", "valid", "invalid"),
    [
        (lambda x: x, [(3,)], [(2,), (9,)], [(0,), (1,)]),
        (lambda x, y: x + y, [(3,), (3,)], [(5, 5)], [(5, 6)]),
        (lambda x: x.view(-1, 4), [(12,)], [(8,), (20,)], [(10,)]),
        (lambda x: x if x.shape[0] > 4 else -x, [(6,)], [(5,), (50,)], [(4,)]),
        (lambda x: x[: x.shape[0] // 2] * 2, [(6,)], [(7,), (4,)], []),
    ],
)
def test_guards_decide_which_sizes_a_capture_serves(function, sizes, valid, invalid):
    symbols = symbols_of(function, *sizes)
    assert [values for values in (*valid, *invalid) if symbols.holds(values)] == list(valid)


def test_a_size_that_becomes_a_number_is_named_with_its_line():
    fixed = symbols_of(lambda x: x + torch.ones(7), (7,)).fixed()
    assert list(fixed) == [Dimension(0, 0)]
    assert "test_dynamic_sizes.py" in fixed[Dimension(0, 0)]


EXPRESSIONS = [
    lambda n: math.ceil(n * 0.1 * 3),
    lambda n: math.floor(n * 0.7 * 10),
    lambda n: math.floor((n * 0.3) // 0.1),
    lambda n: n * 0.1 + 0.2 + 0.3,
    lambda n: (n + 0.1) * 0.2 / 0.7,
    lambda n: n // 0.3 - 5 // (n * 0.7) + n % 0.7,
    lambda n: round(n * 0.5) + round(n / 3, 1) + round(n, -1),
    lambda n: 1 / n**0.5 + n**-1 + 2 ** (-8 / n) + torch.sym_sqrt(n),
    lambda n: math.trunc(-n / 4) + math.ceil(-n / 4) + abs(-n * 0.1) + int(n > 4.2),
    lambda n: max(1, n * 0.25) + min(n / 2, 7) + torch.sym_max(n, 7.5),
    lambda n: (5 - n) // 3 + (5 - n) % 4 + n // -7 + n % -7 + (n // 3) // (2 - n),
    lambda n: (n >> 1) + (n & 5) + (n | 3) + (n ^ 6) + (n << 2) + n**3,
    lambda n: -0.0 * n + (n - n) / -3,
    lambda n: 2 if n * 0.3 > 4.2 else 3,
    lambda n: 2 if (n / 2).is_integer() else 3,
    lambda n: int(n * 0.3) + math.sqrt(n) + float(n),
    lambda n: math.ceil(n / 4) * 4 - n,
    lambda n: n / 3 == n * (1 / 3),
]


@pytest.mark.parametrize("place", range(len(EXPRESSIONS)))
def test_sizes_are_computed_as_python_computes_them(place):
    function, computed = EXPRESSIONS[place], []
    symbols = symbols_of(lambda x: [computed.append(function(x.shape[0]))] and x, (20,))
    served = [n for n in (*range(2, 200), 10**9 + 7) if symbols.holds((n,))]
    assert 20 in served
    for n in served:
        (value,) = symbols.evaluated((expression(computed[-1]),), (n,))
        assert repr(value) == repr(function(n)), n


@pytest.mark.parametrize(
    ("function", "invalid"),
    [
        (lambda x: x * (1 / (x.shape[0] - 5)), 5),  # a division by zero
        (lambda x: x * (2 if 7 % (x.shape[0] - 5) > 0.5 else 3), 5),
        (lambda x: x * (x.shape[0] - 4.0) ** 0.5, 3),  # a complex number
        (lambda x: x * 2.0 ** (x.shape[0] * 100.0), 11),  # an overflow
    ],
)
def test_a_capture_does_not_hold_where_its_sizes_cannot_be_computed(function, invalid):
    symbols = symbols_of(function, (7,))
    assert [size for size in (7, 8, invalid) if symbols.holds((size,))] == [7, 8]
