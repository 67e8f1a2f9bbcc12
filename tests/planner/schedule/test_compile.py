"""Planned steps of whole models: bit-equal to eager under every plan, and as many bytes as the plan says."""

import copy

import pytest
import torch
from conftest import assert_equal
from random_fates import plan_of, tensors_of
from real_bytes import disagreements
from small_models import MODELS, build, loss_of

import ackpt
from experiments.steps.captured_step import CapturedStep

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3
OPTIMIZERS = {
    "fp32": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "bf16": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}
POLICIES = ("none", "full", "manual 1")


def precision(name):
    return torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16")


@pytest.fixture(scope="module", params=[(name, run) for name in MODELS for run in OPTIMIZERS], ids=" ".join)
def case(request):
    """A model; a copy captured once, with its graph, steps and plans by policy; and what both are called with."""
    name, run = request.param
    model, args, kwargs = build(name)
    copied = copy.deepcopy(model)
    with precision(run):
        captured = CapturedStep(copied, *args, **kwargs)
    plans = {policy: plan_of(captured.graph, policy) for policy in POLICIES}
    steps = {policy: captured.planned(plan) for policy, plan in plans.items()}
    return name, run, model, (copied, captured.graph, steps, plans), (args, kwargs)


def trained(model, step, args, kwargs, run):
    """What `STEPS` steps leave behind: losses, gradients, the state of model and optimizer, random numbers."""
    torch.manual_seed(1)
    optimizer = OPTIMIZERS[run](model.parameters())
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with precision(run):
            loss = loss_of(step(*args, **kwargs))
        loss.backward()
        found += [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [*found, *state, *model.state_dict().values(), torch.get_rng_state()]


def test_three_steps_leave_the_same_bits_under_every_plan(case):
    name, run, eager, (model, _, steps, _), (args, kwargs) = case
    initial = copy.deepcopy(eager.state_dict())
    expected = trained(eager, eager, args, kwargs, run)
    for policy, step in steps.items():
        model.load_state_dict(initial)
        assert_equal(expected, trained(model, step, args, kwargs, run), policy)
    for each in (eager, model):
        counts = [value for key, value in each.state_dict().items() if key.endswith("num_batches_tracked")]
        assert all(count == STEPS for count in counts) and bool(counts) == ("resnet" in name)


def measured(model, step, args, kwargs, run) -> int:
    """Dynamic peak of a step before which there are no gradients."""

    def once():
        with precision(run):
            loss = loss_of(step(*args, **kwargs))
        loss.backward()

    model.zero_grad()
    resident = (model, *tensors_of(args, kwargs))
    return ackpt.measure(once, "cpu", resident=resident, warmup=0, repeats=0).dynamic_peak_bytes


def test_the_measured_peak_is_that_of_the_plan(case):
    _, run, _, (model, graph, steps, plans), (args, kwargs) = case
    wrong_shapes = run == "bf16" and disagreements(graph)
    for policy, step in steps.items():
        peak, planned = measured(model, step, args, kwargs, run), plans[policy].dynamic_peak_bytes
        if wrong_shapes:  # torch gives the statistics of norms in bf16 another dtype than its shape functions say
            assert abs(peak - planned) <= 0.01 * peak, policy
        else:
            assert peak == planned, policy
