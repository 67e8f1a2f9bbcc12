"""`ackpt.fits`: the peak of every batch of a data set, from its lengths, and the largest batch that fits.

The step is captured once with dynamic sizes, and `ManySizes` evaluates its schedules at every shape that occurs. A
batch fits a GPU by the rule of `device_memory`. Batches whose peak is at most half of the device's memory fit. Of the
others, at most `_MOST_REPLAYS` are replayed, evenly spaced by their peak, and each counts for those up to the next.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ackpt.core.budget import dynamic_limit, is_share
from ackpt.core.errors import TraceError
from ackpt.core.progress import shown, stage
from ackpt.metering.cpu_meter import no_collection
from ackpt.metering.gpus import MIB, gpu
from ackpt.metering.meter import memory_format
from ackpt.planner.capture.aot import CAPTURING, capture
from ackpt.planner.capture.call_facts import Sizes, call_of
from ackpt.planner.capture.dynamic_sizes import SMALLEST, Dimension, is_sized, layout
from ackpt.planner.capture.inspection.calls import call_arguments
from ackpt.planner.capture.inspection.model_checks import check_model
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.capture.model_facts import WatchedModel
from ackpt.planner.capture.optimizer_state import NO_LOOP, Loop, check_optimizer, with_loop
from ackpt.planner.costs.devices import Device, device
from ackpt.planner.policies import auto, full
from ackpt.planner.policies.search.frontier import frontier
from ackpt.planner.schedule.schedule import Schedule, everything
from ackpt.planner.step.many_sizes import ManySizes, Values
from ackpt.planner.step.runnable import Runnable

from .device_memory import device_memory
from .named_models import BUILT_IN, batches_of, training_step
from .planned_shapes import PlanConfig, allocated_on, calls_as_on, scaled_loss, split_budget, with_training_loop
from .step_request import TRANSFORMERS

BATCH_SIZE, TOKENS, PACKED = "batch_size", "tokens_per_batch", "packed"
_WORDS = {
    BATCH_SIZE: "{} sequences, padded to the longest",
    TOKENS: "at most {} tokens, padding included",
    PACKED: "one row of at most {} tokens, packed",
}
NONE, FULL, AUTO = "none", "full", "auto"
_TITLES = {NONE: "without checkpointing", FULL: "per-block checkpointing", AUTO: "plan within the budget"}
_MOST_CAPTURES = 8
_MOST_REPLAYS = 16  # of one epoch
_ALMOST = 99  # percent of the batches
Shape = tuple[int, int]  # number of sequences, length


@dataclass(frozen=True)
class Batching:
    """How sequences become batches: ``kind``, one of the keywords of `fits`, and its number."""

    kind: str
    number: int

    def __str__(self) -> str:
        return _WORDS[self.kind].format(f"{self.number:,}")

    def shapes(self, lengths: Sequence[int]) -> list[Shape]:
        """The shapes of the batches of sequences of these lengths, taken in this order."""
        shapes, count, longest, total = [], 0, 0, 0
        for length in lengths:
            size = {
                BATCH_SIZE: count + 1,
                TOKENS: (count + 1) * max(longest, length),
                PACKED: total + length,
            }[self.kind]
            if count and size > self.number:
                shapes.append(self._shape(count, longest, total))
                count = longest = total = 0
            count, longest, total = count + 1, max(longest, length), total + length
        return [*shapes, self._shape(count, longest, total)]

    def _shape(self, count: int, longest: int, total: int) -> Shape:
        return (1, total) if self.kind == PACKED else (count, longest)


@dataclass(frozen=True)
class Peaks:
    """The batches of one epoch: their ``shapes`` (sequences, length), and the peak of each in bytes.

    ``exceeding``: how many do not fit; None without a device or a budget.
    """

    shapes: tuple[Shape, ...]
    bytes: tuple[int, ...]
    exceeding: int | None

    def percentile(self, percent: int) -> int:
        """The least bytes that the peaks of so many percent of the batches do not exceed."""
        return sorted(self.bytes)[-(-percent * len(self.bytes) // 100) - 1]

    @property
    def worst(self) -> Shape:
        """The shape of the batch with the highest peak."""
        return self.shapes[self.bytes.index(max(self.bytes))]

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data."""
        figures = {"median_bytes": 50, "p99_bytes": 99, "worst_bytes": 100}
        return {
            "batches": len(self.shapes),
            **{name: self.percentile(percent) for name, percent in figures.items()},
            "worst": list(self.worst),
            "exceeding": self.exceeding,
        }


@dataclass(frozen=True)
class Method:
    """One way to run all batches of a data set: by policy ``none``, ``full`` or ``auto``.

    ``random``, ``sorted``: the batches in a shuffled order, and those of sequences sorted by length. ``largest``: the
    largest batch size, or number of tokens, at which every batch fits in both orders; ``largest_for_99``: at which
    99 % of the batches in the shuffled order fit. 0 if none does; None without a device or a budget. ``flops``: of an
    epoch in the shuffled order, ``recompute_flops`` in addition to them; ``added_time``: modeled time of the
    recomputation as a fraction of the baseline's, None if the rates of the device are unknown.
    """

    policy: str
    random: Peaks
    sorted: Peaks
    largest: int | None
    largest_for_99: int | None
    flops: int
    recompute_flops: int
    added_time: float | None


@dataclass(frozen=True)
class Fits:
    """The result of `ackpt.fits`: ``methods`` by policy; ``str()`` is a table.

    ``count``, ``shortest``, ``longest``: of the lengths; ``batches``: how they are batched; ``device``, ``budget``:
    as given, a budget in bytes.
    """

    count: int
    shortest: int
    longest: int
    batches: Batching
    device: str | None
    budget: int | None
    methods: dict[str, Method]

    def __str__(self) -> str:
        limit = self.device or (None if self.budget is None else memory_format(self.budget))
        unit = "batch size" if self.batches.kind == BATCH_SIZE else "tokens"
        lines = [f"{self.count:,} sequences of {self.shortest:,} to {self.longest:,} tokens; batches: {self.batches}"]
        head = f"{'':26}{'order':8}{'batches':>9}{'median':>12}{'99 %':>12}{'worst':>12}"
        lines.append(head + (f"   exceed {limit}" if limit else ""))
        for name, method in self.methods.items():
            for order, peaks in (("random", method.random), ("sorted", method.sorted)):
                sizes = "".join(f"{memory_format(peaks.percentile(percent)):>12}" for percent in (50, 99, 100))
                title = _TITLES[name] if order == "random" else ""
                exceeding = "" if peaks.exceeding is None else f"   {peaks.exceeding:,}"
                lines.append(f"{title:26}{order:8}{len(peaks.shapes):>9,}{sizes}{exceeding}")
        for name, method in self.methods.items():
            parts = []
            if method.largest is not None:
                parts.append(f"largest {unit} {method.largest:,} for all batches, {method.largest_for_99:,} for 99 %")
            if name != NONE:
                parts.append(f"recomputes {method.recompute_flops / max(1, method.flops):.1%} of the epoch's FLOPs")
                parts += [] if method.added_time is None else [f"adds {method.added_time:.1%} to its modeled time"]
            if parts:
                lines.append(f"{_TITLES[name]}: {', '.join(parts)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data; sizes in bytes."""
        methods = {
            name: {**vars(method), "random": method.random.to_json(), "sorted": method.sorted.to_json()}
            for name, method in self.methods.items()
        }
        return {**vars(self), "batches": asdict(self.batches), "methods": methods}


def fits(
    model: nn.Module,
    lengths: Sequence[int],
    *,
    batch_size: int | None = None,
    tokens_per_batch: int | None = None,
    packed: int | None = None,
    batch: Callable[[int, int], Any] | None = None,
    device: str | None = None,
    budget: int | str | None = None,
    optimizer: torch.optim.Optimizer | str | None = None,
    accumulation: bool = False,
    seed: int = 0,
) -> Fits:
    """Return the peaks of all batches of a data set, and the largest batch that fits; no training step runs.

    The step is captured once with dynamic sizes, and evaluated at every shape that occurs.

    Args:
        model: an ``nn.Module`` on the CPU or the meta device, or from `ackpt.from_shapes`. With `device`, its data are
            not read.
        lengths: the length of every sequence of the data set.
        batch_size: so many sequences make a batch, padded to its longest.
        tokens_per_batch: sequences make a batch as long as it has at most so many tokens, padding included.
        packed: sequences are concatenated to rows of at most so many tokens; a row is a batch of one sequence.
        batch: a function of the number of sequences and their length that returns the arguments of the model, as for
            `ackpt.apply_budget`. By default those of a model of transformers that returns its loss.
        device: the name of a GPU, such as ``"l4"``: a batch fits if the allocator's reserved bytes and the CUDA context
            fit its memory, as in ``ackpt plan``. The step is planned under the active autocast. By default, peaks are
            those on the CPU.
        budget: bytes of the whole peak, such as ``"20GiB"``, for a third method: plans of policy ``"auto"`` that
            recompute activations or pack dropout masks. Without `device`, a batch fits if its peak is within
            the budget.
        optimizer, accumulation: as in `ackpt.compile`.
        seed: of the shuffled order.

    Raises:
        ValueError: for lengths that are no positive integers or exceed the model's positions, and for none or several
            of `batch_size`, `tokens_per_batch` and `packed`.
        TypeError: for a model whose arguments are not known, without `batch`.
        TraceError: if the model cannot be captured, or needs a capture for almost every size.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 1))
        >>> batch = lambda size, length: torch.zeros(size, length, dtype=torch.long)
        >>> found = ackpt.fits(model, [3, 9, 5, 4, 8, 2], batch_size=2, batch=batch, budget="4kB")
        >>> found.methods["none"].sorted.shapes, found.methods["none"].sorted.exceeding
        (((2, 3), (2, 5), (2, 9)), 0)
    """
    check_model(model)
    check_optimizer(model, optimizer)
    make, positions = batches_of(model) if batch is None else (batch, None)
    where = None if device is None else _gpu(device)
    tensors = [*model.parameters(), *model.buffers()]
    if where is None and any(tensor.is_cuda for tensor in tensors):
        raise ValueError("the model is on a GPU: name the device, as in device='l4', for which its batches are planned")
    active = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
    dtype = "float32" if active is None or where is None else str(torch.get_autocast_dtype(active))
    data = model
    if where is not None or any(isinstance(tensor, FakeTensor) for tensor in tensors):
        data = copy.deepcopy(model, {id(tensor): _on_meta(tensor) for tensor in tensors})
    return evaluated(
        _Evaluation(
            data,
            make,
            where,
            partial(calls_as_on, where, dtype.removeprefix("torch.")),
            lambda graph: with_loop(graph, model, Loop(optimizer, accumulation)),
            _bytes(budget),
            None,
        ),
        lengths,
        batching(batch_size, tokens_per_batch, packed),
        positions,
        seed,
    )


def fits_of_plan(config: PlanConfig, lengths: Sequence[int], batches: Batching, name_of: Callable[[int], str]) -> Fits:
    """As `fits`, for the model of a configuration of ``ackpt plan``."""
    where = None if config.device is None else _gpu(config.device)
    budget = _bytes(config.budget)
    stage(f"building {config.step.model}")
    model, positions = training_step(config.step).model, None
    if config.step.model.startswith(TRANSFORMERS):
        try:
            make, positions = batches_of(model)
        except TypeError:
            raise ValueError(f"{config.step.model} reads no sequences of tokens, so --lengths does not apply") from None
    elif batches.kind == PACKED:
        raise ValueError(f"--packed makes rows for models of transformers ({TRANSFORMERS}...), not {config.step.model}")
    else:

        def make(size: int, length: int) -> dict[str, Any]:
            return BUILT_IN[config.step.model][2](model, replace(config.step, batch_size=size, seq_len=length))

    @contextlib.contextmanager
    def capturing():
        scaled = scaled_loss(model) if config.scaling else contextlib.nullcontext()
        with calls_as_on(where, config.autocast), scaled:
            yield

    context = None if config.context_mib is None else config.context_mib * MIB
    finish = partial(with_training_loop, model=model, config=config)
    evaluation = _Evaluation(model, make, where, capturing, finish, budget, context)
    return evaluated(evaluation, lengths, batches, positions, name_of=name_of)


def evaluated(
    evaluation: _Evaluation,
    lengths: Sequence[int],
    batches: Batching,
    positions: tuple[int, str] | None,
    seed: int = 0,
    name_of: Callable[[int], str] = "lengths[{}]".format,
) -> Fits:
    """The report on an epoch; `name_of` the length at an index, for errors."""
    check_lengths(lengths, batches, positions, name_of)
    shuffled, ordered = random.Random(seed).sample(list(lengths), len(lengths)), sorted(lengths)
    with shown(), no_collection(), CAPTURING, _disable_current_modes():
        methods = {
            policy: evaluation.method(policy, shuffled, ordered, batches, positions)
            for policy in (NONE, FULL, *([] if evaluation.budget is None else [AUTO]))
        }
    name = None if evaluation.where is None else evaluation.where.name
    return Fits(len(lengths), ordered[0], ordered[-1], batches, name, evaluation.budget, methods)


class _Evaluation:
    """A model's step at many shapes.

    ``make``: the arguments of the model for a number of sequences and a length; ``capturing``: a context for captures;
    ``finish``: adds the training loop to a captured graph; ``context_bytes``: replaces the known size of the context.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[int, int], Any],
        where: Device | None,
        capturing: Callable[[], contextlib.AbstractContextManager[Any]],
        finish: Callable[[JointGraph], JointGraph],
        budget: int | None,
        context_bytes: int | None,
    ):
        self.model, self.make, self.where, self.budget = model, make, where, budget
        self._capturing, self._finish, self._context_bytes = capturing, finish, context_bytes
        self._captures: list[_OneCapture] = []
        self._places: dict[Shape, tuple[_OneCapture, Values]] = {}
        self._peaks: dict[tuple[str, Shape], tuple[int, Schedule]] = {}
        self._fits: dict[tuple[str, Shape], bool] = {}

    def method(self, policy, shuffled, ordered, batches: Batching, positions) -> Method:
        shapes = batches.shapes(shuffled)
        self.place(max(shapes, key=lambda shape: (min(shape) >= SMALLEST, shape[0] * shape[1], shape[1])))
        both = [self.epoch(policy, each) for each in (shapes, batches.shapes(ordered))]
        largest = [None, None]
        if self.where is not None or self.budget is not None:
            largest = [self._largest(policy, share, shuffled, ordered, batches, positions) for share in (100, _ALMOST)]
        flops = recomputed = 0
        seconds = added = 0.0
        for shape, count in Counter(shapes).items():
            one, values = self.place(shape)
            of_nodes = one.sizes.costs(values)
            more_flops, more_seconds = one.sizes.recompute_cost(self._peaks[policy, shape][1], values)
            flops, recomputed = flops + count * int(of_nodes[0].sum()), recomputed + count * more_flops
            seconds, added = seconds + count * float(of_nodes[1].sum()), added + count * more_seconds
        return Method(policy, *both, *largest, flops, recomputed, added / seconds if seconds else None)

    def epoch(self, policy: str, shapes: Sequence[Shape]) -> Peaks:
        """The peaks of batches of these shapes, and how many of them do not fit."""
        self._evaluate(policy, shapes)
        peaks = tuple(self._peaks[policy, shape][0] for shape in shapes)
        has_limit = self.where is not None or self.budget is not None
        return Peaks(tuple(shapes), peaks, self._exceeding(policy, shapes) if has_limit else None)

    def _exceeding(self, policy: str, shapes: Sequence[Shape], enough: float = float("inf")) -> int:
        """How many batches of these shapes do not fit; stops at more than `enough`."""
        self._evaluate(policy, shapes)
        exceeding, near = 0, []
        for shape, count in Counter(shapes).items():
            is_within = self._is_within(policy, shape)
            exceeding += count if is_within is False else 0
            near += [(self._peaks[policy, shape][0], shape, count)] * (is_within is None)
        near.sort(reverse=True)
        together = max(1, -(-len(near) // _MOST_REPLAYS))
        for at in range(0, len(near), together):
            if exceeding > enough:
                break
            group = near[at : at + together]
            exceeding += 0 if self._is_within_reserved(policy, group[0][1]) else sum(count for *_, count in group)
        return exceeding

    def _largest(self, policy, percent: int, shuffled, ordered, batches: Batching, positions) -> int:
        """The largest number of `batches` for which so many percent of the batches fit; 0 if there is none."""

        def is_enough(number: int) -> bool:
            for order in (shuffled, ordered) if percent == 100 else (shuffled,):
                shapes = Batching(batches.kind, number).shapes(order)
                most = (100 - percent) * len(shapes) // 100
                if self._exceeding(policy, shapes, most) > most:
                    return False
            return True

        longest = ordered[-1]
        least = 1 if batches.kind == BATCH_SIZE else longest
        most = {BATCH_SIZE: len(ordered), TOKENS: len(ordered) * longest, PACKED: sum(ordered)}[batches.kind]
        if batches.kind == PACKED and positions is not None:
            most = min(most, positions[0])
        low, high = least - 1, min(batches.number, most)
        while high <= most and is_enough(high):
            low, high = high, most if high < most < 2 * high else 2 * high
        high = min(high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_enough(middle) else (low, middle)
        return low if low >= least else 0

    def _is_within(self, policy: str, shape: Shape) -> bool | None:
        """Whether a batch fits: the budget, if there is one for this method, and the device; None if a replay says."""
        peak, _ = self._peaks[policy, shape]
        if self.budget is not None and (policy == AUTO or self.where is None) and peak > self.budget:
            return False
        if self.where is None or 2 * peak <= self._room:
            return True
        return False if peak > self._room else None

    @property
    def _room(self) -> int:
        """What the context leaves of the device's memory."""
        assert self.where is not None
        context = gpu(self.where.name).context_bytes if self._context_bytes is None else self._context_bytes
        return self.where.memory_bytes - context

    def _is_within_reserved(self, policy: str, shape: Shape) -> bool:
        if (policy, shape) not in self._fits:
            assert self.where is not None
            one, values = self.place(shape)
            graph, workspace = one.sizes.sized(values), one.sizes.workspace_bytes(values).tolist()
            schedule, on = self._peaks[policy, shape][1], gpu(self.where.name)
            memory = device_memory(graph, workspace, schedule, self.where, on, self._context_bytes)
            self._fits[policy, shape] = memory.fits
        return self._fits[policy, shape]

    def _evaluate(self, policy: str, shapes: Sequence[Shape]) -> None:
        """Find the schedule and the peak at all these shapes."""
        todo: dict[int, list[Shape]] = {}
        for shape in dict.fromkeys(shapes):
            if (policy, shape) not in self._peaks:
                todo.setdefault(self._captures.index(self.place(shape)[0]), []).append(shape)
        for at, group in todo.items():
            found = self._captures[at].peaks(policy, [self._places[shape][1] for shape in group], self.budget)
            self._peaks.update({(policy, shape): each for shape, each in zip(group, found)})

    def place(self, shape: Shape) -> tuple[_OneCapture, Values]:
        """The capture that serves a shape, and the sizes of its dynamic dimensions there."""
        if shape not in self._places:
            sizes = self._sizes(*shape)
            places = ((one, one.values(sizes)) for one in self._captures)
            found = next(((one, values) for one, values in places if values is not None), None)
            self._places[shape] = self._captured(shape) if found is None else found
        return self._places[shape]

    def _sizes(self, size: int, length: int) -> Sizes:
        with torch.device("meta"):
            leaves = tree_leaves(call_arguments(self.make(size, length)))
        return tuple(map(layout, filter(is_sized, leaves)))

    def _captured(self, shape: Shape) -> tuple[_OneCapture, Values]:
        """A new capture, in which the dimensions that change with the shape are dynamic if they are at least 2."""
        if len(self._captures) == _MOST_CAPTURES:
            raise TraceError(
                f"the model needs more than {_MOST_CAPTURES} captures for these lengths, such as one for batches of "
                f"{shape[0]} sequences of length {shape[1]}: pad to a few lengths, or change the model so that it does "
                "not branch on its sizes"
            )
        stage(f"capturing batches of {shape[0]} sequences of length {shape[1]}")
        size, length = shape
        args, kwargs = call_arguments(self.make(size, length))
        others = self._sizes(size + 1, length), self._sizes(size, length + 1)
        with self._capturing():
            call = call_of(WatchedModel(self.model), args, kwargs)
            places = [at for at, leaf in enumerate(call.leaves) if is_sized(leaf)]
            dims = {
                Dimension(at, dim)
                for other in others
                for at, (was, *_), (now, *_) in zip(places, call.sizes, other)
                for dim, (one, two) in enumerate(zip(was, now))
                if one != two and one >= SMALLEST
            }
            with capture(self.model, args, kwargs, "loss", "drop", sorted(dims)) as captured:
                step = Runnable(captured, call, self.model, NO_LOOP)
        graph = step.reference if self.where is None else allocated_on(self.where, step.reference)
        one = _OneCapture(ManySizes(step, self._finish(graph), self.where), call.sizes)
        self._captures.append(one)
        return one, step.values


class _OneCapture:
    """One capture and the schedules of each method at its sizes."""

    def __init__(self, sizes: ManySizes, own: Sizes):
        self.sizes, self._own = sizes, own

    def values(self, sizes: Sizes) -> Values | None:
        """The sizes of the dynamic dimensions in a call with these layouts; None if the capture does not serve it."""
        symbols = self.sizes.step.captured.symbols
        if symbols is None:
            return () if sizes == self._own else None
        return symbols.values_in(sizes)

    def peaks(self, policy: str, values: list[Values], budget: int | None) -> list[tuple[int, Schedule]]:
        """The peak at these sizes and its schedule: for ``auto`` the cheapest within the budget, else the lowest."""
        if policy != AUTO:
            schedule = self._everything if policy == NONE else self._full
            return [(int(peak), schedule) for peak in self.sizes.peaks(schedule, values)]
        assert budget is not None
        found: list[tuple[int, Schedule] | None] = [None] * len(values)
        waiting = np.arange(len(values))
        for number in range(1 + len(self._frontier) if len(values) else 0):
            schedule = self._frontier[number - 1] if number else self._everything
            peaks = self.sizes.peaks(schedule, [values[at] for at in waiting])
            for at, peak in zip(waiting, peaks):
                if (before := found[at]) is None or peak < before[0]:
                    found[at] = int(peak), schedule
            waiting = waiting[peaks > budget]
            if not len(waiting):
                break
        return found  # pyright: ignore[reportReturnType]

    @cached_property
    def _everything(self) -> Schedule:
        return everything(self.sizes.graph)

    @cached_property
    def _full(self) -> Schedule:
        return full.schedule(self.sizes.graph, self.sizes.profile, None)

    @cached_property
    def _frontier(self) -> list[Schedule]:
        return [point.schedule for point in frontier(self.sizes.graph, self.sizes.profile, auto.candidates)]


def batching(batch_size: int | None, tokens_per_batch: int | None, packed: int | None) -> Batching:
    """The one option that is given; ValueError for none or several, and for a number below 1."""
    options = {BATCH_SIZE: batch_size, TOKENS: tokens_per_batch, PACKED: packed}
    given = {name: value for name, value in options.items() if value is not None}
    if len(given) != 1:
        raise ValueError(
            f"{' and '.join(given) or 'no way'} to make batches: give one of batch_size, tokens_per_batch and packed "
            "(--batch-size, --tokens-per-batch, --packed)"
        )
    ((kind, number),) = given.items()
    if type(number) is not int or number < 1:
        raise ValueError(f"{kind} must be an integer of at least 1, got {number!r}")
    return Batching(kind, number)


def check_lengths(lengths, batches: Batching, positions: tuple[int, str] | None, name_of: Callable[[int], str]) -> None:
    """ValueError for the first length that is invalid, or too long for the model or a batch."""
    if not len(lengths):
        raise ValueError("there are no lengths: give the number of tokens of every sequence of the data set")
    for at, length in enumerate(lengths):
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 1:
            raise ValueError(f"{name_of(at)} is {length!r}: a length is a positive integer")
        if positions is not None and length > positions[0]:
            raise ValueError(
                f"{name_of(at)} is {length}, longer than the {positions[0]} positions of the model "
                f"({positions[1]}): truncate the sequence, or raise {positions[1]} in the model's configuration"
            )
        if batches.kind != BATCH_SIZE and length > batches.number:
            raise ValueError(f"{name_of(at)} is {length}, which exceeds {batches.kind}={batches.number}")
    if batches.kind == PACKED and positions is not None and batches.number > positions[0]:
        raise ValueError(f"packed={batches.number} exceeds the {positions[0]} positions of the model ({positions[1]})")


def lengths_in(path: Path) -> tuple[list[int], Callable[[int], str]]:
    """The lengths in a file, one number a line or a list as JSON, and a function that names the place of each.

    Raises:
        ValueError: for a file that cannot be read, is empty, or has other content; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--lengths {path} cannot be read: {error}") from error
    if text.lstrip()[:1] == "[":
        try:
            numbers = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"--lengths {path}, line {error.lineno}: this is not JSON: {error.msg}") from error
        return numbers, lambda at: f"entry {at + 1} of {path}"
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    numbers = []
    for number, line in lines:
        try:
            numbers.append(int(line))
        except ValueError:
            raise ValueError(f"--lengths {path}, line {number}: {line!r} is not a number of tokens") from None
    return numbers, lambda at: f"line {lines[at][0]} of {path}"


def _bytes(budget: int | str | None) -> int | None:
    bound, is_reserved = split_budget(budget)
    if is_reserved:
        raise ValueError(
            f"the budget {budget!r} bounds reserved bytes: give allocated ones, as in {str(bound).strip()!r}"
        )
    found = dynamic_limit(budget, 0, 0)
    if budget is not None and is_share(budget):
        raise ValueError(
            f"the budget {budget!r} is a fraction, which bounds every batch by its own baseline: give bytes, such as "
            "'20GiB'"
        )
    return found


def _gpu(name: str) -> Device:
    where = device(name)
    gpu(name)
    return where


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without data, on the meta device."""
    made = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")
    needs_grad = tensor.requires_grad
    return nn.Parameter(made, needs_grad) if isinstance(tensor, nn.Parameter) else made.requires_grad_(needs_grad)
