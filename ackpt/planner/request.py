"""`Request`: every option of a planned step, as one value that is checked when it is made."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ackpt.core.budget import added_share, dynamic_limit, split_budget
from ackpt.core.errors import BudgetError, warn
from ackpt.planner.capture.call_facts import Call
from ackpt.planner.capture.dynamic_sizes import SMALLEST, Dimension
from ackpt.planner.capture.inspection.calls import named_leaves
from ackpt.planner.capture.inspection.model_checks import (
    check_call,
    check_keywords,
    forward_names,
    is_tensor,
    positional_names,
)
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.capture.optimizer_state import NO_LOOP, Loop, OutsideLoss, loop_with
from ackpt.planner.capture.outputs import check_choices
from ackpt.planner.costs.devices import Device
from ackpt.planner.costs.profiles import rates
from ackpt.planner.policies import Policy, check_policy, name_of, options_of
from ackpt.planner.policies.search.schedule_cache import cache_folder
from ackpt.planner.schedule.plan import Plan

Bounds = tuple[int, int]
DynamicArgument = bool | Mapping[str, Mapping[int, Bounds | None]] | None
COMPILERS = ("eager", "inductor")
_WORDS = ("policy", "differentiate", "outputs", "on_exceed")  # keywords whose values are strings
_IN_PARTS = ("auto", "none", "full")  # policies of models with a scripted or compiled submodule


@dataclass(frozen=True)
class Request:
    """The options of a planned step; most fields are keywords of `ackpt.compile`.

    ``loop``: from optimizer, accumulation and scaler. ``folder``: where results of searches are cached. ``device``:
    from device_profile. ``on_plan`` and ``compiler``: options of the backend of ``torch.compile``; ``on_plan`` is
    called with every new plan before it runs. ``planner``: a function that plans each graph in place of the policy;
    every size is then a graph of its own. ``chunk_head``: whether the head of a language model runs in chunks;
    ``"auto"``: if the budget needs it.
    """

    budget: float | str | None = None
    slowdown: float | str | None = None
    policy: Policy = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    differentiate: str = "loss"
    outputs: str = "drop"
    loop: Loop = NO_LOOP
    dynamic: DynamicArgument = None
    folder: Path | None = None
    device: Device | None = None
    regions: bool | None = None
    on_exceed: str = "raise"
    on_plan: Callable[[Any], Any] | None = None
    compiler: str = "eager"
    planner: Callable[[JointGraph], Plan] | None = None
    chunk_head: bool | str = False

    @classmethod
    def from_keywords(
        cls,
        *,
        optimizer: torch.optim.Optimizer | str | None = None,
        accumulation: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        loss: OutsideLoss | None = None,
        device_profile: Device | str | None = None,
        cache: Any = None,
        options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> "Request":
        """The request with these keywords of `ackpt.compile`; refuses invalid ones before any work."""
        loop = loop_with(optimizer, accumulation, scaler)._replace(loss=loss)
        request = cls(loop=loop, options={} if options is None else options, **others)
        device = rates(device_profile)
        if cache is not None and request.plan is None:
            check_policy(request.policy, cache)
        return replace(request, device=device, folder=cache_folder(cache))

    def __post_init__(self) -> None:
        if self.plan is None:
            check_policy(self.policy)
        else:
            self._check_plan()
        self._check_options()
        self._check_regions()
        self._check_chunk_head()
        dynamic_limit(self.budget, 0, 0)  # refuses an invalid budget
        if added_share(self.slowdown) is not None:
            self._check_slowdown()
        check_choices(self.differentiate, self.outputs)
        if self.on_plan is not None and not callable(self.on_plan):
            raise TypeError(f"on_plan must be a function of a plan, got {type(self.on_plan).__name__}")
        if self.compiler not in COMPILERS:
            raise ValueError(f"compiler {self.compiler!r} is not known; the compilers are {', '.join(COMPILERS)}")

    def report(self, message: str, least_bytes: int | None = None) -> None:
        """Raise a BudgetError that a step exceeds the budget, or warn, as ``on_exceed`` says."""
        if self.on_exceed == "raise":
            raise BudgetError(message, least_bytes, self.budget)
        warn(message)

    @property
    def is_captured_by_size(self) -> bool:
        """Whether each size has a capture of its own, with no dynamic dimensions."""
        return bool(self.chunk_head) or self.loop.loss is not None

    @property
    def is_reserved(self) -> bool:
        """Whether the budget bounds what a GPU's allocator reserves, which only a plan of one graph can keep."""
        return split_budget(self.budget)[1]

    @property
    def may_plan_in_parts(self) -> bool:
        """Whether the model is planned in parts if it cannot be captured as one graph."""
        if self.regions is None:
            is_whole = self.slowdown is not None or self.is_captured_by_size or self.is_reserved
            return self.budget is not None and self.policy == "auto" and not is_whole
        return self.regions

    @property
    def in_parts_hint(self) -> str:
        """With which budget a model that is refused as one graph is planned in parts; empty if other options forbid."""
        is_fixed = self.regions is not None or self.plan is not None or self.planner is not None
        if is_fixed or self.policy != "auto" or self.chunk_head:
            return ""
        budget = "a budget" if self.slowdown is None else "a budget and without slowdown="
        budget += "" if self.loop.loss is None else " and without loss="
        return f'With {budget}, as in budget="6GiB", the model is planned in parts.'

    @property
    def may_exclude_opaque_submodules(self) -> bool:
        """Whether a scripted or compiled submodule stays outside of the plan."""
        is_searched = self.plan is None and self.planner is None
        is_whole = self.regions is False or self.slowdown is not None or self.loop.loss is not None or self.is_reserved
        return not is_whole and is_searched and self.policy in _IN_PARTS

    def _check_plan(self) -> None:
        if not isinstance(self.plan, Plan):
            raise TypeError(
                f"plan must be an ackpt.Plan, got {type(self.plan).__name__}; read a file with ackpt.Plan.load(path)"
            )
        if self.budget is not None:
            raise ValueError("give either a budget or a plan; a plan has its budget")
        if self.policy not in ("auto", self.plan.policy) and getattr(self.policy, "__name__", "") != self.plan.policy:
            raise ValueError(f"give either a policy or a plan; this plan was made by policy {self.plan.policy!r}")

    def _check_slowdown(self) -> None:
        if self.plan is not None:
            raise ValueError("give either a slowdown or a plan; a plan has its schedule")
        if self.regions:
            raise ValueError("regions=True plans the model in parts, whose times are not modeled: leave slowdown out")
        if self.budget is None and self.policy != "auto":
            raise ValueError(
                f"slowdown= without a budget is for policy 'auto', which knows what each peak costs, not for "
                f"{name_of(self.policy)!r}: leave the policy out, or give a budget as well"
            )

    def _check_options(self) -> None:
        options = self.options
        if not isinstance(options, Mapping):
            raise TypeError(
                f"options must be a dict of options of the policy, such as {{'time_limit': 60}}, got "
                f"{type(options).__name__}"
            )
        if misplaced := sorted({"budget", "policy", "graph", "cache"} & set(options)):
            raise TypeError(f"{misplaced[0]!r} is not an option of a policy: pass it as an argument of its own")
        if foreign := sorted({"compiler", "on_plan"} & set(options)):
            raise TypeError(f"{foreign[0]!r} is an option of torch.compile(model, backend='ackpt', options=...)")
        if options and self.plan is not None:
            raise ValueError("give either options or a plan; a plan is made already")

    def _check_regions(self) -> None:
        if self.regions not in (None, True, False):
            raise TypeError(f"regions must be None, True or False, got {self.regions!r}")
        if self.on_exceed not in ("raise", "warn"):
            raise ValueError(f"on_exceed must be 'raise' or 'warn', got {self.on_exceed!r}")
        if self.loop.loss is not None and (self.regions or self.dynamic not in (None, False)):
            raise ValueError("loss= captures the model as one graph at every size: leave regions and dynamic out")
        if self.regions and self.is_reserved:
            raise ValueError("regions=True plans allocated bytes: leave 'reserved' out of the budget")
        if self.regions and (self.plan is not None or self.policy != "auto"):
            raise ValueError("regions=True plans the model in parts: give a budget, and neither a plan nor a policy")

    def _check_chunk_head(self) -> None:
        if self.chunk_head not in (False, True, "auto"):
            raise ValueError(f"chunk_head must be True, False or 'auto', got {self.chunk_head!r}")
        if not self.chunk_head:
            return
        reasons = {
            "needs a budget, which decides how many chunks there are": self.budget is None,
            "captures every size by itself: leave dynamic out": self.dynamic not in (None, False),
            "needs the model as one graph: leave regions out": bool(self.regions),
            "never has all logits: leave outputs='keep' out": self.outputs == "keep",
            "runs operations in place, which Inductor does not: use compiler='eager'": self.compiler != "eager",
        }
        for reason in (reason for reason, applies in reasons.items() if applies):
            raise ValueError(f"chunk_head={self.chunk_head!r} {reason}")


def refuse_values_for_the_model(model, args, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse values of keywords of `compile` that are meant for the model; warn if its forward has the same name."""
    names = forward_names(model) - set(positional_names(model, args))
    for name, value in given.items():
        default = defaults[name]
        if value is default or (isinstance(value, str) and value == default):
            continue
        instead = f"pass it by position, or call ackpt.apply_budget(model, {{{name!r}: value, ...}}, budget)"
        is_word = isinstance(value, str) or callable(value)
        if isinstance(value, torch.Tensor) or (name in names and name in _WORDS and not is_word):
            got = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise TypeError(
                f"{name}= is a keyword of ackpt.compile, and got {got}. If the model's forward has an argument "
                f"{name!r}, {instead}"
            )
        if name in names:
            warn(
                f"{name}={value!r} is the keyword of ackpt.compile, and the model's forward has an argument {name!r}, "
                f"too, which keeps its default: if you mean that one, {instead}"
            )


def refuse_misplaced_keywords(model, args, kwargs, request: Request, keywords) -> None:
    """Refuse keywords that are probably meant for `compile` or the policy, and calls that the forward does not take."""
    check_keywords(model, kwargs, keywords, "ackpt.compile")
    options = {} if request.plan is not None else options_of(request.policy)
    if misplaced := sorted((set(kwargs) - forward_names(model)) & set(options)):
        name, policy = misplaced[0], name_of(request.policy)
        raise TypeError(f"{name!r} is an option of policy {policy!r}: give it as options={{{name!r}: ...}}")
    check_call(model, args, kwargs, keywords)


def declared(dynamic: DynamicArgument, model: nn.Module, call: Call) -> set[Dimension]:
    """The dimensions that `dynamic` or ``torch._dynamo.mark_dynamic`` names in this call."""
    if dynamic is False:
        return set()
    chosen = set(declared_bounds(dynamic, model, call))
    for at, leaf in enumerate(call.leaves):
        if is_tensor(leaf):
            marked = range(leaf.dim()) if dynamic is True else getattr(leaf, "_dynamo_dynamic_indices", ())
            chosen |= {Dimension(at, dim) for dim in marked}
    return chosen


def named_dimensions(dynamic: DynamicArgument, model: nn.Module, call: Call) -> set[Dimension]:
    """The dimensions that the user names one by one, so that it is an error if one cannot be dynamic."""
    return set() if dynamic is True else declared(dynamic, model, call)


def declared_bounds(dynamic: DynamicArgument, model: nn.Module, call: Call) -> dict[Dimension, Bounds | None]:
    """The bounds of every dimension that `dynamic` names; an error for those that do not fit the call."""
    if dynamic is None or isinstance(dynamic, bool):
        return {}
    if not isinstance(dynamic, Mapping):
        raise TypeError(
            f"dynamic must be None, True, False or a dict such as {{'input_ids': {{1: (16, 512)}}}}, got {dynamic!r}"
        )
    leaves = dict(named_tensors(model, call))
    found: dict[Dimension, Bounds | None] = {}
    for name, dims in dynamic.items():
        if name not in leaves:
            raise ValueError(f"dynamic names {name!r}, but the tensors of this call are {', '.join(leaves)}")
        at = leaves[name]
        tensor: Any = call.leaves[at]
        if not isinstance(dims, Mapping):
            raise TypeError(f"dynamic[{name!r}] must be a dict such as {{1: (16, 512)}}, got {type(dims).__name__}")
        for dim, bounds in dims.items():
            if not isinstance(dim, int) or not 0 <= dim < tensor.dim():
                raise ValueError(f"dynamic[{name!r}] names dimension {dim!r}; the tensor has {tensor.dim()} dimensions")
            found[Dimension(at, dim)] = _checked_bounds(bounds, name, dim, tensor.shape[dim])
    return found


def undeclared_equals(dynamic: DynamicArgument, model: nn.Module, call: Call, fixed: Iterable[Dimension]) -> str:
    """What to add to `dynamic` if the model needs equal sizes of `fixed` and of other arguments' dimensions.

    Empty if no other dimension has such a size.
    """
    names = {at: name for name, at in named_tensors(model, call)}
    chosen, bounds = declared(dynamic, model, call), declared_bounds(dynamic, model, call)
    others: dict[Dimension, Bounds | None] = {}
    for one in (each for each in fixed if each.leaf in names):
        tensor = call.leaves[one.leaf]
        for at in (at for at in names if call.leaves[at] is not tensor):
            equal = (dim for dim, size in enumerate(call.leaves[at].shape) if size == tensor.shape[one.dim])
            others |= {each: bounds.get(one) for dim in equal if (each := Dimension(at, dim)) not in chosen}
    if not others:
        return ""
    said = " and ".join(f"dimension {each.dim} of argument {names[each.leaf]}" for each in others)
    entries = ", ".join(f'"{names[each.leaf]}": {{{each.dim}: {limits}}}' for each, limits in others.items())
    has, add = "has", f"both must be equal, add {entries} to dynamic"
    if len(others) > 1:
        has, add = "have", f"it must equal some of them, add these to dynamic, as in {entries}"
    return f"{said[0].upper()}{said[1:]} {has} the same size, and a fixed one: if {add}. Otherwise leave"


def named_tensors(model: nn.Module, call: Call):
    """(name, index) of every tensor of a call; a positional argument has the name of the forward's parameter."""
    parameters = list(inspect.signature(model.forward).parameters)
    for at, (name, leaf) in enumerate(named_leaves(call.args, call.kwargs)):
        if is_tensor(leaf):
            number, _, rest = name.partition("[")
            is_position = number.isdecimal() and int(number) < len(parameters)
            yield (parameters[int(number)] + name[len(number) :] if is_position else name), at


def _checked_bounds(bounds, name: str, dim: int, size: int) -> Bounds | None:
    where = f"dynamic[{name!r}][{dim}]"
    if bounds is None:
        return None
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2 or not all(isinstance(each, int) for each in bounds):
        raise TypeError(f"{where} must be (smallest, largest) or None, got {bounds!r}")
    low, high = bounds
    if not SMALLEST <= low <= high:
        raise ValueError(f"{where} must be {SMALLEST} <= smallest <= largest, got {bounds!r}")
    if not low <= size <= high:
        raise ValueError(
            f"{where} is {bounds!r}, but the size of dimension {dim} of {name!r} in this call is {size}: declare "
            "bounds that include it, or None for any size"
        )
    return low, high
