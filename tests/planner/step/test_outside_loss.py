"""A loss that the training loop computes counts toward the budget: ``loss=`` of `ackpt.apply_budget`."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ackpt

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
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


def wide(logits, batch):
    return entropy(logits.double(), batch, label_smoothing=0.1)


def shifted(logits, batch):
    return entropy(logits[:, :-1], {"y": batch["y"][:, 1:]})


def in_dict(outputs, batch):
    return entropy(outputs["logits"], batch)


def error(logits, batch):
    return functional.mse_loss(logits, torch.zeros_like(logits))


@pytest.mark.parametrize(
    ("kind", "loss", "as_tuple", "optimizer"),
    [
        (Model, entropy, False, "adamw"),
        (Model, entropy, True, None),
        (Model, wide, False, None),
        (Model, shifted, False, None),
        (Model, error, False, None),
        (InDict, in_dict, False, None),
    ],
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
