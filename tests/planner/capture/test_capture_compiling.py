"""A captured step takes the ways that the plain model takes, also where a model asks whether it is compiled."""

import re

import pytest
import torch
from conftest import assert_as_eager, raises
from torch import nn

import ackpt


class Asks(nn.Linear):
    def forward(self, x):
        return (super().forward(x) * (3 if torch.compiler.is_compiling() else 2)).square().sum()


class Looks(nn.Linear):
    """Looks at values, unless it is compiled."""

    def forward(self, x):
        if not torch.compiler.is_compiling() and not bool((x == x).all()):
            raise ValueError("not a number")
        return super().forward(x).square().sum()


def same(model, x):
    step = ackpt.compile(model, x, policy="full")
    assert_as_eager(model, step, x)
    assert not torch.compiler.is_compiling()


def test_a_model_that_asks_is_compiling_is_captured_as_in_eager():
    same(Asks(4, 4), torch.randn(3, 4))


LOOKS = "looks at the values of a tensor at .*test_capture_compiling.py"


@pytest.mark.parametrize(
    "how", [{"policy": "full"}, {"budget": "1MiB", "regions": False}, {"budget": 1.0, "regions": False}]
)
def test_with_data_a_model_that_reads_values_in_eager_is_refused(how):
    raises(ackpt.TraceError, LOOKS, lambda: ackpt.compile(Looks(4, 4), torch.randn(3, 4), **how))
    raises(ackpt.TraceError, LOOKS, lambda: ackpt.trace(Looks(4, 4), torch.randn(3, 4)))
    assert not torch.compiler.is_compiling()


def test_without_data_it_is_captured_as_compiled_with_one_note(tmp_path):
    model, x = Looks(4, 4).to("meta"), torch.empty(3, 4, device="meta")
    said = "captured as torch.compile runs it, because the model itself looks at .*own step may differ"
    with pytest.warns(UserWarning, match=said) as warned:
        plan = ackpt.plan(ackpt.trace(model, x))
        ackpt.trace(model, x)
    assert len(warned) == 1
    assert re.search(said, plan.note) and plan.note in plan.table()
    plan.save(tmp_path / "plan.json")
    assert ackpt.Plan.load(tmp_path / "plan.json").note == plan.note
    for make in (lambda: ackpt.compile(model, x, budget=0.5), lambda: ackpt.plan(ackpt.trace(model, x), "50%")):
        with pytest.raises(ackpt.BudgetError, match="torch.compile runs it.*Give bytes"):
            make()
    assert ackpt.compile(model, x, budget="1GiB").plan.peak_bytes <= 2**30


class Fails(nn.Linear):
    def forward(self, x):
        if torch.compiler.is_compiling():
            raise NotImplementedError("no compiled variant")
        return super().forward(x).sum() if x.sum() > 0 else super().forward(x).mean()


def test_a_model_refused_in_both_ways_names_both_reasons():
    model, x = Fails(4, 4), torch.ones(3, 4)
    with pytest.raises(ackpt.TraceError, match=LOOKS) as error:
        ackpt.trace(model, x)
    assert "no compiled variant" not in str(error.value)
    with pytest.raises(ackpt.TraceError, match="values of a tensor .*is_compiling.*no compiled variant"):
        ackpt.trace(model.to("meta"), x.to("meta"))
