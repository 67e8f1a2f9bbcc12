"""Measure the bytes, FLOPs and seconds of one training step.

``measure`` runs a step and returns exact bytes: the peak, and the live bytes by category after every allocation and
free. `cpu_meter` and `cuda_meter` record these events; `prediction` derives them from shapes alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import torch

from ackpt.core.errors import warn
from ackpt.core.progress import shown

from . import cpu_meter, cuda_meter
from .flops import UncountedFlops, count_flops
from .resident import Item, Resident
from .timeline import CATEGORIES, MeterError, Timeline

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "CATEGORIES",
    "Comparison",
    "Measurement",
    "MeterError",
    "Ratio",
    "Seconds",
    "Timeline",
    "compare_seconds",
    "count_flops",
    "measure",
    "memory_format",
]


@dataclass(frozen=True)
class Spread:
    """Repeated values: median, lowest, highest and every sample in order."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Iterable[float]) -> Self:
        samples = tuple(samples)
        return cls(median(samples), min(samples), max(samples), samples)

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "low": self.low, "high": self.high, "samples": list(self.samples)}


class Seconds(Spread):
    """Seconds of repeated runs.

    Example:
        >>> from ackpt.metering.meter import Seconds
        >>> Seconds.of([0.3, 0.1, 0.2]).median
        0.2
    """


class Ratio(Spread):
    """Ratios of the seconds of paired runs.

    Example:
        >>> from ackpt.metering.meter import Ratio
        >>> ratio = Ratio.of([1.2, 1.0, 1.1])
        >>> ratio.low, ratio.high
        (1.0, 1.2)
    """


@dataclass(frozen=True)
class Measurement:
    """The memory, seconds and FLOPs of one step: bytes at the peak by category, and the timeline of live bytes.

    ``resident_bytes``: parameters, buffers, inputs, optimizer state. ``dynamic_peak_bytes``: the peak of everything
    else, including gradients that exist before the step. ``allocator``: on CUDA, the peaks of requested and reserved
    bytes; with offload, the peak of the store. ``seconds`` and ``flops`` are ``None`` if they were not measured;
    ``flops`` also if they cannot be counted. ``unknown_workspace``: the operations of a prediction that may allocate
    more than predicted.

    Example:
        >>> import torch, ackpt
        >>> layer, x = torch.nn.Linear(256, 256), torch.ones(8, 256)
        >>> step = ackpt.measure(lambda: layer(x).sum().backward(), resident=(layer, x), repeats=0)
        >>> step.peak_bytes == step.resident_bytes + step.dynamic_peak_bytes == sum(step.categories.values())
        True
        >>> step.categories["gradients"], step.seconds
        (263168, None)
    """

    device: str
    resident_bytes: int
    dynamic_peak_bytes: int
    categories: dict[str, int]
    timeline: Timeline
    seconds: Seconds | None = None
    flops: int | None = None
    allocator: dict[str, int] = field(default_factory=dict)
    unknown_workspace: tuple[str, ...] = ()

    def __repr__(self) -> str:
        seconds = "" if self.seconds is None else f", {1e3 * self.seconds.median:.3g} ms"
        flops = "" if self.flops is None else f", {self.flops / 1e9:.3g} GFLOP"
        unknown = ", ".join(self.unknown_workspace)
        flops += f", without the workspace of {unknown}" if unknown else ""
        return (
            f"<Measurement on {self.device}: peak {memory_format(self.peak_bytes)}, "
            f"{memory_format(self.resident_bytes)} of it resident{seconds}{flops}>"
        )

    @property
    def peak_bytes(self) -> int:
        return self.resident_bytes + self.dynamic_peak_bytes

    @property
    def store_peak_bytes(self) -> int:
        """The largest number of bytes in the offload store at one time; not part of the other sizes."""
        return self.allocator.get("store_peak_bytes", 0)

    def to_json(self) -> dict[str, Any]:
        """Plain data without the timeline, for which there is ``timeline.thinned(400).to_json()``."""
        return {
            "device": self.device,
            "peak_bytes": self.peak_bytes,
            "resident_bytes": self.resident_bytes,
            "dynamic_peak_bytes": self.dynamic_peak_bytes,
            "categories": dict(self.categories),
            "flops": self.flops,
            "seconds": None if self.seconds is None else self.seconds.to_json(),
            **self.allocator,
            **({"unknown_workspace": [*self.unknown_workspace]} if self.unknown_workspace else {}),
        }


def measure(
    step_fn: Callable[[], object],
    device: torch.device | str | None = None,
    *,
    resident: Iterable[Item] = (),
    warmup: int = 1,
    repeats: int = 3,
) -> Measurement:
    """Measure the memory, FLOPs and time of a step, which runs ``warmup + 1 + repeats`` times.

    Args:
        step_fn: one forward and backward, with or without an optimizer step; called without arguments. Its result is
            discarded at once.
        device: ``"cpu"`` or ``"cuda"``; by default the device of the resident tensors.
        resident: modules, optimizers, tensors and dicts of tensors that are allocated before and after the step. Shared
            storages count once. Gradients of resident parameters are identified by their ``.grad``.
        warmup: number of steps before the measurement, so that optimizer state exists (or does not, with 0). The first
            one counts the FLOPs with `count_flops`; if that fails, a warning says why.
        repeats: number of timed steps; with 0, ``seconds`` is None.

    Returns:
        A `Measurement`; all sizes in bytes, times in seconds.

    Raises:
        MeterError: if this machine has no such device, or a torch profiler is already running.
        TypeError, ValueError: for arguments of the wrong type or value.

    On the CPU the bytes are those of torch's allocator, exact to the byte, in this thread and the threads of its
    backward. They do not include scratch memory that a library (oneDNN, MKL) allocates itself. On CUDA the peak is
    ``torch.cuda.max_memory_allocated``.

    Example:
        >>> import torch, ackpt
        >>> layer, x = torch.nn.Linear(256, 256), torch.ones(8, 256)
        >>> step = ackpt.measure(lambda: layer(x).sum().backward(), resident=(layer, x))
        >>> step.resident_bytes == 4 * (256 * 256 + 256 + 8 * 256)
        True
    """
    check_step(step_fn)
    _check_count("warmup", warmup, least=0)
    _check_count("repeats", repeats, least=0)
    owned = Resident(resident)
    device = _device(device, owned)
    backend = _backend(device)
    flops = None

    def warm_up():
        nonlocal flops
        for index in range(warmup):
            if index == 0:
                try:
                    flops = count_flops(step_fn)
                except UncountedFlops as error:
                    warn(str(error))
            else:
                step_fn()

    before = warm_up if warmup else None
    with shown("measuring the step"):
        timeline, resident_bytes, peak_bytes, allocator = backend.trace(step_fn, before, owned, device)
        samples = [backend.clock(step_fn, device) for _ in range(repeats)]
    return assemble(
        str(device),
        timeline,
        resident_bytes,
        peak_bytes,
        allocator=allocator,
        seconds=Seconds.of(samples) if samples else None,
        flops=flops,
    )


def assemble(device, timeline, resident, peak_bytes=None, **rest) -> Measurement:
    """A Measurement from the `resident` bytes by category and the timeline of the dynamic bytes."""
    resident_bytes = sum(resident.values())
    at_peak = timeline.at(timeline.peak_index)
    categories = {name: resident.get(name, 0) + at_peak.get(name, 0) for name in CATEGORIES}
    if peak_bytes is None:
        peak_bytes = resident_bytes + timeline.peak_bytes
    else:  # the allocator's peak, which includes more than the timeline
        categories["other"] = peak_bytes - sum(categories.values())
    return Measurement(device, resident_bytes, peak_bytes - resident_bytes, categories, timeline, **rest)


@dataclass(frozen=True)
class Comparison:
    """Seconds of every function, and their ratios to the reference function within each round.

    Example:
        >>> import ackpt
        >>> comparison = ackpt.compare_seconds({"short": lambda: sum(range(10)), "long": lambda: sum(range(10_000))})
        >>> comparison.reference, comparison.ratios["short"].median
        ('short', 1.0)
        >>> len(comparison.seconds["long"].samples)
        5
    """

    reference: str
    seconds: dict[str, Seconds]
    ratios: dict[str, Ratio]

    def to_json(self) -> dict[str, Any]:
        """Plain data; the key ``seconds_ratio`` tells that ratios of times differ from run to run."""
        return {
            "reference": self.reference,
            "seconds": {name: seconds.to_json() for name, seconds in self.seconds.items()},
            "seconds_ratio": {name: ratio.to_json() for name, ratio in self.ratios.items()},
        }


def compare_seconds(
    functions: Mapping[str, Callable[[], object]],
    repeats: int = 5,
    reference: str | None = None,
    device: torch.device | str | None = None,
    clock: Literal["wall", "processor"] = "wall",
) -> Comparison:
    """Time several functions in rounds, in one process; in every round each function runs once.

    Args:
        functions: ``{name: function}``; each is called without arguments, and once before the first round.
        repeats: number of rounds. Every second round runs in reverse order, so that no function is always the first.
        reference: name of the function that ratios refer to; by default the first.
        device: ``"cpu"`` (default) or ``"cuda"``, which times every run by CUDA events.
        clock: ``"processor"`` counts the seconds in which processors work for this process, added up over its threads.
            With one thread, it leaves out the time in which the machine runs other processes. On a CPU only.

    Returns:
        Seconds of each function and its ratios to the reference, taken within each round.

    Example:
        >>> import ackpt
        >>> ackpt.compare_seconds({"a": lambda: sum(range(10)), "b": lambda: sum(range(99))}).ratios["a"].median
        1.0
    """
    if not functions:
        raise ValueError("compare_seconds needs at least one function: {name: function}")
    reference = next(iter(functions)) if reference is None else reference
    if reference not in functions:
        raise ValueError(f"reference {reference!r} is none of the functions: {', '.join(functions)}")
    _check_count("repeats", repeats, least=1)
    device = _device(device, Resident(()))
    if clock not in ("wall", "processor"):
        raise ValueError(f"unknown clock {clock!r}: choose wall or processor")
    if clock == "processor" and device.type != "cpu":
        raise MeterError("the clock 'processor' does not see what a GPU does: use clock='wall' on device 'cuda'")
    seconds_of = _backend(device).clock if clock == "wall" else partial(cpu_meter.clock, now=time.process_time)
    for function in functions.values():
        function()
    samples = {name: [] for name in functions}
    for index in range(repeats):
        for name in functions if index % 2 == 0 else reversed([*functions]):
            samples[name].append(seconds_of(functions[name], device))
    return Comparison(
        reference,
        {name: Seconds.of(values) for name, values in samples.items()},
        {name: Ratio.of(a / b for a, b in zip(values, samples[reference])) for name, values in samples.items()},
    )


def memory_format(size: int) -> str:
    """Format a number of bytes in binary units with one decimal.

    Example:
        >>> import ackpt.metering.meter
        >>> ackpt.metering.meter.memory_format(333447168)
        '318.0 MiB'
    """
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def _backend(device):
    return cuda_meter if device.type == "cuda" else cpu_meter


def _device(device, owned) -> torch.device:
    """The given device, or that of the resident tensors; raises MeterError if it cannot be measured."""
    if device is None:
        types = {tensor.device.type for _, tensor in owned.tensors()}
        device = next((name for name in ("meta", "cuda") if name in types), "cpu")
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise MeterError(f"{device.type} tensors cannot be measured: use a CPU or a CUDA GPU, or predict() for shapes")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MeterError("device 'cuda' was asked for, but torch sees no CUDA GPU: use device='cpu', or predict()")
    return device


def check_step(step_fn) -> None:
    """Raise TypeError if `step_fn` is not callable."""
    if not callable(step_fn):
        raise TypeError(
            "step_fn must be a function without arguments that runs one step, as in "
            f"lambda: model(x).sum().backward(); got {type(step_fn).__name__}"
        )


def _check_count(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, {least} or more")
