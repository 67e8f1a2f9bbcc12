"""The plan behind ``torch.compile`` with Inductor: what it saves, and what its gradients are."""

import shutil

import pytest
import torch
from torch import nn

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, when it imports Inductor
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 2))


def saved_bytes(loss, model, x) -> int:
    """What the compiled step keeps for its backward, beside parameters and inputs."""
    node = loss.grad_fn
    while type(node).__name__ != "CompiledFunctionBackward":
        node = node.next_functions[0][0]
    own = {tensor.untyped_storage()._cdata for tensor in (x, *model.parameters())}
    kept = {value.untyped_storage()._cdata: value.untyped_storage() for value in node.saved_tensors}
    return sum(storage.nbytes() for key, storage in kept.items() if key not in own)


def test_inductor_saves_the_planned_activations():
    model, x, sizes, fates = net(), torch.randn(4, 8), [], {}
    model(x).square().mean().backward()
    for _ in range(2):
        torch._dynamo.reset()
        other, plans = net(), []
        options = {"compiler": "inductor", "policy": "manual", "fates": fates, "on_plan": plans.append}
        loss = torch.compile(other, backend="ackpt", options=options)(x).square().mean()
        sizes.append(saved_bytes(loss, other, x))
        assert sizes[-1] == plans[0].saved_bytes
        loss.backward()
        for expected, found in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(found.grad, expected.grad)
        fates = {name: "recomputed" for name in plans[0].fates if not name.startswith("addmm")}  # the activations
    torch._dynamo.reset()
    assert len(set(sizes)) == 2


def test_inductors_plans_have_fused_costs(monkeypatch):
    seen = []
    monkeypatch.setattr("ackpt.planner.backend.dynamo.fused", lambda graph, costs, device: seen.append(device) or costs)
    model = torch.compile(
        torch.nn.Linear(8, 8), backend="ackpt", options={"compiler": "inductor", "device_profile": "t4"}
    )
    model(torch.ones(4, 8)).sum().backward()
    assert [device.name for device in seen] == ["t4"]
