"""Results of operations on fake tensors that are computed once: equal arguments, aliases, and what tells them apart."""

import pytest
import torch
from conftest import raises
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

import ackpt
from ackpt.graph import lower, rewrite
from ackpt.planner.schedule.proof import FakeResults, fake_results, storages_in

aten = torch.ops.aten


class Counted:
    """An operation that counts how often it runs."""

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
