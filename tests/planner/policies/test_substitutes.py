"""Smaller values kept instead of larger ones: which they are, and that plans which keep them run as planned."""

import pytest
import torch
from conftest import assert_as_eager, measured_step, model_of
from torch import nn

import ackpt
from ackpt.graph import profile
from ackpt.planner.policies import auto
from ackpt.planner.policies.chains.blocks import coarse_chain
from ackpt.planner.policies.chains.substitutes import smaller, substituted
from ackpt.planner.policies.search.frontier import costs, pareto
from ackpt.planner.schedule.schedule import everything
from experiments import bert as bert_step
from experiments.models import BertConfig, BertForMaskedLM
from experiments.steps.step_shapes import Shapes

SIZES = {"dim": 32, "ff_dim": 64, "layers": 3, "heads": 4, "vocab_size": 24}


def residual(dropout=0.0):
    """Products in bfloat16, sums and norms in float32, as under autocast on a GPU."""
    return model_of(
        lambda self, x: self.norm(x + self.dropout(self.product(x.to(self.product.weight.dtype)))),
        product=nn.Linear(16, 16, dtype=torch.bfloat16),
        dropout=nn.Dropout(dropout),
        norm=nn.LayerNorm(16),
    )


def names(graph, storages):
    return sorted(str(graph.nodes[graph.storages[s].producer].target).split(".")[1] for s in storages)


def kept(model, price):
    """What is saved plainly, and what is instead, by operation."""
    graph = ackpt.trace(model, torch.ones(8, 16, requires_grad=True))
    plain, figures = frozenset(everything(graph).saved), profile(graph)
    found = smaller(graph.analysis, plain, plain, figures.flops, costs(graph, figures), price)
    return names(graph, plain), names(graph, found)


def test_a_product_is_saved_instead_of_the_sum_that_adds_it():
    before, after = kept(residual(), price=1e9)
    assert "add" in before and "addmm" not in before
    assert "add" not in after and "addmm" in after


def test_nothing_is_substituted_at_zero_cost():
    before, after = kept(residual(), price=0)
    assert before == after


def test_dropout_masks_are_recomputed_with_their_results():
    before, after = kept(residual(dropout=0.5), price=1e9)
    dropouts = [name for name in before if "dropout" in name]
    assert dropouts and not [name for name in after if "dropout" in name]
    assert "addmm" in after


def test_sums_that_are_not_larger_than_their_product_are_saved():
    before, after = kept(nn.Sequential(residual(), residual()).float(), price=1e9)
    assert before.count("add") == after.count("add") == 2


def test_large_graphs_have_fewer_tries(monkeypatch):
    graph = ackpt.trace(nn.Sequential(*(residual() for _ in range(3))), torch.ones(8, 16))
    figures = profile(graph)
    many = substituted(graph, coarse_chain(graph), figures)
    monkeypatch.setattr("ackpt.planner.policies.chains.substitutes._WALKED", len(graph.nodes) - 1)
    few = substituted(graph, coarse_chain(graph), figures)
    assert 0 < len(few) < len(many)


def test_a_wide_model_in_mixed_precision_costs_less():
    shapes = Shapes(bert_step.configuration("gpu", fields={"layers": 6}).setting())
    graph, figures = shapes._graph()
    blocks = coarse_chain(graph)
    without = pareto(graph, figures, auto.chain_schedules(graph, blocks, figures))
    within = pareto(graph, figures, substituted(graph, blocks, figures))
    lower = [
        any(ours.peak_bytes <= theirs.peak_bytes and ours.cost < theirs.cost for ours in within) for theirs in without
    ]
    assert sum(lower) > len(lower) / 4


@pytest.mark.parametrize("budget", [0.7, 0.5])
def test_a_step_in_mixed_precision_keeps_its_budget_and_its_gradients(budget):
    torch.manual_seed(0)
    model, tokens = BertForMaskedLM(BertConfig(positions=32, **SIZES)), torch.randint(24, (8, 32))
    with torch.autocast("cpu", torch.bfloat16):
        step = ackpt.compile(model, tokens, budget=budget, labels=tokens)
    for _ in range(2):
        assert_as_eager(model, step, tokens, labels=tokens, autocast=True)
    measured = measured_step(model, step, tokens, labels=tokens, autocast=True)
    assert measured.dynamic_peak_bytes <= budget * step.plan.baseline_dynamic_peak_bytes
