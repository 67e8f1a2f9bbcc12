"""Budgets: what they mean in bytes, what is no budget, and that the smallest one named works."""

from __future__ import annotations

import doctest
import importlib
import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import ackpt
from ackpt.graph.budget import dynamic_limit, parse_bytes


def test_examples_run():
    results = doctest.testmod(importlib.import_module("ackpt.graph.budget"))
    assert results.failed == 0 and results.attempted > 0


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
    ],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["6 parsecs", "", "GiB", "-1GiB", "1e3B", "6", "6 GiB GiB", "0x10B", "nanB"])
def test_what_is_no_size_is_refused_with_the_units(text):
    with pytest.raises(ValueError, match="is no size in bytes: write a number and one of B, kB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0B", "0.0GiB", "0.4B"])
def test_a_size_of_nothing_is_refused(text):
    with pytest.raises(ValueError, match="must be positive"):
        parse_bytes(text)


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
def test_what_a_budget_leaves_for_dynamic_bytes(budget, limit):
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
    (torch.tensor(0.5), TypeError, "got Tensor"),
    ("6 parsecs", ValueError, "'6 parsecs' is no budget: write bytes with a unit, as in '6GiB'.*or a fraction.*'50%'"),
    ("%", ValueError, "'%' is no budget"),
    ("", ValueError, "'' is no budget"),
    ("0,5", ValueError, "'0,5' is no budget"),
    ("1e6", ValueError, r"in \(0, 1\], got '1e6'; for bytes give an int or a string such as '6GiB'"),
    ("150%", ValueError, r"in \(0, 1\], got '150%'"),
    ("0", ValueError, r"in \(0, 1\], got '0'"),
    ("0B", ValueError, "must be positive, got '0B'"),
]


@pytest.mark.parametrize(("budget", "error", "message"), NO_BUDGETS)
def test_what_is_no_budget_is_refused_by_plan_and_compile(budget, error, message):
    with pytest.raises(error, match=message):
        dynamic_limit(budget, 1000, 300)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    with pytest.raises(error, match=message):
        ackpt.compile(model, x, budget=budget)


class Residual(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).tanh().sin()


def layers():
    return nn.Sequential(*(Residual(8, 8) for _ in range(6))), torch.ones(64, 8)


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("budget", [1, "1B", 0.01])
def test_a_budget_that_cannot_be_kept_names_those_that_can(policy, budget):
    model, x = layers()
    with pytest.raises(ackpt.BudgetError, match=f"policy '{policy}' cannot keep the budget") as raised:
        ackpt.compile(model, x, budget=budget, policy=policy)
    size = int(re.search(r"\((\d+) bytes\)", str(raised.value))[1])
    share = float(re.search(r"or ([0-9.]+) of the plain step", str(raised.value))[1])
    for found in (size, f"{size}B", share):
        step = ackpt.compile(model, x, budget=found, policy=policy)
        assert step.plan.peak_bytes == size and step.plan.dynamic_peak_bytes <= step.plan.limit_bytes
    with pytest.raises(ackpt.BudgetError):
        ackpt.compile(model, x, budget=size - 1, policy=policy)
    step(x).sum().backward()


def test_a_later_batch_that_is_too_small_for_the_fraction_says_so():
    model, x = layers()
    least = float(re.search(r"or ([0-9.]+) of", refusal(model, x))[1])
    assert float(re.search(r"or ([0-9.]+) of", refusal(model, x[:1]))[1]) > least
    step = ackpt.compile(model, x, budget=least, policy="full")
    with pytest.raises(ackpt.BudgetError, match="kept for the arguments planned before. .*drop_last=True") as raised:
        step(x[:1])
    assert raised.value.least_bytes < step.plan.peak_bytes
    step(x).sum().backward()


def refusal(model, x) -> str:
    with pytest.raises(ackpt.BudgetError) as raised:
        ackpt.compile(model, x, budget=0.01, policy="full")
    assert "drop_last" not in str(raised.value)
    return str(raised.value)


def test_a_budget_is_kept_by_the_measured_step():
    model, x = layers()
    step = ackpt.compile(model, x, budget=0.8, policy="full")

    def once():
        model.zero_grad()
        output = step(x)
        output.sum().backward()

    found = ackpt.measure(once, "cpu", resident=(model, x), repeats=0)
    assert found.resident_bytes == step.plan.resident_bytes
    assert found.dynamic_peak_bytes <= step.plan.limit_bytes == 8 * step.plan.baseline_dynamic_peak_bytes // 10
