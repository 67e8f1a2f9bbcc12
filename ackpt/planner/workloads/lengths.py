"""`ackpt.fits`: the peak of every batch of a data set, from its lengths, and the largest batch that fits.

The step is captured once with dynamic sizes, and `ManySizes` evaluates its schedules at every shape that occurs. A
batch fits a GPU by the rule of `device_memory`. Batches whose peak is at most half of the memory fit. Of the
others, at most `_MOST_REPLAYS` are replayed, evenly spaced by their peak, and each counts for those up to the next.
"""

import contextlib
import copy
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ackpt.core.budget import dynamic_limit, is_share, readable, split_budget
from ackpt.core.errors import BudgetError, TraceError
from ackpt.core.progress import shown, stage
from ackpt.metering.cpu_meter import no_collection
from ackpt.metering.gpus import gpu
from ackpt.metering.meter import memory_format
from ackpt.planner.capture.aot import CAPTURING, capture
from ackpt.planner.capture.call_facts import Sizes, WatchedModel, call_of
from ackpt.planner.capture.dynamic_sizes import SMALLEST, Dimension, is_sized, layout
from ackpt.planner.capture.inspection.calls import call_arguments
from ackpt.planner.capture.inspection.model_checks import check_model
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.capture.optimizer_state import NO_LOOP, Loop, check_optimizer, with_loop
from ackpt.planner.capture.shapes import Shapes
from ackpt.planner.costs.devices import Device, device
from ackpt.planner.schedule.allocations import device_memory
from ackpt.planner.schedule.schedule import Schedule
from ackpt.planner.step.many_sizes import AUTO, FULL, ManySizes, Values
from ackpt.planner.step.plans import CapturedStep

from .planned_shapes import PlanConfig, allocated_on, calls_as_on, scaled_loss, with_training_loop
from .step_request import BUILT_IN, TRANSFORMERS, batches_of, training_step

BATCH_SIZE, TOKENS, PACKED = "batch_size", "tokens_per_batch", "packed"
_WORDS = {
    BATCH_SIZE: "of {:,} sequences, padded to the longest",
    TOKENS: "of at most {:,} tokens, padding included",
    PACKED: "of one row of at most {:,} tokens, packed",
}
NONE = "none"
_TITLES = {NONE: "without checkpointing", FULL: "per-block checkpointing", AUTO: "plan within the budget"}
_MOST_CAPTURES = 8
_MOST_REPLAYS = 16  # of one epoch
Shape = tuple[int, int]  # number of sequences, length


@dataclass(frozen=True)
class Peaks:
    """The batches of an epoch: the ``shapes`` (sequences, length), and the peak of each in bytes.

    ``exceeding``: how many do not fit; None without a device or a budget.

    Example:
        >>> from ackpt.planner.workloads.lengths import Peaks
        >>> peaks = Peaks(((2, 9), (2, 5), (1, 7)), (4000, 2500, 1600), 1)
        >>> peaks.percentile(50), peaks.worst
        (2500, (2, 9))
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
        sizes = {name: self.percentile(at) for name, at in (("median", 50), ("p99", 99), ("worst", 100))}
        return {"batches": len(self.shapes), "bytes": sizes, "worst": self.worst, "exceeding": self.exceeding}


@dataclass(frozen=True)
class Method:
    """One way to run all batches of a data set, by policy ``none``, ``full`` or ``auto``; an entry of ``Fits.methods``.

    ``random``, ``sorted``: the batches in a shuffled order, and those of sequences sorted by length. ``largest``: the
    largest batch size, or number of tokens, at which every batch fits in both orders; ``largest_for_99``: at which
    99 % of the batches in the shuffled order fit. 0 if none does; None without a device or a budget. ``flops``: of an
    epoch in the shuffled order, ``recompute_flops`` in addition to them; ``added_time``: modeled time of the
    recomputation as a fraction of the baseline's, None if the rates of the device are unknown. The schedules of
    ``full`` and ``auto`` are found at the largest batch, and evaluated at all others.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> batch = lambda size, length: torch.zeros(size, length, dtype=torch.long)
        >>> found = ackpt.fits(model, [3, 9, 5], batch_size=1, batch=batch).methods["none"]
        >>> found.sorted.shapes, found.largest, found.recompute_flops
        (((1, 3), (1, 5), (1, 9)), None, 0)
    """

    random: Peaks
    sorted: Peaks
    largest: int | None
    largest_for_99: int | None
    flops: int
    recompute_flops: int
    added_time: float | None

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {**vars(self), "random": self.random.to_json(), "sorted": self.sorted.to_json()}


@dataclass(frozen=True)
class Fits:
    """The result of `ackpt.fits`: ``methods`` by policy; ``str()`` is a table.

    ``count``, ``shortest``, ``longest``: of the lengths; ``batches``: how they are batched, in words; ``device``: its
    name; ``budget``: in bytes.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8))
        >>> batch = lambda size, length: torch.zeros(size, length, dtype=torch.long)
        >>> print(str(ackpt.fits(model, [3, 9, 5], tokens_per_batch=16, batch=batch)).splitlines()[0])
        3 sequences of 3 to 9 tokens; batches of at most 16 tokens, padding included
    """

    count: int
    shortest: int
    longest: int
    batches: str
    device: str | None
    budget: int | None
    methods: dict[str, Method]

    @property
    def smallest_budget(self) -> int | None:
        """The smallest budget that plans keep for all batches, if `budget` is infeasible for some; otherwise None."""
        auto = self.methods.get(AUTO)
        least = 0 if auto is None else max(*auto.random.bytes, *auto.sorted.bytes)
        return least if self.budget is not None and least > self.budget else None

    def __str__(self) -> str:
        limit = self.device or (None if self.budget is None else memory_format(self.budget))
        lines = [
            f"{self.count:,} sequences of {self.shortest:,} to {self.longest:,} tokens; batches {self.batches}",
            f"{'':26}{'order':8}{'batches':>9}{'median':>12}{'99 %':>12}{'worst':>12}"
            + (f"   exceed {limit}" if limit else ""),
        ]
        unit, notes = "sequences" if "sequences" in self.batches else "tokens", []
        for name, method in self.methods.items():
            for order, peaks in (("random", method.random), ("sorted", method.sorted)):
                sizes = "".join(f"{memory_format(peaks.percentile(percent)):>12}" for percent in (50, 99, 100))
                exceeding = "" if peaks.exceeding is None else f"   {peaks.exceeding:,}"
                title = _TITLES[name] if order == "random" else ""
                lines.append(f"{title:26}{order:8}{len(peaks.shapes):>9,}{sizes}{exceeding}")
            parts = []
            if method.largest is not None:
                parts = [f"all batches fit up to {method.largest:,} {unit}, 99 % up to {method.largest_for_99:,}"]
            if name != NONE:
                parts.append(f"recomputes {method.recompute_flops / max(1, method.flops):.1%} of the epoch's FLOPs")
                parts += [] if method.added_time is None else [f"adds {method.added_time:.1%} to its modeled time"]
            if name == AUTO and self.smallest_budget is not None and self.budget is not None:
                over = sum(peak > self.budget for peak in method.random.bytes)
                parts.append(
                    f"the budget is infeasible for {over:,} of the random batches, which count with their lowest peak; "
                    f"the smallest feasible budget for all batches is {readable(self.smallest_budget)} "
                    f"({self.smallest_budget} bytes)"
                )
            notes += [f"{_TITLES[name]}: {', '.join(parts)}"] if parts else []
        return "\n".join([*lines, *notes])

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data; sizes in bytes."""
        methods = {name: method.to_json() for name, method in self.methods.items()}
        return {**vars(self), "smallest_budget": self.smallest_budget, "methods": methods}


def fits(
    model: nn.Module,
    lengths: Iterable[int] | torch.Tensor,
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
        lengths: the length of every sequence of the data set: a list, an array, a tensor, or any other iterable. For
            inputs of a fixed size, such as images, ``[1] * number``, with a `batch` that ignores the length.
        batch_size: the number of sequences in a batch, which is padded to the longest.
        tokens_per_batch: the largest number of tokens in a batch, padding included.
        packed: the largest number of tokens in a row of concatenated sequences; a row is a batch of one sequence.
        batch: a function of the number of sequences and their length that returns the arguments of the model, as for
            `ackpt.apply_budget`. By default those of a model of transformers that returns its loss.
        device: the name of a GPU, such as ``"l4"``: a batch fits if the allocator's reserved bytes and the CUDA context
            fit its memory, as in ``ackpt plan``. The step is planned under the active autocast. By default, peaks are
            those on the CPU.
        budget: bytes of the whole peak, such as ``"20GiB"``, for a third method: plans of policy ``"auto"`` that
            recompute activations or pack dropout masks. Without `device`, a batch fits if its peak is within
            the budget.
        optimizer, accumulation: as in `ackpt.compile`.
        seed: the seed of the shuffled order.

    Raises:
        ValueError: for lengths that are no positive integers or exceed the model's positions, for none or several of
            `batch_size`, `tokens_per_batch` and `packed`, and for a `batch` that ignores the number of
            sequences, or the length if lengths differ.
        TypeError: for a model whose arguments are not known, without `batch`.
        TraceError: if the model cannot be captured, or needs a capture for almost every size.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 1))
        >>> batch = lambda size, length: torch.zeros(size, length, dtype=torch.long)
        >>> found = ackpt.fits(model, [3, 9, 5, 4, 8, 2], batch_size=2, batch=batch, budget="4kB")
        >>> found.methods["none"].sorted.shapes, found.methods["none"].sorted.exceeding
        (((2, 3), (2, 5), (2, 9)), 1)
    """
    steps, positions = steps_of(model, batch, device, budget, optimizer, accumulation)
    numbers = lengths.tolist() if isinstance(lengths, (torch.Tensor, np.ndarray)) else lengths
    if not isinstance(numbers, Iterable):
        raise TypeError(f"lengths must be the lengths of all sequences, such as [512, 83, 240], got {numbers!r}")
    return report(steps, [*numbers], batching(batch_size, tokens_per_batch, packed), positions, seed=seed)


def steps_of(model: nn.Module, batch, device: str | None, budget, optimizer, accumulation: bool):
    """The steps of `model` at many shapes, and its number of positions with the field's name, None if unknown."""
    check_model(model)
    check_optimizer(model, optimizer)
    make, positions = batches_of(model) if batch is None else (batch, None)
    where = None if device is None else rates_of(device)
    tensors = [*model.parameters(), *model.buffers()]
    if where is None and any(tensor.is_cuda for tensor in tensors):
        raise ValueError("the model is on a GPU: name the device, as in device='l4', for which its batches are planned")
    active = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
    dtype = "float32" if active is None or where is None else str(torch.get_autocast_dtype(active))
    data = model
    if where is not None or any(isinstance(tensor, FakeTensor) for tensor in tensors):
        with torch.device("meta"):
            shape_of = Shapes(tensors)
        data = copy.deepcopy(model, shape_of.copies)
    capturing = partial(calls_as_on, where, dtype.removeprefix("torch."))
    finish = lambda graph: with_loop(graph, model, Loop(optimizer, accumulation))  # noqa: E731
    context = 0 if where is None else gpu(where.name).context_bytes
    return _Steps(data, make, where, _bytes(budget), capturing, finish, context), positions


@contextlib.contextmanager
def quiet():
    """Inside, the steps of a model at many shapes are captured and evaluated."""
    with shown(), no_collection(), CAPTURING, _disable_current_modes():
        yield


def fits_of_plan(config: PlanConfig, lengths: Sequence[int], kind: "Batching", name_of: Callable[[int], str]) -> Fits:
    """As `fits`, for the model of a configuration of ``ackpt plan``."""
    name, budget = config.step.model, _bytes(config.budget)
    where = None if config.device is None else rates_of(config.device)
    stage(f"building {name}")
    model, positions = training_step(config.step).model, None
    if name.startswith(TRANSFORMERS):
        try:
            make, positions = batches_of(model)
        except TypeError:
            raise ValueError(f"{name} reads no sequences of tokens, so --lengths does not apply") from None
    elif kind[0] == PACKED:
        raise ValueError(f"--packed makes rows for models of transformers ({TRANSFORMERS}...), not {name}")
    else:

        def own(size: int, length: int) -> dict[str, Any]:
            step = replace(config.step, batch_size=size, seq_len=length)
            return BUILT_IN[name][2](model, step) if name in BUILT_IN else training_step(step).inputs

        make = own

    @contextlib.contextmanager
    def capturing():
        with calls_as_on(where, config.autocast), scaled_loss(model) if config.scaling else contextlib.nullcontext():
            yield

    finish = partial(with_training_loop, model=model, config=config)
    steps = _Steps(model, make, where, budget, capturing, finish, config.context_bytes)
    return report(steps, lengths, kind, positions, name_of)


def report(
    steps: "_Steps",
    lengths: Sequence[int],
    kind: "Batching",
    positions: tuple[int, str] | None,
    name_of: Callable[[int], str] = "lengths[{}]".format,
    seed: int = 0,
) -> Fits:
    """The report on one epoch; `name_of`: the length at an index, in words."""
    check_lengths(lengths, kind, positions, name_of)
    steps.check_arguments(kind, lengths)
    orders = random.Random(seed).sample(list(lengths), len(lengths)), sorted(lengths)
    most = positions[0] if positions is not None and kind[0] == PACKED else sum(lengths)
    policies = NONE, FULL, *([] if steps.budget is None else [AUTO])
    with quiet():
        methods = {policy: steps.method(policy, orders, kind, most) for policy in policies}
    name, (_, ascending) = None if steps.where is None else steps.where.name, orders
    words = _WORDS[kind[0]].format(kind[1])
    return Fits(len(lengths), ascending[0], ascending[-1], words, name, steps.budget, methods)


@dataclass
class _Steps:
    """The steps of a model at many shapes.

    ``make``: the arguments of the model for a number of sequences and a length; ``capturing``: a context for captures;
    ``finish``: adds the training loop to a captured graph; ``context_bytes``: of CUDA on the device.
    """

    model: nn.Module
    make: Callable[[int, int], Any]
    where: Device | None
    budget: int | None
    capturing: Callable[[], contextlib.AbstractContextManager[Any]]
    finish: Callable[[JointGraph], JointGraph]
    context_bytes: int
    captures: list[ManySizes] = field(default_factory=list)
    places: dict[Shape, tuple[ManySizes, Values]] = field(default_factory=dict)
    peaks: dict[tuple[str, Shape], tuple[int, Schedule]] = field(default_factory=dict)
    replayed: dict[tuple[str, Shape], bool] = field(default_factory=dict)

    def method(self, policy: str, orders: tuple[list[int], list[int]], kind: "Batching", most: int) -> Method:
        both = [shapes(kind, order) for order in orders]
        self.place(max(both[0], key=lambda shape: (min(shape) >= SMALLEST, shape[0] * shape[1], shape[1])))
        exceeding = [self._exceeding(policy, each) for each in both]
        peaks = (tuple(self.peaks[policy, shape][0] for shape in each) for each in both)
        has_limit = self.where is not None or self.budget is not None
        epochs = [Peaks(tuple(e), p, n if has_limit else None) for e, p, n in zip(both, peaks, exceeding)]
        largest = [self._largest(policy, share, orders, kind, most) if has_limit else None for share in (100, 99)]
        flops = recomputed = 0
        seconds = added = 0.0
        for shape, count in Counter(both[0]).items():
            capture, values = self.place(shape)
            of_nodes, more = capture.costs(values), capture.recompute_cost(self.peaks[policy, shape][1], values)
            flops, recomputed = flops + count * int(of_nodes[0].sum()), recomputed + count * more[0]
            seconds, added = seconds + count * float(of_nodes[1].sum()), added + count * more[1]
        return Method(epochs[0], epochs[1], *largest, flops, recomputed, added / seconds if seconds else None)  # pyright: ignore

    def check_arguments(self, kind: "Batching", lengths: Sequence[int]) -> None:
        """ValueError if the arguments have the same sizes for every number of sequences, or for different lengths."""
        own = 1, (longest := max(lengths))
        others = {"number of sequences": [(2, longest)], "length": [(1, 1), (1, longest + 1024)]}  # batch= may pad
        if kind[0] == PACKED:
            del others["number of sequences"]
        elif min(lengths) == longest:  # inputs of a fixed size, such as images
            del others["length"]
        for name, shapes in others.items():
            if all(self._sizes(*shape) == self._sizes(*own) for shape in shapes):
                raise ValueError(
                    f"batch= returns arguments of the same sizes for every {name}, such as batch{own} and "
                    f"batch{shapes[-1]}: use both of its arguments"
                )

    def _exceeding(self, policy: str, batches: Sequence[Shape], enough: float = float("inf")) -> int:
        """How many batches of these shapes do not fit; stops at more than `enough`."""
        for shape in dict.fromkeys(batches):
            if (policy, shape) not in self.peaks:
                capture, values = self.place(shape)
                self.peaks[policy, shape] = capture.with_policy(policy, values, self.budget)
        exceeding, near = 0, []
        for shape, count in Counter(batches).items():
            is_within = self._is_within(policy, shape)
            exceeding += count if is_within is False else 0
            near += [(self.peaks[policy, shape][0], shape, count)] * (is_within is None)
        near.sort(reverse=True)
        together = max(1, -(-len(near) // _MOST_REPLAYS))
        for at in range(0, len(near), together):
            if exceeding > enough:
                break
            group = near[at : at + together]
            exceeding += 0 if self._is_within_reserved(policy, group[0][1]) else sum(count for *_, count in group)
        return exceeding

    def _largest(self, policy: str, percent: int, orders, kind: "Batching", most: int) -> int:
        """The largest number of `kind`, up to `most`, for which so many percent of the batches fit; 0 for none."""

        def is_enough(number: int) -> bool:
            for order in orders if percent == 100 else orders[:1]:
                batches = [self._searched(policy, shape) for shape in shapes((kind[0], number), order)]
                allowed = (100 - percent) * len(batches) // 100
                if self._exceeding(policy, batches, allowed) > allowed:
                    return False
            return True

        count, longest = len(orders[1]), orders[1][-1]
        least = 1 if kind[0] == BATCH_SIZE else longest
        most = min(most, {BATCH_SIZE: count, TOKENS: count * longest, PACKED: most}[kind[0]])
        low, high = least - 1, min(kind[1], most)
        while high <= most and is_enough(high):
            low, high = high, most if high < most < 2 * high else 2 * high
        high = min(high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_enough(middle) else (low, middle)
        return low if low >= least else 0

    def most_sequences(self, policy: str, length: int, most: int) -> int:
        """The largest number of sequences of this length, up to `most`, that fits; BudgetError if one does not."""
        assert self.budget is not None
        low = 0
        while low < most:
            count = min(max(1, 2 * low), (low + most + 1) // 2)
            shape = self._searched(policy, (count, length))
            if self._exceeding(policy, [shape]) or self.peaks[policy, shape][0] > self.budget:
                most = count - 1
            else:
                low = count
        if not low:
            peak = self.peaks[policy, self._searched(policy, (1, length))][0]
            raise BudgetError(
                f"one sequence of length {length} needs {readable(peak)}, more than the budget: give a larger budget, "
                "or leave out longer sequences",
                peak,
                self.budget,
            )
        return low

    def _searched(self, policy: str, shape: Shape) -> Shape:
        """`shape`, or two sequences in place of one if they fit, since one sequence needs a capture of its own."""
        two = SMALLEST, shape[1]
        return (
            two if self._served(shape) is None and shape[0] < SMALLEST and not self._exceeding(policy, [two]) else shape
        )

    def _is_within(self, policy: str, shape: Shape) -> bool | None:
        """Whether a batch fits: the budget, if there is one for this method, and the device; None if a replay says."""
        peak, _ = self.peaks[policy, shape]
        if self.budget is not None and (policy == AUTO or self.where is None) and peak > self.budget:
            return False
        if self.where is None:
            return True
        room = self.where.memory_bytes - self.context_bytes
        if 2 * (peak + 2 * gpu(self.where.name).cublas_workspace_bytes) <= room:  # of two threads
            return True
        return None if peak <= room else False

    def _is_within_reserved(self, policy: str, shape: Shape) -> bool:
        if (policy, shape) not in self.replayed:
            assert self.where is not None
            (capture, values), schedule = self.place(shape), self.peaks[policy, shape][1]
            graph, workspace = capture.sized(values), capture.workspace_bytes(values).tolist()
            memory = device_memory(graph, workspace, schedule, self.where, self.context_bytes)
            self.replayed[policy, shape] = memory.fits
        return self.replayed[policy, shape]

    def place(self, shape: Shape) -> tuple[ManySizes, Values]:
        """The capture that serves a shape, and the sizes of its dynamic dimensions there."""
        if self._served(shape) is None:
            self.places[shape] = self._captured(shape)
        return self.places[shape]

    def _served(self, shape: Shape) -> tuple[ManySizes, Values] | None:
        """As `place`, but None without a capture that serves the shape."""
        if shape not in self.places:
            sizes = self._sizes(*shape)
            served = ((capture, capture.values(sizes)) for capture in self.captures)
            self.places |= next(({shape: (each, values)} for each, values in served if values is not None), {})
        return self.places.get(shape)

    def _sizes(self, size: int, length: int) -> Sizes:
        with torch.device("meta"):
            leaves = tree_leaves(call_arguments(self.make(size, length)))
        return tuple(map(layout, filter(is_sized, leaves)))

    def _captured(self, shape: Shape) -> tuple[ManySizes, Values]:
        """A new capture, in which the dimensions that change with the shape are dynamic if they are at least 2."""
        size, length = shape
        if len(self.captures) == _MOST_CAPTURES:
            raise TraceError(
                f"the model needs more than {_MOST_CAPTURES} captures for these lengths, such as one for batches of "
                f"{size} sequences of length {length}: pad to a few lengths, or change the model so that it does not "
                "branch on its sizes"
            )
        stage(f"capturing batches of {size} sequences of length {length}")
        args, kwargs = call_arguments(self.make(size, length))
        with self.capturing():
            call = call_of(WatchedModel(self.model), args, kwargs)
            places = [at for at, leaf in enumerate(call.leaves) if is_sized(leaf)]
            dims = {
                Dimension(at, dim)
                for other in (self._sizes(size + 1, length), self._sizes(size, length + 1))
                for at, (was, *_), (now, *_) in zip(places, call.sizes, other)
                for dim, (one, two) in enumerate(zip(was, now))
                if one != two and one >= SMALLEST
            }
            with capture(self.model, args, kwargs, "loss", "drop", sorted(dims)) as captured:
                step = CapturedStep(captured, call, self.model, NO_LOOP)
        if step.reference.analysis.restrided:
            raise TraceError("the model returns a tensor whose strides leave gaps: return the loss, or a copy of it")
        graph = allocated_on(self.where, step.reference)
        self.captures.append(ManySizes(step, self.finish(graph), self.where, call.sizes))
        return self.captures[-1], step.sizes


Batching = tuple[str, int]  # one of the keywords of `fits` that make batches, and its number


def batching(batch_size, tokens_per_batch, packed, said: Callable[[str], str] = str) -> Batching:
    """The one option that is given; ValueError for none or several, and for a number below 1; `said`: their names."""
    options = {BATCH_SIZE: batch_size, TOKENS: tokens_per_batch, PACKED: packed}
    given = {name: value for name, value in options.items() if value is not None}
    if len(given) != 1:
        raise ValueError(
            f"{' and '.join(map(said, given)) or 'no way'} to make batches: give one of {said(BATCH_SIZE)}, "
            f"{said(TOKENS)} and {said(PACKED)}"
        )
    ((kind, number),) = given.items()
    if type(number) is not int or number < 1:
        raise ValueError(f"{said(kind)} must be an integer of at least 1, got {number!r}")
    return kind, number


def shapes(kind: Batching, lengths: Sequence[int]) -> list[Shape]:
    """The shapes of the batches of sequences of these lengths, taken in this order."""
    (name, number), found, count, longest, total = kind, [], 0, 0, 0
    for length in lengths:
        longer = max(longest, length)
        if count and {BATCH_SIZE: count + 1, TOKENS: (count + 1) * longer, PACKED: total + length}[name] > number:
            found.append((1, total) if name == PACKED else (count, longest))
            count, longer, total = 0, length, 0
        count, longest, total = count + 1, longer, total + length
    return [*found, (1, total) if name == PACKED else (count, longest)]


def check_lengths(lengths, kind: Batching, positions: tuple[int, str] | None, name_of: Callable[[int], str]) -> None:
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
        if kind[0] != BATCH_SIZE and length > kind[1]:
            raise ValueError(f"{name_of(at)} is {length}, which exceeds {kind[0]}={kind[1]}")
    if kind[0] == PACKED and positions is not None and kind[1] > positions[0]:
        raise ValueError(f"packed={kind[1]} exceeds the {positions[0]} positions of the model ({positions[1]})")


def _bytes(budget: float | str | None) -> int | None:
    bound, is_reserved = split_budget(budget)
    if is_reserved:
        raise ValueError(
            f"the budget {budget!r} bounds reserved bytes: give allocated ones, as in {str(bound).strip()!r}"
        )
    if budget is not None and is_share(budget):
        raise ValueError(
            f"the budget {budget!r} is a fraction, which bounds every batch by its own baseline: give bytes, such as "
            "'20GiB'"
        )
    return dynamic_limit(budget, 0, 0)


def rates_of(name: str) -> Device:
    """The rates of a GPU by its name, whose memory is known, too."""
    where = device(name)
    gpu(name)
    return where
