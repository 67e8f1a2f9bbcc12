"""Budgets: what they mean in bytes, what is no budget, and that the smallest one named works."""

import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import raises
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import ackpt
from ackpt.core.budget import dynamic_limit, from_text, least_share, readable


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GiB", 6 * 2**30),
        ("512 MB", 512 * 10**6),
        ("1.5kb", 1500),
        (" 7 B ", 7),
        (".5KiB", 512),
        ("2tib", 2 * 2**40),
        ("1.9B", 1),
        ("4.35MB", 4_350_000),
    ],
)
def test_sizes_are_parsed(text, size):
    assert from_text(text) == size


UNITS = r"is not a budget: write bytes with a unit, as in '6GiB' \(B, kB"
NO_SIZES = dict.fromkeys(["6 parsecs", "", "GiB", "-1GiB", "1e3B", "6 GiB GiB", "0x10B", "nanB"], UNITS)


@pytest.mark.parametrize(
    "text, message", [*NO_SIZES.items(), *((text, "must be positive") for text in ("0B", "0.0GiB", "0.4B"))]
)
def test_invalid_sizes_are_refused_with_the_units(text, message):
    raises(ValueError, message, lambda: from_text(text))


@pytest.mark.parametrize(
    ("budget", "limit"),
    [
        (None, None),
        (1.0, 1001),
        (0.5, 500),
        ("0.5", 500),
        ("50%", 500),
        ("1", 1001),
        (1e-9, 0),
        (300, 0),
        (1300, 1000),
        ("1300", 1000),
        ("1kB", 700),
        (100, -200),
        (np.float32(0.5), 500),
        (np.float64(0.5), 500),
        (np.int64(1300), 1000),
        (Fraction(1, 2), 500),
    ],
)
def test_dynamic_bytes_are_the_budget_minus_resident_bytes(budget, limit):
    assert dynamic_limit(budget, 1001, 300) == limit


NO_BUDGETS = [
    (0, ValueError, "must be positive, got 0"),
    (-1, ValueError, "must be positive, got -1"),
    (0.0, ValueError, r"in \(0, 1\], got 0.0"),
    (-0.5, ValueError, r"in \(0, 1\], got -0.5"),
    (1.5, ValueError, r"in \(0, 1\], got 1.5"),
    (math.nan, ValueError, r"in \(0, 1\], got nan"),
    (math.inf, ValueError, r"in \(0, 1\], got inf"),
    (True, TypeError, "got bool"),
    (2j, TypeError, "got complex"),
    ([1], TypeError, "got list"),
    (np.True_, TypeError, "got bool"),
    (np.float32(1.5), ValueError, r"in \(0, 1\], got .*1.5"),
    (np.int64(0), ValueError, "must be positive"),
    (Decimal("0.5"), TypeError, "got Decimal"),
    (torch.tensor(0.5), TypeError, "got (a t|T)ensor"),
    (
        "6 parsecs",
        ValueError,
        "'6 parsecs' is not a budget: write bytes with a unit, as in '6GiB'.*or a fraction.*'50%'",
    ),
    ("%", ValueError, "'%' is not a budget"),
    ("22G", ValueError, r"'22G' is not a budget \(did you mean '22GiB' or '22GB'\?\): write bytes with a unit"),
    ("1.5 k", ValueError, r"did you mean '1.5KiB' or '1.5kB'\?"),
    ("500Mi", ValueError, r"did you mean '500MiB' or '500MB'\?"),
    ("", ValueError, "'' is not a budget"),
    ("0,5", ValueError, "'0,5' is not a budget"),
    ("1e6", ValueError, r"'1e6' is not a budget: a fraction .* at most 1, as in '0.5' or '50%'; bytes .*'6442450944'"),
    ("150%", ValueError, r"'150%' is not a budget: a fraction"),
    ("0%", ValueError, r"'0%' is not a budget: a fraction .* is more than 0"),
    ("0", ValueError, r"'0' is not a budget: a fraction"),
    ("nan", ValueError, r"'nan' is not a budget: a fraction"),
    ("0B", ValueError, "must be positive, got '0B'"),
]


@pytest.mark.parametrize(("budget", "error", "message"), NO_BUDGETS)
def test_invalid_budgets_are_refused_by_plan_and_compile(budget, error, message):
    raises(error, message, lambda: dynamic_limit(budget, 1000, 300))
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    raises(error, message, lambda: ackpt.compile(model, x, budget=budget))


@given(size=st.integers(1, 2**52))
@example(size=1292076)
@example(size=2**20 - 1)
def test_a_printed_size_is_at_least_the_bytes_when_read_back(size):
    read = from_text(readable(size))
    assert size <= read <= size + max(0, size // 10)


@given(peak=st.integers(1, 2**44), more=st.integers(0, 2**44))
@example(peak=5747, more=4253)  # 0.5747 * 10000 is 5746.999...
def test_the_smallest_fraction_gives_the_peak(peak, more):
    share = least_share(peak, peak + more)
    assert 0 < share <= 1 and dynamic_limit(share, peak + more, 0) >= peak
    assert from_text(str(share)) == share
    less = (round(share * 10**4) - 1) / 10**4
    assert less <= 0 or dynamic_limit(less, peak + more, 0) < peak


def test_no_fraction_gives_more_than_the_whole():
    assert least_share(1001, 1000) is None


class Residual(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).tanh().sin()


def layers():
    return nn.Sequential(*(Residual(8, 8) for _ in range(6))), torch.ones(64, 8)


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("budget", [1, "1B", 0.01])
def test_an_infeasible_budget_names_the_smallest_feasible_ones(traced, policy, budget):
    (model, x), (graph, profile) = layers(), traced
    with pytest.raises(ackpt.BudgetError, match=f"policy '{policy}' cannot keep the budget") as raised:
        ackpt.compile(model, x, budget=budget, policy=policy)
    size = int(re.search(r"\((\d+) bytes\)", str(raised.value))[1])
    share = float(re.search(r"or ([0-9.]+) of the baseline", str(raised.value))[1])
    text = re.search(r"this policy is (\S+ \S+) \(", str(raised.value))[1]
    assert text == readable(size)
    for found in (size, f"{size}B", text, share):
        plan = ackpt.plan(graph, found, policy, profile=profile)
        assert plan.peak_bytes == size and plan.dynamic_peak_bytes <= plan.limit_bytes
    with pytest.raises(ackpt.BudgetError):
        ackpt.plan(graph, size - 1, policy, profile=profile)
    step = ackpt.compile(model, x, budget=size, policy=policy)
    assert step.plan.peak_bytes == size
    step(x).sum().backward()


@pytest.fixture(scope="module")
def traced():
    model, x = layers()
    graph = ackpt.trace(model, x)
    return graph, ackpt.profile(graph)


POLICIES = ["auto", "full", "rotor", "mu-two"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_named_budget_is_feasible_when_typed_back(traced, policy):
    graph, profile = traced
    with pytest.raises(ackpt.BudgetError) as raised:
        ackpt.plan(graph, "1B", policy, profile=profile)
    said = re.search(r"policy is (\S+ \S+) \((\d+) bytes\)(?:, or ([0-9.]+) of)?", str(raised.value))
    assert int(said[2]) == raised.value.least_bytes
    for text in filter(None, said.groups()):
        plan = ackpt.plan(graph, text, policy, profile=profile)
        assert plan.dynamic_peak_bytes <= plan.limit_bytes


@pytest.mark.parametrize(
    ("budget", "hint"),
    [
        ("50", "without a unit is bytes: write '50GiB' for another unit, '50%' for a fraction"),
        (50, "write '50GiB' for another unit, '50%' for a fraction"),
        ("2000", "write '6GiB' for another unit, '50%' for a fraction"),
        (2000, None),
        ("50B", None),
        (1e-6, None),
    ],
)
def test_small_numbers_without_a_unit_get_a_hint(budget, hint):
    model, x = layers()
    with pytest.raises(ackpt.BudgetError) as raised:
        ackpt.compile(model, x, budget=budget, policy="full")
    assert hint is None or hint in str(raised.value)
    assert ("without a unit" in str(raised.value)) == (hint is not None)
    assert raised.value.budget == budget


def test_a_peak_in_the_optimizers_step_says_that_recomputing_does_not_help():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.ones(2, 64)

    def least(**options):
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        with pytest.raises(ackpt.BudgetError) as raised:
            ackpt.compile(model, x, budget=1, optimizer=optimizer)
        return raised.value.least_bytes, "reached in the optimizer's step" in str(raised.value)

    (together, says), (one, _), (fused, does_not) = least(foreach=True), least(foreach=False), least(fused=True)
    assert says and not does_not
    assert together > one > fused


def test_a_later_batch_too_small_for_the_fraction_is_named():
    model, x = layers()
    least = float(re.search(r"or ([0-9.]+) of", refusal(model, x))[1])
    assert float(re.search(r"or ([0-9.]+) of", refusal(model, x[:1]))[1]) > least
    step = ackpt.compile(model, x, budget=least, policy="full")
    with pytest.raises(ackpt.BudgetError, match="budget was feasible for the earlier call. .*drop_last=True") as raised:
        step(x[:1])
    assert raised.value.least_bytes < step.plan.peak_bytes
    step(x).sum().backward()


def test_a_step_under_autocast_that_exceeds_the_budget_says_how_to_plan_it():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.ones(1, 64)  # casts its weights
    step = ackpt.compile(model, x, budget=1.0, policy="none")
    step = ackpt.compile(model, x, budget=step.plan.peak_bytes)
    said = "autocast changed from off to bfloat16 on cpu. Plan under the autocast that training uses"
    with pytest.raises(ackpt.BudgetError, match=said), torch.autocast("cpu", torch.bfloat16):
        step(x)


def refusal(model, x) -> str:
    with pytest.raises(ackpt.BudgetError) as raised:
        ackpt.compile(model, x, budget=0.01, policy="full")
    assert "drop_last" not in str(raised.value)
    return str(raised.value)
