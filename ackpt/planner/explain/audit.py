"""`ackpt.audit`: is the checkpointing and offload of a step right, does it have an effect, and what does it cost?

The step runs as it is and once with every known kind of checkpointing and offload made a plain call, each time from the
same state. `audit_runs` watches, `audit_findings` compares.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils._pytree import tree_leaves

from ackpt.core.errors import BudgetError, TraceError
from ackpt.metering.flops import UncountedFlops, count_flops
from ackpt.metering.meter import Measurement, measure, memory_format
from ackpt.metering.resident import Item, storages_of
from ackpt.planner.capture.inspection.calls import call_arguments
from ackpt.planner.capture.places import modules_text, pattern, short_source
from ackpt.planner.capture.tracing import trace
from ackpt.planner.choose import default_profile, planned
from ackpt.planner.request import Request
from ackpt.planner.schedule.plan import Plan
from ackpt.planner.step.planned_step import PlannedStep, in_place_of, without_budget

from .audit_findings import (
    Finding,
    Seen,
    arises_in,
    findings,
    flat,
    outside_of_regions,
    saved_bytes,
    text_of,
    uncovered,
)
from .audit_runs import Undo, Watch, intercepted, referred, same

_LARGEST = 8  # lines of each list
_MISSING: Any = object()


@dataclass(frozen=True)
class AuditedRegion:
    """One region of a step: the paths of its modules, and its kind: ``"torch"``, ``"torch, reentrant"`` or ``"ackpt"``.

    ``saved_bytes``: of its inputs; ``dropped_bytes``: what it would save without checkpointing, and recomputes instead;
    ``recomputations``: how often backward ran it.

    Example:
        >>> from ackpt.planner.explain.audit import AuditedRegion
        >>> AuditedRegion("blocks.0", "torch", 1024, 8192, 1).module
        'blocks.0'
    """

    module: str
    kind: str
    saved_bytes: int
    dropped_bytes: int
    recomputations: int


@dataclass(frozen=True)
class SavedOutside:
    """A tensor that a step saves outside of its regions, with the module and the line of code that saves it.

    Example:
        >>> from ackpt.planner.explain.audit import SavedOutside
        >>> SavedOutside(2048, "float32[16, 32]", "head", "model.py:7").bytes
        2048
    """

    bytes: int
    tensor: str
    module: str
    source: str


@dataclass(frozen=True, repr=False)
class Audit:
    """The result of `ackpt.audit`; ``print(audit)`` shows it.

    ``findings``: what is wrong, each with its fix; ``ok``: whether there is none. ``differences``: the largest absolute
    difference to the step without checkpointing and offload, by what differs, such as ``"gradient blocks.0.weight"``;
    None where one of both is missing, infinity for values that are not tensors; empty if all bits are equal.
    ``arises_in``: the first module with another result. ``measured``, ``baseline``: the step as it is (None if it
    fails), and without checkpointing and offload. ``saved_bytes``, ``baseline_saved_bytes``: activations that are live
    when backward begins. ``regions``: every region, the inner ones of nested ones too. ``not_regions``: repeated blocks
    that are no region. ``saved_outside``: tensors saved outside of regions, the largest first. ``offloaded_bytes``,
    ``reloaded_bytes``: by hooks on saved tensors, and 0 on a CPU for torch's ``save_on_cpu``. ``flops``: of the
    baseline, and ``recompute_flops``: those on top; None if they cannot be counted. ``plan``: the plan that
    `ackpt.apply_budget` would make for the measured peak, None if there is none, with the reason in ``no_plan``.
    ``not_restored``: what could not be put back; ``notes``: what the audit does not know.

    Example:
        >>> import torch, ackpt
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> audit = ackpt.audit(model, torch.ones(16, 8))
        >>> audit.ok, audit.saved_bytes == audit.baseline_saved_bytes, audit.regions
        (True, True, ())
    """

    name: str
    findings: tuple[Finding, ...]
    differences: dict[str, float | None]
    arises_in: str
    measured: Measurement | None
    baseline: Measurement
    saved_bytes: int | None
    baseline_saved_bytes: int
    regions: tuple[AuditedRegion, ...]
    not_regions: tuple[str, ...]
    saved_outside: tuple[SavedOutside, ...]
    offloaded_bytes: int
    reloaded_bytes: int
    flops: int | None
    recompute_flops: int | None
    plan: Plan | None
    no_plan: str
    not_restored: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __repr__(self) -> str:
        return "\n".join(_lines(self))


def audit(
    step: nn.Module | Callable[[], object],
    batch: Any = _MISSING,
    *,
    resident: Iterable[Item] = (),
    compare_budget: bool = True,
) -> Audit:
    """Run a training step with and without its checkpointing and offload, and report what is wrong with them.

    Args:
        step: a model, whose step is its forward on `batch` and the backward of its loss; or a function without
            arguments that runs one step of any kind, such as your own loop's body.
        batch: for a model, its inputs: a dict of keyword arguments, a tuple or list of positional ones, or one tensor.
        resident: for a function, the modules and optimizers that it trains, as in `ackpt.measure`. Those that the
            function's code refers to are found without it.
        compare_budget: whether to plan the same step with the measured peak as its budget; for a model only.

    Returns:
        An `Audit`: findings, equality, peaks, saved bytes, regions, offloaded bytes and recomputed FLOPs.

    Raises:
        TypeError, ValueError: for arguments of the wrong type, and for models that are compiled with ``torch.compile``.
        MeterError: as `ackpt.measure`.

    The step runs about seven times. Parameters, buffers, gradients, optimizer state, attributes of modules, random
    number streams (torch, ``random``, numpy) and the objects with a ``state_dict`` that the step refers to are restored
    after every run, from copies in host memory. Recognized are ``torch.utils.checkpoint`` in both variants and
    everything that is built on it (transformers, FSDP's wrapper, accelerate, Lightning, timm), hooks on saved tensors
    (``save_on_cpu``, TRL's and torchtune's ``OffloadActivations``), and this package's regions, offload and plans.

    Example:
        >>> import torch, ackpt
        >>> from torch.utils.checkpoint import checkpoint
        >>> class Net(torch.nn.Sequential):
        ...     def forward(self, x):
        ...         return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False).sum()
        >>> model = Net(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> [finding.kind for finding in ackpt.audit(model, torch.ones(4, 8)).findings]
        ['random']
    """
    modules, function, holders, call = _checked(step, batch, resident)
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise ValueError("audit() was called inside hooks on saved tensors: enter them inside the step instead")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _audited(modules, function, holders, call, compare_budget)


def _checked(step, batch, resident):
    """The modules by prefix, the step, what it holds by name, and the model's call if it is one."""
    if isinstance(resident, (nn.Module, torch.optim.Optimizer, torch.Tensor)):
        raise TypeError("resident must be an iterable of modules, optimizers and tensors, such as (model, optimizer)")
    items = [*resident]
    if isinstance(step, nn.Module):
        if batch is _MISSING:
            raise TypeError(
                "audit(model) needs a batch: audit(model, batch), or a function that runs a step: audit(step)"
            )
        args, kwargs = call_arguments(batch)
        roots, call, function = [step], (step, args, kwargs), _Step(step, args, kwargs)
        items += [(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    elif not callable(step):
        raise TypeError(f"audit() takes a model and a batch, or a function that runs a step, got {type(step).__name__}")
    elif batch is not _MISSING:
        raise TypeError("a step takes no batch: audit(step, resident=[model, optimizer]), or audit(model, batch)")
    else:
        call, function = None, step
        roots = [item for item in (*items, *(value for _, value in referred(step))) if isinstance(item, nn.Module)]
        if not roots:
            raise ValueError(
                "audit(step) found no model in the step's code: name it, as in resident=[model, optimizer]"
            )
    inner = {id(m) for root in roots for m in list(root.modules())[1:]}
    roots = [root for root in {id(root): root for root in roots}.values() if id(root) not in inner]
    roots = [root._ackpt_planned.model if isinstance(root, PlannedStep) else root for root in roots]
    if any(isinstance(m, OptimizedModule) or m._compiled_call_impl is not None for m in _modules_of(roots)):
        raise TypeError("audit() sees eager code only: pass the model from before torch.compile")
    names = [""] if len(roots) == 1 else [f"{type(root).__name__}{number}" for number, root in enumerate(roots)]
    return dict(zip(names, roots)), function, [(f"input {n}", item) for n, item in enumerate(items)], call


def _modules_of(roots):
    return (m for root in roots for m in root.modules() if in_place_of(m) is None)


class _Step:
    """One step of a model: the forward, and the backward of the loss, or else of all outputs that require grad."""

    def __init__(self, model, args, kwargs):
        self.call = model, args, kwargs

    def __call__(self) -> None:
        tensors = self._outputs()
        gradients = [None if t.dim() == 0 else self._tangent(t) for t in tensors]
        if tensors:
            torch.autograd.backward(tensors, gradients)

    def _outputs(self) -> list[torch.Tensor]:
        model, args, kwargs = self.call
        outputs = [t for t in tree_leaves(model(*args, **kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        scalars = [t for t in outputs if t.dim() == 0]
        return scalars if len(scalars) == 1 else outputs

    @staticmethod
    def _tangent(tensor: torch.Tensor) -> torch.Tensor:
        """Different everywhere: the gradient of a plain sum through a normalization is zero."""
        numbers = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float32)
        return numbers.cos_().to(tensor.dtype).view(tensor.shape)


def _audited(modules, function, holders, call, compare_budget) -> Audit:
    undo = Undo(function if call is None else modules[""], modules, holders)
    own = frozenset(s._cdata for tensor in undo.named.values() for s in storages_of(tensor))
    resident = [*modules.values(), *(each for each, *_ in undo.optimizers), *(item for _, item in holders)]

    def observed(neutral: bool) -> tuple[Watch, dict[str, Any], Exception | None]:
        watch, error = Watch(modules, neutral, own), None
        try:
            with watch.watching():
                function()
        except Exception as raised:
            error = raised.with_traceback(None)
        values = undo.values() | {f"output {n}": output for n, output in enumerate(watch.outputs)}
        undo.restore()
        return watch, values, error

    def metered(neutral: bool) -> tuple[Measurement, int | None]:
        with intercepted(Watch({}, True, quiet=True)) if neutral else contextlib.nullcontext():
            measured = measure(function, resident=resident, warmup=0, repeats=0)
            undo.restore()
            try:
                flops = count_flops(function)
            except UncountedFlops:
                flops = None
        undo.restore()
        return measured, flops

    try:
        neutral, expected, failure = observed(True)
        if failure is not None:  # the step itself is wrong
            raise failure
        watch, values, error = observed(False)
        differences = _differences(values, expected)
        noise = _differences(observed(True)[1], expected) if differences else {}
        differences = {
            k: size for k, size in differences.items() if k not in noise or (size or 0) > 10 * (noise[k] or 0)
        }
        baseline, flops = metered(True)
        measured, all_flops = (None, None) if error is not None else metered(False)
    finally:
        undo.restore()
    if baseline.timeline.boundary is None:
        raise ValueError("the step runs no backward: audit a training step, with gradients on")
    said = "" if error is None else str(error).strip().partition("\n")[0]
    seen = Seen(modules, watch, neutral, {} if error is not None else differences, measured, baseline, said)
    found = findings(seen)
    plan, no_plan = None, "it is planned for a model and a batch, not for a step"
    if call is not None and measured is not None and compare_budget:
        plan, no_plan = _planned(call, measured.peak_bytes)
    notes = (
        [f"{modules_text(neutral.unknown)}: recomputed by an unknown kind of checkpointing"] if neutral.unknown else []
    )
    notes += [f"not deterministic: {label} differs between two equal runs" for label in sorted(noise)[:1]]
    outside = (SavedOutside(s.bytes, s.what, s.module, s.source) for s in outside_of_regions(seen))
    return Audit(
        name=" and ".join(type(root).__name__ for root in modules.values()),
        findings=found,
        differences=dict(seen.differences),
        arises_in=arises_in(seen) if seen.differences else "",
        measured=measured,
        baseline=baseline,
        saved_bytes=None if measured is None else saved_bytes(measured),
        baseline_saved_bytes=saved_bytes(baseline),
        regions=tuple(
            AuditedRegion(text_of(r), r.kind, sum(r.inputs.values()), sum(r.dropped.values()), r.recomputations)
            for r in flat(watch.runs)
        ),
        not_regions=tuple(block for blocks in uncovered(seen).values() for block in blocks),
        saved_outside=tuple(outside),
        offloaded_bytes=sum(context.moved for context in watch.contexts.values()),
        reloaded_bytes=sum(context.loaded for context in watch.contexts.values()),
        flops=flops,
        recompute_flops=None if flops is None or all_flops is None else all_flops - flops,
        plan=plan,
        no_plan=no_plan,
        not_restored=undo.left(),
        notes=tuple(notes),
    )


def _differences(values: dict[str, Any], expected: dict[str, Any]) -> dict[str, float | None]:
    """The largest absolute difference by label, of what is not equal bit for bit."""
    found: dict[str, float | None] = {}
    for label in {**expected, **values}:
        if label not in values or label not in expected:
            found[label] = None if label not in values else float("inf")
            continue
        value, other = values[label], expected[label]
        if not isinstance(value, torch.Tensor):
            found |= {} if value == other else {label: float("inf")}
        elif value.shape != other.shape or value.dtype != other.dtype:
            found[label] = float("inf")
        elif not same(value, other):
            wide = torch.complex128 if value.is_complex() else torch.float64
            size = (value.to(wide) - other.to(wide)).abs().max().item()
            found[label] = size if size == size else float("inf")
    return found


def _planned(call, peak_bytes: int) -> tuple[Plan | None, str]:
    """The plan for the same peak, or why there is none."""
    model, args, kwargs = call
    model = model._ackpt_planned.model if isinstance(model, PlannedStep) else model
    try:
        with intercepted(Watch({}, True, quiet=True)), without_budget(model):
            graph = trace(model, *args, **kwargs)
        return planned(graph, Request(peak_bytes), default_profile(graph)), ""
    except (TraceError, BudgetError, ValueError, RuntimeError) as error:
        return None, str(error).partition("\n")[0]


def _lines(audit: Audit) -> list[str]:
    """The text of an audit."""
    count = len(audit.findings)
    rows = [("audit", f"{audit.name}: {count or 'no'} finding{'' if count == 1 else 's'}")]
    rows += [(finding.kind, f"{finding.message}\n{'':<18}fix: {finding.fix}") for finding in audit.findings]
    baseline, measured = audit.baseline, audit.measured
    if measured is not None:
        rows += [("equal", _equality(audit))]
        change = measured.peak_bytes / baseline.peak_bytes - 1 if baseline.peak_bytes else 0.0
        rows += [
            (
                "peak",
                f"{memory_format(measured.peak_bytes)}, baseline {memory_format(baseline.peak_bytes)} ({change:+.1%})",
            )
        ]
        rows += [
            ("saved", f"{memory_format(audit.saved_bytes or 0)}, baseline {memory_format(audit.baseline_saved_bytes)}")
        ]
        if audit.recompute_flops is not None and audit.flops:
            share = (
                f"{audit.recompute_flops / 1e9:.3g} GFLOP, {audit.recompute_flops / audit.flops:.1%} of the baseline's"
            )
            rows += [("recomputed", share)]
        if audit.offloaded_bytes or audit.reloaded_bytes:
            moved = f"{memory_format(audit.offloaded_bytes)}, reloaded {memory_format(audit.reloaded_bytes)}"
            rows += [("offloaded", moved)]
    groups: dict[tuple, list[AuditedRegion]] = {}
    for region in audit.regions:
        key = pattern(region.module), region.kind, region.saved_bytes, region.dropped_bytes, region.recomputations
        groups.setdefault(key, []).append(region)
    for group in [*groups.values()][:_LARGEST]:
        first, each = group[0], " each" * (len(group) > 1)
        said = f"{modules_text(region.module for region in group)} ({first.kind}): saves {memory_format(first.saved_bytes)}"
        times = f" {first.recomputations} times" if first.recomputations != 1 else ""
        rows += [("region", f"{said}, recomputes {memory_format(first.dropped_bytes)}{times}{each}")]
    rows += [("no region", modules_text(audit.not_regions))] * bool(audit.not_regions)
    for saved in audit.saved_outside[:_LARGEST] if audit.regions else ():
        where = f"{saved.module or 'the model itself'}{f', {short_source(saved.source)}' if saved.source else ''}"
        rows += [("saved outside", f"{memory_format(saved.bytes)}  {saved.tensor} of {where}")]
    if audit.plan is not None:
        again, whole = audit.plan.recompute_flops, audit.plan.flops - audit.plan.recompute_flops
        said = f"peak {memory_format(audit.plan.peak_bytes)}, recomputes {again / max(1, whole):.1%} of the FLOPs"
        rows += [("apply_budget", f"{said}, added time {audit.plan.cost:.1%}")]
    elif audit.no_plan and measured is not None:
        rows += [("apply_budget", f"not computed: {audit.no_plan}")]
    rows += [("not restored", word) for word in audit.not_restored]
    rows += [("note", note) for note in audit.notes]
    return [f"{name:<18}{text}" for name, text in rows]


def _equality(audit: Audit) -> str:
    if not audit.differences:
        return "outputs, gradients, parameters, buffers and random numbers, to the last bit"
    label = max(audit.differences, key=lambda name: audit.differences[name] or 0.0)
    size = audit.differences[label]
    by = "is missing" if size is None else f"differs by up to {size:.3g}"
    where = f", first in {audit.arises_in}" if audit.arises_in else ""
    return f"no: {label} {by}{where}; {len(audit.differences)} differ in all"
