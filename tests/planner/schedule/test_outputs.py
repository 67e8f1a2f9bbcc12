"""Outputs: dropped or kept, views of changed inputs, those that backward does not reach; gradients that come in."""

import itertools

import pytest
import torch
from conftest import assert_as_eager, model_of, raises
from torch import nn
from torch.nn import functional as F

import ackpt
from ackpt import plan
from ackpt.graph import PlannedStep
from ackpt.planner.policies import POLICIES
from ackpt.planner.request import Request
from ackpt.planner.schedule.simulator import peak_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 40)

    def forward(self, x, labels):
        for _ in range(2):
            x = F.gelu(self.down(F.gelu(self.up(x))))
        logits = self.head(x)
        return F.cross_entropy(logits, labels), logits, logits.argmax(-1), x


@pytest.fixture
def given():
    torch.manual_seed(0)
    return Classifier(), torch.randn(64, 16), torch.randint(0, 40, (64,))


def measured(step, model, batch, outputs: str) -> int:
    def once():
        model.zero_grad()
        returned = step(*batch)
        if outputs == "drop":
            returned = returned[:1]
        returned[0].backward()

    return ackpt.measure(once, resident=(model, *batch), repeats=0).peak_bytes


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in ("manual", "selective")])
def test_the_measured_peak_is_the_planned_one(given, policy):
    model, *batch = given
    peaks = {}
    for outputs in ("drop", "keep"):
        budget = None if policy in ("none", "full") else 0.8
        step = ackpt.compile(model, *batch, budget=budget, policy=policy, outputs=outputs)
        peaks[outputs] = measured(step, model, batch, outputs)
        assert peaks[outputs] == step.plan.peak_bytes
    assert peaks["drop"] < peaks["keep"]


def test_the_baseline_of_a_fraction_drops_them_as_well(given):
    model, *batch = given
    for outputs in ("drop", "keep"):
        step = ackpt.compile(model, *batch, budget=0.8, outputs=outputs)
        assert measured(model, model, batch, outputs) == step.plan.baseline_peak_bytes


def test_outputs_kept_by_the_caller_are_refused_beyond_the_budget(given):
    model, *batch = given
    step = ackpt.compile(model, *batch, budget=0.8)
    returned = step(*batch)
    raises(ackpt.BudgetError, r"output 1 of shape \[64, 40\].*outputs='keep'", lambda: returned[0].backward())
    del returned
    loss = step(*batch)[0]
    loss.backward()
    for budget in ("1MiB", None):
        step = ackpt.compile(model, *batch, budget=budget, policy="auto" if budget else "full")
        returned = step(*batch)
        returned[0].backward()


def test_the_model_itself_runs_only_if_its_outputs_fit_as_well(given):
    model, *batch = given
    kept = ackpt.compile(model, *batch, outputs="keep").plan.peak_bytes
    dropped = ackpt.compile(model, *batch).plan.peak_bytes
    step = ackpt.compile(model, *batch, budget=(kept + dropped) // 2)
    returned = step(*batch)
    raises(ackpt.BudgetError, "still referenced", lambda: returned[0].backward())


def test_a_plan_for_dropped_outputs_is_refused_for_kept_ones(given):
    model, *batch = given
    plan = ackpt.compile(model, *batch, policy="full").plan
    with pytest.raises(ackpt.PlanError):
        ackpt.compile(model, *batch, plan=plan, outputs="keep")


def test_invalid_values_of_the_option_are_refused(given):
    model, *batch = given
    with pytest.raises(ValueError, match="outputs must be 'drop' or 'keep', got 'all'"):
        ackpt.compile(model, *batch, outputs="all")
    raises(ValueError, "outputs must be 'drop' or 'keep', got 3", lambda: ackpt.trace(model, *batch, outputs=3))


@pytest.mark.parametrize("function", [lambda h: h.view(4, 32), lambda h: h, lambda h: h[0]])
@pytest.mark.parametrize("differentiate", ["loss", "all"])
def test_an_output_that_is_changed_before_backward_reads_it(function, differentiate):
    """Eager raises an error; AOTAutograd does not notice a change of a single view."""

    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden).tanh().mean(), function(hidden)

    model = model_of(forward, first=nn.Linear(16, 16), second=nn.Linear(16, 16))
    step = ackpt.compile(model, torch.randn(8, 16), policy="none", differentiate=differentiate)
    loss, output = step(torch.randn(8, 16))
    with torch.no_grad():
        output.mul_(2)
    raises(ackpt.CheckpointError, "output 1 of shape .* was changed in place .*output.clone()", loss.backward)
    loss, output = step(torch.randn(8, 16))
    output.clone().mul_(2)
    loss.backward()


@pytest.mark.parametrize("policy", ["none", "full"])
def test_the_caller_may_change_an_output_that_backward_does_not_read(given, policy):
    class Masked(Classifier):
        def forward(self, x, labels):
            loss, logits, *_ = super().forward(x, labels)
            return loss, logits * 2

    torch.manual_seed(0)
    model = Masked()
    step = ackpt.compile(model, *given[1:], policy=policy)

    def change(outputs):
        loss, logits = outputs
        logits[:, 0] = -1e9
        logits.mul_(2)
        return loss

    assert_as_eager(model, step, *given[1:], loss=change)


CASES = {
    "a view": lambda x, w: (x.t(), (x.sin() @ w).sum()),
    "a part, which backward does not read": lambda x, w: (x[1:], w.sin()),
    "itself, which backward reads": lambda x, w: (x, (x @ w).sin()),
    "a copy": lambda x, w: (x.clone(), (x @ w).sin()),
    "two views": lambda x, w: (x.t(), x.view(-1), (x @ w).tanh().sin()),
}


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("name", CASES)
def test_planned_as_measured(name, policy):
    def forward(self, x):
        x.add_(1)
        return self.function(x, self.weight)

    model, x = model_of(forward, weight=nn.Parameter(torch.randn(4, 4)), function=CASES[name]), torch.randn(3, 4)
    expected = [output.detach().clone() for output in model(x.clone())]
    step = ackpt.compile(model, x, policy=policy, differentiate="all")
    own = x.clone()
    found = step(own)
    assert all(map(torch.equal, found, expected))
    assert (found[0].data_ptr() == own.data_ptr()) is (name not in ("a copy", "a part, which backward does not read"))

    def once():
        model.zero_grad()
        last = step(x)[-1]
        last.backward(torch.ones_like(last))

    del found
    measured = ackpt.measure(once, "cpu", resident=(model, x), repeats=0)
    assert measured.dynamic_peak_bytes == step.plan.dynamic_peak_bytes


def views(function):
    return model_of(
        lambda self, x, y: (self.function(x, y), self.layer(y).sum()), layer=nn.Linear(6, 6), function=function
    )


CHANGED = {
    "a view of the other": lambda x, y: (x.add_(100), y[0])[1],
    "a view of the one": lambda x, y: (y.add_(100), y[0])[1],
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("parts", [lambda x: (x, x[1:]), lambda x: (x[:3], x[1:]), lambda x: (x[1:], x)])
def test_a_view_of_inputs_that_share_memory_is_refused_if_one_is_changed(name, parts):
    with pytest.raises(ackpt.TraceError, match="output 0 of the model is a view of an input that shares memory"):
        ackpt.compile(views(CHANGED[name]), *parts(torch.arange(24.0).view(4, 6)), policy="full")


KEPT = {
    "the input itself": lambda x, y: (x.add_(100), y)[1],
    "a copy": lambda x, y: (x.add_(100), y[0].clone())[1],
    "nothing changed": lambda x, y: y[0],
}


@pytest.mark.parametrize("name", KEPT)
def test_other_outputs_of_inputs_that_share_memory(name):
    model, results = views(KEPT[name]), []
    x = torch.arange(24.0).view(4, 6)
    step = ackpt.compile(model, x, x[1:], policy="full")
    for call in (model, step):
        x = torch.arange(24.0).view(4, 6)
        results.append([x, *call(x, x[1:])])
    assert all(map(torch.equal, *results))


STEPS = {
    "ackpt.compile": lambda model, x: ackpt.compile(model, x, differentiate="all"),
    "dynamo": lambda model, x: torch.compile(model, backend="ackpt", options={"differentiate": "all"}),
}
DIFFERENTIABLE = (0, 1, 3)
REACHED = [c for size in (1, 2, 3) for c in itertools.combinations(DIFFERENTIABLE, size)]


@pytest.mark.parametrize("name", STEPS)
def test_parameters_that_backward_does_not_reach_have_no_gradient(name):
    def forward(self, x):
        h = self.trunk(x).sin()
        left = self.left(h).cos()
        return left, self.right(x).tanh(), h.detach().sum(), left * 2

    layers = {name: nn.Linear(4, 4) for name in ("trunk", "left", "right")}
    model, x = model_of(forward, **layers, unused=nn.Parameter(torch.zeros(2))), torch.randn(2, 4)
    torch._dynamo.reset()
    step = STEPS[name](model, x)
    for reached in REACHED:
        assert_as_eager(model, step, x, loss=lambda outputs: sum(outputs[place].sum() for place in reached))  # noqa: B023


def test_a_gradient_that_is_always_zero_is_zero():
    size, sign, x = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4)), torch.randn(4)
    model = model_of(lambda self, x: (torch.copysign(self.size, self.sign) * x).sum(), size=size, sign=sign)
    ackpt.compile(model, x)(x).backward()
    assert model.sign.grad is not None and not model.sign.grad.any()


# name -> (outputs, bytes of the tangents, bytes of gradients that torch copies into them)
CASES_TANGENTS = {
    "whole": (lambda h, s: s, 48, 0),
    "rows": (lambda h, s: s[1:], 32, 0),
    "turned rows": (lambda h, s: s[1:].t(), 32, 0),
    "an element": (lambda h, s: s[0, 1], 4, 0),
    "part of a row": (lambda h, s: s[:1, 1:], 12, 0),
    "columns": (lambda h, s: s[:, ::2], 44, 24),  # 11 floats from the first to the last, 6 of them
    "turned columns": (lambda h, s: s[:, 1:].t(), 44, 36),
    "a column": (lambda h, s: s[:, 1], 36, 12),
    "expanded": (lambda h, s: s[:, :1].expand(3, 5), 60, 0),
    "all columns": (lambda h, s: s.unbind(1), 4 * 36, 4 * 12),
    "of two values": (lambda h, s: (h[:, ::2], s[0]), 44 + 16, 24),
}


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("name", CASES_TANGENTS)
def test_incoming_gradients_have_memory_of_their_own(name, policy):
    def forward(self, x):
        product = x @ self.weight
        return self.view(product, product.sin())

    view, tangents, copied = CASES_TANGENTS[name]
    model, x = model_of(forward, weight=nn.Parameter(torch.randn(4, 4)), view=view), torch.randn(3, 4)
    graphs = []

    def planner(graph):
        graphs.append(graph)
        return plan(graph, policy=policy)

    step = PlannedStep(model, Request(planner=planner, differentiate="all"))
    step.prepare(x)
    (graph,) = graphs
    analysis = graph.analysis
    assert sum(analysis.bytes[s] for place in analysis.tangents for s in graph.nodes[place].storages) == tangents
    assert analysis.incoming_bytes == copied

    def once(step):
        model.zero_grad()
        outputs = step(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    once(model)
    expected = model.weight.grad
    once(step)
    assert torch.equal(model.weight.grad, expected)
    measured = ackpt.measure(lambda: once(step), "cpu", resident=(model, x), repeats=0)
    assert measured.dynamic_peak_bytes == step.plan.dynamic_peak_bytes
    assert peak_of(graph, step.plan.schedule, [0] * len(graph.nodes)) == step.plan.dynamic_peak_bytes


def channels_last(returned):
    layers = {"first": nn.Conv2d(3, 8, 1), "second": nn.Conv2d(8, 16, 1)}
    model = model_of(lambda self, x: self.returned(self.second(self.first(x).sin())), returned=returned, **layers)
    return model.to(memory_format=torch.channels_last)


def test_gradients_in_another_order_than_the_planned_one_are_refused():
    """Torch would copy them: memory that the plan does not count, and sums that round another way."""
    x, target = torch.randn(2, 3, 8, 8), torch.randn(2, 16, 8, 8)
    step = ackpt.compile(channels_last(lambda y: y), x, policy="none")
    raises(RuntimeError, "contiguous", lambda: nn.functional.mse_loss(step(x), target).backward())
    step(x).backward(target.contiguous(memory_format=torch.channels_last))
    step(x).sum().backward()  # expanded


def test_contiguous_outputs_take_contiguous_gradients():
    x, target = torch.randn(2, 3, 8, 8), torch.randn(2, 16, 8, 8)
    model = channels_last(lambda y: y.contiguous())
    assert_as_eager(model, ackpt.compile(model, x, policy="none"), x, loss=lambda y: nn.functional.mse_loss(y, target))
