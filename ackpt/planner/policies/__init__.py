"""Policies: each turns a graph, its profile and a limit in bytes into one schedule.

``ackpt.plan`` runs a policy, simulates its schedule, and refuses a schedule that exceeds the budget. `POLICIES` names
the function of each policy. ``chains`` has the code that policies for chains of blocks share, and ``search`` the Pareto
frontier and the searches that extend it. Read `full` first, then `auto`.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ackpt.core.errors import did_you_mean

#: Policy -> the function in `ackpt.planner.policies` that decides: `schedule(graph, profile, limit_bytes, **options)`
POLICIES = {
    "none": "full.none",
    "full": "full.schedule",
    "manual": "manual.schedule",
    "auto": "auto.schedule",
    "rotor": "rotor.schedule",
    "mu-two": "mu_two.schedule",
    "selective": "selective.schedule",
}
Policy = str | Callable[..., Any]  # a name in `POLICIES`, or a function that is called as `schedule` is
# Policies of papers, which only a checkout has.
_STUDIES = {"chen-sqrt": "chen.chen_sqrt", "chen-log": "chen.chen_log", "revolve": "revolve.revolve"}
_STUDIES |= {"ilp": "ilp.ilp", "min-cut": "min_cut.min_cut"}
_KEYWORDS = ("budget", "policy", "profile", "cache")  # of `ackpt.plan`, which are no options of a policy


def name_of(policy: Policy) -> str:
    """The name of a policy in plans and messages."""
    return policy if isinstance(policy, str) else policy.__name__


def function_of(policy: Policy) -> Callable[..., Any]:
    """The function of a policy, which chooses the schedule."""
    if not isinstance(policy, str):
        return policy
    module, _, name = POLICIES[policy].partition(".")
    return getattr(importlib.import_module(f"ackpt.planner.policies.{module}"), name)


def options_of(policy: Policy) -> dict[str, inspect.Parameter]:
    """The parameters of a policy after the graph, the profile and the limit, by their names."""
    parameters = list(inspect.signature(function_of(policy)).parameters.values())[3:]
    return {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}


def check_policy(policy: Any, cache: Any = None) -> None:
    """Refuse what is neither the name of a policy nor a function that can be one, and a cache for a function.

    Raises:
        ValueError, TypeError: naming the policies, or what the function lacks.
    """
    if isinstance(policy, str) or not callable(policy):
        if policy not in list(POLICIES):
            close = did_you_mean(policy, POLICIES)
            if isinstance(policy, str) and policy in _STUDIES:
                close = f": it is a function of the repository's study; pass experiments.policies.{_STUDIES[policy]}"
            raise ValueError(f"policy {policy!r} is not known{close}; the policies are {', '.join(POLICIES)}")
        return
    called = "policy(graph, profile, limit_bytes, **options), and returns a Schedule"
    name = getattr(policy, "__name__", None)
    if name is None or isinstance(policy, type):
        raise TypeError(f"policy must be a name or a function that is called as {called}, got {policy!r}")
    if name in POLICIES:
        raise ValueError(
            f"the function {name!r} has the name of another policy, and a plan names its policy: rename it"
        )
    try:
        inspect.signature(policy).bind_partial(None, None, None)
    except (TypeError, ValueError) as error:  # a ValueError: functions in C may have no signature
        raise TypeError(f"policy {name!r} takes other arguments ({error}): it is called as {called}") from None
    if cache is not None:
        raise ValueError(
            f"cache stores what named policies decide, and the code of the function {name!r} may change: leave cache "
            "out"
        )


def check_options(policy: Policy, options: Mapping[str, Any]) -> None:
    """Refuse options that `policy` does not have, and a call without an option that it needs."""
    expected, name = options_of(policy), name_of(policy)
    parameters = inspect.signature(function_of(policy)).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if not takes_all and (unknown := sorted(set(options) - set(expected))):
        knows = f"knows {', '.join(expected)}" if expected else "knows no options"
        hint = ": give policy='manual'" if unknown[0] == "fates" else did_you_mean(unknown[0], [*expected, *_KEYWORDS])
        raise TypeError(f"{unknown[0]!r} is not an option of a plan; policy {name!r} {knows}{hint}")
    if missing := [option for option, p in expected.items() if p.default is p.empty and option not in options]:
        raise TypeError(f"policy {name!r} needs the option {missing[0]!r}: see help(ackpt.plan)")
