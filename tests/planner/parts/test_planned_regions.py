"""Models that cannot be one graph train within a budget, bit-equal to eager, and every step is checked."""

import copy
import pickle
import types

import pytest
import torch
from branching_models import MODELS, Adds, Mean, built, feed_forward, measured, results
from conftest import assert_equal, left_by, measured_step, model_of, raises, seed, streams
from torch import nn

import ackpt
from ackpt.core.errors import BudgetError, TraceError
from ackpt.planner.parts.module_blocks import Block
from ackpt.planner.parts.regions_plan import Record, RegionsPlan, Run, Segment

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


def test_nothing_runs_before_the_first_step_and_every_step_is_bit_equal(name, fresh_dynamo):
    model, batch = built(name)
    for _ in range(4 if name == "scripted" else 1):  # TorchScript optimizes after the first runs
        expected, after = results(model, model, batch), streams()
    model.zero_grad()
    seed()
    before = copy.deepcopy(model.state_dict())
    drawn, calls = streams(), []
    modules = [each for each in model.children() if not isinstance(each, torch.jit.ScriptModule)]
    hooks = [module.register_forward_pre_hook(lambda *_: calls.append(1)) for module in modules]
    step = ackpt.compile(model, budget="1GiB", regions=True, **batch)
    assert calls == [] and streams() == drawn and all(p.grad is None for p in model.parameters())
    for hook in hooks:
        hook.remove()
    assert_equal([*before.values()], [*model.state_dict().values()], "state")
    assert isinstance(step.plan, RegionsPlan) and step.plan.peak_bytes == 2**30 and not step.history
    assert set(step.plan.fates.values()) == {"checkpointed"}
    for _ in range(3):
        assert_equal(results(model, step, batch), expected, name)
        assert streams() == after
    assert set(step.plan.fates.values()) == {"saved"} and [e.kind for e in step.history] == ["regions"]
    assert not any(isinstance(vars(module).get("forward"), Block) for module in model.modules())


# Fractions of the way from all blocks checkpointed to all saved.
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_steps_stay_within_the_budget(name, share, fresh_dynamo):
    model, batch = built(name)
    for _ in range(4 if name == "scripted" else 1):
        expected = results(model, model, batch)
    probe = ackpt.compile(model, budget="1GiB", regions=True, **batch)
    results(model, probe, batch)
    least, baseline = probe.plan.least_peak_bytes, probe.plan.baseline_peak_bytes
    budget = int(least + share * (baseline - least))
    step = ackpt.compile(model, budget=budget, regions=True, **batch)
    for _ in range(3):
        assert_equal(results(model, step, batch), expected, name)
    plan = step.plan
    assert plan.peak_bytes <= budget and plan.dynamic_peak_bytes <= plan.limit_bytes
    assert measured(model, step, batch).peak_bytes <= plan.peak_bytes
    assert ("checkpointed" in plan.fates.values()) == (share < 1.0 and least < baseline)
    if share:
        own = measured(model, model, batch).peak_bytes
        assert own <= baseline
    else:
        smaller = ackpt.compile(model, budget=least - 1, regions=True, **batch)
        raises(BudgetError, "keep the budget", lambda: results(model, smaller, batch))


def test_the_first_step_needs_no_copy_of_random_numbers_beyond_its_plan():
    model, x = nn.Sequential(feed_forward(), feed_forward(), Mean()), torch.randn(8, 16)
    probe = ackpt.compile(model, x, budget="1MiB", regions=True)
    probe(x).backward()
    step = ackpt.compile(model, x, budget=probe.plan.least_peak_bytes, regions=True)

    def run():
        model.zero_grad()
        step(x).backward()

    first = ackpt.measure(run, resident=[model, x], warmup=0, repeats=0).peak_bytes
    assert first <= step.plan.peak_bytes == probe.plan.least_peak_bytes


def test_a_fraction_is_relative_to_the_baseline_of_the_first_step():
    model, batch = built("early exit")
    step = ackpt.compile(model, budget=0.7, **batch)
    results(model, step, batch)
    plan = step.plan
    assert plan.limit_bytes == int(0.7 * plan.baseline_dynamic_peak_bytes) >= plan.dynamic_peak_bytes
    assert list(plan.fates.values()) == ["checkpointed", "checkpointed", "saved", "saved"]
    assert "all blocks saved, from the first step" in plan.table()


def test_an_infeasible_budget_raises_in_the_first_step():
    model, batch = built("early exit")
    expected = results(model, model, batch)
    step = ackpt.compile(model, budget=0.05, **batch)
    with pytest.raises(BudgetError, match="planned regions cannot keep the budget 0.05: .*smallest feasible") as error:
        results(model, step, batch)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert_equal(gradients, expected[1 : 1 + len(gradients)], "complete gradients")
    least = error.value.least_bytes
    for _ in range(2):  # and in every further step
        raises(BudgetError, "this step allocates .* keep the budget 0.05", lambda: results(model, step, batch))
    step = ackpt.compile(model, budget=least, **batch)
    for _ in range(3):
        assert_equal(results(model, step, batch), expected, "least")
    assert step.plan.peak_bytes == least
    bytes_of_parameters = sum(parameter.nbytes for parameter in model.parameters())
    tiny = ackpt.compile(model, budget=bytes_of_parameters + 50_000, **batch)
    with pytest.raises(BudgetError, match="reaches module 'layers.*all blocks are checkpointed.*is larger than") as e:
        results(model, tiny, batch)
    assert e.value.least_bytes <= least and all(parameter.grad is None for parameter in model.parameters())
    assert all("forward" not in vars(module) for module in model.modules())


def test_policies_without_a_budget():
    model, x = nn.Sequential(feed_forward(), feed_forward(), feed_forward(), Mean()), torch.randn(8, 16)
    expected = results(model, model, {"input": x})
    free = ackpt.compile(model, x, regions=True)
    assert set(free.plan.fates.values()) == {"saved"}
    assert_equal(results(model, free, {"input": x}), expected, "no budget")
    assert free.plan.limit_bytes is None and free.plan.peak_bytes == free.plan.baseline_peak_bytes
    assert measured(model, free, {"input": x}).peak_bytes == free.plan.peak_bytes
    model, batch = built("early exit")
    for options in ({}, {"budget": 0.7, "regions": False}, {"budget": 0.7, "policy": "full"}):
        with pytest.raises(TraceError, match="looks at the values of a tensor"):
            ackpt.compile(model, **options, **batch)


@pytest.mark.parametrize("name", ["scripted", "compiled"])
@pytest.mark.parametrize("policy", ["auto", "none", "full"])
def test_a_scripted_or_compiled_submodule_needs_no_budget(name, policy, fresh_dynamo):
    model, batch = built(name)
    for _ in range(4):  # TorchScript optimizes after the first runs
        expected = results(model, model, batch)
    step = ackpt.compile(model, policy=policy, **batch)
    for _ in range(2):
        assert_equal(results(model, step, batch), expected, name)
    assert step.plan.fates == dict.fromkeys(("0", "2", "3"), "checkpointed" if policy == "full" else "saved")
    assert step.plan.limit_bytes is None and step.plan.note.startswith("module '1'")


def test_other_policies_name_those_that_leave_a_scripted_module_out():
    model, batch = built("scripted")
    for options in ({"policy": "rotor"}, {"regions": False}):
        with pytest.raises(TypeError, match="module '1' .* can stay outside the plan: .* 'auto', 'none' or 'full'"):
            ackpt.compile(model, **options, **batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regions": 1.5}, "regions must be None, True or False"),
        ({"on_exceed": "ignore"}, "on_exceed must be 'raise' or 'warn'"),
        ({"regions": True, "policy": "full"}, "neither a plan nor a policy"),
    ],
)
def test_invalid_options_are_refused(options, message):
    raises((TypeError, ValueError), message, lambda: ackpt.compile(nn.Linear(2, 2), torch.ones(1, 2), **options))


def test_errors_of_the_model_are_raised_unchanged():
    model, batch = built("early exit")
    step = ackpt.compile(model, budget=0.7, **batch)
    raises(RuntimeError, "same reduction dim", lambda: ackpt.compile(model, torch.ones(4, 5), budget=0.7))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # in a planned step
        step(torch.ones(4, 5))
    step(**batch).backward()
    raises(TraceError, "values of a tensor", lambda: ackpt.compile(model.to("meta"), torch.ones(64, 16), budget=0.7))


class InADataclass(Adds):
    """The outputs are fields of an object that torch's pytrees do not know."""

    def forward(self, x):
        return types.SimpleNamespace(loss=super().forward(x))


def test_outputs_in_an_object_are_followed():
    seed(0)
    model, x = InADataclass(), torch.randn(160, 16)
    step = ackpt.compile(model, x, budget="1GiB", regions=True)
    step(x).loss.backward()
    assert step.plan.peak_bytes is not None and set(step.plan.fates.values()) == {"saved"}


def test_a_budget_applied_in_place_can_be_removed():
    model, batch = built("early exit")
    expected = results(model, model, batch)
    step = ackpt.apply_budget(model, batch, budget=0.7)
    for _ in range(2):
        assert_equal(results(model, model, batch), expected, "in place")
    assert isinstance(step.plan, RegionsPlan) and type(model).__name__ == "EarlyExit"
    with torch.no_grad():
        assert torch.equal(model(**batch), expected[0])
    other = pickle.loads(pickle.dumps(model))  # has no budget
    assert_equal(results(other, other, batch), expected, "pickled")
    ackpt.remove_budget(model)
    assert_equal(results(model, model, batch), expected, "removed")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))])
def test_a_copy_plans_for_itself(copied):
    model, batch = built("early exit")
    step = ackpt.compile(model, budget=0.7, **batch)
    results(model, step, batch)
    other = copied(step)
    for _ in range(2):
        assert_equal(results(other, other, batch), results(model, step, batch), "copy")
    assert other.plan == step.plan


def test_smaller_batches_use_the_plan_of_the_largest():
    model, batch = built("early exit")
    step = ackpt.compile(model, budget=0.75, **batch)
    for rows, events in ((32, 1), (64, 2), (1, 2), (80, 3), (70, 3)):
        x = torch.randn(rows, 16)
        assert_equal(results(model, step, {"x": x}), results(model, model, {"x": x}), f"{rows} rows")
        assert len(step.history) == events
    assert list(step.plan.fates.values()).count("saved") == 2


class Grows(Adds):
    def forward(self, x):
        return super().forward(x.repeat(int(x.max()), 1))


def values(largest: int) -> torch.Tensor:
    return torch.rand(64, 16).clamp(max=0.9).index_fill(0, torch.tensor([0]), largest)


def test_a_step_that_is_too_large_raises_in_the_forward_or_warns():
    model, x = Grows(), values(6)
    step, warns = (ackpt.compile(model, x=values(2), budget=0.7, on_exceed=each) for each in ("raise", "warn"))
    for each in (step, warns):
        results(model, each, {"x": values(2)})
    model.zero_grad()
    raises(BudgetError, "allocates .* reaches module 'blocks.*at most .* keep the budget 0.7.*warn", lambda: step(x=x))
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.warns(UserWarning, match="keep the budget 0.7") as warned:
        found = results(model, warns, {"x": x})
    assert len(warned) == 1
    assert_equal(found, results(model, model, {"x": x}), "warned")
    results(model, step, {"x": values(2)})  # the next step is as ever


def test_every_new_plan_is_reported_and_none_is_saved(tmp_path):
    model, batch = built("early exit")
    plans = []
    step = torch.compile(model, backend="ackpt", options={"budget": 0.7, "on_plan": plans.append})
    for rows in (64, 32, 80):
        for _ in range(2):
            model.zero_grad()
            step(x=torch.randn(rows, 16)).backward()
    assert len(plans) == 2 and plans[0].peak_bytes < plans[1].peak_bytes
    raises(ackpt.PlanError, "a plan in parts cannot be saved", lambda: plans[0].save(tmp_path / "plan.json"))
    assert not list(tmp_path.iterdir())


def test_the_optimizer_counts():
    model, batch = built("matcher")
    optimizer = torch.optim.AdamW(model.parameters())
    plain = ackpt.compile(model, budget="1GiB", **batch)
    with_state = ackpt.compile(model, budget="1GiB", optimizer=optimizer, **batch)
    states = 8 * sum(parameter.numel() for parameter in model.parameters()) + 4 * len([*model.parameters()])
    assert with_state.plan.resident_bytes == plain.plan.resident_bytes + states
    results(model, plain, batch)
    results(model, with_state, batch)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert with_state.plan.dynamic_peak_bytes >= max(gradients, plain.plan.dynamic_peak_bytes)


def test_two_forwards_before_one_backward():
    model, x, y = Adds(), torch.randn(64, 16), torch.randn(64, 16)

    def both(call):
        return lambda: call(x=x) + call(x=y)

    expected = left_by(model, both(model))
    step = ackpt.compile(model, x, budget=0.7)
    for _ in range(3):
        assert_equal(left_by(model, both(step)), expected, "both")
    assert measured_step(model, both(step), warmup=0).dynamic_peak_bytes <= step.plan.limit_bytes
    probe = ackpt.compile(model, x, budget="1GiB")
    results(model, probe, {"x": x})
    one = ackpt.compile(model, x, budget=probe.plan.least_peak_bytes)
    for _ in range(2):
        results(model, one, {"x": x})
    with pytest.raises(BudgetError, match="this step allocates"):
        left_by(model, both(one))  # two forwards need more
    assert_equal(results(model, one, {"x": x}), results(model, model, {"x": x}), "as before")


def test_forwards_without_a_backward_are_forgotten():
    model, x = Adds(), torch.randn(64, 16)
    step = ackpt.compile(model, x, budget=0.8)
    for _ in range(3):
        step(x)  # with gradients enabled, as an evaluation without no_grad
    assert step.plan.peak_bytes is None and not step.history
    results(model, step, {"x": x})
    peak = step.plan.peak_bytes
    other = ackpt.compile(model, x, budget=0.8)
    results(model, other, {"x": x})
    assert other.plan.peak_bytes == peak
    for _ in range(3):
        step(x)
    assert_equal(results(model, step, {"x": x}), results(model, model, {"x": x}), "results")


def test_gradients_of_earlier_steps_count():
    model, x = Adds(), torch.randn(64, 16)
    step = ackpt.compile(model, x, budget="1GiB")
    results(model, step, {"x": x})
    least = step.plan.least_peak_bytes
    tight = ackpt.compile(model, x, budget=least)
    for _ in range(2):
        results(model, tight, {"x": x})
    with pytest.raises(BudgetError, match="this step allocates"):
        tight(x=x).backward()  # without zero_grad
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    accumulates = ackpt.compile(model, x, budget="1GiB", accumulation=True)
    assert accumulates.plan.resident_bytes == step.plan.resident_bytes + gradients
    model.zero_grad()
    for _ in range(3):
        accumulates(x).backward()
    assert len(accumulates.history) == 1


def test_a_loss_held_by_the_loop_is_allowed():
    model, x = Adds(), torch.randn(64, 16)
    probe = ackpt.compile(model, x, budget="1GiB")
    results(model, probe, {"x": x})
    step = ackpt.compile(model, x, budget=probe.plan.least_peak_bytes)
    for _ in range(3):
        model.zero_grad()
        loss = step(x)
        loss.backward()


class Holds(Adds):
    def forward(self, x):
        features = self.first(x)
        return super().forward(x), features.repeat(1, 64)


def test_outputs_held_by_the_loop_count():
    model, x = Holds(), torch.randn(64, 16)
    step = ackpt.compile(model, x, budget=0.75)
    held = 64 * 16 * 64 * 4
    for _ in range(2):
        model.zero_grad()
        step(x)[0].backward()
    assert step.plan.limit_bytes - step.plan.dynamic_peak_bytes < held
    model.zero_grad()
    loss, features = step(x)
    raises(BudgetError, "allocates .* in backward.* 256.0 KiB more .* drop outputs", loss.backward)
    assert features.shape == (64, 1024) and all(parameter.grad is None for parameter in model.parameters())


class Remembers(nn.Sequential):
    memory = None

    def forward(self, input):
        x = torch.tanh(super().forward(input))
        x = x if self.memory is None else x + 0.1 * self.memory
        self.memory = x.detach()
        return x


def test_tensors_kept_for_the_next_step_count():
    def model():
        torch.manual_seed(0)
        return Adds(lambda: Remembers(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16)))

    batch = {"x": torch.randn(64, 16)}
    kept, own, of_plan = 3 * 64 * 16 * 4, model(), model()
    step = ackpt.compile(of_plan, budget=0.8, **batch)
    first = None
    for _ in range(3):
        assert_equal(results(own, own, batch), results(of_plan, step, batch), "step")
        first = first or step.plan
    assert step.plan.least_peak_bytes == first.least_peak_bytes + kept
    assert step.plan.baseline_peak_bytes == first.baseline_peak_bytes + kept
    assert step.plan.dynamic_peak_bytes <= step.plan.limit_bytes == int(0.8 * step.plan.baseline_dynamic_peak_bytes)
    assert [event.kind for event in step.history] == ["regions", "regions"]
    of_plan = model()
    step = ackpt.compile(of_plan, budget=first.least_peak_bytes, **batch)
    results(of_plan, step, batch)
    raises(BudgetError, "this step allocates", lambda: results(of_plan, step, batch))
    assert step.plan.least_peak_bytes == first.least_peak_bytes + kept
    of_plan = model()
    step = ackpt.compile(of_plan, budget=step.plan.least_peak_bytes, **batch)
    for _ in range(3):
        results(of_plan, step, batch)


def test_a_returned_argument_belongs_to_the_block_that_computed_it():
    skips = iter([False, True, True])
    model = Adds(
        lambda: model_of(lambda self, x: x if self.skips else self.layer(x), layer=feed_forward(), skips=next(skips)),
        is_residual=False,
    )
    batch = {"x": torch.randn(64, 16)}
    step = ackpt.compile(model, budget="1GiB", **batch)
    results(model, step, batch)
    assert step.plan.baseline_peak_bytes == measured(model, model, batch).peak_bytes
    step = ackpt.compile(model, budget=step.plan.least_peak_bytes, **batch)
    for _ in range(2):
        results(model, step, batch)
    assert measured(model, step, batch).peak_bytes <= step.plan.peak_bytes


class SkipsBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(), nn.Linear(64, 16)) for _ in range(6))
        self.blocks, self.skipped = nn.ModuleList(blocks), set()

    def forward(self, x):
        for at, block in enumerate(self.blocks):
            if at not in self.skipped:
                x = x + block(x)
        return x.square().mean() if x.sum() < 1e9 else x.mean()


@pytest.mark.parametrize("skipped", [{3, 4, 5}, {0, 1, 2}, {0, 2, 4}])
@pytest.mark.parametrize("budget", ["bytes", 0.7])
def test_blocks_that_the_first_step_skips_have_room(skipped, budget):
    own, x = SkipsBlocks(), torch.randn(64, 16)
    step = ackpt.compile(SkipsBlocks(), x, budget="1GiB")
    step(x).backward()
    assert step.plan.baseline_peak_bytes == measured_step(own, own, x).peak_bytes
    limit = int(1.1 * step.plan.least_peak_bytes)
    model = SkipsBlocks()
    model.skipped = skipped
    step = ackpt.compile(model, x, budget=limit if budget == "bytes" else budget)
    for _ in range(4):
        left_by(model, step, x)
        model.skipped = set()
    peak = measured_step(model, step, x, warmup=0).peak_bytes
    assert peak <= step.plan.limit_bytes + step.plan.resident_bytes and "saved" in step.plan.fates.values()


def test_a_larger_batch_without_the_optimizer_is_warned_of_with_its_state():
    model = SkipsBlocks()
    step = ackpt.compile(model, torch.randn(8, 16), budget="1MiB")
    optimizer = torch.optim.AdamW(model.parameters())
    step(torch.randn(8, 16)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="does not count the state of AdamW.*planned peak is .*, not 1.0 MiB"):
        loss = step(torch.randn(16, 16))
    loss.backward()
    assert isinstance(step.plan.peak_bytes, int)


@pytest.mark.parametrize(("limit", "saved"), [(250, ["second"]), (289, ["second"]), (290, ["first", "second"])])
def test_among_equal_blocks_the_last_are_saved_first(limit, saved):
    first, second = (Run(path, 0, 0, held_bytes=100, cost=1.0) for path in ("first", "second"))
    held = [Segment(50, first, change=100), Segment(60, second, change=100), Segment(90, second, change=-100)]
    backward = [Segment(190, second, None), Segment(160, second), Segment(150, first, change=-100), Segment(250, first)]
    assert sorted(Record([*held, *backward]).chosen(limit)) == saved
