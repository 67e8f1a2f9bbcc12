"""Costs of operations that a compiler fuses: a chain reads once and writes once."""

import pytest
import torch

import ackpt
from ackpt.planner.costs.devices import Device
from ackpt.planner.costs.profiles import fused, profile

BYTES = 4 * 64 * 8  # of every tensor below
ROOF = Device("memory only", 10**9, {"float32": 1e30}, 1.0, 1.0, "made up")  # a byte takes a second


def seconds(model, *args, device=ROOF):
    graph = ackpt.trace(model, *args)
    costs = fused(graph, profile(graph, device), device)
    return {node.name: costs.seconds[node.id] for node in graph.nodes if node.phase == "forward"}


def test_a_chain_reads_once_and_writes_once():
    class Line(torch.nn.Module):
        def forward(self, x):
            return torch.tanh(torch.sigmoid(x).view(-1).neg()).sum()

    taken = seconds(Line(), torch.ones(64, 8, requires_grad=True))
    assert (taken["sigmoid"], taken["neg"], taken["tanh"]) == (
        BYTES,
        0.0,
        BYTES,
    )  # reads x; nothing; writes for the sum


def test_other_operations_keep_their_cost():
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    graph = ackpt.trace(layers, torch.ones(64, 8))
    costs = profile(graph, ROOF)
    after = fused(graph, costs, ROOF)
    changed = {node.target for node in graph.nodes if after.seconds[node.id] != costs.seconds[node.id]}
    assert changed <= {"aten.gelu.default", "aten.gelu_backward.default", "aten.mul.Tensor"}


def test_fusion_saves_no_compute():
    slow = Device("slow tanh", 10**9, {"float32": 1e30}, 1e30, 1.0, "made up", {"tanh": {"float32": 1.0}})
    taken = seconds(
        torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Sigmoid()), torch.ones(64, 8, requires_grad=True), device=slow
    )
    assert taken["tanh"] == pytest.approx(64 * 8)


def test_without_seconds_nothing_changes():
    graph = ackpt.trace(torch.nn.Tanh(), torch.ones(4, 8, requires_grad=True))
    costs = profile(graph)
    assert fused(graph, costs, ROOF) is costs
