"""A budget in place: the model stays the object that it is, and its training calls run as planned."""

import concurrent.futures
import copy
import pickle

import pytest
import torch
from conftest import measured_step, raises
from torch import nn
from torch.nn import functional as F

import ackpt
from ackpt.checkpointing import standing_in
from ackpt.checkpointing.reachable import IN_PLACE


class Net(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.width = width
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)))
        self.head = nn.Linear(width, 5)

    def forward(self, x, labels=None):
        logits = self.head(self.body(x))
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def predict(self, x):
        return self(x).argmax(-1)

    def training_step(self, batch):
        return self.forward(**batch)


class OwnCall(Net):
    def __call__(self, x, labels):
        return self.forward(x, labels)


BATCH = {"x": torch.randn(32, 16, generator=torch.Generator().manual_seed(0)), "labels": torch.arange(32) % 5}
PAIR = BATCH["x"], BATCH["labels"]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


def gradients(model, batch=BATCH):
    model.zero_grad()
    model(**batch)["loss"].backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", [Net, OwnCall])
@pytest.mark.parametrize("call", ["__call__", "forward", "training_step"])
@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("in_place", [True, False])
def test_every_way_to_call_the_model_runs_as_planned(kind, call, regions, in_place):
    model = kind()
    budget = "40KiB" if regions else 0.8  # the regions of so small a model save nothing
    step = ackpt.apply_budget(model, BATCH, budget, regions=regions) if in_place else None
    step = step or ackpt.compile(model, **BATCH, budget=budget, regions=regions)
    forward = getattr(model if in_place else step, call)
    args, kwargs = ((BATCH,), {}) if call == "training_step" else ((), BATCH)
    measured = measured_step(model, forward, *args, loss=lambda outputs: outputs["loss"], warmup=2, **kwargs)
    assert step.plan is not None and measured.peak_bytes <= step.plan.peak_bytes <= 40 << 10
    assert regions or measured.dynamic_peak_bytes < 0.8 * step.plan.baseline_dynamic_peak_bytes


@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("in_place", [True, False])
def test_hooks_of_the_model_run_in_every_step(regions, in_place):
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    if in_place:
        ackpt.apply_budget(model, BATCH, "1MiB", regions=regions)
    call = model if in_place else ackpt.compile(model, **BATCH, budget="1MiB", regions=regions)
    calls = []

    def doubles(owner, args, kwargs):
        return args, {**kwargs, "x": 2 * kwargs["x"]}

    def adds(owner, args, result):
        calls.append(owner)
        return {"loss": result["loss"] + 1}

    for each in (model, plain):
        each.register_forward_pre_hook(doubles, with_kwargs=True)
        each.register_forward_hook(adds)
    for _ in range(2):
        assert all(map(torch.equal, gradients(call), gradients(plain)))
    assert calls == [model, plain] * 2


def test_type_state_and_attributes_of_the_model_stay_the_same(model):
    names, attributes = list(model.state_dict()), set(dir(model))
    ackpt.apply_budget(model, BATCH, budget=0.7)
    assert type(model) is Net and isinstance(model, Net) and model.width == 16
    assert list(model.state_dict()) == names and set(dir(model)) == attributes
    assert [name for name, _ in model.named_modules()] == [name for name, _ in Net().named_modules()]


def test_evaluation_and_methods_run_the_model(model):
    step = ackpt.apply_budget(model, BATCH, budget=0.7)
    events = len(step.history)
    model.eval()
    with torch.no_grad():
        assert model.predict(BATCH["x"]).shape == (32,)
    with torch.inference_mode():
        assert model(BATCH["x"]).shape == (32, 5)
    model.train()
    assert len(step.history) == events


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_plain_models(model, copied):
    step = ackpt.apply_budget(model, BATCH, budget=0.7)
    other = copied(model)
    assert type(other) is Net and all(map(torch.equal, gradients(other), gradients(model)))
    other.forward = lambda *args: Net.forward(other, *args)
    assert standing_in.in_place_of(model) is not None and "forward" not in vars(model)
    runs = len(step.history)
    other(torch.randn(7, 16), torch.zeros(7, dtype=torch.long))["loss"].backward()
    assert len(step.history) == runs  # the copy has no plan


def test_a_budget_can_be_removed(model):
    expected = gradients(model)
    step = ackpt.apply_budget(model, BATCH, budget=0.7)
    ackpt.remove_budget(model)
    assert IN_PLACE not in vars(model)
    events = len(step.history)
    model(torch.randn(7, 16), torch.zeros(7, dtype=torch.long))["loss"].backward()
    assert len(step.history) == events and all(map(torch.equal, gradients(model), expected))
    raises(ValueError, "this Net has no budget", lambda: ackpt.remove_budget(model))


def test_a_second_budget_replaces_the_first(model):
    first = ackpt.apply_budget(model, BATCH, budget=0.9)
    second = ackpt.apply_budget(model, BATCH, budget=ackpt.apply_budget(model, BATCH, budget=0.7).plan.peak_bytes)
    assert second.plan.peak_bytes < first.plan.peak_bytes
    with pytest.raises(ackpt.BudgetError):
        ackpt.apply_budget(model, BATCH, budget=0.001)
    events = len(second.history)
    model(torch.randn(7, 16), torch.zeros(7, dtype=torch.long))["loss"].backward()
    assert len(second.history) > events  # the second one is still in place


@pytest.mark.parametrize("given", [(BATCH,), (PAIR,), ([*PAIR],), PAIR], ids=["dict", "tuple", "list", "positional"])
@pytest.mark.parametrize("named", [True, False])
def test_batches_of_every_form_are_accepted(model, given, named):
    if named or given is PAIR:
        step = ackpt.apply_budget(model, *given, budget=0.7)
    else:
        step = ackpt.apply_budget(model, *given, 0.7)
    gradients(model, BATCH)
    assert step.plan.recompute_flops > 0


def test_the_step_can_be_called_as_well(model):
    step = ackpt.apply_budget(model, BATCH, budget=0.7)
    expected = gradients(model)
    model.zero_grad()
    step(**BATCH)["loss"].backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected))
    step.prepare(x=BATCH["x"][:20].clone(), labels=BATCH["labels"][:20].clone())
    assert [event.kind for event in step.history] == ["capture", "dynamic capture"]


def test_other_plans_refuse_a_model_with_a_budget(model):
    ackpt.apply_budget(model, BATCH, budget=0.7)
    for call in (lambda: ackpt.compile(nn.Sequential(model), BATCH["x"]), lambda: ackpt.trace(model, **BATCH)):
        with pytest.raises(TypeError, match="it has a budget of its own. Call ackpt.remove_budget"):
            call()


def test_several_threads_can_call_the_model(model):
    ackpt.apply_budget(model, BATCH, budget=0.7)
    expected = model(**BATCH)["loss"].detach()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: model(**BATCH)["loss"].detach(), range(3)))
    assert all(torch.equal(each, expected) for each in results)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo reads that of the second graph's input
class TestInCompiledFunctions:
    """Dynamo breaks its graph at the model, which runs as planned."""

    @pytest.mark.parametrize("compiled_before", [False, True])
    def test_it_runs_as_planned(self, model, fresh_dynamo, compiled_before):
        expected = gradients(model)
        function = torch.compile(lambda batch: model(**batch)["loss"] * 2 / 2, backend="aot_eager")
        if compiled_before:
            function(BATCH).backward()
        step = ackpt.apply_budget(model, BATCH, budget=0.7)
        assert measured_step(model, function, BATCH).peak_bytes == step.plan.peak_bytes
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected))

    def test_a_part_of_a_compiled_model_runs_as_planned(self, model, fresh_dynamo):
        whole = nn.Sequential(model, nn.Flatten(0))
        whole(BATCH["x"]).sum().backward()
        expected = [p.grad.clone() for p in model.parameters()]
        step = ackpt.apply_budget(model, BATCH["x"], budget=0.7)
        compiled = torch.compile(whole, backend="aot_eager")
        # The gradient of the output is a view of one number here; the plan counts a whole tensor.
        assert measured_step(model, compiled, BATCH["x"], loss=torch.sum).peak_bytes <= step.plan.peak_bytes
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected))

    def test_a_full_graph_is_refused(self, model, fresh_dynamo):
        ackpt.apply_budget(model, BATCH, budget=0.7)
        function = torch.compile(lambda: model(**BATCH)["loss"], backend="aot_eager", fullgraph=True)
        raises(torch._dynamo.exc.Unsupported, "A module with a region or plan of ackpt cannot be part", function)


def test_the_mark_of_accelerate_changes_no_capture(model):
    step = ackpt.apply_budget(model, BATCH, budget=0.7)
    model._is_accelerate_prepared = True  # as the Trainer's Accelerator does
    gradients(model)
    assert [event.cause for event in step.history] == ["first call"]


def test_a_capture_names_all_that_changed(model):
    step = ackpt.apply_budget(model, BATCH, budget=0.7)
    model.width = 17
    gradients(model, {name: tensor[:30] for name, tensor in BATCH.items()})
    cause = step.history[-1].cause
    assert "x changed from float32 [32, 16] to float32 [30, 16]" in cause
    assert "width of the model changed from 16 to 17" in cause


def test_a_model_with_a_budget_is_explained_without_it(model):
    plain = ackpt.explain(model, BATCH)
    step = ackpt.apply_budget(model, BATCH, budget=0.7)
    assert repr(ackpt.explain(model, BATCH)) == repr(plain)
    gradients(model)
    assert len(step.history) == 1 and standing_in.in_place_of(model) is not None


def test_a_warning_points_at_the_line_that_called(model):
    model.dropout = 0.1
    step = ackpt.apply_budget(model, BATCH, budget=0.7)
    with pytest.warns(UserWarning, match="was captured and planned") as warned:
        for value in range(4):
            model.dropout = value / 10 + 0.01
            gradients(model)
    assert warned[0].filename == __file__
    assert len(step.history) > 4


def test_compile_keeps_the_budget(model):
    step = ackpt.apply_budget(model, BATCH, budget=0.7)
    model.compile(backend="eager")
    assert measured_step(model, model, loss=lambda outputs: outputs["loss"], **BATCH).peak_bytes == step.plan.peak_bytes
    ackpt.remove_budget(model)
    model.compile(backend="eager")
    assert model._compiled_call_impl is not None


def test_a_later_budget_of_a_part_is_named():
    whole, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)), torch.ones(2, 4)
    ackpt.apply_budget(whole, x, "1MiB")
    whole(x).sum().backward()
    ackpt.apply_budget(whole[0], x, "1MiB", differentiate="all")
    with pytest.warns(UserWarning, match="module '0' .*has a budget of its own, which has no effect in the calls of"):
        whole(x).sum().backward()


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (
            BATCH,
            r"unexpected keyword argument 'x'; pass the batch as one argument, such as a dict: apply_budget\(model",
        ),
        ({**BATCH, "budjet": 0.5}, r"unexpected keyword argument 'budjet' \(did you mean 'budget'\?\)$"),
        ({}, r"got no batch: write apply_budget\(model, batch, budget=...\)"),
    ],
    ids=["unpacked", "misspelt", "none"],
)
def test_a_batch_that_is_not_one_argument_is_explained(model, inputs, said):
    raises(TypeError, said, lambda: ackpt.apply_budget(model, budget=0.5, **inputs))


def test_a_dict_in_a_list_says_how_each_function_takes_it(model):
    said = r"ackpt.compile\(model, \*\*batch\), or .* ackpt.apply_budget\(model, batch, b"
    raises(TypeError, said, lambda: ackpt.apply_budget(model, [BATCH], budget=0.5))


def test_a_saved_plan_runs_in_place(model, tmp_path):
    path = ackpt.compile(model, **BATCH, budget=0.7).plan.save(tmp_path / "plan.json")
    expected = gradients(model)
    step = ackpt.apply_budget(model, BATCH, plan=ackpt.Plan.load(path))
    assert all(map(torch.equal, gradients(model), expected)) and step.plan == ackpt.Plan.load(path)
    raises(ValueError, "either a budget or a plan", lambda: ackpt.apply_budget(model, BATCH, 0.7, plan=step.plan))


def test_a_budget_that_is_left_out_is_named():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    with pytest.warns(UserWarning, match="without a budget .* recomputes nothing: give budget='22GiB'"):
        ackpt.apply_budget(model, x)
    ackpt.apply_budget(model, x, policy="full")  # which needs none
