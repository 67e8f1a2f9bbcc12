"""Evictions at the peak lower it, the schedules remain valid, and torch's partitioner reaches no lower peak."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_equal, measured_step, model_of
from planned_models import MODELS, SKIPS, results, traced
from torch import nn
from torch._functorch import config

import ackpt
from ackpt.graph import simulate
from ackpt.planner.policies.search.frontier import costs
from ackpt.planner.policies.search.refinement import descent
from ackpt.planner.schedule.schedule import everything, lower
from ackpt.planner.schedule.simulator import peak_of

pytestmark = pytest.mark.usefixtures("one_thread")

TRIES = 60


@pytest.mark.parametrize("name", [*MODELS, *SKIPS])
def test_every_eviction_lowers_the_peak_or_the_number_of_steps_that_reach_it(name):
    graph, profile = traced(name)
    cost, workspace = costs(graph, profile), profile.workspace_bytes
    for saved in (everything(graph).saved, ()):
        start = lower(graph, {*saved, *graph.analysis.must_be_saved})
        found = descent(graph, start, cost, workspace, TRIES)
        ranks = []
        for schedule in (start, *found):
            live = simulate(graph, profile, schedule).timeline.live
            assert max(live) == peak_of(graph, schedule, workspace)
            ranks.append(max(live))
        assert ranks == sorted(ranks, reverse=True) and len(found) <= TRIES
        if saved:  # almost everything that is saved only waits
            assert ranks[-1] < ranks[0]


class ListBlock(nn.Module):
    """Every layer concatenates the list of all features before it, as in torchvision's DenseNet."""

    def __init__(self, channels, growth, layers):
        super().__init__()
        inside = [channels + growth * layer for layer in range(layers)]
        self.layers = nn.ModuleList(
            nn.Sequential(
                *(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4 * growth, 1, bias=False)),
                *(nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)),
            )
            for width in inside
        )

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


def list_dense_net():
    between = nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 16, 1, bias=False), nn.AvgPool2d(2)
    stem, end = nn.Conv2d(3, 16, 3, padding=1, bias=False), (nn.BatchNorm2d(32), nn.ReLU())
    return model_of(
        lambda self, x, labels: F.cross_entropy(self.head(self.features(x).mean((2, 3))), labels),
        features=nn.Sequential(stem, ListBlock(16, 8, 2), *between, ListBlock(16, 8, 2), *end),
        head=nn.Linear(32, 10),
    )


def list_densenet():
    torch.manual_seed(0)
    return list_dense_net(), (torch.randn(4, 3, 16, 16), torch.randint(10, (4,)))


def lowest_peak_of_partitioner():
    """The lowest measured peak of torch's partitioner over its settings."""
    peaks = []
    for aggressive, budget in ((False, 0.2), (True, 0.6), (True, 0.4), (True, 0.2)):
        torch._dynamo.reset()
        with config.patch(activation_memory_budget=budget, aggressive_recomputation=aggressive):
            model, args = list_densenet()
            call = torch.compile(model, backend="aot_eager_decomp_partition")
            peaks.append(measured_step(model, call, *args, warmup=2).dynamic_peak_bytes)
    torch._dynamo.reset()
    return min(peaks)


def test_the_smallest_feasible_budget_is_below_the_peaks_of_torchs_partitioner():
    model, args = list_densenet()
    eager = results(model, model, args)
    graph = ackpt.trace(model, *args)
    with pytest.raises(ackpt.BudgetError) as refusal:
        ackpt.plan(graph, budget=1)

    model, args = list_densenet()
    step = ackpt.compile(model, *args, budget=refusal.value.least_bytes)
    assert step.plan.peak_bytes == refusal.value.least_bytes
    assert_equal(eager, results(model, step, args), "tensor")
    assert measured_step(model, step, *args).dynamic_peak_bytes == step.plan.dynamic_peak_bytes
    assert step.plan.dynamic_peak_bytes < lowest_peak_of_partitioner()
