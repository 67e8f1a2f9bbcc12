"""How a variant of a model ends: equal to the unmodified one, refused by a clear error, or a finding."""

import gc
import linecache
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import ackpt
from ackpt.core.errors import BudgetError, CheckpointError, OffloadError
from ackpt.planner.parts.regions_plan import RegionsPlan

from .model import Spec
from .training import Run, measured_peak, train
from .variants import Variant, plain, variants

EQUAL, REGROUPED, REFUSED, ANNOUNCED, FINDING = "equal", "regrouped", "refused", "announced", "finding"
_PACKAGE = str(Path(ackpt.__file__).parent)
_OWN_ERRORS = (BudgetError, CheckpointError, OffloadError)
_ANNOUNCES = ("bit-equal", "differ", "values of tensors")


@dataclass(frozen=True)
class Outcome:
    """What a variant ended in, in words: an error, the first difference, or the bytes of a peak.

    ``regrouped``: gradients differ in the last bits where a tensor is used three times or more, so that a region adds
    its gradients in another order, or a plan those of two forwards or of a use outside of it, as documented.
    ``announced``: different, but a warning has said so.
    """

    variant: str
    kind: str
    text: str = ""


def check(spec: Spec, only: str | None = None) -> list[Outcome] | None:
    """The outcomes of all variants, or of the one named `only`; None if the unmodified model fails."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            expected = train(spec, plain)
            again = train(spec, plain)
        except Exception:  # what eager refuses is no model
            return None
        if difference(expected, again) is not None:
            return None
    cached = _Baseline(spec)
    outcomes = []
    for variant in variants(spec):
        if only in (None, variant.name):
            try:
                outcomes.append(_outcome(spec, variant, expected, cached))
            except _CannotBeMeasured:
                return None
            gc.collect()
    return outcomes


def _outcome(spec: Spec, variant: Variant, expected: Run, baseline: Callable[[], int]) -> Outcome:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run = train(spec, variant.prepare)
        except Exception as error:
            return Outcome(variant.name, REFUSED if is_clear(error) else FINDING, in_words(error))
    text = difference(expected, run, inside=not variant.recomputes)
    if text is not None:
        said = _said(caught)
        if said:
            return Outcome(variant.name, ANNOUNCED, f"{text}; {said[0]}")
        tolerance = _documented(spec, variant, expected)
        if tolerance and difference(expected, run, not variant.recomputes, tolerance) is None:
            return Outcome(variant.name, REGROUPED, text)
        return Outcome(variant.name, FINDING, text)
    if variant.plans:
        try:
            text = _peak_beyond(spec, variant, baseline)
        except BudgetError as error:  # a step that keeps more of the one before than the first step did
            return Outcome(variant.name, REFUSED, in_words(error))
        except Exception as error:
            baseline()
            return Outcome(variant.name, FINDING, in_words(error))
        if text is not None:
            return Outcome(variant.name, FINDING, text)
    return Outcome(variant.name, EQUAL)


class _CannotBeMeasured(Exception):
    """The unmodified model fails in a second step with nothing between the steps."""


class _Baseline:
    """The peak of the unmodified model, measured when it is first asked for."""

    def __init__(self, spec: Spec):
        self.spec, self.peak = spec, None

    def __call__(self) -> int:
        if self.peak is None:
            try:
                self.peak, _ = measured_peak(self.spec, plain)
            except Exception as error:
                raise _CannotBeMeasured from error
        return self.peak


def _documented(spec: Spec, variant: Variant, expected: Run) -> float:
    """The largest documented difference, relative to the largest element: that of another order of sums, or of one
    rounding where regions share a weight under autocast; 0 if results must be equal."""
    if not (variant.recomputes or variant.plans and (spec.accumulates or spec.penalty)):
        return 0.0
    names = set(spec.names())
    in_bfloat16 = spec.autocast or "Autocast" in names
    shares = variant.recomputes and in_bfloat16 and (spec.tied or names & {"SharedWeights", "CalledTwice"})
    if not shares and expected.most_uses <= 2:
        return 0.0
    return 2.0**-7 if in_bfloat16 else 1e-5


def _said(caught) -> list[str]:
    """Of the warnings, those that announce a difference."""
    return [str(each.message) for each in caught if any(word in str(each.message) for word in _ANNOUNCES)]


def _peak_beyond(spec: Spec, variant: Variant, baseline) -> str | None:
    """How a planned step takes more bytes than its plan or its budget says; None if it does not."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            measured, call = measured_peak(spec, variant.prepare)
        except ackpt.MeterError:  # planned again while it was measured, a model captured as compiled measures itself
            return None
        promised = call.plan.dynamic_peak_bytes
        if "is not counted" in (call.plan.note or ""):  # the temporary memory of custom operations in Python
            return None
        if measured > promised:
            return f"peak: {measured} bytes measured, {promised} planned"
        if variant.budget is None or call.plan.limit_bytes is None or _said(caught):
            return None
        if promised > call.plan.limit_bytes:
            return f"peak: {promised} bytes planned, at most {call.plan.limit_bytes} keep the budget"
        if isinstance(call.plan, RegionsPlan):  # of whose baseline, an upper bound, a fraction is
            return None
        asked = int(variant.budget * call.plan.baseline_dynamic_peak_bytes)
        if abs(call.plan.limit_bytes - asked) <= 1 and measured > variant.budget * baseline():
            share = measured / baseline()
            return f"peak: {measured} bytes measured, {share:.3f} of the {baseline()} bytes of the unmodified model"
    return None


def is_clear(error: BaseException) -> bool:
    """Whether the package has raised an error itself: one of its classes, or by a ``raise`` in its files."""
    if isinstance(error, (*_OWN_ERRORS, ackpt.PlanError, ackpt.TraceError)):
        return True
    if not isinstance(error, (RuntimeError, TypeError, ValueError)):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0)
    return last.filename.startswith(_PACKAGE) and line.strip().startswith("raise ")


def in_words(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {' '.join(str(error).split())[:400]}"


def difference(expected: Run, actual: Run, inside: bool = True, tolerance: float = 0.0) -> str | None:
    """The first difference between two runs in words; None if there is none.

    `inside`: whether plain values in lists and dicts of modules count. `tolerance`: by how much floating-point tensors
    may differ, relative to their largest element; the steps after the first that differs are then not compared, as they
    begin with other parameters.
    """
    for step, (one, other) in enumerate(zip(expected.records, actual.records)):
        differs = False
        for name in {**one, **other}:
            if name.startswith("inside") and not inside:
                continue
            if name not in one or name not in other:
                return f"step {step}: {name} is there {'before' if name in one else 'now'} only"
            text = _differing(one[name], other[name])
            if text is not None and not _is_close(one[name], other[name], tolerance):
                return f"step {step}: {name}: {text}"
            differs |= text is not None
        if differs:
            break
    return None


def _is_close(one, other, tolerance: float) -> bool:
    if not tolerance or not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point():
        return False
    largest = one.double().abs().nan_to_num().max().item()
    return torch.allclose(one.double(), other.double(), rtol=0.0, atol=tolerance * max(1.0, largest), equal_nan=True)


def _differing(one, other) -> str | None:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        if type(one) is type(other) and one == other:
            return None
        said = f"{one!r} and {other!r}"
        return said if len(said) < 200 and not isinstance(one, list) else "not the same"
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{list(one.shape)} {one.dtype} and {list(other.shape)} {other.dtype}"
    if (
        torch.equal(one, other)
        or torch.equal(one.nan_to_num(), other.nan_to_num())
        and torch.equal(one.isnan(), other.isnan())
    ):
        return None
    most = (one.double() - other.double()).abs().max().item() if not one.is_complex() else "complex"
    return f"differs by {most:.3g} of {one.double().abs().max().item():.3g}"
