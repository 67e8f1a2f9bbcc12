"""Memory outside of the model: earlier forwards, an optimizer's state, and a loss, which ``loss=`` makes count."""

import copy
import re
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import model_of
from planned_models import Mean
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as optimizers

import ackpt
from ackpt.planner.step import uncovered

X, LABELS = torch.linspace(-1, 1, 32 * 16).reshape(32, 16), torch.arange(32) % 10
LOSS_OUTSIDE = r"no output of Net is a scalar loss, so the budget .* not what a loss outside of it .* shape \[32, 10\]"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 10))

    def forward(self, x, labels=None):
        logits = self.body(x)
        return logits if labels is None else (F.cross_entropy(logits, labels), logits)


def recorded(function):
    """The result of `function`, and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        result = function()
    return result, [str(each.message) for each in given]


@pytest.mark.parametrize("budget", [40_000, "0.04MB", 1.0])
def test_a_loss_outside_of_the_model_is_named_when_the_budget_is_given(budget):
    model = Net()
    with pytest.warns(UserWarning, match=LOSS_OUTSIDE):
        step = ackpt.apply_budget(model, X, budget=budget)
    _, said = recorded(lambda: [model(X).sum().backward(), step.prepare(X[:8].clone()), model.zero_grad()])
    assert not said  # once for each step
    with pytest.warns(UserWarning, match=LOSS_OUTSIDE):
        ackpt.compile(Net(), X, budget=budget)(X)


def test_a_loss_outside_of_the_model_is_named_before_a_budget_is_refused():
    def refused():
        with pytest.raises(ackpt.BudgetError):
            ackpt.apply_budget(Net(), X, budget=10_000)

    _, said = recorded(refused)
    assert len(said) == 1 and re.match(LOSS_OUTSIDE, said[0])


def test_a_loss_inside_of_the_model_is_covered():
    model = Net()
    _, said = recorded(lambda: ackpt.apply_budget(model, {"x": X, "labels": LABELS}, budget="1MiB"))
    _, later = recorded(lambda: model(X, LABELS)[0].backward())
    _, without_budget = recorded(lambda: ackpt.compile(Net(), X)(X).sum().backward())
    assert not said and not later and not without_budget


@pytest.mark.parametrize("options", [{}, {"regions": True}])
def test_a_loss_that_leaves_the_model_is_named_with_its_bytes(options):
    model = Net()
    ackpt.apply_budget(model, (X, LABELS), budget="1MiB", **options)
    model(X, LABELS)[0].backward()
    with pytest.warns(UserWarning, match=LOSS_OUTSIDE + r", 1.2 KiB \(1280 bytes\)"):
        F.cross_entropy(model(X), LABELS).backward()
    assert not recorded(lambda: [model(X), model(X, LABELS)])[1]


def deep():
    torch.manual_seed(0)
    layers = ((nn.Linear(32, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
    return nn.Sequential(*(nn.Sequential(*each) for each in layers), Mean())


A, B = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0)).unbind()


def pair(model, kept):
    (model(A) + model(B)).backward()


def in_turns(model, kept):
    losses = [model(A), model(B)]
    for loss in losses:
        loss.backward()


def same_input(model, kept):
    (model(A) - 0.5 * model(A)).backward()


def alone(model, kept):
    model(A)  # dropped
    loss = model(A)
    loss.backward()
    kept.append(loss)


def evaluated_between(model, kept):
    loss = model(A)
    model.eval()
    with torch.no_grad():
        model(torch.cat([A, B]).repeat(8, 1))
    model.train()
    loss.backward()


def accumulated(model, kept):
    for x in (A, B, A):
        model(x).backward()


@pytest.mark.parametrize("options", [{}, {"regions": True}])
@pytest.mark.parametrize(
    ("loop", "exceeds"),
    [
        *((pair, True), (in_turns, True), (same_input, True), (evaluated_between, True)),
        *((alone, False), (accumulated, False)),
    ],
)
def test_what_earlier_forwards_hold_counts(loop, exceeds, options):
    """In bytes it is an error, or with on_exceed="warn" a warning; for a fraction, a warning."""
    probe = deep()
    step = ackpt.apply_budget(probe, A, budget="1GiB", accumulation=True, **options)
    probe(A).backward()
    budget = step.plan.baseline_peak_bytes
    expected = deep()
    loop(expected, [])
    for limit, on_exceed in ((budget, "raise"), (budget, "warn"), (1.0, "raise")):
        model, kept = deep(), []
        step = ackpt.apply_budget(model, A, budget=limit, accumulation=True, on_exceed=on_exceed, **options)
        model(A).backward()
        model.load_state_dict(deep().state_dict())
        model.zero_grad()
        if exceeds and limit == budget and on_exceed == "raise":
            with pytest.raises(ackpt.BudgetError, match="(other|earlier) forwards|without gradients"):
                loop(model, kept)
            continue
        _, said = recorded(partial(loop, model, kept))
        assert bool(said) == exceeds and all("on_exceed" in each or "budget 1.0" in each for each in said)
        for one, other in zip(model.parameters(), expected.parameters()):
            assert torch.equal(one.grad, other.grad)
        assert all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))


@pytest.mark.parametrize(
    ("keep", "counts"), [(lambda loss: loss, False), (torch.Tensor.item, False), (torch.Tensor.detach, True)]
)
def test_a_loss_in_memory_for_all_elements_may_be_kept(keep, counts):
    """The next forward reduces the storage of ``mse_loss``, unless another tensor shares it."""

    x, y = torch.randn(2, 2000, 16, generator=torch.Generator().manual_seed(0)).unbind()
    model, kept = model_of(lambda self, x, y: F.mse_loss(self.layer(x), y), layer=nn.Linear(16, 16)), []
    model.requires_grad_(False)
    x.requires_grad_()
    budget = ackpt.compile(model, x, y, budget="1GiB").plan.peak_bytes
    ackpt.apply_budget(model, (x, y), budget=budget, on_exceed="warn")

    def train():
        for _ in range(3):
            x.grad = None
            loss = model(x, y)
            loss.backward()
            kept.append(keep(loss))

    _, said = recorded(train)
    assert bool(said) == counts and len({torch.as_tensor(each).item() for each in kept}) == 1


def test_forwards_of_models_that_share_parameters_count():
    encoder = deep()[:2]
    models = [nn.Sequential(*encoder, nn.Linear(32, 8), Mean()) for _ in range(2)]
    least = [ackpt.compile(each, A, budget=1.0).plan.baseline_peak_bytes for each in models]
    for each in models:
        ackpt.apply_budget(each, A, budget=max(least))
    with pytest.raises(ackpt.BudgetError, match="forward begins while .* of other forwards"):
        (models[0](A) + models[1](B)).backward()


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_loss_of_one_element_is_one_and_sizes_may_be_symbols(dynamic):
    class One(Net):
        def forward(self, x, labels):
            return super().forward(x, labels)[0].reshape(1)

    assert not recorded(lambda: ackpt.compile(One(), X, LABELS, budget="1MiB", dynamic=dynamic))[1]
    _, said = recorded(lambda: ackpt.compile(Net(), X, budget="1MiB", dynamic=dynamic))
    assert len(said) == 1 and "is a scalar loss" in said[0]


def test_a_loss_outside_of_a_model_in_parts_is_named_at_its_first_call():
    model = Net()
    ackpt.apply_budget(model, X, budget="1MiB", regions=True)
    with pytest.warns(UserWarning, match=LOSS_OUTSIDE):
        model(X)
    assert not recorded(lambda: model(X))[1]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_state_of_an_optimizer_that_is_not_planned_is_counted_at_the_next_call(kind):
    model = Net()
    step = ackpt.apply_budget(model, (X, LABELS), budget="1MiB")
    optimizer = kind(model.parameters(), lr=0.1)
    other = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.1)

    def train():
        optimizer.zero_grad()
        model(X, LABELS)[0].backward()
        other.step()
        optimizer.step()

    assert not recorded(train)[1]
    _, said = recorded(train)
    if kind is torch.optim.SGD:  # it has no state
        assert not said
        return
    elements, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    size = 4 * (2 * elements + tensors)
    (message,) = said
    assert f"the budget '1MiB' does not count the state of AdamW, {size / 2**10:.1f} KiB ({size} bytes)" in message
    assert f"with it, the planned peak is {(step.plan.peak_bytes + size) / 2**10:.1f} KiB, not " in message
    assert "Give optimizer= where you give the budget" in message
    assert not recorded(train)[1]


@pytest.mark.parametrize("given", [{"budget": 1.0}, {"budget": "1MiB", "optimizer": "adamw"}, {"policy": "none"}])
def test_without_the_optimizer_state_no_bytes_are_promised(given):
    model = Net()
    ackpt.apply_budget(model, (X, LABELS), **given)
    optimizer = torch.optim.AdamW(model.parameters())

    def train():
        optimizer.zero_grad()
        model(X, LABELS)[0].backward()
        optimizer.step()

    assert not recorded(lambda: [train(), train()])[1]


def test_optimizers_are_observed_until_that_of_the_model_has_stepped():
    model = Net()
    step = ackpt.apply_budget(model, (X, LABELS), budget="1MiB")
    copied = copy.deepcopy(model)  # has no budget
    for each in (copied, model):
        assert step._ackpt_uncovered in uncovered._WATCHING
        each(X, LABELS)[0].backward()
        torch.optim.SGD(each.parameters()).step()
    assert step._ackpt_uncovered not in uncovered._WATCHING
    ackpt.apply_budget(Net(), (X, LABELS), budget="1MiB")
    assert list(optimizers._global_optimizer_post_hooks.values()).count(uncovered._stepped) == 1


@pytest.mark.parametrize("over", [-1, 1])
def test_the_allocator_of_a_gpu_shows_whether_the_step_stayed_within_its_budget(monkeypatch, over):
    """With simulated counters: 1000 bytes when the forward begins, and a peak of limit and workspaces at the end."""
    model = Net()
    step = ackpt.apply_budget(model, X, budget=1.0)
    watched = step._ackpt_uncovered
    limit = step.plan.limit_bytes
    peaks = iter([5, 1000 + limit + uncovered._WORKSPACES + over])
    stats = lambda device: {"allocated_bytes": {"all": {"current": 1000, "peak": next(peaks)}}}  # noqa: E731
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", stats)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(watched, "model", SimpleNamespace(parameters=lambda: iter([on_gpu])))
    loss = model(X).sum()
    _, said = recorded(loss.backward)
    assert (next(peaks, None), len(said)) == (None, over > 0)
    if said:
        size = uncovered._WORKSPACES + over
        assert said[0].startswith(f"this step exceeded the budget 1.0 by {size / 2**20:.1f} MiB, with a peak of ")
        model.zero_grad()
        assert not recorded(lambda: model(X).sum().backward())[1]


V = 500


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)]
        self.embed, self.blocks, self.head = nn.Embedding(V, 32), nn.ModuleList(blocks), nn.Linear(32, V)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class InDict(Model):
    def forward(self, x):
        return {"logits": super().forward(x), "size": 3}


def entropy(logits, batch, **options):
    targets = batch["y"] if isinstance(batch, dict) else batch[1]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


@pytest.mark.parametrize(
    ("kind", "loss", "as_tuple", "optimizer"),
    [
        (Model, entropy, False, "adamw"),
        (Model, entropy, True, None),
        (Model, lambda logits, batch: entropy(logits.double(), batch, label_smoothing=0.1), False, None),
        (Model, lambda logits, batch: entropy(logits[:, :-1], {"y": batch["y"][:, 1:]}), False, None),
        (Model, lambda logits, batch: F.mse_loss(logits, torch.zeros_like(logits)), False, None),
        (InDict, lambda outputs, batch: entropy(outputs["logits"], batch), False, None),
    ],
    ids=["entropy, adamw", "of a tuple", "wide", "shifted", "error", "in a dict"],
)
def test_the_bytes_of_a_loss_in_the_loop_count_toward_the_budget(kind, loss, as_tuple, optimizer):
    torch.manual_seed(0)
    model, others = kind(), torch.randint(0, V, (2, 2, 24))
    batch = {"x": torch.randint(0, V, (4, 16)), "y": torch.randint(0, V, (4, 16))}
    longer = {"x": others[0], "y": others[1]}  # planned in the loop, without the batch
    adam = torch.optim.AdamW(model.parameters()) if optimizer else None

    def step(batch=batch):
        model.zero_grad()
        outputs = model(batch["x"])
        kept = loss(outputs, tuple(batch.values()) if as_tuple else batch)
        kept.backward()
        if adam is not None and batch is not longer:
            adam.step()
        return kept

    step()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    example = tuple(batch.values()) if as_tuple else batch
    with pytest.raises(ackpt.BudgetError) as infeasible:
        ackpt.apply_budget(model, example, budget=1, loss=loss, optimizer=adam)
    for budget in (infeasible.value.least_bytes, None):
        planned = ackpt.apply_budget(
            model, example, budget=budget or "100%", policy="auto" if budget else "none", loss=loss, optimizer=adam
        )
        measured = ackpt.measure(step, resident=[model, *batch.values(), *([adam] if adam else [])])
        assert measured.peak_bytes <= planned.plan.peak_bytes
        assert budget or measured.peak_bytes == planned.plan.peak_bytes
        assert planned.plan.peak_bytes <= (budget or planned.plan.baseline_peak_bytes)
    measured = ackpt.measure(lambda: step(longer), resident=[model, *longer.values(), *([adam] if adam else [])])
    assert measured.peak_bytes <= planned.plan.peak_bytes

    model.load_state_dict(weights)
    adam = None
    step()
    planned_gradients = [each.grad for each in model.parameters()]
    ackpt.remove_budget(model)
    step()
    assert all(torch.equal(a, b.grad) for a, b in zip(planned_gradients, model.parameters()))  # pyright: ignore


@pytest.mark.parametrize(
    ("loss", "others", "kind", "said"),
    [
        (3, {}, TypeError, "loss must be a function of outputs and batch, got int"),
        (entropy, {"dynamic": True}, ValueError, "leave regions and dynamic out"),
        (entropy, {"regions": True}, ValueError, "leave regions and dynamic out"),
        (lambda outputs, batch: outputs, {}, ackpt.TraceError, "loss= cannot run without data: grad can be"),
        (lambda outputs, batch: outputs.sum() * outputs.max().item(), {}, ackpt.TraceError, "without reading values"),
        (lambda outputs, batch: batch["z"], {}, ackpt.TraceError, "loss= cannot run without data: 'z'"),
        (lambda outputs, batch: None, {}, ackpt.TraceError, "it returned None instead of a tensor"),
    ],
)
def test_a_loss_that_cannot_be_planned_is_refused(loss, others, kind, said):
    batch = {"x": torch.zeros(4, 16, dtype=torch.int64), "y": torch.zeros(4, 16, dtype=torch.int64)}
    with pytest.raises(kind, match=said):
        ackpt.apply_budget(Model(), batch, budget="100%", loss=loss, **others)


def test_a_loss_that_cannot_run_at_other_sizes_is_refused_there():
    def loss(logits, batch):
        return entropy(logits, {"y": batch["y"][:, : 16 if logits.shape[1] == 16 else 1]})

    model, batch = Model(), {name: torch.zeros(4, 16, dtype=torch.int64) for name in "xy"}
    ackpt.apply_budget(model, batch, budget="100%", loss=loss)
    with pytest.raises(ackpt.TraceError, match="loss= cannot run without data: .*whose sizes change"):
        model(torch.zeros(4, 12, dtype=torch.int64))


def test_planned_under_autocast():
    model, x = Model(), torch.randint(V, (4, 16))
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="a cross-entropy on them: "):
        ackpt.compile(model, x, budget=0.99)
