"""What a call was captured for, in words, and what an error says of a later call or of another plan's."""

import pytest
import torch
from conftest import model_of, raises
from torch import nn

import ackpt
from ackpt.planner.capture.inspection.calls import described, differences
from ackpt.planner.schedule.plan import PlanError

X = torch.ones(64, 8)


class Block(nn.Linear):
    """What is dropped at random is kept for backward in training alone."""

    def forward(self, x):
        return x + nn.functional.dropout(super().forward(x).tanh().sin(), 0.5, self.training)


class Drops(nn.Linear):
    """In training a mask can be made again; in evaluation nothing is left to run again."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x).tanh(), 0.5, self.training)


def keywords():
    """A model that takes whatever it is given."""
    return model_of(lambda self, x, plans=None, **kwargs: self.inner(x).tanh().sin(), inner=nn.Linear(8, 8))


def layers():
    return nn.Sequential(*(Block(8, 8) for _ in range(4)))


def test_a_call_is_described():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout())
    model[0].bias.requires_grad_(False)
    model[1].eval()
    x = torch.ones(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = described(model, (x, [x, torch.ones(2, dtype=torch.int64)]), {"scale": 2.0, "note": "n" * 99})
    assert found == {
        "torch": torch.__version__,
        "model": "Sequential",
        "parameters": "72 in 2 tensors of float32, 64 trained",
        "mode": "training of 2 in 3 modules",
        "autocast": "bfloat16 on cpu",
        "differentiate": "loss",
        "argument 0": "float32 [4, 8]",
        "argument 1[0]": "the tensor that is 0, too",
        "argument 1[1]": "int64 [2]",
        "argument scale": "2.0",
        "argument note": f"'{'n' * 59}...",
    }
    meta = described(nn.Linear(8, 8, device="meta"), (torch.ones(4, 8, device="meta"),), {})
    assert differences(described(nn.Linear(8, 8), (x,), {}), meta) == []
    assert differences(None, meta) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda model: (model, X.expand(2, 64, 8), {}),
            r"argument 0 changed from float32 \[64, 8\] to float32 \[2, 64, 8\]",
        ),
        (lambda model: (model.double(), X, {}), "parameters changed from 288 in .* float32.* to 288 in .* float64"),
        (lambda model: (model.eval(), X, {}), "mode changed from training to evaluation"),
        (lambda model: (model[:3], X, {}), "parameters changed from 288 in 8 .* to 216 in 6"),
        (lambda model: (model, X, {"differentiate": "all"}), None),
    ],
    ids=["dimensions", "dtype", "mode", "layers", "same graph"],
)
def test_a_plan_for_another_graph_names_the_difference(change, said):
    plan = ackpt.compile(layers(), X, policy="full").plan
    model, x, options = change(layers())
    x = x.to(next(model.parameters()).dtype)
    if said is None:
        assert ackpt.compile(model, x, plan=plan, **options).plan is plan
        return
    raises(PlanError, f"made for another graph .*{said}", lambda: ackpt.compile(model, x, plan=plan, **options))


def test_a_model_that_computes_something_else_with_the_same_call_is_named():
    plan = ackpt.compile(nn.Sequential(Block(8, 8)), X, policy="full").plan
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(PlanError, match="the call is the same, so the model's code or configuration differs"):
        ackpt.compile(model, X, plan=plan)


def test_a_plan_and_a_later_call_with_other_arguments():
    step = ackpt.compile(layers(), X, policy="full")
    step = ackpt.compile(layers(), X, plan=step.plan)
    said = r"is a part of a larger tensor.*clone\(.*\) makes\. It matched.*drop_last=True"
    raises(PlanError, said, lambda: step(X[:3]))
    step(X[:3].clone())
    step.eval()
    with pytest.raises(PlanError, match="mode changed from training to evaluation.*under torch.no_grad") as raised:
        step(X)
    assert "drop_last" not in str(raised.value)
    with torch.no_grad():
        step(X)
    step.train()
    step(X).sum().backward()


def test_evaluation_with_gradients_is_not_explained_by_the_batch():
    step = ackpt.compile(nn.Sequential(*(Drops(8, 8) for _ in range(4))), X, budget=0.86)
    step.eval()
    said = "mode changed from training to evaluation.*under torch.no_grad"
    with pytest.raises(ackpt.BudgetError, match=said) as raised:
        step(X)
    assert "A fraction is relative" not in str(raised.value) and raised.value.least_bytes < step.plan.peak_bytes


def test_a_larger_batch_with_a_budget_in_bytes_is_not_explained_by_a_fraction():
    step = ackpt.compile(layers(), X, budget=32_000, policy="full")
    with pytest.raises(ackpt.BudgetError, match=r"to float32 \[65, 8\]. Give the budget that the largest") as raised:
        step(torch.ones(65, 8))
    assert "fraction is" not in str(raised.value)


@pytest.mark.parametrize("name", ["budgt", "budgets", "polcy", "optimiser", "option", "Budget"])
def test_a_misspelt_keyword_is_not_handed_to_the_model(name):
    for model in (keywords(), nn.Linear(8, 8)):
        with pytest.raises(TypeError, match=f"{name!r} is not a keyword of ackpt.compile.*: did you mean '"):
            ackpt.compile(model, X, **{name: 0.5})


def test_a_keyword_that_the_forward_cannot_take_is_compared_with_those_of_compile():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'budjet' \(did you mean 'budget'\?\); its param"):
        ackpt.compile(nn.Linear(8, 8), X, budjet=0.5)


def test_an_option_of_the_policy_among_the_keywords_is_named():
    with pytest.raises(TypeError, match="'every_n_layers' is an option of policy 'selective': give it as options=."):
        ackpt.compile(keywords(), X, budget=0.5, policy="selective", every_n_layers=1)


def test_a_misspelt_option_of_a_plan_is_named():
    graph = ackpt.trace(layers(), X)
    for name, meant in [("budgt", "budget"), ("profil", "profile")]:
        with pytest.raises(TypeError, match=f"not an option of a plan; .*did you mean '{meant}'"):
            ackpt.plan(graph, **{name: 0.5})
    with pytest.raises(TypeError, match="knows .* .did you mean 'every_n_layers'"):
        ackpt.plan(graph, 0.5, "selective", every_n_layer=1)
