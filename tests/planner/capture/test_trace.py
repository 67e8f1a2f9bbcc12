"""The joint graph: what it computes is the model's step, every node has one identity, bytes belong to storages."""

import json

import pytest
import torch
from conftest import model_of, raises
from torch import nn

import ackpt
from ackpt import plan
from ackpt.graph import PlannedStep, TraceError, trace
from ackpt.planner.request import Request
from experiments.models import BertConfig, BertForMaskedLM, resnet18

pytestmark = pytest.mark.usefixtures("one_thread")


def small():
    """BatchNorm, a view, a value used twice, a keyword, a dict of outputs, one of them without a gradient."""

    def forward(self, x, *, scale=None):
        h = torch.relu(self.norm(self.first(x)))
        h = h if scale is None else h * scale
        return {"loss": self.last(h).square().mean(), "hidden": h.t(), "count": (h > 0).sum()}

    return model_of(forward, first=nn.Linear(4, 8), norm=nn.BatchNorm1d(8), last=nn.Linear(8, 2, bias=False))


def step(model, *args, **kwargs):
    """Outputs, gradients by name and buffers after one eager step whose outputs get gradients of ones."""
    outputs = list(model(*args, **kwargs).values())
    needing = [output for output in outputs if output.requires_grad]
    torch.autograd.backward(needing, [torch.ones_like(output) for output in needing])
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return outputs, gradients, dict(model.named_buffers())


def check(graph):
    assert [node.id for node in graph.nodes] == list(range(len(graph.nodes)))
    assert [node.phase for node in graph.nodes] == sorted((node.phase for node in graph.nodes), reverse=True)
    assert all(node.phase == "backward" for node in graph.nodes[graph.boundary :])
    for node in graph.nodes:
        assert all(place < node.id for place in node.inputs)
    for storage in graph.storages:
        assert graph.storages[storage.id] is storage
        assert storage.producer == storage.nodes[0]
        assert all(storage.id in graph.nodes[place].storages for place in storage.nodes)
        reads = [node.id for node in graph.nodes if any(storage.id in graph.nodes[i].storages for i in node.inputs)]
        touched = sorted({*reads, *storage.nodes})
        forward = [place for place in touched if place < graph.boundary]
        backward = [place for place in touched if place >= graph.boundary]
        assert storage.last_fw_access == (forward[-1] if forward else None)
        assert storage.first_bw_access == (backward[0] if backward else None)
        assert storage.last_bw_access == (backward[-1] if backward else None)
    json.dumps(graph.to_json())


CASES = {
    "small": lambda: (small(), (torch.randn(3, 4),), {}),
    "resnet18": lambda: (resnet18(10), (torch.randn(2, 3, 32, 32), torch.tensor([1, 2])), {}),
    "bert": lambda: (
        BertForMaskedLM(BertConfig(dim=16, layers=2, heads=2, ff_dim=32, vocab_size=50, positions=16)),
        (torch.randint(50, (2, 8)),),
        {"labels": torch.randint(50, (2, 8))},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_node_ids_follow_execution_and_accesses_are_complete(case):
    model, args, kwargs = CASES[case]()
    graph = trace(model, *args, **kwargs)
    check(graph)
    assert set(graph.gradients) == {name for name, _ in model.named_parameters()}
    sizes = graph.bytes()
    assert sizes["parameter"] == sum(parameter.nbytes for parameter in model.parameters())
    assert sizes["activation"] > 0


def test_the_text_of_a_small_model():
    graph = trace(small(), torch.randn(3, 4), differentiate="all")
    forward = [node for node in graph.nodes if node.inputs and node.phase == "forward"]
    assert [node.module for node in forward if node.target == "aten.addmm.default"] == ["first"]
    assert {node.module for node in forward if "batch_norm" in node.target} == {"norm"}
    assert all(__file__ in node.source for node in forward if node.target == "aten.relu.default")
    backward = [node for node in graph.nodes if node.phase == "backward" and "batch_norm" in node.target]
    assert [node.module for node in backward] == ["norm"]
    updates = [node for node in graph.nodes if node.target == "aten.copy_.default"]
    assert len(updates) == 3 and all(node.phase == "forward" for node in updates)
    relu = next(node for node in forward if node.target == "aten.relu.default")
    kept = graph.storages[relu.storages[0]]
    assert (kept.category, kept.bytes) == ("activation", 3 * 8 * 4) and kept.first_bw_access >= graph.boundary
    assert len(kept.nodes) > 1  # its transpose, and what backward reads, lie in the same memory
    assert not any(node.is_random for node in graph.nodes)
    dropped = trace(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(3, 4))
    assert [node.target for node in dropped.nodes if node.is_random] == ["ackpt_graph.dropout_noise.default"]


@pytest.mark.parametrize(("dropout", "drawing"), [(0.0, 0), (0.5, 1)])
def test_attention_draws_only_where_it_drops(dropout, drawing):
    def attention(self, x):
        q = (x * self.weight)[None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=dropout)

    graph = trace(model_of(attention, weight=nn.Parameter(torch.ones(4))), torch.ones(3, 4))
    assert sum(node.is_random for node in graph.nodes) == drawing


def test_a_layer_of_torch_has_no_line_of_the_users():
    graph = trace(nn.Linear(8, 2), torch.ones(4, 8))
    assert {node.source for node in graph.nodes} == {""}


def test_an_error_in_a_layer_of_torch_is_torchs_own():
    raises(RuntimeError, "^a and b must have same reduction dim", lambda: trace(nn.Linear(8, 2), torch.ones(4, 7)))


@pytest.mark.parametrize("case", CASES)
def test_a_model_on_meta_has_the_same_graph(case):
    model, args, kwargs = CASES[case]()
    real = trace(model, *args, **kwargs)
    to_meta = lambda value: value.to("meta")  # noqa: E731
    shapes = trace(model.to("meta"), *map(to_meta, args), **{name: to_meta(value) for name, value in kwargs.items()})
    assert shapes.hash == real.hash and shapes.bytes() == real.bytes()
    assert all(parameter.is_meta for parameter in model.parameters())


def test_different_graphs_have_different_hashes():
    def graph(width=4, rows=3, activation=nn.ReLU):
        return trace(nn.Sequential(nn.Linear(4, width), activation()), torch.randn(rows, 4)).hash

    assert graph() == graph()
    assert len({graph(), graph(width=5), graph(rows=2), graph(activation=nn.GELU)}) == 4


class Draws(nn.Linear):
    def forward(self, x):
        return torch.distributions.Normal(super().forward(x), 1.0, validate_args=True).rsample()


VALUES = r"values of a tensor, in torch's own code at .*batchnorm.py:\d+ \(exponential_average_factor"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)), VALUES),
        (Draws(4, 4), r"in torch's own code at .*distributions.* unless validate_args"),
    ],
)
def test_bad_input_is_refused_in_one_error(model, message, caplog):
    raises(TraceError, message, lambda: trace(model, torch.randn(2, 4)))
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert not torch.compiler.is_compiling()


def test_submodules_may_have_any_name():
    layers = {name: nn.Linear(4, 4) for name in ("call", "own", "reads", "ties", "returned")}  # the capture's own names
    model = model_of(lambda self, x: self.returned(self.ties(self.reads(self.own(self.call(x))))).sum(), **layers)
    assert len(trace(model, torch.ones(2, 4)).gradients) == 10


# Gradients that autograd would copy when it keeps them: the graph copies them, and the plan counts them.


def with_leaves(forward):
    """Parameters of which two have strides of their own, and two are one."""
    values = {"weight": torch.randn(4, 4), "other": torch.randn(4, 4), "bias": torch.randn(4)}
    values |= {"turned": torch.randn(4, 2, 3).permute(2, 0, 1), "gaps": torch.randn(4, 8)[:, ::2]}  # turned: (3, 4, 2)
    model = model_of(forward, **{name: nn.Parameter(value) for name, value in values.items()})
    model.tied = model.weight
    return model


# name -> (forward, how many gradients are copied)
COPIES = {
    "sum": (lambda m, x: m.weight.sum(), 1),
    "of one element": (lambda m, x: m.bias[:1].sum() * 2, 0),
    "broadcast": (lambda m, x: (x * m.bias + m.weight.sum(0).mean()).sin(), 1),
    "tied": (lambda m, x: (m.tied + 1).sum() * 2, 1),
    "the incoming gradient": (lambda m, x: x + m.bias, 1),
    "the incoming gradient for two leaves": (lambda m, x: m.weight + m.other, 2),
    "one gradient for two leaves": (lambda m, x: (m.weight + m.other).sin(), 1),
    "one gradient for two leaves, turned": (lambda m, x: (m.weight + m.other.t()).sin(), 1),
    "other strides": (lambda m, x: (m.turned.contiguous() * 2).sin(), 1),
    "one value for all, other strides": (lambda m, x: m.turned.sum(), 1),
    "of a leaf with gaps, turned": (lambda m, x: (m.gaps.t().contiguous() * 2).sin(), 1),
    "of a leaf with gaps": (lambda m, x: (m.gaps * 2).contiguous().sin(), 0),
    "nobody else's": (lambda m, x: (x @ m.weight).sin() * m.bias, 0),
    "a view of the incoming gradient": (lambda m, x: (m.bias * 1).view(2, 2), 0),
    "views of one gradient": (lambda m, x: torch.cat([m.weight, m.other]), 0),
    "two that die with their copies": (
        lambda m, x: m.weight.t().contiguous().sin() + m.other.t().contiguous().cos(),
        2,
    ),
}


def backward(step, leaves, x):
    """One backward with gradients of one, from no gradient; what it leaves in the leaves."""
    for leaf in leaves:
        leaf.grad = None
    output = step(x)
    output.backward(torch.ones_like(output))
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("name", COPIES)
def test_copies_made_by_autograd_are_in_the_graph_and_in_the_peak(name):
    forward, expected = COPIES[name]
    model, x = with_leaves(forward), torch.randn(3, 4, requires_grad=True)
    graphs = []

    def planner(graph):
        graphs.append(graph)
        return plan(graph, policy="none")

    step = PlannedStep(model, Request(planner=planner, differentiate="all"))
    step.prepare(x)
    (graph,) = graphs
    copies = [n for n in graph.nodes if n.target == "aten.clone.default" and n.phase == "backward"]
    assert len(copies) == expected

    leaves = [*model.parameters(), x]
    for mine, its in zip(backward(step, leaves, x), backward(model, leaves, x)):
        assert (mine is None) == (its is None)
        assert mine is None or (torch.equal(mine, its) and mine.stride() == its.stride())
    measured = ackpt.measure(lambda: [backward(step, leaves, x)], "cpu", resident=(model, x), repeats=0)
    assert measured.dynamic_peak_bytes == step.plan.dynamic_peak_bytes
