"""Tiny models whose activations weigh more than their gradients, and what a plan of them is asked for."""

import re
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_equal, measured_step, model_of
from torch import nn

import ackpt
from ackpt.graph import simulate
from ackpt.models import LanguageModel, TransformerConfig
from experiments.models import ResNet, ResNetConfig
from experiments.steps.captured_step import CapturedStep

WORDS, LENGTH = 20, 24
BUDGETS = (0.95, 0.8, 0.6, 0.4, 0.2)


def language_model(words=WORDS, length=LENGTH, **sizes):
    config = TransformerConfig(**{"dim": 16, "ff_dim": 32, "layers": 2, "head_dim": 8, **sizes}, vocab_size=words)
    tokens, offsets = torch.randint(words, (4 * length,)), length * torch.arange(5, dtype=torch.int32)
    return LanguageModel(config), (tokens, offsets, length, tokens.roll(-1))


def resnet18(width=4, images=(4, 3, 32, 32)):
    model = ResNet(ResNetConfig("basic", (2, 2, 2, 2), width=width, num_classes=5))
    return model, (torch.randn(images), torch.randint(5, images[:1]))


class Residuals(nn.Module):
    """Adds what each block computes, one after the other; the loss of the result."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()


def line(pairs=32, width=8):
    layers = [layer for _ in range(pairs) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, Mean()), (torch.randn(128, width),)


def convolutions(inside, out):
    layers = []
    for a, b in ((inside, out), (out, out)):
        layers += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*layers)


def unet():
    def forward(self, x, y):
        skips = []
        for number, block in enumerate(self.down):
            x = block(x)
            if number < len(self.down) - 1:
                skips.append(x)
                x = F.max_pool2d(x, 2)
        for up, join in zip(self.up, self.join):
            x = join(torch.cat([up(x), skips.pop()], 1))
        return F.cross_entropy(self.head(x), y)

    widths = [3, 4, 8, 16]
    model = model_of(
        forward,
        down=nn.ModuleList(convolutions(a, b) for a, b in zip(widths, widths[1:])),
        up=nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, 2) for a in widths[-2:0:-1]),
        join=nn.ModuleList(convolutions(2 * a, a) for a in widths[-2:0:-1]),
        head=nn.Conv2d(4, 2, 1),
    )
    return model, (torch.randn(4, 3, 32, 32), torch.randint(2, (4, 32, 32)))


def dense():
    """Every layer reads all before it."""

    def forward(self, x, y):
        found = [self.stem(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return F.cross_entropy(self.head(torch.cat(found, 1).mean((2, 3))), y)

    stem, layers = nn.Conv2d(3, 8, 3, padding=1), nn.ModuleList(convolutions(8 * (i + 1), 8) for i in range(12))
    model = model_of(forward, stem=stem, layers=layers, head=nn.Linear(8 * 13, 4))
    return model, (torch.randn(4, 3, 16, 16), torch.randint(4, (4,)))


MODELS = {build.__name__: build for build in (language_model, resnet18, line)}
SKIPS = {build.__name__: build for build in (unet, dense)}  # models whose values are read again far behind


def build(name):
    """The model and its arguments, the same every time."""
    torch.manual_seed(0)
    return {**MODELS, **SKIPS}[name]()


@cache
def captured(name):
    model, args = build(name)
    return model, CapturedStep(model, *args)


@cache
def traced(name):
    graph = captured(name)[1].graph
    return graph, ackpt.profile(graph)


def least_of(refusal: BaseException) -> int:
    """The smallest budget, in bytes, that a `BudgetError` names."""
    size = re.search(r"The smallest feasible budget of this policy is .* \((\d+) bytes\)", str(refusal))
    assert size
    return int(size.group(1))


@cache
def plans(name, policy, **options):
    """A plan for every one of `BUDGETS` that the policy keeps; where it refuses one, that for the budget it names."""
    graph, profile = traced(name)
    made = []
    for budget in BUDGETS:
        try:
            plan = ackpt.plan(graph, budget, policy, profile=profile, **options)
        except ackpt.BudgetError as refusal:
            least = least_of(refusal)
            plan = ackpt.plan(graph, least, policy, profile=profile, **options)
            assert plan.peak_bytes == least
            with pytest.raises(ackpt.BudgetError):
                ackpt.plan(graph, least - 1, policy, profile=profile, **options)
            return [*made, plan]
        assert plan.dynamic_peak_bytes <= budget * plan.baseline_dynamic_peak_bytes
        made.append(plan)
    return made


def step_keeps(name, plan):
    """The step that runs as planned takes what the simulator says, and leaves the bits of eager."""
    fresh, args = build(name)
    model, captured_step = captured(name)
    model.load_state_dict(fresh.state_dict())
    step = captured_step.planned(plan)
    graph, _ = traced(name)
    workspace = measured_workspace(name, torch.get_num_threads())
    assert measured_step(model, step, *args).dynamic_peak_bytes == simulate(graph, workspace, plan.schedule).peak_bytes
    model.load_state_dict(fresh.state_dict())
    model.zero_grad()
    assert_equal(plain_results(name, torch.get_num_threads()), results(model, step, args), "tensor")


@cache
def measured_workspace(name, threads):
    """The profile with measured workspace; another number of `threads` needs another workspace."""
    return ackpt.profile(traced(name)[0], workspace="measured")


@cache
def plain_results(name, threads):
    """What eager gives; sums on another number of `threads` round another way."""
    model, args = build(name)
    return results(model, model, args)


def results(model, step, args):
    loss = step(*args)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters()), *model.buffers()]
