"""Graphs run node by node: what is measured, what is left alone, and how values wait on the host."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from ackpt.graph import trace
from ackpt.metering.meter import MeterError
from ackpt.planner.capture.example_values import given, made_up
from ackpt.planner.costs import operation_runs as run
from ackpt.planner.costs.operation_costs import allocates
from ackpt.planner.costs.profiles import profile
from ackpt.planner.costs.workspace import workspace_bytes

CPU = torch.device("cpu")
CALLS: list[torch.Tensor] = []


@torch.library.custom_op("profile_test::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(x)
    if x.sum() != 41:
        raise RuntimeError("the sum must be 41\nand it is not")
    return x.clone()


@torch.library.custom_op("profile_test::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(x)
    return x.clone()


for operation in (picky, counted):
    operation.register_fake(torch.empty_like)
    operation.register_autograd(lambda ctx, grad: grad)


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


class Everything(nn.Module):
    """Views, parts of results, running statistics, a constant, dropout, complex numbers, integers and bools."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(5, 6), nn.BatchNorm1d(6), nn.Linear(3, 4)

    def forward(self, ids, mask, *, scale):
        h = nn.functional.dropout(self.norm(self.embedding(ids)), 0.25)
        first, second = h.chunk(2, 1)
        waves = torch.fft.rfft(first.t())
        power = (waves * waves.conj()).real.sum()
        h = torch.where(mask, power, second * scale + torch.tensor([1.0, 2.0, 3.0]))
        return nn.functional.cross_entropy(self.head(h[:, None].expand(4, 2, 3)[:, 1]), ids.clamp(max=3))


ARGS = (torch.tensor([1, 4, 2, 0]), torch.tensor([True, False, True]))
KWARGS = {"scale": torch.full((4, 3), 0.5)}


@pytest.fixture(scope="module")
def everything():
    torch.manual_seed(0)
    model = Everything()
    return model, trace(model, *ARGS, **KWARGS)


@pytest.mark.parametrize("real", [False, True])
def test_measured_bytes_are_those_of_the_shapes_and_of_each_operation_alone(everything, real):
    model, graph = everything
    found = profile(graph, "cpu", mode="measured", inputs=(model, ARGS, KWARGS) if real else None)
    shapes = profile(graph)
    assert (found.bytes_in, found.bytes_out, found.flops) == (shapes.bytes_in, shapes.bytes_out, shapes.flops)
    assert found.workspace_bytes == workspace_bytes(graph)
    timed = {node.id for node in graph.nodes if found.seconds[node.id] > 0}
    assert timed == {node.id for node in graph.nodes if allocates(graph.analysis.fx[node.id])}
    assert (found.device, found.swap_seconds, found.graph) == ("cpu", None, graph.hash)


@pytest.mark.parametrize("real", [False, True])
def test_state_of_the_caller_is_unchanged(everything, real):
    model, graph = everything
    assert graph.analysis.mutated
    held = [*model.parameters(), *model.buffers(), *ARGS, *KWARGS.values()]
    before, versions = copy.deepcopy([tensor.detach() for tensor in held]), [tensor._version for tensor in held]
    state = torch.get_rng_state()
    profile(graph, mode="measured", inputs=(model, ARGS, KWARGS) if real else None)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, held, before))
    assert [tensor._version for tensor in held] == versions
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_operation_runs_once_to_warm_up_three_times_for_time_and_once_for_bytes():
    class Model(nn.Linear):
        def forward(self, x):
            return counted(super().forward(x)).sum()

    profile(trace(Model(2, 2), torch.ones(1, 2)), mode="measured")
    assert len(CALLS) == 1 + run.RUNS + 1


def test_autocast_of_the_caller_changes_nothing():
    graph = trace(nn.Linear(8, 8), torch.ones(4, 8))
    expected = profile(graph, mode="measured")
    with torch.autocast("cpu", torch.bfloat16):
        found = profile(graph, mode="measured")
    assert (found.bytes_out, found.workspace_bytes) == (expected.bytes_out, expected.workspace_bytes)


class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 41.0))

    def forward(self, x):
        return picky(self.weight * x)


def test_operations_see_the_real_inputs():
    model, x = Picky(), torch.ones(1)
    graph = trace(model, x)
    profile(graph, mode="measured", inputs=(model, x))
    assert all(torch.equal(seen, torch.full((1,), 41.0)) for seen in CALLS)


@pytest.mark.parametrize("traced_twice", [True, False])
def test_one_tensor_may_be_two_arguments(traced_twice):
    class Product(nn.Module):
        def forward(self, x, y, z):
            return x * y + z

    x, z = torch.ones(2, requires_grad=True), torch.ones(2)
    graph = trace(Product(), x, x if traced_twice else x.detach().clone().requires_grad_(), z)
    found = profile(graph, mode="measured", inputs=(Product(), (x, x, z)))
    assert found.origin["seconds"] == "measured"


def test_an_operation_that_fails_is_named():
    graph = trace(Picky(), torch.ones(1))
    says = r"picky \(profile_test.picky.default\) of module .* does not run: the sum must be 41\. Give the model"
    with pytest.raises(MeterError, match=says):
        profile(graph, mode="measured")


WRONG = {
    "inputs lack 'embedding.weight'": lambda model: (ARGS, KWARGS),
    "inputs lack argument": lambda model: (model, ARGS),
    "inputs hold 1 tensors more": lambda model: (model, ARGS, KWARGS, torch.ones(1)),
    r"argument .* is bool\[3\] on cpu, but the graph was traced with int64\[4\] on cpu": lambda model: (
        model,
        ARGS[::-1],
        KWARGS,
    ),
    r"'embedding.weight' is float32\[6, 6\] on cpu, but the graph was traced with float32\[5, 6\]": lambda model: (
        nn.ModuleDict({"embedding": nn.Embedding(6, 6)}),
        ARGS,
        KWARGS,
    ),
}


@pytest.mark.parametrize("says", WRONG)
def test_inputs_that_do_not_fit_are_refused(everything, says):
    model, graph = everything
    with pytest.raises(MeterError, match=says):
        profile(graph, mode="measured", inputs=WRONG[says](model))


def test_made_up_values_are_small_valid_and_always_the_same(everything):
    _, graph = everything
    values = made_up(graph)
    again = made_up(graph)
    for node, value, other in zip(graph.module.graph.find_nodes(op="placeholder"), values, again):
        assert torch.equal(value, other)
        assert (value.shape, value.dtype) == (node.meta["val"].shape, node.meta["val"].dtype)
        storages = [graph.storages[storage] for storage in graph.nodes[node.meta["ackpt_id"]].storages]
        if any(storage.category == "parameter" for storage in storages):
            assert value.abs().max() <= 0.05 and value.unique().numel() == value.numel()
        elif value.dtype == torch.long:
            assert not value.any()
        else:
            assert (0 <= value).all() and (value <= 1).all()


class Living(run.Runner):
    """Notes the bytes of the storages that are there after every node."""

    def run_node(self, n):
        found = super().run_node(n)
        tensors = [leaf for leaf in tree_leaves([*self.env.values(), found]) if isinstance(leaf, torch.Tensor)]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self.most = max(getattr(self, "most", 0), sum(storage.nbytes() for storage in storages.values()))
        return found


def test_values_are_freed_after_their_last_use():
    size = 1000

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            for _ in range(20):
                x = x + self.weight
            return x.sum()

    graph = trace(Chain(), torch.ones(size))
    runner = Living(graph, CPU)
    with torch.no_grad():
        runner.run(*made_up(graph))
    assert runner.most < 4 * 4 * size


class Waiting(run.Swapping):
    """As on CUDA, with the host as the device; checks that no value stays there."""

    def run_node(self, n):
        found = super().run_node(n)
        if n.op != "output":
            assert not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(found))
        return found


def test_values_moved_to_the_host_come_back_unchanged(everything):
    model, graph = everything
    values = {}
    for runner in (run.Runner(graph, CPU), Waiting(graph, CPU)):
        torch.manual_seed(0)
        inputs = given(graph, (model, ARGS, KWARGS))
        with torch.no_grad():
            outputs = tree_leaves(runner.run(*inputs))
            placeholders = dict(zip(graph.module.graph.find_nodes(op="placeholder"), inputs))
        values[type(runner)] = [leaf.among(leaf.host) if isinstance(leaf, run.Parked) else leaf for leaf in outputs]
        assert len(placeholders) == len(inputs)
    expected, found = values.values()
    assert len(expected) == len(found) > 5
    for one, other in zip(expected, found):
        assert (one is None and other is None) or (torch.equal(one, other) and one.stride() == other.stride())


def test_writes_are_seen_by_other_views_on_the_host():
    graph = fx.Graph()
    x = graph.placeholder("x")
    flat = graph.call_function(torch.ops.aten._unsafe_view.default, (x, [6]))  # shares memory, and does not say so
    row = graph.call_function(torch.ops.aten.select.int, (x, 0, 1))
    changed = graph.call_function(torch.ops.aten.copy_.default, (row, graph.placeholder("y")))
    graph.output((graph.call_function(torch.ops.aten.clone.default, (x,)), changed, flat))
    for place, node in enumerate(graph.nodes):
        node.meta.update(ackpt_id=place, val=torch.empty(1))

    class Joint:
        module = fx.GraphModule(nn.Module(), graph)

    runner = Waiting(Joint, CPU)  # pyright: ignore
    given = torch.zeros(2, 3)
    found = [waits.among(waits.host).tolist() for waits in runner.run(given, torch.ones(3))]
    assert found == [[[0, 0, 0], [1, 1, 1]], [1, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert not given.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_cuda_more_is_measured_than_fits_at_once():
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to("cuda")
    x = torch.ones(4096, 1024, device="cuda")
    graph = trace(model, x)
    model.to("cpu")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = profile(graph, mode="measured")
    assert torch.cuda.max_memory_allocated() - before < sum(storage.bytes for storage in graph.storages) / 2
    timed = {node.id for node in graph.nodes if found.seconds[node.id] > 0}
    assert timed == {node.id for node in graph.nodes if allocates(graph.analysis.fx[node.id])}
    assert found.origin["swap_seconds"] == "measured" and len(found.swap_seconds) == len(graph.storages)
