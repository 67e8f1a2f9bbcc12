"""A policy may be a function of the user's own, wherever a policy is given."""

import functools

import pytest
import torch
from conftest import raises_cleanly
from torch import nn

import ackpt
from ackpt.graph import Plan, lower
from ackpt.planner.policies import POLICIES, check_policy, function_of, options_of
from experiments.policies import PAPERS


def save_first(graph, profile, limit_bytes, count=1):
    """Saves the first `count` activations."""
    return lower(graph, [each.id for each in graph.storages if each.category == "activation"][:count])


def with_any_option(graph, profile, limit_bytes, **options):
    return save_first(graph, profile, limit_bytes, **options)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 1))


X = torch.ones(4, 8)


def saved(plan) -> int:
    return list(plan.fates.values()).count("saved")


@pytest.mark.parametrize("policy", [save_first, with_any_option])
@pytest.mark.parametrize("count", [1, 2])
def test_all_entry_points_take_a_function(policy, count):
    model, plans = layers(), []
    plans.append(ackpt.plan(ackpt.trace(model, X), policy=policy, count=count))
    plans.append(ackpt.compile(model, X, policy=policy, options={"count": count}).plan)
    plans.append(ackpt.apply_budget(model, X, policy=policy, options={"count": count}).plan)
    ackpt.remove_budget(model)
    options = {"policy": policy, "count": count, "on_plan": plans.append}
    torch.compile(model, backend="ackpt", options=options)(X).sum().backward()
    assert [(plan.policy, saved(plan)) for plan in plans] == [(policy.__name__, count)] * 4


def test_a_function_plans_every_size():
    model = layers()
    step = ackpt.compile(model, X, policy=save_first)
    for rows in (6, 9):
        step(torch.ones(rows, 8)).sum().backward()
        assert step.plan.policy == "save_first" and saved(step.plan) == 1
    assert [event.kind for event in step.history] == ["capture", "dynamic capture", "plan"]


def test_a_saved_plan_of_a_function_runs_without_it(tmp_path):
    path = tmp_path / "plan.json"
    ackpt.compile(layers(), X, policy=save_first).plan.save(path)
    step = ackpt.compile(layers(), X, plan=Plan.load(path))
    assert step.plan.policy == "save_first" and saved(step.plan) == 1
    again = ackpt.compile(layers(), X, plan=step.plan, policy=save_first)
    assert again.plan is step.plan


def two_arguments(graph, profile):
    return None


def no_schedule(graph, profile, limit_bytes):
    return {"relu": "recomputed"}


def full(graph, profile, limit_bytes):
    return save_first(graph, profile, limit_bytes)


REFUSED = {
    "partial": (functools.partial(save_first, count=2), TypeError, "a name or a function that is called as policy"),
    "class": (Plan, TypeError, "a name or a function that is called as policy"),
    "two arguments": (two_arguments, TypeError, "'two_arguments' takes other arguments .too many.*it is called as"),
    "in C": (max, TypeError, "'max' takes other arguments .no signature.*it is called as"),
    "no schedule": (no_schedule, TypeError, "'no_schedule' returned a dict: it must return a Schedule"),
    "name of another": (full, ValueError, "the function 'full' has the name of another policy.*rename it"),
    "number": (3, ValueError, "policy 3 is not known; the policies are none, full"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_objects_that_cannot_be_a_policy_are_refused(name):
    policy, error, message = REFUSED[name]
    with raises_cleanly(error, message):
        ackpt.plan(ackpt.trace(layers(), X), policy=policy)
    with raises_cleanly(error, message):
        ackpt.compile(layers(), X, policy=policy)


def test_an_option_that_a_function_lacks_is_refused():
    with raises_cleanly(TypeError, "'counts' is not an option of a plan; policy 'save_first' knows count.*'count'"):
        ackpt.plan(ackpt.trace(layers(), X), policy=save_first, counts=2)


def test_decisions_of_a_function_are_not_cached(tmp_path):
    for call in (ackpt.compile, ackpt.apply_budget):
        with raises_cleanly(ValueError, "the code of the function 'save_first' may change: leave cache out"):
            call(layers(), X, policy=save_first, cache=tmp_path)


def test_a_function_over_its_budget_is_refused():
    with raises_cleanly(ackpt.BudgetError, "policy 'save_first' cannot keep the budget 1:.*smallest feasible budget"):
        ackpt.compile(layers(), X, policy=save_first, budget=1)


@pytest.mark.parametrize("name", POLICIES)
def test_a_registered_name_selects_a_function_with_options(name):
    assert callable(function_of(name))
    assert not {"graph", "profile", "limit_bytes"} & set(options_of(name))


def test_papers_policies_say_where_they_are():
    for name, function in PAPERS.items():
        with pytest.raises(ValueError, match=rf"pass {function.__module__}\.{function.__name__}; the policies"):
            check_policy(name)
    for module in ("chen", "revolve"):
        with pytest.raises(AttributeError, match=f"from experiments.policies import {module}"):
            getattr(ackpt.policies, module)
