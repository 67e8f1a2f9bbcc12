"""Allocations by kind: the simulator's live bytes at every event, and what an infeasible budget consists of."""

import pytest
import torch
from torch import nn

import ackpt
from ackpt.models import LanguageModel, TransformerConfig
from ackpt.planner.choose import default_profile
from ackpt.planner.schedule.allocations import LIVE, allocations, by_kind, described


def block():
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 8))


def step(optimizer=False):
    model = nn.Sequential(block(), block(), block())
    adam = torch.optim.AdamW(model.parameters()) if optimizer else None
    return ackpt.trace(model, torch.randn(64, 8), optimizer=adam)


@pytest.mark.parametrize("policy", ["none", "full", "auto"])
@pytest.mark.parametrize("optimizer", [False, True])
def test_the_live_allocations_are_the_simulator_s_bytes_at_every_event(policy, optimizer):
    graph = step(optimizer)
    profile = default_profile(graph)
    plan = ackpt.plan(graph, 0.7 if policy == "auto" else None, policy, profile=profile)
    blocks = allocations(graph, plan.schedule, profile.workspace_bytes)
    for index, live in enumerate(plan.timeline.live):
        assert sum(b.bytes for b in blocks if b.is_live(index)) == plan.resident_bytes + live
    assert {b.kind for b in blocks} <= set(LIVE)
    assert any(b.kind == "recomputed" for b in blocks) == (plan.recompute_flops > 0)


def test_kinds_are_those_of_the_graph(optimizer=True):
    graph = step(optimizer)
    plan = ackpt.plan(graph)
    blocks = allocations(graph, plan.schedule, [0] * len(graph.nodes))
    sizes, total = graph.bytes(), by_kind(blocks)
    resident = ("parameters", "buffers", "inputs", "optimizer")
    assert [total[kind] for kind in resident] == [
        *(sizes[name] for name in ("parameter", "buffer", "input")),
        graph.optimizer_bytes,
    ]
    assert total["saved"] == plan.saved_bytes
    names = [described(graph, b) for b in blocks if b.kind == "gradients"]
    assert sorted(names) == sorted(f"gradient of {name}" for name in graph.gradients)


def refusal(graph) -> str:
    with pytest.raises(ackpt.BudgetError) as refused:
        ackpt.plan(graph, budget=1)
    return str(refused.value)


def test_an_infeasible_budget_says_that_gradients_are_the_problem():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    message = refusal(ackpt.trace(model, torch.ones(2, 256)))
    assert "1.0 MiB are parameters, 1.0 MiB are gradients and " in message
    assert "activations are not the problem: freeze parameters (LoRA)" in message


def test_an_infeasible_budget_names_all_remedies():
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())]
    message = refusal(ackpt.trace(nn.Sequential(*layers), torch.ones(256, 128)))
    assert "activations are not the problem" not in message
    assert "the largest allocation is " in message
    assert message.endswith(
        ", 128.0 KiB: use a smaller batch, shorter sequences or smaller images, or freeze parameters (LoRA), use a "
        "smaller dtype or optimizer state, or shard the model (FSDP2)."
    )


def test_an_infeasible_budget_names_the_loss():
    model = LanguageModel(TransformerConfig(dim=16, ff_dim=32, layers=1, head_dim=8, vocab_size=1000))
    ids, starts = torch.zeros(64, dtype=torch.int64), torch.tensor([0, 64], dtype=torch.int32)
    message = refusal(ackpt.trace(model, ids, starts, 64, ids))
    # 64 * 1000 * 4 bytes
    assert "250.0 KiB: use a smaller batch, shorter sequences or smaller images, or chunk the loss" in message


def test_an_infeasible_budget_names_the_optimizer_s_step():
    model = nn.Linear(256, 256)
    graph = ackpt.trace(model, torch.ones(2, 256), optimizer=torch.optim.AdamW(model.parameters(), foreach=True))
    assert "which no checkpointing makes smaller" in refusal(graph)
