"""The workspace of operations: against the meter, one by one and in whole steps; at other sizes, mostly not run."""

import contextlib

import pytest
import torch
from conftest import assert_as_eager, measured_step, model_of, raises, threads
from real_bytes import disagreements
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import ackpt
from ackpt.graph import PlannedStep, profile, simulate, trace
from ackpt.metering import run_alone
from ackpt.metering.meter import MeterError
from ackpt.planner.capture.aot import capture
from ackpt.planner.capture.call_facts import WatchedModel, call_of
from ackpt.planner.capture.dynamic_sizes import Dimension
from ackpt.planner.capture.optimizer_state import NO_LOOP
from ackpt.planner.costs.workspace import workspace_bytes
from ackpt.planner.schedule.schedule import everything, lower
from ackpt.planner.step.plans import CapturedStep


class Convolutions(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(layers)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def make_words():
    def forward(self, tokens):
        h = self.embedding(tokens)
        h = self.norm(h + self.mix(h))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), tokens.flatten())

    return model_of(
        forward, embedding=nn.Embedding(11, 8), mix=nn.Linear(8, 8), norm=nn.LayerNorm(8), head=nn.Linear(8, 11)
    )


MODELS = {
    "convolutions": (Convolutions, (torch.ones(2, 4, 8, 8), torch.zeros(2, dtype=torch.long)), False),
    "words": (make_words, (torch.zeros(2, 6, dtype=torch.long),), False),
    "words in bfloat16": (make_words, (torch.zeros(2, 6, dtype=torch.long),), True),
}


def traced(name):
    build, args, autocast = MODELS[name]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return trace(build(), *args)


@pytest.mark.parametrize("saves", ["all", "nothing"])
@pytest.mark.parametrize("name", MODELS)
def test_with_workspaces_the_simulated_peak_is_the_measured_one(name, saves):
    build, args, autocast = MODELS[name]
    model = build()

    class Planner:
        def __init__(self, graph):
            analysis = graph.analysis
            least = {storage for place in analysis.not_recomputable for storage in graph.nodes[place].storages}
            least &= analysis.base_of.keys()
            self.schedule = everything(graph) if saves == "all" else lower(graph, least)

    step = PlannedStep(model, Planner)
    measured = measured_step(model, step, *args, autocast=autocast).dynamic_peak_bytes
    graph = traced(name)
    found = simulate(graph, profile(graph, workspace="measured"), Planner(graph).schedule)
    assert found.peak_bytes == measured


def test_the_cost_does_not_grow_with_the_number_of_layers(monkeypatch):
    runs = []
    count = run_alone.count_allocations
    monkeypatch.setattr(run_alone, "count_allocations", lambda function: runs.append(function) or count(function))
    counts = {}
    for layers in (2, 5):
        graph = trace(Convolutions(layers), *MODELS["convolutions"][1])
        runs.clear()
        workspace_bytes(graph)
        counts[layers] = len(runs)
    assert counts[2] == counts[5]


@contextlib.contextmanager
def profiler():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True):
        yield


AROUND = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a profiler": profiler,
    "a FLOP counter": lambda: FlopCounterMode(display=False),
    "fake tensors": FakeTensorMode,
    "another default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("around", AROUND)
def test_modes_and_hooks_of_the_caller_see_nothing(around):
    graph = traced("words")
    expected = workspace_bytes(traced("words"))
    with AROUND[around]() as entered:
        assert workspace_bytes(graph) == expected
    if around == "a FLOP counter":
        assert entered.get_total_flops() == 0


def test_random_states_of_the_caller_are_unchanged():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    graph = trace(model, torch.ones(2, 4))
    assert any(node.is_random for node in graph.nodes)
    state = torch.get_rng_state()
    workspace_bytes(graph)
    assert torch.equal(torch.get_rng_state(), state)


def test_arguments_are_made_so_that_operations_run():
    """An integer divisor must not be 0, an index must be within any size."""

    def divide(self, x, counts, mask):
        return (self.weight * (x // counts)).masked_fill(mask, 0).sum() + self.weight[mask.long()].sum()

    model = model_of(divide, weight=nn.Parameter(torch.ones(3)))
    graph = trace(model, torch.arange(3), torch.ones(3, dtype=torch.long), torch.ones(3, dtype=torch.bool))
    assert len(workspace_bytes(graph)) == len(graph.nodes)


@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_made_up_mask_selects_at_most_the_available_elements(policy):
    def forward(self, tokens, image):
        words, features = self.words(tokens), self.image(image).tanh()
        mask = (tokens == 7).unsqueeze(-1).expand_as(words)
        return self.head(words.masked_scatter(mask, features).tanh()).square().sum()

    model = model_of(forward, words=nn.Embedding(8, 16), image=nn.Linear(16, 16), head=nn.Linear(16, 1))
    args = torch.tensor([[1, 7, 7, 2, 3]]), torch.randn(2, 16)
    step = ackpt.compile(model, *args, policy=policy)
    assert_as_eager(model, step, *args)
    assert measured_step(model, step, *args).peak_bytes == step.plan.peak_bytes


@torch.library.custom_op("workspace_test::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    if x.sum() != 41:
        raise RuntimeError("the sum must be 41")
    return x.clone()


picky.register_fake(torch.empty_like)
picky.register_autograd(lambda ctx, grad: grad)


def test_an_operation_that_cannot_run_alone_is_named():
    graph = trace(model_of(lambda self, x: picky(self.inner(x)), inner=nn.Linear(2, 2)), torch.ones(1, 2))
    raises(MeterError, "picky .workspace_test.picky.default. of module .*must be 41", lambda: disagreements(graph))


@torch.library.custom_op("workspace_test::counting", mutates_args=())
def counting(x: torch.Tensor) -> torch.Tensor:
    COUNTED.append(x.sum().item())
    return x.clone()


COUNTED: list[float] = []
counting.register_fake(torch.empty_like)
counting.register_autograd(lambda ctx, grad: counting(grad))


def test_python_kernels_run_in_steps_only():
    COUNTED.clear()
    model = model_of(lambda self, x: counting(self.inner(x)).square().sum(), inner=nn.Linear(2, 2))
    step = ackpt.compile(model, torch.ones(4, 2), budget="1MiB")
    step.prepare(torch.ones(5, 2))
    step.prepare(torch.ones(6, 2))
    assert COUNTED == []
    assert step.plan.note.startswith("the temporary memory of workspace_test.counting.default is not counted")
    step(torch.ones(5, 2)).backward()
    assert len(COUNTED) == 2


def test_a_graph_on_another_device_is_refused():
    graph = traced("words")
    with FakeTensorMode():  # torch without CUDA cannot trace such a model
        graph.analysis.fx[graph.boundary].meta["val"] = torch.ones(2, device="cuda")
    raises(MeterError, "measured on the CPU, and this graph is on cuda:0", lambda: workspace_bytes(graph))


HOARD: list[torch.Tensor] = []


@torch.library.custom_op("workspace_test::unlike", mutates_args=())
def unlike(x: torch.Tensor, how: str) -> torch.Tensor:
    if how == "wide":
        return x.double()
    if how == "part of more":
        return torch.zeros(10)[:3]
    if how == "hoards" or (how == "hoards once" and not HOARD):
        HOARD.append(torch.ones(10))
    return x.clone()


unlike.register_fake(lambda x, how: torch.empty_like(x))
unlike.register_autograd(lambda ctx, grad: (grad, None))


def make_unlike(how):
    return model_of(
        lambda self, x: unlike(self.weight * x, self.how)[1:].exp(), how=how, weight=nn.Parameter(torch.ones(3))
    )


@pytest.mark.parametrize(("how", "real_bytes"), [("wide", 24), ("part of more", 40)])
def test_storages_with_other_sizes_than_in_the_graph_are_reported(how, real_bytes):
    graph = trace(make_unlike(how), torch.ones(3))
    first, *later = disagreements(graph)
    (storage,) = next(node.storages for node in graph.nodes if node.target == "workspace_test.unlike.default")
    assert (first.target, first.storage) == ("workspace_test.unlike.default", storage)
    assert (first.graph_bytes, first.real_bytes) == (12, real_bytes)
    # What is computed from wider values is wider.
    wider = [(one.target, one.graph_bytes, one.real_bytes) for one in later if one.target == "aten.exp.default"]
    assert wider == ([("aten.exp.default", 8, 16)] if how == "wide" else [])


def test_memory_kept_by_the_first_call_is_no_workspace():
    HOARD.clear()
    graph = trace(make_unlike("hoards once"), torch.ones(3))
    assert disagreements(graph) == ()
    assert HOARD and not any(workspace_bytes(graph))


def test_bytes_left_besides_the_results_are_reported():
    graph = trace(make_unlike("hoards"), torch.ones(3))
    (found,) = disagreements(graph)
    assert (found.target, found.storage) == ("workspace_test.unlike.default", None)
    assert (found.graph_bytes, found.real_bytes) == (12, 12 + 40)


@pytest.mark.parametrize("name", MODELS)
def test_storages_of_ordinary_models_have_the_sizes_of_the_graph(name):
    assert disagreements(traced(name)) == ()


def test_a_graph_is_measured_once(monkeypatch):
    graph = traced("words")
    expected = workspace_bytes(graph)
    monkeypatch.setattr(run_alone, "count_allocations", None)
    assert workspace_bytes(graph) == expected


BAGS = torch.arange(20).view(5, 4) % 8
PEAKS = {
    "largest of bags": lambda y: nn.functional.embedding_bag(BAGS, y, mode="max"),
    "mean of bags": lambda y: nn.functional.embedding_bag(BAGS, y, mode="mean"),
    "logcumsumexp": lambda y: y.logcumsumexp(1),
    "norm": lambda y: y.norm(1.5, -1),
}


def of_rows(operation):
    return model_of(lambda self, x: self.operation(self.layer(x)).mean(), layer=nn.Linear(6, 6), operation=operation)


@pytest.mark.parametrize("name", PEAKS)
def test_the_smallest_budget_is_the_measured_peak(name):
    model, x = of_rows(PEAKS[name]), torch.randn(8, 6)
    with pytest.raises(ackpt.BudgetError) as error:
        ackpt.compile(model, x, budget=1)
    step = ackpt.compile(model, x, budget=error.value.least_bytes)

    def run():
        step(x).backward()
        model.zero_grad()

    measured = ackpt.measure(run, resident=(model, x, *([BAGS] if "bags" in name else [])), repeats=0)
    assert measured.peak_bytes == error.value.least_bytes


def test_a_workspace_that_depends_on_values_is_named():
    step = ackpt.compile(of_rows(lambda y: y.prod(-1)), torch.randn(8, 6))
    assert step.plan.note == (
        "the gradient of prod takes more temporary memory than counted if its argument contains zeros"
    )
    assert ackpt.compile(of_rows(lambda y: y.logcumsumexp(1)), torch.randn(8, 6)).plan.note is None


@pytest.mark.parametrize(
    "kind", ["attention", "fused", "masked", "convolution", "dtypes", "cumulative", "sums", "expanded gradient"]
)
@pytest.mark.parametrize("count", [1, 2])
def test_the_workspace_is_that_of_running_every_operation(kind, count):
    def forward(self, ids):
        x = self.norm(self.embed(ids))
        if self.kind == "attention":
            scores = x @ x.transpose(1, 2)
            scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, float("-inf"))
            x = F.dropout(scores.softmax(-1), 0.1) @ self.linear(x)
        elif self.kind == "fused":
            x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        elif self.kind == "masked":
            mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            x = self.norm(F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask)[:, 0])
        elif self.kind == "convolution":
            x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        elif self.kind == "sums":
            mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            x = torch.where(mask, x @ x.transpose(1, 2), 0.0) @ x + x.sum((0, 1))
            return self.head(x).square().mean() + x.exp().sum((0, 1, 2))
        elif self.kind == "expanded gradient":
            return F.gelu(self.linear(x)).sum()
        elif self.kind == "dtypes":
            x = x * ids[..., None] + torch.arange(ids.shape[1])[:, None] / 7 + x.double().sum()
        elif self.kind == "cumulative":
            x = torch.cat([x.cumsum(1), x.flip(1)], 1).sort(1).values.float()
            return self.head(x).logsumexp(-1).std()
        return F.cross_entropy(self.head(x.float()).flatten(0, 1), ids.flatten())

    with threads(count):
        layers = {"linear": nn.Linear(32, 32), "conv": nn.Conv1d(32, 32, 3, padding=1), "head": nn.Linear(32, 40)}
        model = model_of(forward, kind=kind, embed=nn.Embedding(40, 32), norm=nn.LayerNorm(32), **layers)
        ids = torch.randint(0, 40, (4, 12))
        with capture(model, (ids,), {}, dynamic=[Dimension(0, 0), Dimension(0, 1)]) as captured:
            step = CapturedStep(captured, call_of(WatchedModel(model), (ids,), {}), model, NO_LOOP)
        for batch, length in ((2, 3), (4, 13), (3, 100), (16, 64), (64, 130), (2, 600)):
            graph = step.graph((batch, length))
            assert step.workspace_bytes((batch, length)) == workspace_bytes(graph), (batch, length)
