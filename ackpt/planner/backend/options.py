"""The options of ``torch.compile(model, backend="ackpt", options=...)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ackpt.core.errors import check_misspelt
from ackpt.planner.capture.optimizer_state import Loop, loop_with
from ackpt.planner.capture.outputs import check_differentiate, check_outputs
from ackpt.planner.choose import device_of_costs
from ackpt.planner.costs.devices import Device
from ackpt.planner.policies.search.schedule_cache import Cache
from ackpt.planner.schedule.plan import Plan

COMPILERS = ("eager", "inductor")
_NOT_OF_INDUCTOR = ("outputs", "optimizer", "accumulation", "scaler", "cache")


@dataclass(frozen=True)
class Options:
    """Checked options; ``of_policy`` are those of the policy. See `ackpt.planner.backend.dynamo.backend`."""

    budget: float | str | None
    policy: str
    differentiate: str
    outputs: str
    compiler: str
    on_plan: Callable[[Plan], Any] | None
    loop: Loop
    cache: Cache | None
    device_profile: Device | str | None
    costs: Literal["rates", "measured"]
    of_policy: dict[str, Any]


def checked(options: Any, mode: str | None = None) -> Options:
    """`options` as the user gives them, or an error that names the one that is wrong.

    Args:
        options: a dict, or None.
        mode: of ``torch.compile``; it belongs to another backend, so anything but None is refused.

    Raises:
        TypeError, ValueError: naming the option.
    """
    if mode is not None:
        raise ValueError(
            f"mode {mode!r} is one of Inductor's: leave it out; options={{'compiler': 'inductor'}} uses it"
        )
    if not isinstance(options, (Mapping, type(None))):
        raise TypeError(f"options must be a dict such as {{'budget': '6GiB'}}, got {type(options).__name__}")
    rest = dict(options or {})
    if foreign := sorted({"plan", "dynamic"} & set(rest)):
        raise TypeError(
            f"{foreign[0]!r} is not an option of this backend: use ackpt.compile(model, ..., {foreign[0]}=...)"
        )
    names = ("budget", "policy", "differentiate", "outputs", "compiler", "on_plan", "device_profile", "costs")
    names += _NOT_OF_INDUCTOR
    check_misspelt(rest, names, "this backend")
    on_plan = rest.pop("on_plan", None)
    if on_plan is not None and not callable(on_plan):
        raise TypeError(f"on_plan must be a function of a plan, got {type(on_plan).__name__}")
    compiler = rest.pop("compiler", "eager")
    if compiler not in COMPILERS:
        raise ValueError(f"compiler {compiler!r} is not known; the compilers are {', '.join(COMPILERS)}")
    if compiler == "inductor" and (refused := next(filter(rest.__contains__, _NOT_OF_INDUCTOR), None)):
        raise TypeError(
            f"{refused!r} is not an option of compiler 'inductor', whose plans count all outputs and no optimizer, and "
            "are not cached"
        )
    outputs = rest.pop("outputs", "drop")
    check_outputs(outputs)
    differentiate = check_differentiate(rest.pop("differentiate", "loss"))
    budget, policy = rest.pop("budget", None), rest.pop("policy", "auto")
    loop = loop_with(rest.pop("optimizer", None), rest.pop("accumulation", False), rest.pop("scaler", None))
    cache, device = rest.pop("cache", None), rest.pop("device_profile", None)
    costs = rest.pop("costs", "rates")
    device_of_costs(device, costs)
    return Options(budget, policy, differentiate, outputs, compiler, on_plan, loop, cache, device, costs, rest)
