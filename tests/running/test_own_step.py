"""The model's own step: measuring it has no side effects, and where it runs instead of a plan, it keeps the budget."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from conftest import assert_equal
from torch import nn

import ackpt
from ackpt.capture import as_compiled
from ackpt.running import variants

pytestmark = [
    pytest.mark.usefixtures("one_thread", "seeded"),
    pytest.mark.filterwarnings("ignore:The model was captured as torch.compile runs it"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # torch hides it elsewhere
]


def body(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


class ReadsValues(nn.Module):
    """Is captured as torch.compile runs it, which compares it with the model's own step."""

    def __init__(self):
        super().__init__()
        self.layers = body()

    def forward(self, x):
        if not torch.compiler.is_compiling() and (x > 1e9).all():
            x = x * 0
        return self.layers(x)


def is_own(step) -> bool:
    """Whether the last call ran the model itself."""
    return step._ackpt_planned._last[-1].run is None


UPSTREAM = {
    "saves nothing": lambda data, outer: data + outer,
    "saves its result": lambda data, outer: torch.tanh(data + outer),
    "a leaf": lambda data, outer: outer.expand(len(data), 8).detach().requires_grad_(),
}
MODELS = {
    "its own step": (body, "1GiB"),
    "writes into its input": (lambda: body(nn.ReLU(inplace=True)), "1GiB"),
    "as torch.compile runs it": (ReadsValues, "1GiB"),
    "of a fraction": (ReadsValues, 1.0),
}


@pytest.mark.parametrize("dynamic", [None, False])
@pytest.mark.parametrize("upstream", UPSTREAM)
@pytest.mark.parametrize("name", MODELS)
def test_the_graph_that_computes_an_argument_is_left_alone(name, upstream, dynamic):
    if name == "writes into its input" and upstream != "saves nothing":
        pytest.skip("eager mode refuses it")
    make, budget = MODELS[name]
    model, outer, batches = make(), nn.Parameter(torch.ones(8)), [torch.randn(rows, 8) for rows in (4, 6, 9, 9)]

    def gradients(call):
        found = []
        for batch in batches:
            model.zero_grad()
            outer.grad = None
            x = UPSTREAM[upstream](batch, outer)
            call(x).square().mean().backward()
            found += [outer.grad, x.grad if x.is_leaf else None, *(p.grad for p in model.parameters())]
        return [each for each in found if each is not None]

    expected = gradients(model)
    step = ackpt.compile(model, UPSTREAM[upstream](batches[0], outer), budget=budget, dynamic=dynamic)
    assert_equal(expected, gradients(step), "gradient")


def test_a_tensor_that_is_passed_twice_is_one_tensor_when_the_step_is_measured():
    outer = nn.Parameter(torch.ones(4, 8))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, others):
            assert x is others["again"]
            return (self.layer(x) * others["again"]).mean()

    x = outer * 2
    step = ackpt.compile(Twice(), x, {"again": x}, budget="1GiB")
    assert is_own(step)


def test_hooks_of_parameters_run_only_in_steps():
    model, calls = body(), []
    model[0].weight.register_hook(lambda gradient: calls.append(1) or gradient * 2)
    model[0].bias.grad = torch.ones(8)
    step = ackpt.compile(model, torch.randn(4, 8), budget="1GiB")
    assert is_own(step)
    assert not calls and torch.equal(model[0].bias.grad, torch.ones(8))
    x = torch.randn(4, 8)
    for call in (step, model):
        call(x).sum().backward()
    assert len(calls) == 2


class Wasteful(nn.Module):
    """Its code computes something that nothing reads, and that a graph therefore does not show."""

    def __init__(self, waste):
        super().__init__()
        self.layers, self.waste = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)), waste

    def forward(self, x):
        self.waste(x)
        return self.layers(x).square().mean()


def all_pairs(x):
    torch.mm(x, x.t())


def one_megabyte(x):
    torch.empty(250_000)


@pytest.mark.parametrize(
    ("waste", "budget", "rows", "own"),
    [
        (all_pairs, "20MB", (16, 32, 2048, 64), (True, True, False, False)),
        (all_pairs, 1.0, (16, 32, 2048, 64), (True, True, False, False)),
        (one_megabyte, "20MB", (1024, 16, 512, 32), (True, True, True, True)),
        (one_megabyte, 1.0, (1024, 16, 512, 32), (True, False, False, False)),
    ],
)
def test_the_model_itself_runs_at_sizes_at_which_its_measured_peak_is_the_simulated_one(waste, budget, rows, own):
    model = Wasteful(waste)
    step = ackpt.compile(model, torch.randn(rows[0], 64), budget=budget, dynamic={"x": {0: (2, 4096)}})
    ran = []
    for count in rows:
        x = torch.randn(count, 64)
        step.prepare(x)
        ran.append(is_own(step))
        model.zero_grad()
        measured = ackpt.measure(lambda: step(x).backward(), resident=(model, x), repeats=0, warmup=0)  # noqa: B023
        assert measured.dynamic_peak_bytes <= step.plan.limit_bytes
    assert tuple(ran) == own


def test_smaller_sizes_are_not_measured_again(monkeypatch):
    measured = []
    monkeypatch.setattr(
        variants, "measured_baseline", lambda *given: measured.append(given) or as_compiled.measured_baseline(*given)
    )
    model = body()
    step = ackpt.compile(model, torch.randn(16, 8), budget="1MB", dynamic={"input": {0: (2, 4096)}})
    counts = []
    for rows in (16, 4, 32, 24, 8, 33):
        step.prepare(torch.randn(rows, 8))
        assert is_own(step)
        counts.append(len(measured))
    assert counts == [1, 1, 2, 2, 2, 3]


def deep() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)), nn.Linear(64, 1))


@pytest.mark.parametrize(("budget", "is_kept"), [(0.7, False), ("10MB", True)])
def test_an_existing_gradient_of_an_argument_counts(budget, is_kept):
    model, x = deep(), torch.randn(256, 64, requires_grad=True)
    step = ackpt.compile(model, x, budget=budget)
    step(x).sum().backward()
    model.zero_grad()
    loss = step(x).sum()
    with contextlib.nullcontext() if is_kept else pytest.raises(ackpt.CheckpointError, match="64.0 KiB of gradients"):
        loss.backward()


def wide() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))


def accumulated(step, model, x):
    for _ in range(2):
        step(x).sum().backward()


def twice_differentiated(step, model, x):
    torch.autograd.grad(step(x).sum(), next(model.parameters()), create_graph=True)


def retained(step, model, x):
    step(x).sum().backward(retain_graph=True)


def retained_and_repeated(step, model, x):
    loss = step(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


USES = [
    (accumulated, ackpt.CheckpointError, "backward begins while .* of gradients exist"),
    (twice_differentiated, RuntimeError, "create_graph=True: a planned step cannot be differentiated twice"),
    (retained, ackpt.CheckpointError, "retain_graph=True: backward would free none of the activations"),
    (retained_and_repeated, ackpt.CheckpointError, "retain_graph=True"),
]


@pytest.mark.parametrize(("use", "error", "message"), USES)
@pytest.mark.parametrize("own", [True, False])
def test_a_step_that_would_exceed_the_budget_raises_also_if_the_model_itself_runs(use, error, message, own):
    model, x = (wide(), torch.randn(64, 64)) if own else (deep(), torch.randn(256, 64))
    step = ackpt.compile(model, x, budget=ackpt.compile(model, x, budget="10MB").plan.peak_bytes if own else 0.7)
    assert is_own(step) == own
    with pytest.raises(error, match=message):
        use(step, model, x)
    model.zero_grad()
    step(x).sum().backward()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("use", [retained, retained_and_repeated, accumulated])
def test_a_budget_with_room_allows_it(use, own):
    model, x = deep(), torch.randn(256, 64)
    step = ackpt.compile(model, x, budget="10MB" if own else 0.7)
    if not own:
        step = ackpt.compile(model, x, plan=dataclasses.replace(step.plan, limit_bytes=10**7))
    assert is_own(step) == own
    expected = []
    for call in (model, step):
        model.zero_grad()
        use(call, model, x)
        expected.append([p.grad for p in model.parameters()])
    assert_equal(*expected, "gradient")


class Outputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 32)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        logits = self.last(hidden)
        return {"loss": logits.mean(), "hidden": hidden, "logits": logits, "name": "outputs"}


def test_only_the_loss_has_a_gradient_also_if_the_model_itself_runs():
    model, x = Outputs(), torch.randn(64, 8)
    step = ackpt.compile(model, x, budget="10MB")
    outputs = step(x)
    assert is_own(step)
    assert outputs["name"] == "outputs" and torch.equal(outputs["logits"], model(x)["logits"])
    with pytest.raises(RuntimeError, match="backward reaches an output other than the loss"):
        (outputs["loss"] + outputs["logits"].sum()).backward()
    with torch.no_grad():
        assert not step(x)["logits"].requires_grad
    step(x)["loss"].backward()


def test_several_outputs_are_checked_when_backward_reaches_the_first_of_them():
    model, x = Outputs(), torch.randn(64, 8)
    exact = ackpt.compile(model, x, budget="10MB", differentiate="all", outputs="keep").plan.peak_bytes
    step = ackpt.compile(model, x, budget=exact, differentiate="all", outputs="keep")
    assert is_own(step)

    def backward(call):
        outputs = call(x)
        (outputs["loss"] + outputs["hidden"].sum() + outputs["logits"].sum()).backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = backward(model)
    model.zero_grad()
    assert_equal(expected, backward(step), "gradient")  # the head has its gradients before backward reaches "hidden"
    with pytest.raises(ackpt.CheckpointError, match="of gradients exist"):
        backward(step)
