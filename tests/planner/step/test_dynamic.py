"""One capture and one search serve all sizes: bit-equal to eager, with the simulated peak, at every size."""

import contextlib
import dataclasses
import gc
import logging
import re
import sys
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import assert_as_eager, model_of, raises
from dynamic_steps import Words, check, gpt2, ids, kinds
from torch import nn
from torch.nn import functional as F

import ackpt
from ackpt.planner.capture.aot import CAPTURING, capture
from ackpt.planner.capture.call_facts import WatchedModel, call_of
from ackpt.planner.capture.dynamic_sizes import Dimension
from ackpt.planner.capture.optimizer_state import Loop
from ackpt.planner.costs.devices import device
from ackpt.planner.costs.profiles import profile, with_gpu_workspace
from ackpt.planner.policies import auto, full
from ackpt.planner.policies.search.frontier import frontier
from ackpt.planner.schedule.schedule import everything, recomputed
from ackpt.planner.schedule.simulator import simulate
from ackpt.planner.step.many_sizes import ManySizes
from ackpt.planner.step.plans import CapturedStep
from ackpt.planner.workloads.planned_shapes import allocated_on, calls_as_on

WIDTH = 32


class Blocks(nn.Module):
    """An encoder with dropout, where asked for also in attention, which is many more operations then."""

    def __init__(self, dropout: float = 0.1, attention_dropout: float = 0.0):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout, batch_first=True)
        self.block.self_attn.dropout = attention_dropout

    def forward(self, ids, mask=None):
        x = self.block(self.embed(ids), src_key_padding_mask=mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        )
        self.head = nn.Linear(16, 4)

    def forward(self, images):
        return self.head(self.body(images).flatten(1)).square().mean()


def test_one_capture_serves_all_lengths_and_batches():
    model = Blocks(attention_dropout=0.1)
    step = ackpt.compile(model, ids(8, 20), budget=0.6)
    for batch, length in ((8, 20), (8, 32), (8, 13), (5, 32), (3, 47)):
        check(step, model, ids(batch, length))
        assert step.plan.dynamic_peak_bytes <= 0.6 * step.plan.baseline_dynamic_peak_bytes
    # A second length, and a second batch: each is the first change of its dimension.
    assert kinds(step) == ["capture", "dynamic capture", "plan", "dynamic capture", "plan"]


def test_a_plan_for_other_sizes_is_that_of_a_capture_of_these_sizes_alone():
    model = Blocks(dropout=0.0)
    step = ackpt.compile(model, ids(4, 20), budget="800kB")
    for length in (31, 12):
        alone = ackpt.compile(model, ids(4, length), budget="800kB", dynamic=False)
        step.prepare(ids(4, length))
        assert step.plan.baseline_peak_bytes == alone.plan.baseline_peak_bytes
        assert step.plan.peak_bytes <= 800_000
        assert step.plan.lower_bound == alone.plan.lower_bound


def test_a_mask_shares_the_dimension_of_the_ids():
    model = Blocks()
    step = ackpt.compile(model, ids(4, 20), torch.zeros(4, 20, dtype=torch.bool), budget=0.7)
    for length in (24, 17, 33):
        mask = torch.zeros(4, length, dtype=torch.bool)
        mask[0, length // 2 :] = True
        check(step, model, ids(4, length), mask)
    assert kinds(step) == ["capture", "dynamic capture", "plan", "plan"]


def test_two_lengths_of_an_encoder_and_a_decoder():
    def forward(self, source, target):
        source, target = self.encoder(self.embed(source)).tanh(), self.decoder(self.embed(target)).tanh()
        weights = self.dropout((target @ source.transpose(1, 2)).softmax(-1))
        return (target + weights @ source).square().mean()

    layers = {"embed": nn.Embedding(50, WIDTH), "encoder": nn.Linear(WIDTH, WIDTH), "decoder": nn.Linear(WIDTH, WIDTH)}
    model = model_of(forward, **layers, dropout=nn.Dropout(0.1))
    step = ackpt.compile(model, ids(4, 10), ids(4, 12), budget=0.8)
    for source, target in ((14, 18), (20, 9), (11, 30), (16, 16)):
        check(step, model, ids(4, source), ids(4, target))
    assert kinds(step) == ["capture", "dynamic capture", "plan", "plan", "plan"]


def test_nothing_is_recomputed_where_the_baseline_keeps_the_budget():
    model = Words()
    step = ackpt.compile(model, ids(8, 40), budget="540kB")
    for length in (50, 4, 6):
        check(step, model, ids(8, length))
    assert step.plan.cost == 0 and not step.plan.schedule.replayed


def test_parts_of_larger_tensors_are_captured_for_themselves(caplog):
    model, whole = Words(), ids(4, 20)
    step = ackpt.compile(model, whole[:, :12], budget="10MiB")
    for length in (13, 16):
        check(step, model, whole[:, :length])
    assert kinds(step) == ["capture", "refused", "capture", "capture"]
    assert "is a part of a larger tensor" in step.history[1].cause
    with pytest.raises(ackpt.TraceError, match=r"pass a copy, as clone\(.*\) makes"):
        ackpt.compile(model, whole[:, :12], budget="10MiB", dynamic={"ids": {1: None}})
    step = ackpt.compile(model, whole[:, :12].clone(), budget="10MiB")
    for length in (13, 16):
        check(step, model, whole[:, :length].clone())
    assert kinds(step) == ["capture", "dynamic capture", "plan"]


def test_bytes_of_a_batch_count_in_its_whole_storage():
    model, data = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(3200, 64)
    with pytest.raises(ackpt.BudgetError) as error:
        ackpt.compile(model, data[:32].clone(), budget=1000)
    step = ackpt.compile(model, data[:32].clone(), budget=error.value.least_bytes)
    raises(ackpt.BudgetError, "The budget was feasible for the earlier call", lambda: step(data[:32]))
    step(data[:32].clone()).sum().backward()


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad])
def test_parts_of_equal_size_share_a_capture(mode):
    model = nn.Linear(8, 1)
    with mode():
        data = torch.randn(20, 8)
        batches = [data[at : at + 4] for at in (0, 4, 8)]
    step = ackpt.compile(model, batches[0], policy="full")
    for batch in batches:
        step(batch)
    assert kinds(step) == ["capture"]
    with mode():
        longer = [data[:5], data[5:10]]
    for batch in longer:
        step(batch)
    events = len(step.history)
    for batch in (*batches, *longer):
        step(batch)
    assert len(step.history) == events


def test_no_batch_is_kept_alive():
    model = Words()
    step = ackpt.compile(model, ids(8, 20), budget="310kB")
    for length in (24, 31, 6):
        batch = ids(8, length)
        reference = weakref.ref(batch)
        model.zero_grad()
        step(batch).backward()
        del batch
        gc.collect()
        assert reference() is None


def test_a_length_for_which_no_known_schedule_fits_is_searched_for():
    model = Words(2)
    step = ackpt.compile(model, ids(8, 20), budget="430kB")
    step.prepare(ids(8, 24))
    for length in (40, 44):
        step.prepare(ids(8, length))
        assert step.plan.peak_bytes <= 430_000
    raises(ackpt.BudgetError, "smallest feasible budget", lambda: step.prepare(ids(8, 400)))
    check(step, model, ids(8, 22))


class Indexed(Words):
    """Slices everything, for which torch's indexing returns an alias, unless the size is a symbol."""

    def forward(self, ids):
        x = self.blocks(self.embed(ids))[:, slice(0, None), :] @ self.embed.weight.t()
        return F.cross_entropy(x.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("kind", [Words, Indexed])
def test_the_search_of_the_first_capture_serves_the_first_dynamic_one_at_its_sizes(kind, monkeypatch):
    searches, recomputing = [], auto.recomputing
    monkeypatch.setattr(auto, "recomputing", lambda *args: (searches.append(args[0]), recomputing(*args))[1])
    model = kind(2)
    step = ackpt.compile(model, ids(8, 44), budget="450kB")
    at_first = len(searches)
    for length in (32, 38, 44):
        check(step, model, ids(8, length))
    assert at_first > 0 and len(searches) == at_first
    assert kinds(step) == ["capture", "dynamic capture", "plan"]
    own = ackpt.compile(model, ids(8, 38), budget="450kB", dynamic={"ids": {1: (4, 44)}})
    assert len(searches) > at_first
    step.prepare(ids(8, 38))
    assert (own.plan.cost, own.plan.peak_bytes) == (step.plan.cost, step.plan.peak_bytes)
    step = ackpt.compile(model, ids(8, 20), budget="450kB")
    at_first = len(searches)
    step.prepare(ids(8, 44))
    assert len(searches) > at_first  # at these larger sizes
    check(step, model, ids(8, 44))


def test_at_each_length_the_cheapest_schedule_of_the_search_runs():
    model = Words(2)
    step = ackpt.compile(model, ids(8, 20), budget="450kB")
    for length in (44, 32, 44, 38):
        check(step, model, ids(8, length))
        plan = step.prepare(ids(8, length))
        assert plan.schedule.backward == cheapest_within(step, length, 450_000).backward
    assert kinds(step) == ["capture", "dynamic capture", "plan", "plan"]


def cheapest_within(step, length: int, budget: int):
    """The first schedule of the search, in the order of costs, whose simulated peak at this length is in the budget."""
    ((capture, plans),) = next(iter(step._ackpt_variants._groups.values())).captures
    graph, profile = capture.described((length,))
    schedules = [dataclasses.replace(each, graph=graph.hash) for _, each in plans._candidates]
    peaks = [simulate(graph, profile, each).peak_bytes + graph.resident_bytes for each in schedules]
    assert [cost for cost, _ in plans._candidates] == sorted(cost for cost, _ in plans._candidates)
    assert min(peaks) <= budget < max(peaks)
    return next(each for each, peak in zip(schedules, peaks) if peak <= budget)


@pytest.mark.parametrize(
    "factor",
    [
        lambda size: 2 if isinstance(size, int) else 3,
        lambda size: 2 if type(size) is int else 3,
        lambda size: {"6": 2, "12": 3}.get(str(size), 4),
        lambda size: len(f"{size}"),
    ],
)
@pytest.mark.parametrize("as_argument", [False, True])
def test_code_that_asks_for_the_type_of_a_size_is_captured_for_each_size(factor, as_argument):
    model = model_of(
        lambda self, x, size=None: (self.layer(x) * factor(x.shape[0] if size is None else size)).tanh().mean(),
        layer=nn.Linear(8, 8),
    )
    more = [6] if as_argument else []
    step = ackpt.compile(model, torch.randn(6, 8), *more)
    for rows in (12, 7):
        check(step, model, torch.randn(6 if as_argument else rows, 8), *[rows][: len(more)])
    assert kinds(step) == ["capture", "refused", "capture", "capture"]
    assert re.search(r"first at .*test_dynamic.py:\d+: the code may check isinstance", step.history[1].cause)


def test_special_lengths_are_captured_for_themselves():
    model = Words()
    step = ackpt.compile(model, ids(8, 20), budget=0.9)
    step.prepare(ids(8, 24))
    check(step, model, ids(8, 30))
    assert kinds(step) == ["capture", "dynamic capture", "plan"]
    step.prepare(ids(1, 30))  # one row: a number in the graph, not a symbol
    assert kinds(step)[-1] == "dynamic capture"
    check(step, model, ids(1, 37))
    assert kinds(step)[-1] == "plan"


def test_a_guard_that_fails_leads_to_another_capture():
    model = model_of(
        lambda self, x: (self.long if x.shape[0] > 30 else self.short)(x).tanh(),
        short=nn.Linear(8, 8),
        long=nn.Linear(8, 8),
    )
    step = ackpt.compile(model, torch.randn(10, 8), budget=1.0)
    for rows in (12, 20, 40, 50, 13, 60):
        assert_as_eager(model, step, torch.randn(rows, 8))
    assert kinds(step) == ["capture", "dynamic capture", "plan", "dynamic capture", "plan", "plan", "plan"]


def test_declared_bounds_are_searched_at_the_largest_size():
    model = Words()
    step = ackpt.compile(model, ids(6, 20), budget="600kB", dynamic={"ids": {1: (4, 80)}})
    ((_, plans),) = next(iter(step._ackpt_variants._groups.values())).captures
    assert plans.expected[:2] == [(20,), (80,)]
    for length in (70, 80, 5):
        check(step, model, ids(6, length))
    assert kinds(step) == ["dynamic capture", "plan", "plan", "plan"]
    for length in (3, 81):
        with pytest.raises(ValueError, match=rf"\[1\] is \(4, 80\), but .* in this call is {length}: declare bounds"):
            step(ids(6, length))
    with torch.no_grad():  # evaluation has no plan
        step(ids(6, 81))
    check(step, model, ids(6, 79))
    assert kinds(step) == ["dynamic capture", *["plan"] * 4]


def test_dimensions_marked_by_the_user_are_dynamic():
    model, example = Words(), ids(6, 20)
    torch._dynamo.mark_dynamic(example, 1)
    step = ackpt.compile(model, example, budget=0.7)
    check(step, model, ids(6, 31))
    assert kinds(step) == ["dynamic capture", "plan"]


@pytest.mark.parametrize(
    ("dynamic", "error", "message"),
    [
        ({"idx": {1: (4, 80)}}, ValueError, "dynamic names 'idx', but the tensors of this call are ids"),
        ({"ids": {2: None}}, ValueError, "names dimension 2; the tensor has 2 dimensions"),
        ({"ids": {1: (30, 80)}}, ValueError, "but the size of dimension 1 of 'ids' in this call is 20: declare"),
        ({"ids": {1: (1, 80)}}, ValueError, "must be 2 <= smallest <= largest"),
        ({"ids": {1: 80}}, TypeError, r"must be \(smallest, largest\) or None, got 80"),
        ({"ids": 1}, TypeError, "must be a dict such as"),
        ("all", TypeError, "dynamic must be None, True, False or a dict"),
    ],
)
def test_bad_declarations_of_dimensions_are_refused(dynamic, error, message):
    raises(error, message, lambda: ackpt.compile(Words(), ids(6, 20), budget=0.7, dynamic=dynamic))


def fixed():
    def forward(self, x):
        return (self.layer(x) * self.scale).tanh()  # for ten rows alone

    return model_of(forward, layer=nn.Linear(8, 8), scale=nn.Buffer(torch.ones(10, 8)))


def test_a_size_that_the_model_fixes_is_an_error_if_it_is_declared():
    with pytest.raises(ackpt.TraceError, match=r"one size only of dimension 0 of argument 0 at .*test_dynamic.py:\d+"):
        ackpt.compile(fixed(), torch.randn(10, 8), dynamic={"x": {0: None}})
    step = ackpt.compile(fixed(), torch.randn(10, 8), dynamic=True)
    assert "one size only" in step.history[0].cause


class Weighted(nn.Linear):
    def forward(self, x, weights, biases=None):
        return (super().forward(x) * weights).tanh() + (0 if biases is None else biases)


def test_a_dimension_that_must_equal_one_that_is_not_declared_names_it():
    x, weights = torch.randn(4, 10, 8), torch.randn(4, 10, 1)
    said = r"dimension 1 of argument x at .*\. Dimension 1 of argument weights has the same size, and a fixed one: if "
    said += r'both must be equal, add "weights": \{1: \(4, 10\)\} to dynamic\. Otherwise leave it out'
    with pytest.raises(ackpt.TraceError, match=said):
        ackpt.apply_budget(Weighted(8, 8), {"x": x, "weights": weights}, 0.9, dynamic={"x": {1: (4, 10)}})
    both = r'and dimension 1 of argument biases have .*as in "weights": \{1: None\}, "biases": \{1: None\}\. Otherwise'
    with pytest.raises(ackpt.TraceError, match=both):
        ackpt.apply_budget(Weighted(8, 8), [x, weights, weights.clone()], 0.9, dynamic={"x": {1: None}})
    step = ackpt.compile(Weighted(8, 8), x, weights, dynamic={"x": {1: (4, 10)}, "weights": {1: (4, 10)}})
    step.prepare(x[:, :6].clone(), weights[:, :6].clone())
    assert kinds(step) == ["dynamic capture", "plan"]


def test_captures_are_logged_once_with_their_cause(caplog):
    model = Words()
    with caplog.at_level(logging.INFO, "ackpt"):
        step = ackpt.compile(model, ids(6, 20), budget=0.7)
        for length in (20, 26, 26):
            step.prepare(ids(6, length))
    assert len(caplog.records) == len(step.history) == 2
    assert step.history[1].cause == "argument 0 changed from int64 [6, 20] to int64 [6, 26]"


SCALE = 2.0


def scaled():
    """Reads a value outside of the model."""
    return model_of(lambda self, x: (self.layer(x) * SCALE).tanh(), layer=nn.Linear(8, 8))


def test_a_value_that_changes_is_the_cause_of_a_capture_at_a_new_size(monkeypatch):
    step = ackpt.compile(scaled(), torch.ones(4, 8), dynamic={"x": {0: None}})
    step.prepare(torch.ones(6, 8))
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    step.prepare(torch.ones(5, 8))
    assert kinds(step) == ["dynamic capture", "plan", "dynamic capture"]
    sizes = "argument 0 changed from float32 [6, 8] to float32 [5, 8]"
    assert step.history[-1].cause == f"global 'SCALE' of {__name__} changed; {sizes}"


def test_an_attribute_that_changes_at_every_step_is_warned_of():
    model = Words()
    step = ackpt.compile(model, ids(2, 8))
    with pytest.warns(UserWarning, match=r"captured and planned 4 times because p of blocks\.2 changed"):
        for share in (0.4, 0.3, 0.2, 0.6):
            model.blocks[2].p = share
            step.prepare(ids(2, 8))
    cause = "p of blocks.2 changed from 0.1 to 0.4; to avoid replanning, change it once per epoch, or hold it"
    assert step.history[1].cause.startswith(cause)
    model.blocks[0].note = 1
    step.prepare(ids(2, 8))
    assert step.history[-1].cause == (
        "note of blocks.0 changed; hold it in a buffer that changes in place to avoid replanning"
    )


def test_a_dropout_with_its_probability_in_a_buffer_is_planned_once():
    def forward(self, x):
        x = self.layers(x)
        return (x * (torch.rand_like(x) >= self.p) / (1 - self.p)).square().mean()

    model = model_of(
        forward, layers=nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)), p=nn.Buffer(torch.tensor(0.5))
    )
    x = torch.randn(64, 16)
    step = ackpt.compile(model, x, budget="1MB")
    for share in (0.4, 0.3, 0.0):
        model.p.fill_(share)
        check(step, model, x)
    assert kinds(step) == ["capture"]


def test_sizes_of_a_model_without_data_are_symbols_too():
    with torch.device("meta"):
        model, sizes = Words(), [(4, 8), (3, 9)]
        batches = [torch.zeros(size, dtype=torch.long) for size in sizes]
    step = ackpt.compile(model, batches[0], policy="none", dynamic=True)
    plans = [step.prepare(batch) for batch in batches]
    assert kinds(step) == ["dynamic capture", "plan"]
    alone = [ackpt.plan(ackpt.trace(model, batch), policy="none") for batch in batches]
    assert [plan.peak_bytes for plan in plans] == [plan.peak_bytes for plan in alone]


def runnable(model, *args, loop=None, where=None, dtype="float32", **kwargs) -> CapturedStep:
    """The step, captured with all dimensions of its tensors dynamic."""
    with CAPTURING, calls_as_on(where, dtype):
        call = call_of(WatchedModel(model), args, kwargs)
        tensors = [(at, leaf) for at, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor)]
        dims = [Dimension(at, dim) for at, leaf in tensors for dim in range(leaf.dim())]
        with capture(model, args, kwargs, "loss", "drop", dims) as captured:
            return CapturedStep(captured, call, model, loop or Loop(None, False))


def test_peaks_on_a_cpu_equal_the_simulators_with_packed_masks_too():
    model = Words()
    step = runnable(model, ids(8, 30), loop=Loop(torch.optim.AdamW(model.parameters()), True))
    many = ManySizes(step, step.reference)
    points = frontier(many.graph, many.profile, auto.candidates)
    schedules = [everything(many.graph), full.schedule(many.graph, many.profile, None), *(p.schedule for p in points)]
    assert any(schedule.packed for schedule in schedules)
    sizes = [(8, 30), (2, 7), (5, 90), (16, 3)]
    for schedule in schedules:
        for values in sizes:
            graph, costs = step.described(values)
            simulated = simulate(graph, costs, replace(schedule, graph=graph.hash))
            assert many.peak(schedule, values) == simulated.peak_bytes + graph.resident_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peaks_and_costs_on_a_gpu_equal_those_of_each_size(dtype):
    with torch.device("meta"):
        model, tokens = gpt2(n_layer=1, attn_pdrop=0.0), torch.zeros(4, 32, dtype=torch.long)
    where = device("l4")
    step = runnable(model, input_ids=tokens, labels=tokens.clone(), where=where, dtype=dtype)
    many = ManySizes(step, allocated_on(where, step.reference), where)
    schedules = [everything(many.graph), full.schedule(many.graph, many.profile, None)]
    for batch, length in ((4, 32), (2, 64), (7, 13)):
        values = tuple({0: batch, 1: length}[each.dim] for each in step.dimensions)
        graph = allocated_on(where, step.graph(values))
        costs = with_gpu_workspace(graph, profile(graph, where))
        flops, seconds = many.costs(values)
        assert flops.tolist() == list(costs.flops) and np.allclose(seconds, costs.seconds, rtol=1e-12)
        assert many.workspace_bytes(values).tolist() == list(costs.workspace_bytes)
        for schedule in schedules:
            simulated = simulate(graph, costs, replace(schedule, graph=graph.hash))
            assert many.peak(schedule, values) == simulated.peak_bytes + graph.resident_bytes
            added = many.recompute_cost(schedule, values)
            assert added[0] == simulated.recompute_flops
            assert added[1] == pytest.approx(sum(costs.seconds[node] for node in recomputed(graph, schedule)))
