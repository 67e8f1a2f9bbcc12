"""The backend ``"ackpt"`` of ``torch.compile``: planned, equal to eager, and clear about what it refuses."""

import copy

import pytest
import torch
from conftest import assert_as_eager, assert_equal, function_of, left_by_steps, model_of, raises
from torch import nn
from torch.utils.checkpoint import checkpoint

import ackpt

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        h = torch.relu(self.norm(self.dropout(self.first(x))))
        return {"loss": self.last(h).square().mean(), "hidden": h}


def compiled(model, **options):
    return torch.compile(model, backend="ackpt", options=options)


def pair():
    torch.manual_seed(0)
    model = Net()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("policy", ["none", "full"])
def test_three_steps_are_bit_equal_to_eager(policy):
    eager, planned = pair()
    batches, plans = [(torch.randn(4, 8),) for _ in range(3)], []
    call = compiled(planned, policy=policy, on_plan=plans.append)
    steps = ((eager, eager), (planned, call))
    assert_equal(*(left_by_steps(*each, batches, loss=lambda outputs: outputs["loss"]) for each in steps), "state")
    assert [plan.policy for plan in plans] == [policy]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compiler": "gcc"}, "compiler 'gcc' is not known; the compilers are eager, inductor"),
        ({"policy": "best"}, "policy 'best' is not known"),
        ({"differentiate": "some"}, "differentiate must be 'loss' or 'all'"),
        ({"policy": "none", "fuel": 3}, "fuel"),
        ({"dynamic": True}, r"not an option of this backend: use ackpt.compile\(model, ..., dynamic=...\)"),
        ({"optimizer": "adanw"}, "adanw"),
        ({"cache": 3}, "cache"),
        ({"compiler": "inductor", "cache": "folder"}, "'cache' is not an option of compiler 'inductor'"),
        ({"on_plan": 3}, "on_plan must be a function of a plan, got int"),
        ({"budgt": 0.5}, "'budgt' is not a keyword of this backend: did you mean 'budget'"),
        ({"compilr": "inductor"}, "'compilr' is not a keyword of this backend: did you mean 'compiler'"),
    ],
)
def test_unknown_options_are_refused(options, message):
    _, model = pair()
    raises((TypeError, ValueError), message, lambda: compiled(model, **options)(torch.randn(4, 8)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "max-autotune"}, "mode 'max-autotune' is one of Inductor's: leave it out"),
        ({"options": "budget"}, r"options must be a dict such as \{'budget': '6GiB'\}, got str"),
    ],
)
def test_other_arguments_of_torch_compile_are_refused(given, message):
    _, model = pair()
    for compiler in (torch.compile, nn.Module.compile):
        with pytest.raises((TypeError, ValueError), match=message):
            compiler(model, backend="ackpt", **given)


class Branches(Net):
    def forward(self, x):
        h = self.first(x)
        if h.sum() > 0:
            h = h * 2
        return {"loss": self.last(h).mean()}


def test_a_branch_on_values_is_refused():
    with pytest.raises(ackpt.TraceError, match=r"looks at the values of a tensor at .*test_backend.py.*h.sum\(\) > 0"):
        compiled(Branches(), policy="none")(torch.randn(4, 8))
    with pytest.raises(ackpt.TraceError, match=r"looks at the values of a tensor at .*test_backend.py.*h.sum\(\) > 0"):
        compiled(Branches(), policy="none", compiler="inductor")(torch.randn(4, 8))


def test_only_the_loss_has_a_gradient_unless_asked_for():
    _, model = pair()
    with pytest.raises(RuntimeError, match="an output other than the loss"):
        compiled(model, policy="none")(torch.randn(4, 8))["hidden"].sum().backward()
    torch._dynamo.reset()
    compiled(model, policy="none", differentiate="all")(torch.randn(4, 8))["hidden"].sum().backward()
    assert model.first.weight.grad.abs().sum() > 0


def test_a_retained_graph_runs_backward_twice_and_create_graph_is_refused():
    eager, planned = pair()
    x = torch.randn(4, 8)
    call = compiled(planned, policy="full")
    for run in (eager, call):
        torch.manual_seed(1)
        loss = run(x)["loss"]
        loss.backward(retain_graph=True)
        loss.backward()
    for expected, found in zip(eager.parameters(), planned.parameters()):
        assert torch.equal(expected.grad, found.grad)
    with pytest.raises(RuntimeError, match="a planned step cannot be differentiated twice"):
        call(x)["loss"].backward(create_graph=True)


# Returns what it changed in place; its gradient differs from what its forward's operations have.
DOUBLED = function_of(lambda ctx, x: (x * 2).mul_(1), lambda ctx, gradient: gradient * 3)
instantiates = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does


@instantiates
@pytest.mark.filterwarnings("ignore:The model calls torch.utils.checkpoint itself")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_function_may_return_the_argument_that_it_changed(checkpointed):
    """Dynamo of torch 2.11 loses it without a word."""
    x = torch.ones(4, requires_grad=True)

    def double(x):
        return checkpoint(DOUBLED.apply, x, use_reentrant=False) if checkpointed else DOUBLED.apply(x)

    compiled(lambda x: double(x.sin()).sum(), policy="none")(x).backward()
    assert torch.equal(x.grad, 3 * x.detach().cos())


def test_autocast_casts_a_weight_once_as_eager_does():
    def three_times(self, x):
        return self.layer(torch.tanh(self.layer(torch.tanh(self.layer(x))))).float().square().mean()

    model = model_of(three_times, layer=nn.Linear(8, 8))
    assert_as_eager(model, compiled(model, policy="none"), torch.randn(4, 8), autocast=True)


def test_the_backend_is_an_entry_point():
    assert "ackpt" in torch._dynamo.list_backends()
    assert callable(ackpt.compile)


def test_gradients_in_another_order_than_the_planned_one_are_refused():
    """Torch would copy them: memory that the plan does not count."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Tanh(), nn.Conv2d(8, 16, 1)).to(memory_format=torch.channels_last)
    step = torch.compile(model, backend="ackpt", options={"policy": "none"})
    loss = nn.functional.mse_loss(step(torch.randn(2, 3, 8, 8)), torch.randn(2, 16, 8, 8))
    raises(RuntimeError, "contiguous", loss.backward)
