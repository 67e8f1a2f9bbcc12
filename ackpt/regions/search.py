"""Measure combinations of regions and planned modules in real steps, and find the cheapest one within a limit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ackpt.errors import BudgetError, CheckpointError
from ackpt.metering.meter import Measurement

from .calls import PlannedCall, installed
from .ladder import PLANNED, REGION, Choices, Combination, Option, every, ladder
from .live_bytes import LiveBytes
from .measured_step import MeasuredStep
from .parts import Parts
from .saved_bytes import SavedBytes
from .step_profile import Unit

_DRAWS = 4  # more steps to measure, with other random numbers, of a model that draws some
_EVEN = 8  # combinations to measure if the one that saves the fewest bytes exceeds the budget
_SMALLEST = 1000  # an option that saves less than this fraction of all saved bytes is not tried


class Measured(NamedTuple):
    """A combination, its measured step, and the most bytes that autograd saved in it."""

    combination: Combination
    measurement: Measurement
    dynamic_bytes: int
    saved_bytes: int


def seeds(step: MeasuredStep) -> Sequence[int | None]:
    """The random numbers with which the step is measured: the present ones, and others if it draws any."""
    return (None, *range(_DRAWS)) if step.draws else (None,)


class _Refused(Exception):
    """A combination whose step raises an error."""

    def __init__(self, combination: Combination, error: Exception):
        super().__init__()
        self.combination, self.error = combination, error


class Search:
    """Measures combinations of one step, each once, and finds the cheapest one within a limit.

    Args:
        step: with the example batch.
        choices: of its modules.
        calls: the replacements that run for the modules of a combination.
        optimizer_step_bytes: that the optimizer's step takes in addition to gradients.
        counts_live: whether later forwards run under `LiveBytes`, as those of the search then do, too: under a mode,
            some operations of torch make other copies.
    """

    def __init__(
        self,
        step: MeasuredStep,
        choices: Choices,
        calls: Callable[[Combination], dict[nn.Module, Callable]],
        optimizer_step_bytes: int,
        counts_live: bool,
    ):
        self.step, self.choices, self.calls = step, choices, calls
        self._optimizer_step_bytes = optimizer_step_bytes
        self._counts_live = counts_live
        self._combinations = ladder(choices)
        self._measured: dict[int, Measured | None] = {}

    def dynamic_bytes(self, measurement: Measurement) -> int:
        """The dynamic peak of forward, backward and the optimizer's step."""
        after = measurement.timeline.live[-1] + self._optimizer_step_bytes if self._optimizer_step_bytes else 0
        return max(measurement.dynamic_peak_bytes, after)

    def measured(self, combination: Combination) -> Measured:
        calls = self.calls(combination)
        if any(isinstance(call, PlannedCall) for call in calls.values()):
            with self.step.undone():
                self.step.run(lambda: self._counting(calls, SavedBytes(self.step.tensors)))  # captures
        runs = []
        for seed in seeds(self.step):
            counter = SavedBytes(self.step.tensors)
            measurement = self.step.measured(lambda: self._counting(calls, counter), seed)  # noqa: B023
            runs.append(Measured(combination, measurement, self.dynamic_bytes(measurement), counter.most_bytes))
        largest = max(runs, key=lambda run: run.dynamic_bytes)
        return largest._replace(saved_bytes=max(run.saved_bytes for run in runs))

    def cheapest(self, limit: int | None) -> Measured:
        """The cheapest combination within the limit; if none fits, the one with the lowest peak."""
        while True:
            try:
                return self._cheapest(limit)
            except _Refused as refused:
                self._drop(refused)

    def _cheapest(self, limit: int | None) -> Measured:
        first = self._at(0)
        if first is not None and (limit is None or first.dynamic_bytes <= limit):
            return first
        low, high = 0, len(self._combinations) - 1
        if not self._is_within(high, limit):
            places = range(high, 0, -max(1, high // _EVEN))
            high = next((at for at in places if self._is_within(at, limit)), 0)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_within(middle, limit) else (middle, high)
        measured = [each for each in self._measured.values() if each is not None]
        if not measured:
            raise BudgetError("every way to run this step in parts runs out of memory: use smaller batches")
        chosen = self._measured[high] if high else None
        return chosen or min(measured, key=lambda each: each.dynamic_bytes)

    def _is_within(self, place: int, limit: int | None) -> bool:
        measured = self._at(place)
        return measured is not None and limit is not None and measured.dynamic_bytes <= limit

    def _at(self, place: int) -> Measured | None:
        """The measured combination; None if it runs out of memory."""
        if place not in self._measured:
            combination = self._combinations[place]
            try:
                self._measured[place] = unless_out_of_memory(lambda: self.measured(combination))
            except (CheckpointError, RuntimeError) as error:
                if not combination.options:
                    raise
                raise _Refused(combination, error) from error
        return self._measured[place]

    def _drop(self, refused: _Refused) -> None:
        """Drop the options that raise an error: a region that changes its input in place, for example."""
        raising: set[tuple[type, str]] = set()
        for path, option in refused.combination.options.items():
            kind = type(self.step.model.get_submodule(path)), option.fate
            if kind not in raising and self._raises(Combination(0, 0.0, {path: option})):
                raising.add(kind)
        if not raising:
            raise refused.error
        for choices in every(self.choices):
            kind = type(self.step.model.get_submodule(choices.path))
            choices.options = [option for option in choices.options if (kind, option.fate) not in raising]
        self._combinations, self._measured = ladder(self.choices), {0: self._measured[0]}

    @contextlib.contextmanager
    def _counting(self, calls: dict[nn.Module, Callable], counter: SavedBytes) -> Iterator[None]:
        live = LiveBytes().counting() if self._counts_live else contextlib.nullcontext()
        with installed(calls), counter.counting(), live:
            yield

    def _raises(self, combination: Combination) -> bool:
        calls = self.calls(combination)
        try:
            with self.step.undone():
                self.step.run(lambda: self._counting(calls, SavedBytes(self.step.tensors)))
        except (CheckpointError, RuntimeError):
            return True
        return False


def choices_of(root: Unit, parts: Parts, differing: set[Unit]) -> Choices:
    """The options of all units; those that are `differing` have none of their own."""
    return _choices(root, parts, differing, root.bytes // _SMALLEST)


def _choices(unit: Unit, parts: Parts, differing: set[Unit], smallest: int) -> Choices:
    options: list[Option] = []
    if unit.parent is not None and not unit.has_callers and unit not in differing:
        fewer = unit.bytes - unit.bytes_as_region
        if fewer > smallest:
            options.append(Option(REGION, fewer, unit.cost))
        for plan in parts.plans.get(unit, ()):
            if plan.bytes > smallest:
                options.append(Option(PLANNED, plan.bytes, plan.cost * unit.cost, plan.share))
    children = [_choices(child, parts, differing, smallest) for child in unit.children if not unit.has_callers]
    return Choices(unit.path, options, children, unit.bytes, unit.argument_bytes)


def unless_out_of_memory(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except torch.OutOfMemoryError:
        return None
