"""A mixture of experts that gathers its tokens: plans for the most tokens of an expert, and steps that exceed them."""

import pytest
import torch
from branching_models import feed_forward
from conftest import assert_as_eager, assert_equal, left_by, measured_step, raises
from torch import nn

import ackpt

TOKENS, WIDTH, EXPERTS = 512, 16, 4


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(feed_forward(WIDTH) for _ in range(EXPERTS))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            result = result.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return result


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def to_one_expert(tokens: int, expert: int = 0):
    """A hook of a router that sends so many tokens to one expert, and the others to all experts in turn."""

    def routed(router, inputs, logits):
        chosen = torch.arange(len(logits)) % EXPERTS
        chosen[:tokens] = expert
        return logits + 100 * nn.functional.one_hot(chosen, EXPERTS)

    return routed


def routed(model, tokens: int, expert: int = 0):
    return [layer.router.register_forward_hook(to_one_expert(tokens, expert)) for layer in model.layers]


def without(hooks):
    for hook in hooks:
        hook.remove()


def built():
    torch.manual_seed(0)
    return Model(), torch.randn(TOKENS, WIDTH)


@pytest.mark.parametrize("most_tokens", [256, 384])
def test_a_plan_for_the_most_tokens_of_an_expert_holds_for_all_with_fewer(most_tokens):
    model, x = built()
    hooks = routed(model, most_tokens)
    step = ackpt.compile(model, x, budget=0.8)
    left_by(model, step, x)
    without(hooks)
    assert set(step.plan.fates.values()) == {"saved", "checkpointed"}
    for tokens, expert in ((0, 0), (128, 1), (200, 3), (most_tokens, 0), (most_tokens, 2)):
        hooks = routed(model, tokens, expert)
        assert_as_eager(model, step, x)
        peak = measured_step(model, step, x, warmup=0).dynamic_peak_bytes
        assert peak <= step.plan.limit_bytes, (tokens, expert)
        without(hooks)
    assert len(step.history) == 1


def test_more_tokens_than_the_budget_allows_raise_or_warn():
    model, x = built()
    probe = ackpt.compile(model, x, budget="1GiB")
    left_by(model, probe, x)
    least = probe.plan.least_peak_bytes
    step = ackpt.compile(model, x, budget=least)
    expected = left_by(model, step, x)
    warns = ackpt.compile(model, x, budget=least, on_exceed="warn")
    left_by(model, warns, x)
    hooks = routed(model, TOKENS)
    raises(ackpt.BudgetError, "this step allocates .* keep the budget", lambda: left_by(model, step, x))
    own = left_by(model, model, x)
    with pytest.warns(UserWarning, match="keep the budget"):
        found = left_by(model, warns, x)
    assert_equal(found, own, "step")
    without(hooks)
    assert_equal(left_by(model, step, x), expected, "step")
