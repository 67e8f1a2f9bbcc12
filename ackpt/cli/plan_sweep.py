"""``ackpt plan --sweep``: one plan per size or device, and the largest size that fits, as text or plain data."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from ackpt.core.errors import BudgetError, did_you_mean
from ackpt.core.progress import about
from ackpt.metering.meter import memory_format
from ackpt.planner.workloads.planned_shapes import PlanConfig, Planned, run_plan
from ackpt.planner.workloads.step_request import training_step

from . import plan_text
from .command_line import UsageError

SIZES = {"batch_size": 1, "seq_len": 128, "image_size": 32}  # with the first values of --largest
DEVICE = "device_profile"


@dataclass(frozen=True)
class Sweep:
    """The option that changes, and its values; ``step``: of the sizes between them that are tried, too; 0: none.

    ``is_open``: the last value doubles while the step fits.
    """

    option: str
    values: tuple[int | str, ...]
    step: int = 0
    is_open: bool = False

    @classmethod
    def parsed(cls, text: str) -> Sweep:
        """``seq_len=1024:16384`` doubles to 16384, ``batch_size=1:`` while the step fits; ``4,8`` is a list."""
        option, equals, values = text.partition("=")
        option = option.replace("-", "_")
        if option not in (*SIZES, DEVICE) or not (equals and values):
            options = f"{', '.join(SIZES)} or {DEVICE}"
            raise UsageError(f"--sweep {text}: write {options}, =, and values{did_you_mean(option, (*SIZES, DEVICE))}")
        if option == DEVICE:
            return cls(option, tuple(values.split(",")))
        ends = values.split(":")
        if len(ends) == 2 and not ends[1] and ends[0].isdecimal() and int(ends[0]):
            return cls(option, (int(ends[0]),), int(ends[0]), is_open=True)
        try:
            numbers = [int(number) for number in (ends if len(ends) == 2 else values.split(","))]
        except ValueError:
            numbers = []
        if not numbers or min(numbers) < 1 or len(ends) == 2 and numbers[0] > numbers[1]:
            raise UsageError(f"--sweep {text}: write a range as in {option}=1:64, or numbers as in {option}=4,8,12")
        if len(ends) < 2:
            return cls(option, tuple(numbers))
        first, last = numbers
        doubled = [first << at for at in range((last // first).bit_length())]
        return cls(option, (*doubled, *([last] if last > doubled[-1] else [])), first)

    def changed(self, config: PlanConfig, value) -> PlanConfig:
        if self.option == DEVICE:
            return replace(config, device=value)
        return replace(config, step=replace(config.step, **{self.option: value}))


Rows = dict[int | str, Planned | BudgetError]


def run(config: PlanConfig, sweep: Sweep) -> Rows:
    """The plan for every value, or the error that refuses it, and those around the largest size that fits."""
    configs = {value: sweep.changed(config, value) for value in sweep.values}  # refuses unknown devices
    if sweep.option != DEVICE:
        training_step(configs[max(configs)].step)  # refuses a size before the first one is planned
    rows: Rows = {}

    def fits_with(value) -> bool:
        try:
            with about(f"{sweep.option.replace('_', ' ')} {value}"):
                rows[value] = run_plan(sweep.changed(config, value))
        except BudgetError as error:
            rows[value] = error
        return fits(rows[value])

    results = {value: fits_with(value) for value in sweep.values}
    with contextlib.suppress(ValueError):  # a sequence may be longer than the model's positions
        while sweep.is_open and results[largest := max(results)]:
            results[2 * largest] = fits_with(2 * largest)
    sizes = {value: fit for value, fit in results.items() if isinstance(value, int)}
    largest = max((value for value, fit in sizes.items() if fit), default=0)
    too_large = [value for value in sizes if value > largest]
    if sweep.step and largest and too_large:
        below, above = largest // sweep.step, -(-min(too_large) // sweep.step)
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (middle, above) if fits_with(middle * sweep.step) else (below, middle)
    return {value: rows[value] for value in (sorted(rows) if sweep.step else rows)}


def fits(row: Planned | BudgetError) -> bool:
    """Whether there is a plan, and it fits the device, if there is one."""
    return isinstance(row, Planned) and (row.memory is None or row.memory.fits)


def text(sweep: Sweep, rows: Rows) -> str:
    """A table with one line per value, and the largest size that fits."""
    name = sweep.option.replace("_", " ")
    lines = [f"{name:<16}{'peak':>12}{'reserved':>12}{'added time':>12}  fits"]
    lines += [f"{value:<16}{_line(row)}" for value, row in rows.items()]
    largest = _largest(sweep, rows)
    if largest is None and sweep.is_open:
        lines.append("none fits")
    elif largest is not None and not all(map(fits, rows.values())):
        lines.append(f"largest that fits: {name} {largest}")
    elif sweep.is_open:
        lines.append(f"largest that fits: {name} {largest}, and the model takes no larger one")
    return "\n".join(lines)


def _line(row: Planned | BudgetError) -> str:
    if isinstance(row, BudgetError):
        least = "" if row.least_bytes is None else f"; the smallest budget is {memory_format(row.least_bytes)}"
        return f"{'-':>12}{'-':>12}{'-':>12}  no{least}"
    plan, memory = row.plan, row.memory
    reserved = "-" if memory is None else memory_format(memory.reserved)
    verdict = "" if memory is None else f"{'yes' if memory.fits else 'no'}, {memory_format(memory.margin)} margin"
    return f"{memory_format(plan.peak_bytes):>12}{reserved:>12}{f'{plan.cost:.1%}':>12}  {verdict or 'yes'}"


def _largest(sweep: Sweep, rows: Rows) -> int | str | None:
    if sweep.option not in SIZES:
        return None
    return max((value for value, row in rows.items() if fits(row)), default=None)  # pyright: ignore[reportArgumentType]


def to_json(sweep: Sweep, rows: Rows) -> dict:
    """The same as plain data: the format of a single plan for each value; sizes in bytes."""
    plans = [
        {
            sweep.option: value,
            **(plan_text.to_json(row) if isinstance(row, Planned) else plan_text.refused(row)),
        }
        for value, row in rows.items()
    ]
    return {"sweep": sweep.option, "plans": plans, "largest": _largest(sweep, rows)}
