"""The operations of a step, and its comparison with what the allocator hands out."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import ackpt
from ackpt.models import LanguageModel, TransformerConfig
from experiments import graph_profile
from experiments.graph_profile import compare, operations
from experiments.models import ResNet, ResNetConfig
from experiments.reports import schematics

TOKENS = torch.arange(12) % 7
OFFSETS = torch.tensor([0, 12], dtype=torch.int32)


pytestmark = pytest.mark.usefixtures("one_thread", "seeded")


def language_model():
    config = TransformerConfig(dim=8, ff_dim=16, layers=2, head_dim=4, vocab_size=7)
    return LanguageModel(config), (TOKENS, OFFSETS, 12), {"targets": TOKENS.roll(-1)}


def resnet():
    model = ResNet(ResNetConfig("basic", (1, 1, 1, 1), width=4, num_classes=3))
    return model, (torch.randn(2, 3, 32, 32),), {"labels": torch.tensor([0, 2])}


def test_operations_read_storages_and_not_views():
    def step(weight, x):
        loss = torch.tanh(x @ weight.t()).sum()
        start = torch.ones_like(loss)
        return loss, start, *torch.autograd.grad(loss, [weight], start)

    weight = torch.ones(3, 2, requires_grad=True)
    steps = operations(make_fx(step, tracing_mode="fake")(weight, torch.ones(4, 2)).graph, "ones_like")
    found = {each["name"]: each for each in steps}
    assert list(found)[:3] == ["mm", "tanh", "sum_1"] and not found["sum_1"]["is_backward"]
    assert found["mm"] == {"name": "mm", "bytes": 48, "reads": [], "is_backward": False}
    assert found["tanh_backward"]["is_backward"] and "tanh" in found["tanh_backward"]["reads"]
    assert found["mm_1"]["bytes"] == 24 and found["mm_1"]["reads"] == ["tanh_backward"]
    texts = [text.get_text() for text in schematics.joint_figure(steps).axes[0].texts]
    assert "mm\n48 B" in texts and "tanh\nbackward\n48 B" in texts


@pytest.mark.parametrize(("make", "policies"), [(language_model, ("none", "manual")), (resnet, ("full", "manual"))])
def test_predicted_is_measured(make, policies):
    model, args, kwargs = make()
    found = compare(model, args, kwargs, policies)
    assert tuple(found) == policies
    for policy, row in found.items():
        assert row["off_bytes"] == 0 and row["is_equal"]
        assert (row["recompute_ratio"] == 0) == (policy == "none")


def test_nodes_have_their_costs_and_their_liveness():
    graph = ackpt.trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.ones(4, 8))
    profile = ackpt.profile(graph, "h200")
    rows = graph_profile.node_rows(graph, profile)
    assert max(row["live_bytes"] or 0 for row in rows) == ackpt.plan(graph, policy="none").dynamic_peak_bytes
    (node,) = (node for node in graph.nodes if node.target == "aten.tanh.default")
    (kept,) = (graph.storages[storage] for storage in node.storages)
    row = rows[node.id]
    assert (row["last_fw_access"], row["first_bw_access"]) == (kept.last_fw_access, kept.first_bw_access)
    assert row["recompute_ratio"] == kept.bytes / float(row["seconds"]) and row["target"] == node.target
