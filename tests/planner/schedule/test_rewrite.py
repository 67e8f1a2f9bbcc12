"""The modules that run a schedule, their listings, and the proof that finds any that take other bytes."""

import sys
import weakref

import pytest
import torch
from conftest import raises
from steps import listing_of
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

import ackpt
from ackpt.graph import RewriteError, lower, rewrite
from ackpt.planner.schedule.added_operations import run_again, run_and_save
from ackpt.planner.schedule.listing import Line, Listing, boxed
from ackpt.planner.schedule.proof import FakeResults, fake_results, storages_in


@pytest.fixture
def graph():
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()
    return ackpt.trace(nn.Sequential(*layers), torch.ones(3, 4))


def targets(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def test_a_recomputed_batch_norm_leaves_its_statistics_alone(graph):
    rewritten = rewrite(graph, lower(graph, ()))
    assert torch.ops.aten._native_batch_norm_legit_functional.default in targets(rewritten.forward)
    again = targets(rewritten.backward)
    assert torch.ops.aten._native_batch_norm_legit.no_stats in again
    assert torch.ops.aten._native_batch_norm_legit_functional.default not in again
    assert torch.ops.aten.copy_.default not in again


def test_dropout_is_recomputed_from_the_saved_state(graph):
    rewritten = rewrite(graph, lower(graph, ()))
    assert targets(rewritten.forward).count(run_and_save) == targets(rewritten.backward).count(run_again) == 1
    plain = rewrite(graph, lower(graph, graph.analysis.savable))
    assert run_and_save not in targets(plain.forward) and run_again not in targets(plain.backward)


def test_a_module_with_other_bytes_is_reported(graph, monkeypatch):
    implementation = sys.modules["ackpt.planner.schedule.rewriting"]
    build = implementation._rewritten

    def tampered(*args):
        rewritten = build(*args)
        lines = rewritten.forward_listing.lines
        first = next(line for line in lines if line.target is torch.ops.aten.addmm.default)
        lines.insert(-1, Line("call_function", torch.ops.aten.alias.default, (first,)))  # holds its result to the end
        return rewritten

    monkeypatch.setattr(implementation, "_rewritten", tampered)
    raises(RewriteError, "bytes live.*were simulated", lambda: rewrite(graph, lower(graph, ())))


def mixed(x, index):
    """Operations with lists, missing arguments, keywords, dtypes, constants and results that nothing reads."""
    table = torch.tensor([1.0, float("inf")])
    x.sort()
    picked = torch.ops.aten.index.Tensor(x, [None, index]).clamp(min=-1e-30).to(torch.float64)
    where = torch.where(picked > 0, picked, float("-inf")) + torch.full((2,), float("nan"), dtype=torch.float64).isnan()
    return where[1:, ::2], x.std(dim=[0], correction=0, keepdim=True), table


def test_a_listing_is_turned_back_into_its_graph_and_its_code_gives_the_same_results():
    args = [torch.randn(3, 4), torch.tensor([0, 2])]
    module = make_fx(mixed, tracing_mode="fake")(*args)
    again = fx.GraphModule(module, listing_of(module).graph())
    one, other = (
        [(node.op, node.name, str(node.target), str(node.args), str(node.kwargs)) for node in each.graph.nodes]
        for each in (module, again)
    )
    assert one == other
    assert all(map(torch.equal, again(*args), module(*args)))
    given = list(args)
    results = boxed(module, listing_of(module))(given)
    assert given == []
    assert all(map(torch.equal, results, module(*args)))


def test_the_code_frees_every_value_after_its_last_use():
    seen: list[weakref.ref] = []
    alive: list[list[bool]] = []

    def make(*others):
        alive.append([each() is not None for each in seen])
        made = torch.ones(2)
        seen.append(weakref.ref(made))
        return made

    first = Line("call_function", make)
    second = Line("call_function", make, (first,))
    unread = Line("call_function", make)
    third = Line("call_function", make, (second,))
    fourth = Line("call_function", make, ([third],), {})
    listing = Listing([first, second, unread, third, fourth, Line("output", "output", ((fourth,),))])
    (result,) = boxed(nn.Module(), listing)([])
    assert alive == [[], [True], [False, True], [False, True, False], [False, False, False, True]]
    assert [each() is result for each in seen] == [False, False, False, False, True]


aten = torch.ops.aten


class Counted:
    def __init__(self, operation):
        self.operation, self.count = operation, 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self.operation(*args, **kwargs)


@pytest.fixture
def results():
    with FakeTensorMode():
        yield FakeResults()


def test_equal_arguments_run_once_and_give_new_storages(results):
    add = Counted(aten.add.Tensor)
    x, y = (results.given(name, torch.empty(4, 4)) for name in "xy")
    first, second = results.run(add, (x, x), {}), results.run(add, (y, y), {})
    assert add.count == 1
    assert first.layout is second.layout and first.layout.bytes == 64
    assert len({x.storage, y.storage, first.storage, second.storage}) == 4
    results.run(add, (x, y), {})  # two storages
    assert add.count == 2


@pytest.mark.parametrize("one, other", [((1,), (1.0,)), ((True,), (1,)), (([2, 2],), ([4, 1],))])
def test_other_arguments_are_computed_again(results, one, other):
    fill = Counted(lambda x, value: torch.full((2,), value) if not isinstance(value, list) else x.view(value))
    x = results.given("x", torch.empty(4))
    assert results.run(fill, (x, *one), {}).layout is not results.run(fill, (x, *other), {}).layout
    assert fill.count == 2


def test_tensors_with_other_strides_offsets_or_storages_are_computed_again(results):
    relu = Counted(aten.relu.default)
    whole = torch.empty(4, 4)
    tensors = whole, whole.t(), whole[1:], torch.empty(3, 4), torch.empty(12)[:4].view(2, 2), torch.empty(2, 2)
    for name, tensor in enumerate(tensors):
        results.run(relu, (results.given(name, tensor),), {})
    assert relu.count == len(tensors)


def test_an_alias_has_the_storage_of_its_argument_also_where_two_have_equal_layouts(results):
    second = Counted(lambda x, y: (y.view(-1), x + y))
    x, y, z = (results.given(name, torch.empty(4, 4)) for name in "xyz")
    alias, new = results.run(second, (x, y), {})
    assert alias.storage == y.storage and new.storage not in (x.storage, y.storage)
    alias, new = results.run(second, (z, x), {})
    assert alias.storage == x.storage and second.count == 1
    alias, _ = results.run(second, (y, y), {})
    assert alias.storage == y.storage
    assert storages_in([x, (y, None), alias]) == {x.storage: 64, y.storage: 64}


def test_a_conjugate_and_a_constant_are_told_apart(results):
    real = Counted(aten.view_as_real.default)
    x = torch.empty(3, dtype=torch.complex64)
    results.run(real, (results.given("x", x),), {})
    raises(RuntimeError, "conjugated", lambda: results.run(real, (results.given("conj", x.conj()),), {}))
    with unset_fake_temporarily():
        one, other = torch.tensor([1]), torch.tensor([2])
    same = Counted(lambda x: x)
    results.run(same, (results.given("one", one),), {})
    results.run(same, (results.given("other", other),), {})
    assert same.count == 2


def test_a_second_proof_of_a_graph_runs_only_operations_with_other_arguments():
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(6)]
    graph = ackpt.trace(torch.nn.Sequential(*blocks), torch.ones(4, 8))
    rewrite(graph, lower(graph, graph.analysis.savable))
    known = len(fake_results(graph)._results)
    assert known < len(graph.nodes) / 2  # of six equal layers
    rewrite(graph, lower(graph, ()))
    assert len(fake_results(graph)._results) == known
