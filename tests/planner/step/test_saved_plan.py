"""A saved plan serves all sizes: bit-equal to eager, with its simulated peak, within the bytes of its budget."""

from dataclasses import replace

import pytest
import torch
from conftest import model_of, raises
from dynamic_steps import Words, check, ids, kinds
from test_dynamic import WIDTH, Blocks, Images
from torch import nn
from torch.nn import functional as F

import ackpt


def saved(tmp_path, step) -> ackpt.Plan:
    return ackpt.Plan.load(step.plan.save(tmp_path / "plan.json"))


def bytes_of(plan, allowed) -> int:
    """What the budget of `allowed` leaves for everything."""
    assert allowed.limit_bytes is not None
    return plan.limit_bytes + plan.resident_bytes


def test_a_plan_of_one_size_serves_smaller_batches_and_other_lengths(tmp_path):
    model = Blocks()
    plan = saved(tmp_path, ackpt.compile(model, ids(8, 32), budget=0.6))
    assert plan.sizes == ((8, 32),) and plan.dynamic == ()
    step = ackpt.compile(model, ids(5, 32), plan=plan)
    for batch, length in ((5, 32), (8, 32), (3, 32), (3, 17), (8, 32), (8, 20)):
        check(step, model, ids(batch, length))
        assert step.plan.schedule.saved == plan.schedule.saved and step.plan.policy == "auto"
        assert bytes_of(step.plan, plan) == bytes_of(plan, plan)
        assert step.plan.cost > 0
    assert {*kinds(step)} == {"dynamic capture", "plan"}


def test_at_its_own_sizes_the_plan_itself_runs(tmp_path):
    model = Words()
    plan = saved(tmp_path, ackpt.compile(model, ids(8, 32), budget=0.6))
    step = ackpt.compile(model, ids(8, 32), plan=plan)
    assert kinds(step) == ["capture"] and step.plan is plan
    check(step, model, ids(4, 32))
    step.prepare(ids(8, 32))
    assert step.plan is plan


def test_a_plan_of_a_dynamic_capture_brings_its_dimensions(tmp_path):
    model = Words()
    step = ackpt.compile(model, ids(8, 32), budget=0.6, dynamic={"ids": {1: (8, 32)}})
    plan = saved(tmp_path, step)
    assert plan.dynamic == ((0, 1),) and plan.schedule == step.plan.schedule
    for length in (32, 20):
        again = ackpt.compile(model, ids(8, length), plan=plan)
        check(again, model, ids(8, length))
        assert kinds(again) == ["dynamic capture"]
        check(again, model, ids(8, 11))


def test_a_plan_that_was_chosen_for_another_size_serves_too(tmp_path):
    model = Words()
    step = ackpt.compile(model, ids(8, 32), budget=0.6)
    step.prepare(ids(8, 24))  # from the dynamic capture
    plan = saved(tmp_path, step)
    assert plan.dynamic == ((0, 1),) and plan.sizes == ((8, 24),)
    check(ackpt.compile(model, ids(8, 16), plan=plan), model, ids(8, 24))


def test_sizes_that_exceed_the_budget_are_refused_with_bytes(tmp_path):
    model = Words()
    plan = saved(tmp_path, ackpt.compile(model, ids(4, 16), budget=0.8))
    step = ackpt.compile(model, ids(4, 16), plan=plan)
    message = r"shapes \[16, 64\].* \(\d+ bytes\).*made for the shapes \[4, 16\]"
    error = raises(ackpt.BudgetError, message, lambda: step(ids(16, 64)))
    allowed = bytes_of(plan, plan)
    assert error.value.least_bytes is not None and error.value.least_bytes > allowed
    assert f"({allowed} bytes)" in str(error.value)
    check(step, model, ids(3, 16))  # the step still works


def test_a_byte_less_than_the_peak_is_refused():
    model = Words()
    plan = ackpt.compile(model, ids(4, 20), policy="full").plan
    needed = ackpt.compile(model, ids(4, 20), plan=plan).prepare(ids(8, 20)).peak_bytes
    for allowed in (needed, needed - 1):
        limited = replace(plan, limit_bytes=allowed - plan.resident_bytes)
        step = ackpt.compile(model, ids(4, 20), plan=limited)
        if allowed == needed:
            assert step.prepare(ids(8, 20)).peak_bytes == needed
        else:
            with pytest.raises(ackpt.BudgetError, match=rf"{needed} bytes.*\({allowed} bytes\)"):
                step.prepare(ids(8, 20))


def test_another_model_and_other_arguments_are_refused(tmp_path):
    plan = saved(tmp_path, ackpt.compile(Words(), ids(8, 32), budget=0.6))
    with pytest.raises(ackpt.PlanError, match="made for fixed sizes.*or the model or its arguments differ"):
        ackpt.compile(Words(layers=3), ids(8, 20), plan=plan)
    raises(ackpt.PlanError, "another graph", lambda: ackpt.compile(Images(), torch.randn(2, 3, 16, 16), plan=plan))
    step = ackpt.compile(Words(), ids(8, 20), plan=plan)
    raises(ackpt.PlanError, "another graph.*matched the previous call", lambda: step(ids(8, 1)))
    raises(ackpt.PlanError, "another graph", lambda: ackpt.compile(Words(), ids(8, 20), plan=plan, dynamic=False))


def long_and_short():
    def forward(self, x):
        x = self.body(x).tanh()
        return self.head(x).tanh().sum() if x.shape[0] > 16 else x.sum()

    return model_of(forward, body=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, WIDTH))


class OneSize(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh().sum() * int(x.shape[0])


def test_sizes_that_take_another_path_are_refused(tmp_path):
    plan = saved(tmp_path, ackpt.compile(long_and_short(), torch.ones(20, WIDTH)))
    step = ackpt.compile(long_and_short(), torch.ones(24, WIDTH), plan=plan)
    assert step.plan.dynamic_peak_bytes > plan.dynamic_peak_bytes
    with pytest.raises(ackpt.PlanError, match=r"shapes \[20, 32\], for which the model takes another path"):
        ackpt.compile(long_and_short(), torch.ones(12, WIDTH), plan=plan)
    raises(ackpt.PlanError, "another path|another graph", lambda: step(torch.ones(12, WIDTH)))
    plan = saved(tmp_path, ackpt.compile(OneSize(8, 8), torch.ones(20, 8)))
    with pytest.raises(ackpt.PlanError):
        ackpt.compile(OneSize(8, 8), torch.ones(12, 8), plan=plan)


def test_operations_that_differ_in_a_dynamic_capture_need_a_dynamic_plan(tmp_path):
    class Sliced(nn.Linear):
        def forward(self, x):
            return F.gelu(super().forward(x)[:, slice(0, None), :]).sum()  # an alias for fixed sizes only

    class Pair(Sliced):
        def forward(self, x, y):
            return super().forward(x) + (y * y).sum()

    plan = saved(tmp_path, ackpt.compile(Sliced(8, 8), torch.ones(4, 6, 8)))
    with pytest.raises(ackpt.PlanError, match=r"fixed sizes.*dynamic=\{"):
        ackpt.compile(Sliced(8, 8), torch.ones(4, 5, 8), plan=plan)
    model, given = Pair(8, 8), (torch.ones(4, 6, 8), torch.ones(4, 8))
    plan = saved(tmp_path, ackpt.compile(model, *given))
    said = r"dynamic=\{'x': \{0: \(3, 4\), 1: \(6, 7\)\}, 'y': \{0: \(3, 4\)\}\}"
    raises(ackpt.PlanError, said, lambda: ackpt.compile(model, torch.ones(3, 7, 8), torch.ones(3, 8), plan=plan))
    dynamic = {"x": {0: (3, 4), 1: (6, 7)}, "y": {0: (3, 4)}}
    plan = saved(tmp_path, ackpt.compile(model, *given, dynamic=dynamic))
    assert ackpt.compile(model, torch.ones(3, 7, 8), torch.ones(3, 8), plan=plan).plan.policy == "auto"
    model = Sliced(8, 8)
    plan = saved(tmp_path, ackpt.compile(model, torch.ones(4, 6, 8), dynamic={"x": {1: None}}))
    check(ackpt.compile(model, torch.ones(4, 5, 8), plan=plan), model, torch.ones(4, 9, 8))
