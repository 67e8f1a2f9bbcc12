"""`Plan`: a schedule with its simulated peak, its cost and every activation's fate; saved as JSON for its graph."""

import importlib.util
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path

from ackpt.core.files import read_json, write_text_atomic
from ackpt.metering.meter import memory_format
from ackpt.metering.timeline import Timeline
from ackpt.planner.capture.inspection.calls import differences
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.capture.short_names import common, operation, pattern, short_source
from ackpt.planner.schedule.schedule import Schedule, ScheduleError, digest, from_json, to_json
from ackpt.planner.schedule.simulator import follow, saved_bytes

SAVED, PACKED, RECOMPUTED, OFFLOADED = "saved", "packed", "recomputed", "offloaded"
_SCHEMA = {"schema": "ackpt.plan", "version": 2}


class PlanError(ValueError):
    """A plan that cannot be read, or that does not belong to the model it is used for.

    Example:
        >>> import torch, ackpt
        >>> x = torch.ones(4, 8)
        >>> plan = ackpt.plan(ackpt.trace(torch.nn.Linear(8, 8), x))
        >>> try:
        ...     ackpt.compile(torch.nn.Linear(8, 2), x, plan=plan)
        ... except ackpt.PlanError:
        ...     print("the plan is for another model")
        the plan is for another model
    """


@dataclass(frozen=True)
class Activation:
    """An activation: the result of one operation that backward reads, with its fate, bytes and place in the model.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> (activation,) = ackpt.plan(ackpt.trace(model, torch.ones(4, 8))).activations
        >>> activation.name, activation.fate, activation.bytes, activation.module
        ('tanh', 'saved', 128, '1')
    """

    name: str
    fate: str
    bytes: int
    module: str
    source: str


@dataclass(frozen=True)
class Decision:
    """An operation that is recomputed: its cost, and the peak if its result were saved instead.

    ``cost``: of all its ``runs`` in backward, as a fraction of the baseline's; ``bytes``: of its result;
    ``peak_if_kept_bytes``: the dynamic peak of the same plan with the result saved.

    Example:
        >>> import torch, ackpt
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> plan = ackpt.plan(ackpt.trace(model, torch.ones(64, 8)), budget=0.7)
        >>> dearest = plan.decisions[0]
        >>> dearest.name, dearest.runs, dearest.bytes, dearest.peak_if_kept_bytes > plan.limit_bytes
        ('tanh', 1, 16384, True)
    """

    name: str
    module: str
    cost: float
    bytes: int
    runs: int
    peak_if_kept_bytes: int


@dataclass(frozen=True)
class Plan:
    """The schedule that `ackpt.plan` chose, with its simulated peak and cost.

    ``peak_bytes``: the peak of resident and dynamic bytes together; ``resident_bytes``: parameters, buffers, inputs and
    optimizer state; ``baseline_peak_bytes``: the peak without checkpointing; ``saved_bytes``: saved on the device for
    backward. ``flops``: of the step; ``recompute_flops``: of recomputation. ``limit_bytes``: the bound on dynamic bytes
    that follows from the budget, None without one. ``activations``: what backward reads, in the order of the forward.
    ``cost``: the cost that the plan adds, as a fraction of the baseline's cost. If the profile has times, it is the
    added time, including packing and waits for copies; otherwise it is recomputed FLOPs plus weighted traffic.
    ``lower_bound``: a cost that no schedule within the budget can beat without packing or offload; None without a
    budget, for a plan that packs or offloads, or without scipy.
    ``decisions``: the most expensive recomputations. ``host_bytes``: the most bytes offloaded at one time, not part of
    the peak. ``exposed_seconds``: the seconds in which compute waits for copies; None if the profile has no times.
    ``made_for``: the call that the plan was made for, in words; None if unknown. ``note``: what its guarantees leave
    out, such as the memory inside Python kernels, or sums of gradients in another order; None if nothing. ``sizes``:
    the shape of every tensor of that call; None if unknown. ``dynamic``: (index in ``sizes``, dimension) of the
    dimensions that were dynamic in the capture.
    ``device``: the device for which the plan minimizes time, as in the profile; ``"any"`` if it minimizes FLOPs and
    traffic. ``head_chunks``: in how many chunks of tokens the head of a language model runs; 1 without ``chunk_head``.

    Example:
        >>> import torch, ackpt
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> plan = ackpt.plan(ackpt.trace(model, torch.ones(64, 8)), budget=0.7)
        >>> plan.fates["tanh"], plan.fates["tanh_2"]
        ('recomputed', 'saved')
        >>> plan.dynamic_peak_bytes <= 0.7 * plan.baseline_dynamic_peak_bytes
        True
    """

    policy: str
    limit_bytes: int | None
    peak_bytes: int
    resident_bytes: int
    baseline_peak_bytes: int
    saved_bytes: int
    flops: int
    recompute_flops: int
    peak_node: str
    activations: tuple[Activation, ...]
    schedule: Schedule
    timeline: Timeline
    cost: float
    lower_bound: float | None
    decisions: tuple[Decision, ...]
    host_bytes: int = 0
    exposed_seconds: float | None = None
    made_for: Mapping[str, str] | None = field(default=None, compare=False)
    note: str | None = None
    sizes: tuple[tuple[int, ...], ...] | None = field(default=None, compare=False)
    dynamic: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    device: str = "any"
    head_chunks: int = 1

    def __repr__(self) -> str:
        share = self.dynamic_peak_bytes / max(1, self.baseline_dynamic_peak_bytes)
        return (
            f"<Plan of policy {self.policy!r}: peak {memory_format(self.peak_bytes)}, dynamic {share:.3f} of the "
            f"baseline's; table() says more>"
        )

    @property
    def dynamic_peak_bytes(self) -> int:
        """The peak without resident bytes."""
        return self.peak_bytes - self.resident_bytes

    @property
    def baseline_dynamic_peak_bytes(self) -> int:
        """The dynamic peak without checkpointing."""
        return self.baseline_peak_bytes - self.resident_bytes

    @property
    def gap(self) -> float | None:
        """The optimality gap, ``(1 + cost) / (1 + lower_bound) - 1``: the time or cost of the step beyond the bound.

        None without a lower bound.
        """
        return None if self.lower_bound is None else (1 + self.cost) / (1 + self.lower_bound) - 1

    @cached_property
    def fates(self) -> dict[str, str]:
        """``{name of the node: fate}`` for every activation that backward needs.

        A fate is ``"saved"``, ``"packed"``, ``"recomputed"`` or ``"offloaded"``.
        """
        return {activation.name: activation.fate for activation in self.activations}

    def table(self) -> str:
        """Peak, cost, the most expensive recomputations and the largest activations, as aligned text.

        Activations of equal layers are one line, such as ``48.0 MiB ... 12 x blocks.*.mlp (gelu): 4.0 MiB each``.

        Plans come from one Pareto frontier for all budgets, so a small activation may be recomputed although saving it
        would be "within the budget".
        """
        dynamic, baseline = self.dynamic_peak_bytes, self.baseline_dynamic_peak_bytes
        plain = max(1, self.flops - self.recompute_flops)
        fates = Counter(activation.fate for activation in self.activations)
        again = f"{self.recompute_flops / 1e9:.3f} GFLOP, {self.recompute_flops / plain:.1%} of the step's"
        if self.limit_bytes is not None and fates[SAVED] == len(self.activations) and not self.recompute_flops:
            again = "nothing: the baseline fits the budget"
        rates = "" if self.device == "any" else f", in times of {self.device}"
        lines = [
            f"policy            {self.policy}",
            f"peak              {memory_format(self.peak_bytes)}, {memory_format(self.resident_bytes)} of it resident",
            f"dynamic peak      {memory_format(dynamic)} = {dynamic / max(1, baseline):.3f} of the baseline's "
            f"{memory_format(baseline)}",
            f"reached at        {self.peak_node}",
            f"recomputed        {again}",
            f"cost              {self.cost:.1%} of the step{rates}; {self._bound()}",
            f"activations       {fates[SAVED]} of {len(self.activations)} saved, {memory_format(self.saved_bytes)}; "
            f"{fates[RECOMPUTED]} recomputed, {fates[OFFLOADED]} offloaded"
            + (f", {fates[PACKED]} packed" if fates[PACKED] else ""),
            *self._offload(),
            *([] if self.note is None else [f"note              {self.note}"]),
            "",
            "ten largest       fate        where",
            *(_group_row(group) for group in self.groups()[:10]),
        ]
        if self.decisions:
            lines += ["", "most expensive    cost   runs    if it were saved"]
        limit = self.dynamic_peak_bytes if self.limit_bytes is None else self.limit_bytes
        for decision in self.decisions:
            over = decision.peak_if_kept_bytes - limit
            meant = f"{memory_format(abs(over))} {'above' if over > 0 else 'within'} the budget"
            if self.limit_bytes is None:
                meant = f"a peak {memory_format(abs(over))} {'higher' if over > 0 else 'lower'}"
            lines.append(
                f"{memory_format(decision.bytes):<17} {decision.cost:<6.2%} {decision.runs:<7} {meant}: "
                f"{decision.module or '-'} ({decision.name})"
            )
        return "\n".join(lines)

    def groups(self) -> list[tuple[Activation, ...]]:
        """The activations, with those that equal layers produce on one source line together; the largest groups first.

        Layers are equal if their names differ in numbers only, and the bytes and the fates are equal.
        """
        groups: dict[tuple, list[Activation]] = {}
        for a in self.activations:
            groups.setdefault((pattern(a.module), operation(a.name), a.source, a.bytes, a.fate), []).append(a)
        return sorted(map(tuple, groups.values()), key=lambda group: -sum(a.bytes for a in group))

    def _bound(self) -> str:
        if self.lower_bound is not None:
            gap = f"{self.gap:.1%} = (1 + cost) / (1 + lower bound) - 1"
            return f"lower bound {self.lower_bound:.1%}, optimality gap {gap}"
        has_scipy = importlib.util.find_spec("scipy") is not None
        return "no lower bound was computed" + ("" if has_scipy else ", which needs scipy: pip install scipy")

    def _offload(self) -> list[str]:
        if not self.host_bytes:
            return []
        moved = sum(activation.fate == OFFLOADED for activation in self.activations)
        waits = "" if self.exposed_seconds is None else f", {1e3 * self.exposed_seconds:.3g} ms of waiting for copies"
        return [f"offloaded         {moved}, {memory_format(self.host_bytes)} in host memory{waits}"]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as JSON, whole or not at all.

        Raises:
            RecordError: if it cannot be written there.
        """
        data: dict = dict(_SCHEMA)
        for each in fields(self):
            data[each.name] = getattr(self, each.name)
        data["activations"] = [asdict(activation) for activation in self.activations]
        data["decisions"] = [asdict(decision) for decision in self.decisions]
        data["schedule"] = to_json(self.schedule)
        data["timeline"] = self.timeline.to_json()
        data["digest"] = digest(data)
        return write_text_atomic(path, json.dumps(data) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """The plan that `save` wrote.

        Raises:
            PlanError: if the file is not a plan, is truncated, was written by another version, or was changed later.
        """
        data = read_json(path, "plan", PlanError)
        is_changed = isinstance(data, dict) and "digest" in data and data["digest"] != digest(data)
        schema = {key: data.get(key) for key in _SCHEMA} if isinstance(data, dict) else None
        if schema != _SCHEMA:
            raise PlanError(f"{path} is not a plan of this version: expected {_SCHEMA}, found {schema}; plan again")
        try:
            data["schedule"] = from_json(data["schedule"])
            data["activations"] = tuple(Activation(**activation) for activation in data["activations"])
            data["decisions"] = tuple(Decision(**decision) for decision in data["decisions"])
            data["timeline"] = Timeline.from_json(data["timeline"])
            for name in {"sizes", "dynamic"} & data.keys():
                data[name] = None if data[name] is None else tuple(map(tuple, data[name]))
            # Files of earlier days lack what was added since.
            given = (each.name for each in fields(cls) if each.default is MISSING or each.name in data)
            plan = cls(**{name: data[name] for name in given})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise PlanError(f"{path} is not a complete plan ({error!r} while reading it); plan again") from error
        if is_changed:
            raise PlanError(f"{path} was changed after it was saved, so its figures may not be the plan's; plan again")
        return plan


def _group_row(group: tuple[Activation, ...]) -> str:
    first, modules = group[0], common(a.module for a in group) or "the model itself"
    source = f", {short_source(first.source)}" if first.source else ""
    if len(group) == 1:
        described = f"{modules} ({first.name}){source}"
    else:
        described = f"{len(group)} x {modules} ({operation(first.name)}): {memory_format(first.bytes)} each{source}"
    return f"{memory_format(sum(a.bytes for a in group)):<17} {first.fate:<11} {described}"


def activations(graph: JointGraph, baseline: Schedule, schedule: Schedule) -> tuple[Activation, ...]:
    """The activations of `baseline` and `schedule` with their fates, in the order of the forward."""
    base_of, fates = graph.analysis.base_of, dict.fromkeys(schedule.saved, SAVED)
    fates |= dict.fromkeys(schedule.packed, PACKED) | dict.fromkeys(schedule.offloaded, OFFLOADED)
    listed = []
    for storage in sorted({*baseline.saved, *fates}, key=lambda s: base_of[s]):
        node = graph.nodes[base_of[storage]]
        fate = fates.get(storage, RECOMPUTED)
        listed.append(Activation(node.name, fate, graph.storages[storage].bytes, node.module, node.source))
    return tuple(listed)


def check_applies(graph: JointGraph, plan: Plan, dynamic: object = None) -> None:
    """Refuse a plan of another graph, and one whose bytes are not those of its schedule.

    The peak may be higher than the simulated one, since the workspace of operations is unknown here. The resident bytes
    may be higher by the state of an optimizer that `graph` was traced without. `dynamic`: if `graph` is an instance, at
    the sizes of the plan, of a capture with dynamic dimensions, the argument ``dynamic=`` that names them.
    """
    made_for = plan.schedule.graph
    if made_for != graph.hash and dynamic and not plan.dynamic:
        raise PlanError(
            f"this plan was made for fixed sizes, and a capture for all sizes has other operations ({made_for[:12]}, "
            f"not {graph.hash[:12]}), or the model or its arguments differ otherwise. Name the dimensions that change "
            f"when you make the plan, as in ackpt.compile(..., dynamic={dynamic}), or plan again."
        )
    if made_for != graph.hash:
        raise PlanError(
            f"this plan was made for another graph ({made_for[:12]}, not {graph.hash[:12]}): "
            f"{_what_differs(graph, plan)}. Plan again for this model and these arguments."
        )
    try:
        timeline = follow(graph, plan.schedule, (0,) * len(graph.nodes)).timeline()
    except (ScheduleError, LookupError, TypeError) as error:
        raise PlanError(f"the schedule of this plan cannot run: {error!r}. Plan again.") from error
    resident = graph.resident_bytes
    saved = saved_bytes(graph, plan.schedule)
    limit = plan.dynamic_peak_bytes if plan.limit_bytes is None else plan.limit_bytes
    # (field, what it says, the least and the most that it can be)
    figures = [
        ("saved_bytes", plan.saved_bytes, saved, saved),
        ("resident_bytes", plan.resident_bytes, resident, resident if graph.optimizer_bytes else None),
        ("peak_bytes", plan.peak_bytes, plan.resident_bytes + timeline.peak_bytes, plan.resident_bytes + limit),
    ]
    for name, said, least, most in figures:
        if said < least or (most is not None and said > most):
            true = f"{least}" if most == least else f"at least {least}" if said < least else f"at most {most}"
            raise PlanError(
                f"this plan says that its {name} are {said}, but with this model, and the optimizer, the "
                f"accumulated gradients and the scaler that are given, they are {true}. Plan again, with the same ones."
            )


def _what_differs(graph: JointGraph, plan: Plan) -> str:
    if plan.made_for is None or graph.made_for is None:
        return "model, arguments, dtypes or torch differ"
    clauses = differences(plan.made_for, graph.made_for)
    return "; ".join(clauses) or "the call is the same, so the model's code or configuration differs"
