"""``torch.compile(model, backend="ackpt")`` has no limits of Dynamo: any size, any call, always planned."""

import copy
import pickle

import pytest
import torch
from conftest import SomeMode, assert_equal, left_by, measured_step, raises
from torch import nn

import ackpt

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
LENGTHS = (9, 14, 25, 11, 30)  # more than Dynamo compiles within the limit below


class Net(nn.Module):
    """Layers that keep more than a fraction allows, with dropout and a running average."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        for _ in range(3):
            x = x + self.last(self.dropout(self.norm(self.first(x)).tanh().sin()))
        return x.square().mean()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


def as_module(model, **options):
    return torch.compile(model, backend="ackpt", options=options)


def in_place(model, **options):
    model.compile(backend="ackpt", options=options)
    return model


def as_function(model, **options):
    return torch.compile(lambda x: model(x), backend="ackpt", options=options)


every_way = pytest.mark.parametrize("compiled", [as_module, in_place, as_function])


@every_way
def test_one_capture_serves_more_lengths_than_dynamo_compiles(compiled, model):
    eager, plans = copy.deepcopy(model), []
    call = compiled(model, budget="42KiB", on_plan=plans.append)
    for evaluated in range(1, 11):  # neither compiled nor counted
        with torch.no_grad():
            model.eval(), call(torch.ones(evaluated, 8)), model.train()
    assert plans == []
    with torch._dynamo.config.patch(recompile_limit=1):
        for count, length in enumerate(LENGTHS, 1):
            x = torch.randn(length, 8)
            assert_equal(left_by(model, call, x), left_by(eager, eager, x), "step")
            assert len(plans) == count
            assert measured_step(model, call, x).peak_bytes == plans[-1].peak_bytes <= 42 * 1024
            eager.load_state_dict(model.state_dict())
    assert {plan.cost > 0 for plan in plans} == {True, False}  # the model's own step keeps the budget at some lengths
    left_by(model, call, torch.randn(LENGTHS[0], 8))
    assert len(plans) == len(LENGTHS)


def test_sizes_are_dynamic_as_torch_compile_is_told(model, caplog):
    for dynamic, captures in ((True, 1), (None, 2), (False, 3)):
        caplog.clear()
        call = torch.compile(model, backend="ackpt", dynamic=dynamic)
        with caplog.at_level("INFO", "ackpt"):
            for length in (5, 6, 7):
                call(torch.ones(length, 8)).backward()
        messages = [record.getMessage() for record in caplog.records if record.name == "ackpt"]
        assert sum("capture in" in message for message in messages) == captures


@pytest.mark.parametrize("name", ["forward", "training", "_parameters", "model"])
def test_a_model_may_have_any_name_in_a_function(model, name):
    namespace = {name: model}
    exec(f"def loss(x): return {name}(x)", namespace)
    eager, x = copy.deepcopy(model), torch.randn(5, 8)
    call = torch.compile(namespace["loss"], backend="ackpt", options={"budget": 1.0})
    assert_equal(left_by(model, call, x), left_by(eager, eager, x), "step")


@pytest.mark.parametrize("given", [lambda model: [model], lambda model: {"a": (model,)}])
def test_models_may_be_in_a_container_that_a_function_takes(model, given):
    def loss(models, x):
        (first,) = models if isinstance(models, list) else models["a"]
        return first(x)

    eager, x = copy.deepcopy(model), torch.randn(5, 8)
    call = torch.compile(loss, backend="ackpt", options={"budget": 1.0})
    assert_equal(left_by(model, lambda x: call(given(model), x), x), left_by(eager, eager, x), "step")


def test_an_infeasible_budget_stops_every_step(model):
    call = as_module(model, budget="1KiB")
    for _ in range(2):
        raises(ackpt.BudgetError, "smallest feasible budget", lambda: call(torch.ones(4, 8)))
    with torch.no_grad():
        call(torch.ones(4, 8))


class Breaks(Net):
    """Does what ends a graph of Dynamo."""

    def forward(self, x):
        with torch.autograd.set_detect_anomaly(False):
            torch._dynamo.graph_break()
            return super().forward(x)


@every_way
def test_frames_skipped_by_dynamo_are_planned(compiled):
    x = torch.randn(4, 8)
    sequence = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Net())
    for model, context in ((Breaks(), torch.enable_grad()), (sequence, torch.enable_grad()), (Net(), SomeMode())):
        eager, plans = copy.deepcopy(model), []
        call = compiled(model, on_plan=plans.append)
        with context:
            assert_equal(left_by(model, call, x), left_by(eager, eager, x), "step")
        assert len(plans) == 1


class Trainer:
    def __init__(self, model):
        self.model, self.scale = model, 3.0

    def loss(self, x):
        return self.model(x) * self.scale

    @staticmethod
    def of(model, x, scale=2.0):
        return model(x) * scale


def test_functions_that_use_a_model(model):
    trainer, x = Trainer(model), torch.randn(4, 8)
    for function, args in ((trainer.loss, (x,)), (Trainer.of, (model, x)), (model.forward, (x,))):
        eager, plans = copy.deepcopy(model), []
        expected = left_by(model, lambda _, call=function, args=args: call(*args), x)
        model.load_state_dict(eager.state_dict())
        call = torch.compile(function, backend="ackpt", options={"budget": 0.9, "on_plan": plans.append})
        assert call.__name__ == function.__name__
        assert_equal(left_by(model, lambda _, call=call, args=args: call(*args), x), expected, "step")
        (plan,) = plans
        assert {each.module for each in plan.activations} > {"model.first", "model.norm", "model.dropout"}
        model.load_state_dict(eager.state_dict())


def test_a_forward_that_is_replaced_by_its_compiled_self(model):
    eager, plans, x = copy.deepcopy(model), [], torch.randn(4, 8)
    model.forward = torch.compile(model.forward, backend="ackpt", options={"on_plan": plans.append})
    assert_equal(left_by(model, model, x), left_by(eager, eager, x), "step")
    assert len(plans) == 1


def test_gradients_of_arguments_alone():
    x = torch.randn(64, requires_grad=True)

    def function(x):
        return x.sin().exp().cos().sum()

    plans = []
    torch.compile(function, backend="ackpt", options={"on_plan": plans.append})(x).backward()
    assert torch.equal(x.grad, *torch.autograd.grad(function(x), x))
    assert len(plans) == 1


def test_a_gradient_that_no_plan_knows_is_refused():
    weight = torch.randn(8, requires_grad=True)
    call = torch.compile(lambda x: (x * weight).sum(), backend="ackpt")
    raises(ackpt.TraceError, "would run without a plan: register the tensor", lambda: call(torch.ones(8)))
    with torch.no_grad():
        assert call(torch.ones(8)) == weight.sum()


def test_a_compiled_model_stays_what_torch_compile_returns(model):
    x, options = torch.randn(4, 8), {"budget": 0.9}
    call, eager = as_module(model, **options), copy.deepcopy(model)
    assert isinstance(call, torch._dynamo.OptimizedModule) and call._orig_mod is model
    assert call.dropout is model.dropout and list(call.state_dict()) == [f"_orig_mod.{n}" for n in model.state_dict()]
    copies = [copy.deepcopy(call), pickle.loads(pickle.dumps(call))]
    expected = left_by(eager, eager, x)
    for each in (*copies, call):
        assert_equal(left_by(each._orig_mod, each, x), expected, "step")
    raises(TypeError, "torch.compile has compiled it", lambda: as_module(call))


def test_a_second_compile_replaces_the_first(model):
    first, second = [], []
    in_place(model, on_plan=first.append)
    in_place(model, on_plan=second.append)
    raises(ValueError, "is not known", lambda: in_place(model, policy="best"))
    model(torch.ones(4, 8)).backward()
    assert (len(first), len(second)) == (0, 1)
    ackpt.remove_budget(model)
    model(torch.ones(6, 8)).backward()
    assert len(second) == 1


def test_outputs_kept_by_the_caller_count():
    class Returns(nn.Linear):
        def forward(self, x):
            hidden = super().forward(x).tanh()
            return {"loss": hidden.sin().sum(), "hidden": hidden.detach() + 1}

    model, x, peaks = Returns(64, 64), torch.randn(64, 64), {}
    for outputs in ("drop", "keep"):
        plans = []
        as_module(model, outputs=outputs, on_plan=plans.append)(x)["loss"].backward()
        peaks[outputs] = plans[0].peak_bytes
    assert peaks["keep"] == peaks["drop"] + 64 * 64 * 4


def test_disabled_compilation_runs_the_model(model):
    call = torch.compile(model, backend="ackpt", options={"budget": "1KiB"}, disable=True)
    losses = []
    for each in (call, model):
        torch.manual_seed(0)  # of dropout
        losses.append(each(torch.ones(4, 8)))
    losses[0].backward()
    assert torch.equal(*losses) and all(parameter.grad is not None for parameter in model.parameters())


def test_the_optimizer_accumulated_gradients_and_a_cache_are_options(model, tmp_path):
    x = torch.randn(9, 8)
    plans = []
    options = {"optimizer": "adamw", "accumulation": True, "cache": tmp_path, "on_plan": plans.append, "budget": 0.9}
    for other in (copy.deepcopy(model), model):  # the second finds what the first has searched for
        torch.compile(other, backend="ackpt", options=options)(x).backward()
        expected = ackpt.compile(model, x, budget=0.9, optimizer="adamw", accumulation=True).plan
        assert plans[-1].resident_bytes == expected.resident_bytes and plans[-1].schedule == expected.schedule
        assert len(list(tmp_path.iterdir())) == 1
