"""Capture and plan the modules that can be captured alone, and list their savings and costs.

Modules are tried from the outside to the inside. If a capture fails, the error names the module whose code is the
cause; every module that contains one of its class runs in eager mode, and its submodules are tried.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ackpt.budget import least_share
from ackpt.capture.aot import capture
from ackpt.capture.inspection.model_checks import first_opaque
from ackpt.capture.joint_graph import FORWARD, JointGraph
from ackpt.capture.tracing import captured_graph
from ackpt.errors import TraceError
from ackpt.planner import baseline_of, default_profile
from ackpt.planning.schedule import everything
from ackpt.policies import auto
from ackpt.policies.search.frontier import evenly_spaced, frontier
from ackpt.policies.search.recompute_costs import costs
from ackpt.running.call_facts import call_of
from ackpt.running.model_facts import WatchedModel

from .saved_bytes import not_counting
from .step_profile import Unit

_MOST_PLANS = 4  # of one module
_CONTAINERS = "torch.nn.modules.container"


class PartPlan(NamedTuple):
    """A plan of a module: its budget as a fraction of the module's baseline, and its effect.

    ``bytes``: the decrease in saved bytes; ``cost``: of recomputation, as a fraction of its forward's.
    """

    share: float
    bytes: int
    cost: float


class Parts:
    """Captures the modules of a step; called with each unit and its arguments before its module runs.

    ``plans``: of the units that can be captured. ``reasons``: why others cannot, each cause once.
    """

    def __init__(self, model: nn.Module, error: TraceError | None):
        self.plans: dict[Unit, list[PartPlan]] = {}
        self.reasons: list[str] = []
        self._inside: set[Unit] = set()  # of a captured unit, or of one that inspects values
        self._refusing: set[type] = set()
        self._known: dict[Any, list[PartPlan] | None] = {}
        if error is not None:
            self._refuse(model, error)

    def __call__(self, unit: Unit, args, kwargs) -> None:
        module, parent = unit.module, unit.parent
        if parent in self._inside or parent in self.plans:
            self._inside.add(unit)
            return
        if type(module) in self._refusing:
            self._inside.add(unit)  # the sizes of what it calls may depend on values
            return
        types = tuple(type(each) for each in module.modules())
        if _is_one_operation(module) or not self._refusing.isdisjoint(types) or first_opaque(module) is not None:
            return
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return
        plans = self._plans(module, types, args, kwargs)
        if plans is not None:
            self.plans[unit] = plans
        elif type(module) in self._refusing:
            self._inside.add(unit)

    def _plans(self, module: nn.Module, types, args, kwargs) -> list[PartPlan] | None:
        """The plans of a module; None if it cannot be captured."""
        try:
            call = call_of(WatchedModel(module), args, kwargs)
        except TypeError:  # for an argument such as a cache
            return None
        facts = call.facts
        own = tuple(facts.model.tensors), tuple(facts.model.training)
        key = types, facts.spec, facts.leaves, *own, facts.autocast, call.sizes
        if key not in self._known:
            try:
                with not_counting(), _disable_current_modes():
                    with capture(module, args, kwargs, "all", "keep") as captured:
                        self._known[key] = _plans_of(captured_graph(captured, module, args, kwargs))
            except TraceError as error:
                self._refuse(module, error)
                self._known[key] = None
        return self._known[key]

    def _refuse(self, module: nn.Module, error: TraceError) -> None:
        if error.reason and error.reason not in self.reasons:
            self.reasons.append(error.reason)
        if error.module:
            kind = type(module.get_submodule(error.module))
        elif error.module == "" and not module.__class__.__module__.startswith(_CONTAINERS):
            kind = type(module)
        else:
            return
        self._refusing.add(kind)


def _is_one_operation(module: nn.Module) -> bool:
    """Whether a plan of the module has nothing to choose: it is a layer of torch without submodules."""
    return type(module).__module__.startswith("torch.nn.modules.") and not any(True for _ in module.children())


def _plans_of(graph: JointGraph) -> list[PartPlan] | None:
    """Plans from the least cost to the fewest saved bytes; None if gradients may arrive in another memory layout."""
    if not all(graph.analysis.fx[node].meta["val"].is_contiguous() for node in graph.analysis.tangents):
        return None
    profile = default_profile(graph)
    baseline_bytes = baseline_of(graph, profile, None).peak_bytes
    cost = costs(graph, profile)
    forward = sum(cost[node.id] for node in graph.nodes if node.phase == FORWARD) or 1.0
    saved = _saved_bytes(graph, everything(graph))
    plans = []
    for point in frontier(graph, profile, auto.candidates):
        share = least_share(point.peak_bytes, baseline_bytes)
        fewer = saved - _saved_bytes(graph, point.schedule)
        if share is not None and fewer > 0 and (not plans or fewer > plans[-1].bytes):
            plans.append(PartPlan(share, fewer, point.cost / forward))
    return list(evenly_spaced(plans, _MOST_PLANS))


def _saved_bytes(graph: JointGraph, schedule) -> int:
    return sum(graph.analysis.bytes[storage] for storage in schedule.saved)
