"""`ackpt.audit`: whether the checkpointing and offload of a step is right, has an effect, and what it costs.

The step runs as it is, and with every known kind of checkpointing and offload made a plain call, each time from the
same state. `audit_runs` runs and watches it, `audit_findings` compares.
"""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ackpt.core.errors import BudgetError
from ackpt.core.progress import about, stage
from ackpt.metering import cpu_meter, cuda_meter
from ackpt.metering.flops import UncountedFlops, count_flops
from ackpt.metering.meter import Measurement, Seconds, measure, memory_format
from ackpt.metering.resident import Item, storages_of
from ackpt.planner.capture.inspection.calls import call_arguments
from ackpt.planner.capture.outputs import without_gradient
from ackpt.planner.capture.short_names import modules_text, pattern, short_source
from ackpt.planner.capture.tracing import trace
from ackpt.planner.choose import default_profile, plan_by_policy
from ackpt.planner.policies import auto
from ackpt.planner.policies.search.frontier import baseline_cost, frontier, thinned
from ackpt.planner.request import Request
from ackpt.planner.schedule.plan import Plan
from ackpt.planner.step.planned_step import PlannedStep, in_place_of, without_budget

from .audit_findings import (
    Finding,
    Seen,
    arises_in,
    findings,
    is_too_small,
    not_covered,
    outside_of_regions,
    saved_bytes,
    text_of,
)
from .audit_runs import AuditedRegion, SavedOutside, Undo, Watch, intercepted, named_modules, same
from .print_saved import referred

_LARGEST = 8  # lines of each list
_MISSING: Any = object()
_UNKNOWN = "an unknown kind of checkpointing"


@dataclass(frozen=True, repr=False)
class Audit:
    """The result of `ackpt.audit`; ``print(audit)`` shows it, and ``audit.ok`` says that there are no findings.

    ``differences``: the largest absolute difference to the baseline, the step without checkpointing and offload, by
    what differs, such as ``"gradient blocks.0.weight"``: None for a missing gradient, infinity for what is no tensor;
    empty if all bits are equal. ``arises_in``: the first module with another result. ``measured``: the step as it is,
    None if it fails. ``saved_bytes`` and ``baseline_saved_bytes``: activations that are live when backward begins.
    ``regions``: all, each followed by those inside it. ``not_regions``: repeated blocks that are no regions, although
    others are. ``saved_outside``: of regions, the largest first. ``offloaded_bytes`` and ``reloaded_bytes``: by hooks
    on saved tensors. ``flops``: of the baseline, ``recompute_flops``: those that the step has in addition; None if
    they cannot be counted. ``plan``: what `ackpt.apply_budget` would do with the measured peak as its budget; None
    for the reason in ``no_plan``. ``curve``: peak in bytes and modeled cost of up to three plans, the cheapest first.
    ``notes``: what could not be restored, repeated or recognized.

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
    curve: tuple[tuple[int, float], ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    def __repr__(self) -> str:
        return "\n".join(f"{name:<16}{text}" for name, text in _rows(self))


def audit(
    step: nn.Module | Callable[[], object],
    batch: Any = _MISSING,
    *,
    resident: Iterable[Item] = (),
    compare_budget: bool = True,
    **inputs: Any,
) -> Audit:
    """Run a training step with and without its checkpointing and offload, and report what is wrong with them.

    Args:
        step: a model, whose step is its forward on `batch` and the backward of its loss; or a function without
            arguments that runs one step of your own loop.
        batch: for a model, its inputs: a dict of keyword arguments, a tuple or list of positional ones, or one tensor.
        resident: for a function, the modules and optimizers that it trains, as in `ackpt.measure`; those that its code
            refers to are found.
        compare_budget: for a model, whether to plan the step with the measured peak as its budget.
        inputs: refused, with the way to write them as a batch.

    Raises:
        TypeError, ValueError: for invalid arguments, for a step without backward, and for a model that
            ``torch.compile`` has compiled. Errors of the step itself are raised as they are.

    The step runs about eleven times. From copies in host memory, every run starts with the same parameters, buffers,
    gradients, optimizer state, attributes of modules, random numbers (torch, ``random``, numpy), and objects with a
    ``state_dict`` that the step refers to; afterwards all are as before. Recognized are ``torch.utils.checkpoint`` in
    both variants, all that is built on it (transformers, FSDP's wrapper, accelerate, Lightning, timm), hooks on saved
    tensors (``save_on_cpu``, ``OffloadActivations`` of TRL and torchtune), and this package's regions, offload and
    plans.

    Example:
        >>> import torch, ackpt
        >>> from torch.utils.checkpoint import checkpoint
        >>> class Net(torch.nn.Sequential):
        ...     def forward(self, x):
        ...         return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False).sum()
        >>> model = Net(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> ackpt.audit(model, torch.ones(4, 8)).findings[0].kind
        'random'
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError("audit() was called inside hooks on saved tensors: enter them inside the step instead")
    if inputs:
        written = ", ".join(f"{name!r}: {name}" for name in inputs)
        raise TypeError(f"audit() takes the inputs of a model as one batch: audit(model, {{{written}}})")
    model, modules, given = _checked(step, batch, resident)
    call = None if model is None else (model, *call_arguments(batch))
    with warnings.catch_warnings(), about("audit"):
        warnings.simplefilter("ignore")
        if call is None:
            return _audited(step, modules, given, call, compare_budget)
        said: list[str] = []
        result = _audited(lambda: said.append(_train(*call)), modules, given, call, compare_budget)
        return replace(result, notes=(*result.notes, *filter(None, said[:1])))


def _checked(step, batch, resident) -> tuple[nn.Module | None, dict[str, nn.Module], list[tuple[str, Any]]]:
    """The model if `step` is one, the outermost modules by a prefix of their paths, and the other resident items."""
    model = step if isinstance(step, nn.Module) else None
    if isinstance(resident, (nn.Module, torch.optim.Optimizer, torch.Tensor)):
        raise TypeError("resident must be an iterable of modules, optimizers and tensors, such as (model, optimizer)")
    if not callable(step):
        raise TypeError(f"audit() takes a model and a batch, or a function that runs a step, got {type(step).__name__}")
    if model is not None and batch is _MISSING:
        raise TypeError("audit(model) needs a batch: audit(model, batch), or a function that runs a step: audit(step)")
    if model is None and batch is not _MISSING:
        raise TypeError("a step takes no batch: audit(step, resident=[model, optimizer]), or audit(model, batch)")
    items = [*resident, *(leaf for leaf in tree_leaves(None if model is None else call_arguments(batch)))]
    held = [*items, *((value for _, value in referred(step)) if model is None else (model,))]
    roots = [o._ackpt_variants.model if isinstance(o, PlannedStep) else o for o in held if isinstance(o, nn.Module)]
    inner = {id(module) for root in roots for module in [*root.modules()][1:]}
    roots = [*{id(root): root for root in roots if id(root) not in inner}.values()]
    if not roots:
        raise ValueError("audit(step) found no model in the step's code: name it, as in resident=[model, optimizer]")
    for module in (module for root in roots for module in root.modules()):
        if hasattr(module, "_torchdynamo_orig_callable") or (module._compiled_call_impl and not in_place_of(module)):
            raise TypeError("audit() sees eager code only: pass the model from before torch.compile")
    names = [""] if len(roots) == 1 else [f"{type(root).__name__}_{number}" for number, root in enumerate(roots)]
    tensors = [item for item in items if isinstance(item, (torch.Tensor, torch.optim.Optimizer))]
    return model, dict(zip(names, roots)), [(f"input {number}", item) for number, item in enumerate(tensors)]


def _train(model, args, kwargs) -> str:
    """Run the forward, and the backward of the loss, or else of all outputs that require grad; a note on the latter."""
    outputs = [leaf for leaf in tree_leaves(model(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    dropped = without_gradient(outputs, "loss")
    outputs = [t for index, t in enumerate(outputs) if index not in dropped and t.requires_grad]
    # Different elements: the gradient of a plain sum through a normalization is zero.
    numbers = (torch.arange(t.numel(), device=t.device, dtype=torch.float32).cos_() for t in outputs)
    gradients = [None if not t.dim() else each.to(t.dtype).view(t.shape) for t, each in zip(outputs, numbers)]
    if outputs:
        torch.autograd.backward(outputs, gradients)
    if len(outputs) == 1 and not outputs[0].dim():
        return ""
    shapes = ", ".join(str(list(each.shape)) for each in outputs)
    return (
        f"the model returns no single loss, so all outputs that require grad are differentiated, of shapes {shapes}, "
        "with fixed gradients; if it computes a loss from labels or the like, add them to the batch"
    )


def _audited(step, modules, given, call, compare_budget) -> Audit:
    undo = Undo(step if call is None else modules[""], modules, given)
    names = {id(module): path for path, module in named_modules(modules)}
    own = frozenset(storage._cdata for tensor in undo.named.values() for storage in storages_of(tensor))
    is_sharded = any(hasattr(tensor, "_local_tensor") for tensor in undo.named.values())  # the meter sees its part
    parts = [getattr(tensor, "_local_tensor", tensor) for tensor in undo.named.values()]
    resident = parts if is_sharded else [*modules.values(), *(o for o, *_ in undo.optimizers), *dict(given).values()]

    def observed(neutral: bool) -> tuple[Watch, dict[str, Any], Exception | None]:
        stage("running the step without its checkpointing" if neutral else "running the step")
        watch, error = Watch(names, neutral, own), None
        try:
            with watch.watching():
                step()
        except Exception as raised:
            error = raised.with_traceback(None)
        values = undo.values() | {f"output {number}": output for number, output in enumerate(watch.outputs)}
        undo.restore()
        return watch, values, error

    def metered(neutral: bool) -> tuple[Measurement, int | None]:
        with intercepted(Watch({}, True, quiet=True)) if neutral else contextlib.nullcontext():
            gc.collect()  # what is freed during the step must be the step's
            measured, flops, samples = measure(step, resident=resident, warmup=0, repeats=0), None, []
            undo.restore()
            device = torch.device(measured.device)
            for _ in range(2):
                samples.append((cuda_meter if device.type == "cuda" else cpu_meter).clock(step, device))
                undo.restore()
            measured = replace(measured, seconds=Seconds.of(samples))
            stage("counting FLOPs")
            with contextlib.suppress(UncountedFlops):
                flops = count_flops(step)
        undo.restore()
        return measured, flops

    try:
        plain, expected, failure = observed(neutral=True)
        if failure is not None:  # the step itself is wrong
            raise failure
        watch, values, error = observed(neutral=False)
        differences = {} if error else _differences(values, expected)
        noise = _differences(observed(neutral=True)[1], expected) if differences else {}
        differences = {k: size for k, size in differences.items() if (size or 0.0) > 10 * (noise.get(k, -1.0) or 0.0)}
        baseline, flops = metered(neutral=True)
        measured, all_flops = (None, None) if error else metered(neutral=False)
    finally:
        undo.restore()
    if baseline.timeline.boundary is None:
        raise ValueError("the step runs no backward: audit a training step, with gradients on")
    said = "" if error is None else str(error).strip().partition("\n")[0] or type(error).__name__
    seen = Seen(modules, watch, plain, differences, said, measured, baseline)
    plan, no_plan, curve = None, "only audit(model, batch) plans, not audit(step)" if call is None else "", ()
    if call is not None and measured is not None and compare_budget:
        plan, no_plan, curve = _planned(call, measured.peak_bytes)
    notes = [f"not restored: {words}" for words in undo.left()]
    notes += [f"differs between two equal runs of the step: {label}" for label in sorted(noise)[:1]]
    notes += [f"{_UNKNOWN} recomputes {modules_text(plain.unknown)}"] * bool(plain.unknown)
    found = findings(seen)
    for region in seen.regions:  # nothing of the step is kept
        region.facts = None
    return Audit(
        name=" and ".join(type(root).__name__ for root in modules.values()),
        findings=found,
        differences=differences,
        arises_in=arises_in(seen) if differences else "",
        measured=measured,
        baseline=baseline,
        saved_bytes=None if measured is None else saved_bytes(measured),
        baseline_saved_bytes=saved_bytes(baseline),
        regions=tuple(seen.regions),
        not_regions=tuple(block for blocks in not_covered(seen) for block in blocks),
        saved_outside=tuple(outside_of_regions(seen)),
        offloaded_bytes=sum(context.moved for context in watch.contexts.values()),
        reloaded_bytes=sum(context.loaded for context in watch.contexts.values()),
        flops=flops,
        recompute_flops=None if flops is None or all_flops is None else max(0, all_flops - flops),
        plan=plan,
        no_plan=no_plan,
        curve=curve,
        notes=tuple(notes),
    )


def _differences(values: dict[str, Any], expected: dict[str, Any]) -> dict[str, float | None]:
    """The largest absolute difference by label, of what is not equal bit for bit."""
    found: dict[str, float | None] = {}
    for label in {**expected, **values}:
        value, other = values.get(label), expected.get(label)
        if not (isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)):
            if label not in values or value != other:
                is_missing = label not in values and label.startswith("gradient ")
                found[label] = None if is_missing else float("inf")
        elif value.shape != other.shape:
            found[label] = float("inf")
        elif not same(value, other):
            wide = torch.complex128 if value.is_complex() else torch.float64
            found[label] = (value.to(wide) - other.to(wide)).abs().nan_to_num(float("inf")).max().item()
    return found


def _planned(call, peak_bytes: int) -> tuple[Plan | None, str, tuple[tuple[int, float], ...]]:
    """The plan for the same peak, or the reason why it could not be made, and the curve of an `Audit`."""
    model, args, kwargs = call
    model = model._ackpt_variants.model if isinstance(model, PlannedStep) else model
    curve: tuple[tuple[int, float], ...] = ()
    try:
        with intercepted(Watch({}, True, quiet=True)), without_budget(model):
            graph = trace(model, *args, **kwargs)
        profile = default_profile(graph)
        whole, points = baseline_cost(graph, profile), thinned(frontier(graph, profile, auto.candidates), 3)
        curve = tuple((point.peak_bytes + graph.resident_bytes, point.cost / whole) for point in points)
        return plan_by_policy(graph, Request(peak_bytes), profile), "", curve
    except BudgetError as error:
        least = "unknown" if error.least_bytes is None else memory_format(error.least_bytes)
        return None, f"the smallest feasible budget is {least}", curve
    except Exception as error:
        return None, str(error).partition("\n")[0], curve


def _rows(audit: Audit) -> list[tuple[str, str]]:
    """The text of an audit, as lines with a name each."""
    count, baseline, measured = len(audit.findings), audit.baseline, audit.measured
    summary = f"{count or 'no'} finding{'s' * (count != 1)}"
    if not (count or audit.regions or audit.offloaded_bytes or any(_UNKNOWN in note for note in audit.notes)):
        summary = "no checkpointing found"
    rows = [("audit", f"{audit.name}: {summary}")]
    rows += [(finding.kind, f"{finding.message}\n{'':<16}fix: {finding.fix}") for finding in audit.findings]
    if measured is not None and audit.saved_bytes is not None:
        change = measured.peak_bytes / max(1, baseline.peak_bytes) - 1
        saved, baseline_saved = memory_format(audit.saved_bytes), memory_format(audit.baseline_saved_bytes)
        peaks = f"{memory_format(measured.peak_bytes)}, baseline {memory_format(baseline.peak_bytes)} ({change:+.1%})"
        rows += [("equal", _equality(audit)), ("peak", peaks), ("saved", f"{saved}, baseline {baseline_saved}")]
        longer = measured.seconds.median / baseline.seconds.median - 1 if measured.seconds and baseline.seconds else 0.0
        rows += [("step time", f"{_seconds(measured)}, baseline {_seconds(baseline)} ({longer:+.0%}), measured")]
    if audit.recompute_flops is not None and audit.flops:
        share = f"{audit.recompute_flops / 1e9:.3g} GFLOP, {audit.recompute_flops / audit.flops:.1%} of the baseline's"
        rows += [("recomputed", share)]
    if audit.offloaded_bytes or audit.reloaded_bytes:
        loaded = memory_format(audit.reloaded_bytes)
        rows += [("offloaded", f"{memory_format(audit.offloaded_bytes)}, reloaded {loaded}")]
    groups: dict[tuple, list[str]] = {}
    for each in audit.regions:
        sizes = each.saved_bytes, each.dropped_bytes, each.recomputations
        groups.setdefault((pattern(text_of(each)), each.kind, *sizes), []).append(text_of(each))
    for (_, kind, saved, dropped, times), names in [*groups.items()][:_LARGEST]:
        again = {0: "is not recomputed", 1: f"recomputes {memory_format(dropped)}"}
        again = again.get(times, f"{again[1]} {times} times")
        sizes = f"saves {memory_format(saved)}, {again}{' each' * (len(names) > 1)}"
        rows += [("region", f"{modules_text(names)} ({kind}): {sizes}")]
    rows += [] if audit.regions else [("region", "none: nothing in this step runs under checkpointing")]
    if is_too_small(audit.regions):
        rows += [("effect", "not judged: the regions save little more than their copies of the random number state")]
    rows += [("no region", modules_text(audit.not_regions))] * bool(audit.not_regions)
    for each in audit.saved_outside[:_LARGEST] if audit.regions else ():
        source = f", {short_source(each.source)}" if each.source else ""
        of = each.module or "the model itself"
        rows += [("saved outside", f"{memory_format(each.bytes)}  {each.tensor} of {of}{source}")]
    if audit.plan is not None:
        plan = audit.plan
        share = plan.recompute_flops / max(1, plan.flops - plan.recompute_flops)
        text = f"peak {memory_format(plan.peak_bytes)}, recomputes {share:.1%} of the FLOPs, added time {plan.cost:.1%}"
        rows += [("apply_budget", text)]
    elif audit.no_plan:
        rows += [("apply_budget", f"not computed: {audit.no_plan}")]
    if audit.curve:
        plans = ", ".join(f"{memory_format(peak)} at {cost:+.1%}" for peak, cost in audit.curve)
        rows += [("plans", f"peak and added time: {plans}")]
    rows += [("without", f"peak {memory_format(baseline.peak_bytes)}, {_seconds(baseline)}: no checkpointing at all")]
    return rows + [("note", note) for note in audit.notes]


def _seconds(measured: Measurement) -> str:
    return "unknown time" if measured.seconds is None else f"{measured.seconds.median:.3g} s"


def _equality(audit: Audit) -> str:
    if not audit.differences:
        return "outputs, gradients, parameters, buffers and random numbers, to the last bit"
    sizes = {label: -1.0 if size == float("inf") else size or 0.0 for label, size in audit.differences.items()}
    label = max(sizes, key=sizes.__getitem__)
    by = {0.0: "is missing", -1.0: "differs"}.get(sizes[label], f"differs by up to {sizes[label]:.3g}")
    where = f", first in {audit.arises_in}" if audit.arises_in else ""
    many = len(audit.differences) > 1
    return f"no, {len(audit.differences)} value{'s' * many} differ{'s' * (not many)}: {label} {by}{where}"
