"""Three tiny models whose activations weigh more than their gradients, and what a plan of them is asked for."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from conftest import assert_equal
from torch import nn

import ackpt
from ackpt.graph import simulate
from ackpt.models import LanguageModel, ResNet, ResNetConfig, TransformerConfig

WORDS, LENGTH = 20, 24
BUDGETS = (0.95, 0.8, 0.6, 0.4, 0.2)


def language_model():
    config = TransformerConfig(dim=16, ff_dim=32, layers=2, head_dim=8, vocab_size=WORDS)
    tokens, offsets = torch.randint(WORDS, (4 * LENGTH,)), LENGTH * torch.arange(5, dtype=torch.int32)
    return LanguageModel(config), (tokens, offsets, LENGTH, tokens.roll(-1))


def resnet18():
    model = ResNet(ResNetConfig("basic", (2, 2, 2, 2), width=4, num_classes=5))
    return model, (torch.randn(4, 3, 32, 32), torch.randint(5, (4,)))


class Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()


def line(pairs=32, width=8):
    layers = [layer for _ in range(pairs) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, Mean()), (torch.randn(128, width),)


MODELS = {build.__name__: build for build in (language_model, resnet18, line)}


def build(name):
    """The model and its arguments, the same every time."""
    torch.manual_seed(0)
    return MODELS[name]()


@cache
def traced(name):
    """The graph of a model and its profile."""
    model, args = build(name)
    graph = ackpt.trace(model, *args)
    return graph, ackpt.profile(graph)


def least_of(refusal: BaseException) -> int:
    """The smallest budget, in bytes, that a `BudgetError` names."""
    found = re.search(r"The smallest budget that this policy keeps is .* \((\d+) bytes\)", str(refusal))
    assert found
    return int(found.group(1))


@cache
def plans(name, policy, **options):
    """A plan for every one of `BUDGETS` that the policy keeps; where it refuses one, that for the budget it names."""
    graph, profile = traced(name)
    found = []
    for budget in BUDGETS:
        try:
            plan = ackpt.plan(graph, budget, policy, profile=profile, **options)
        except ackpt.BudgetError as refusal:
            least = least_of(refusal)
            plan = ackpt.plan(graph, least, policy, profile=profile, **options)
            assert plan.peak_bytes == least
            with pytest.raises(ackpt.BudgetError):
                ackpt.plan(graph, least - 1, policy, profile=profile, **options)
            return [*found, plan]
        assert plan.dynamic_peak_bytes <= budget * plan.baseline_dynamic_peak_bytes
        found.append(plan)
    return found


def step_keeps(name, plan):
    """The step that runs as planned takes what the simulator says, and leaves the bits of the plain step."""
    model, args = build(name)
    step = ackpt.compile(model, *args, plan=plan)
    resident = (model, *(value for value in args if isinstance(value, torch.Tensor)))

    def once():
        model.zero_grad()
        step(*args).backward()

    measured = ackpt.measure(once, "cpu", resident=resident, warmup=1, repeats=0)
    graph, _ = traced(name)
    workspace = ackpt.profile(graph, workspace="measured")
    assert measured.dynamic_peak_bytes == simulate(graph, workspace, plan.schedule).peak_bytes
    model.load_state_dict(build(name)[0].state_dict())
    model.zero_grad()
    assert_equal(plain_results(name), results(model, step, args), "tensor")


@cache
def plain_results(name):
    model, args = build(name)
    return results(model, ackpt.compile(model, *args, policy="none"), args)


def results(model, step, args):
    """Loss, gradients and buffers of one step."""
    loss = step(*args)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters()), *model.buffers()]
