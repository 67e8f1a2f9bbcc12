"""The plan behind ``torch.compile`` with Inductor: what it saves, and what its gradients are."""

import shutil

import pytest
import torch
from conftest import model_of
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._inductor import config
from transformers import GPT2Config, GPT2LMHeadModel

import ackpt

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


def test_a_language_model_draws_the_random_numbers_of_eager_mode():
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100, n_positions=32)
    model, ids = GPT2LMHeadModel(config), torch.randint(100, (2, 16))
    step, found = torch.compile(model, backend="ackpt", options={"compiler": "inductor", "budget": 0.9}), []
    for call in (model, step):
        torch.manual_seed(1)
        model.zero_grad()
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append([loss, *(each.grad for each in model.parameters())])
    torch.testing.assert_close(*found)


def test_it_compiles_one_graph_under_the_settings_of_the_user(monkeypatch):
    seen = []

    def compiled(module, values, config_patches):
        seen.append(config.max_autotune)
        return lambda given: module(*given)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compiled)
    options = {"compiler": "inductor", "budget": "1GiB"}
    with config.patch(max_autotune=True):
        torch.compile(net(), backend="ackpt", options=options)(torch.ones(4, 8)).sum().backward()
    assert seen == [True, True]
    branching = model_of(lambda self, x: self.net(x) if x.sum() > 0 else x, net=net())
    with pytest.raises(ackpt.TraceError, match="cannot be captured as one graph"):
        torch.compile(branching, backend="ackpt", options=options)(torch.ones(4, 8))


@pytest.mark.parametrize("in_place", [False, True])
def test_every_length_has_its_plan(in_place, no_inductor):
    """Dynamo gives up after some compilations of one model, which then runs without a plan."""
    model, plans = net(), []
    options = {"compiler": "inductor", "policy": "full", "on_plan": plans.append}
    step = torch.compile(model, backend="ackpt", options=options)
    if in_place:
        model.compile(backend="ackpt", options=options)
        step = model
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in (1, 2, 3, 4, 2):
            step(torch.ones(rows, 8)).sum().backward()
            model.zero_grad()
        with torch.no_grad():
            assert not step(torch.ones(5, 8)).requires_grad
    assert len(plans) == 4


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo reads that of the second graph's input
@pytest.mark.usefixtures("fresh_dynamo", "no_inductor")
@pytest.mark.parametrize("is_function", [False, True])
def test_inside_another_compiled_function(is_function):
    model, x, plans = net(), torch.randn(4, 8), []
    options = {"compiler": "inductor", "on_plan": plans.append}
    inner = torch.compile((lambda x: model(x)) if is_function else model, backend="ackpt", options=options)
    torch.compile(lambda x: inner(x * 1) * 1, backend=CompileCounter())(x).sum().backward()
    found = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    assert all(torch.equal(each.grad, gradient) for each, gradient in zip(model.parameters(), found))
    assert len(plans) == 1


def test_inductors_plans_have_fused_costs(monkeypatch):
    seen = []
    monkeypatch.setattr("ackpt.planner.choose.fused", lambda graph, costs, device: seen.append(device) or costs)
    model = torch.compile(
        torch.nn.Linear(8, 8), backend="ackpt", options={"compiler": "inductor", "device_profile": "t4"}
    )
    model(torch.ones(4, 8)).sum().backward()
    assert [device.name for device in seen] == ["t4"]
