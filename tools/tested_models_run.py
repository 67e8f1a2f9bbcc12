"""What regions and a plan make of one model: equal gradients, promised and measured peaks, or the refusal."""

from __future__ import annotations

import gc
import inspect
import math
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ackpt

#: The budget, as a fraction of the baseline's dynamic peak. If it is infeasible, the budget is halfway between the
#: smallest feasible one and the baseline's peak.
SHARE = 0.8
REFUSALS = (ackpt.CheckpointError, ackpt.TraceError, ackpt.BudgetError, ackpt.PlanError, ackpt.ScheduleError)
Build = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


class NotBuilt(Exception):
    """A model whose own step fails, or that gives other gradients when it is run again: there is nothing to compare."""


class WithLoss(nn.Module):
    """A model that returns no loss, with one: the mean square of its outputs, summed."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        outputs = self.model(*args, **kwargs)
        tensors = [x for x in pytree.tree_leaves(_plain(outputs)) if isinstance(x, Tensor) and x.requires_grad]
        return torch.stack([x.float().square().mean() for x in tensors]).sum()


@dataclass(frozen=True)
class Results:
    """What a step leaves behind."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def difference(self, other: Results) -> float:
        """The largest difference relative to the largest element of all gradients, or of the loss or buffer that
        differs; 0.0 only if all bits are equal."""
        if [*self.gradients] != [*other.gradients]:
            return float("inf")
        scale = max((each.abs().max().item() for each in self.gradients.values() if each.numel()), default=0.0)
        gradients = [_difference(mine, other.gradients[name], scale) for name, mine in self.gradients.items()]
        mine, theirs = [self.loss, *self.buffers.values()], [other.loss, *other.buffers.values()]
        return max(
            [
                *gradients,
                *(
                    _difference(a, b, a.double().abs().max().item())
                    for a, b in zip(mine, theirs, strict=True)
                    if a.numel()
                ),
            ]
        )


def record(build: Build) -> dict[str, Any]:
    """The entry of a model; `build` returns the same ``(model, args, kwargs)`` every time. NotBuilt: see there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fresh = _with_loss(build)
        try:
            expected = _results(*fresh())
            difference = _difference_of(expected, _results(*fresh()))
        except Exception as error:
            raise NotBuilt(f"{type(error).__name__}: {_first_line(error)}") from error
        if difference != 0.0:
            raise NotBuilt("the model's own step gives other gradients when it is repeated")
        parameters = sum(each.numel() for each in fresh()[0].parameters())
        return {"parameters": parameters, "regions": _regions(fresh, expected), "plan": _plan(fresh, expected)}


def _regions(fresh: Build, expected: list[Results]) -> dict[str, Any]:
    model, args, kwargs = fresh()
    try:
        try:
            regions = ackpt.apply_activation_checkpointing(model)
        except ValueError:  # no repeated blocks
            chosen = {id(each) for each in _parts(model)}
            regions = ackpt.apply_activation_checkpointing(model, lambda module: id(module) in chosen)
        difference = _difference_of(expected, _results(model, args, kwargs))
    except Exception as error:
        return _failure(error)
    return {**_compared(difference), "regions": len(regions)}


def _parts(model: nn.Module) -> list[nn.Module]:
    """The modules directly below the model that it calls, or those below the only one."""
    below = [each for each in _called(model) if next(each.parameters(), None) is not None]
    return _parts(below[0]) if len(below) == 1 and [*below[0].children()] else below or [model]


def _called(model: nn.Module) -> list[nn.Module]:
    """The children; those of a list in its place, because a list is not called."""
    found: list[nn.Module] = []
    for each in model.children():
        found += _called(each) if isinstance(each, (nn.ModuleList, nn.ModuleDict)) else [each]
    return found


def _plan(fresh: Build, expected: list[Results]) -> dict[str, Any]:
    model, args, kwargs = fresh()
    baseline = _peak(model, args, kwargs)
    try:
        with tempfile.TemporaryDirectory() as cache:  # a second call captures again, but does not search again
            return _planned(fresh, expected, baseline, cache)
    except Exception as error:
        return _failure(error)


def _planned(fresh: Build, expected: list[Results], baseline: int, cache: str) -> dict[str, Any]:
    model, args, kwargs = fresh()
    start = time.process_time()
    try:
        step = ackpt.apply_budget(model, kwargs or args, SHARE, cache=cache)
        seconds = time.process_time() - start
        found = _results(model, args, kwargs)  # the first step of planned regions may find the budget infeasible
    except ackpt.BudgetError as error:
        if error.least_bytes is None:
            raise
        model, args, kwargs = fresh()
        budget = max(error.least_bytes, (error.least_bytes + baseline) // 2)
        step = ackpt.apply_budget(model, kwargs or args, budget, cache=cache)
        seconds = time.process_time() - start
        found = _results(model, args, kwargs)
    model.zero_grad()
    measured = _peak(model, args, kwargs)
    plan = step.plan
    in_parts = not isinstance(plan, ackpt.Plan)
    return {
        **_compared(_difference_of(expected, found)),
        "in_parts": _first_line(plan.note) if in_parts else None,
        "promised_bytes": plan.peak_bytes,
        "measured_bytes": measured,
        "baseline_bytes": baseline,
        "seconds": round(seconds, 1),
    }


def _compared(difference: float) -> dict[str, Any]:
    """The difference is None where tensors are missing, have another shape or are not finite."""
    outcome = "equal" if difference == 0.0 else "different"
    return {"outcome": outcome, "difference": difference if math.isfinite(difference) else None}


def _failure(error: Exception) -> dict[str, Any]:
    outcome = "refused" if isinstance(error, REFUSALS) else "crash"
    if outcome == "crash":
        traceback.print_exception(error)
    return {"outcome": outcome, "error": type(error).__name__, "message": _first_line(error)}


def _first_line(error: object) -> str:
    """Without the folders of this machine from which Python imports."""
    text = next(iter(str(error).strip().splitlines()), "")
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        text = text.replace(folder + "/", "")
    return text


def _with_loss(build: Build) -> Build:
    def bare() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        _seed(0)
        model, args, kwargs = build()
        if args and kwargs:
            args, kwargs = (), inspect.signature(model.forward).bind(*args, **kwargs).arguments
        return model.train(), args, kwargs

    def wrapped() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        model, args, kwargs = bare()
        return WithLoss(model), args, kwargs

    try:
        model, args, kwargs = bare()
        return bare if _loss(model(*args, **kwargs)) is not None else wrapped
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {_first_line(error)}") from error


def _results(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Results]:
    """Of two steps: the first plans regions, and may set attributes that the model reads."""
    return [_result(model, args, kwargs) for _ in range(2)]


def _result(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Results:
    model.zero_grad()
    loss = _step(model, args, kwargs)
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return Results(loss, gradients, {name: each.clone() for name, each in model.named_buffers()})


def _difference_of(expected: list[Results], found: list[Results]) -> float:
    return max(one.difference(other) for one, other in zip(expected, found, strict=True))


def _peak(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The measured peak of a step, bytes, with resident ones."""
    gc.collect()
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    step = partial(_step, model, args, kwargs)
    return ackpt.measure(step, "cpu", resident=[model, *inputs], warmup=0, repeats=0).peak_bytes


def _step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Forward and backward with the same random numbers every time; returns the loss."""
    _seed(1)
    loss = _loss(model(*args, **kwargs))
    assert loss is not None
    loss.backward()
    return loss.detach()


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (SpecAugment in transformers draws from it)
    random.seed(seed)


def _loss(outputs: Any) -> Tensor | None:
    loss = outputs if isinstance(outputs, Tensor) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad else None


def _plain(outputs: Any) -> Any:
    """Outputs of a library's own class as a dict."""
    return dict(vars(outputs)) if hasattr(outputs, "__dataclass_fields__") else outputs


def _difference(a: Tensor, b: Tensor, scale: float) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.numel() or bool(((a == b) | (a.isnan() & b.isnan())).all()):
        return 0.0
    difference = (a.double() - b.double()).abs().max().item() / (scale or 1.0)
    return difference if math.isfinite(difference) else float("inf")
