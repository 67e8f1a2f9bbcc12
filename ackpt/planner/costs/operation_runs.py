"""Run a graph node by node and measure every operation: seconds, bytes in and out, and workspace.

On the CPU, values live until their last use. On CUDA, only the arguments of the running operation are on the device and
all other values are in host memory, so that graphs that exceed the device's memory can be measured too.
"""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ackpt.core.progress import stage
from ackpt.metering import cpu_meter, cuda_meter
from ackpt.metering.run_alone import cannot_run, count_allocations, flagged, in_own_thread, stand_in
from ackpt.metering.timeline import MeterError
from ackpt.planner.capture.example_values import given, made_up, random_like
from ackpt.planner.capture.joint_graph import JointGraph, once_per_graph
from ackpt.planner.costs.devices import Device, call_of, operation_name
from ackpt.planner.costs.operation_costs import allocates, dtype, elements, flops, traffic, written
from ackpt.planner.costs.workspace import runs_alone, value_of

RUNS = 3  # timed, after one to warm up


@dataclass(frozen=True)
class Cost:
    """The measured cost of one operation: seconds (the median of `RUNS`), bytes read and written, and workspace."""

    seconds: float
    bytes_in: int
    bytes_out: int
    workspace_bytes: int


def run(graph: JointGraph, inputs=None) -> dict[int, Cost]:
    """The cost of every operation by node id, measured on the graph's device with `inputs`, or with made-up values."""
    device = device_of(graph)
    if device.type not in ("cpu", "cuda"):
        raise MeterError(f"operations are measured on cpu and cuda, and this graph is on {device}")
    values = made_up(graph) if inputs is None else given(graph, inputs)
    runner = (Swapping if device.type == "cuda" else Runner)(graph, device)

    def follow():
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            runner.run(*values)

    in_own_thread(follow, [device] if device.type == "cuda" else [])
    return runner.costs


def device_of(graph: JointGraph) -> torch.device:
    """The device of a graph's tensors: the GPU if there is one, although some tensors may be in host memory."""
    values = tree_leaves([node.meta.get("val") for node in graph.module.graph.nodes])
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    return next((device for device in sorted(devices, key=str) if device.type != "cpu"), torch.device("cpu"))


class Runner(fx.Interpreter):
    """Measures every operation of a graph while it runs; values live until their last use."""

    def __init__(self, graph: JointGraph, device: torch.device):
        super().__init__(graph.module)
        self.extra_traceback = False  # the error names the node
        self.joint, self.device = graph, device
        self.costs: dict[int, Cost] = {}

    def get_attr(self, target, args, kwargs):
        value = super().get_attr(target, args, kwargs)
        return random_like(value) if isinstance(value, FakeTensor) else value

    def run_node(self, n):
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return self.measured(n, args, kwargs) if allocates(n) else self.call_function(n.target, args, kwargs)

    def measured(self, node, args, kwargs):
        """The result of `node`; records its cost."""

        def call():
            return self.call_function(node.target, args, kwargs)

        on_cuda = self.device.type == "cuda"
        clock = cuda_meter.clock if on_cuda else cpu_meter.clock
        try:
            call()
            seconds = median(clock(call, self.device) for _ in range(RUNS))
            result, allocations = count_allocations(call, on_cuda)
        except RuntimeError as error:
            advice = "Give the model and its arguments as inputs if values are the cause."
            raise cannot_run(self.joint.nodes[node.meta["ackpt_id"]], "", error, advice) from error
        moved = traffic(node, args, kwargs, result)
        self.costs[node.meta["ackpt_id"]] = Cost(seconds, *moved, allocations.workspace)
        return result


def swap_seconds(graph: JointGraph) -> tuple[float, ...]:
    """By storage id, seconds of one copy from a CUDA device to pinned host memory, the median of `RUNS`."""
    device = device_of(graph)
    by_size: dict[int, float] = {}
    for size in {storage.bytes for storage in graph.storages}:
        on_device = torch.empty(size, dtype=torch.uint8, device=device)
        on_host = torch.empty(size, dtype=torch.uint8, pin_memory=True)

        def copy():
            on_host.copy_(on_device, non_blocking=True)  # noqa: B023

        copy()
        by_size[size] = median(cuda_meter.clock(copy, device) for _ in range(RUNS))
    return tuple(by_size[storage.bytes] for storage in graph.storages)


@dataclass(frozen=True)
class Parked:
    """A tensor in host memory: the bytes of its storage, which its views share, and its layout in them."""

    host: torch.Tensor
    layout: torch.Tensor  # without data

    @classmethod
    def of(cls, host: torch.Tensor, tensor: torch.Tensor) -> Parked:
        return cls(host, stand_in(tensor, device="meta"))

    def among(self, storage: torch.Tensor) -> torch.Tensor:
        """The tensor, in a copy of the bytes."""
        like = self.layout
        whole = storage[: storage.numel() // like.element_size() * like.element_size()].view(like.dtype)
        return flagged(whole.as_strided(like.shape, like.stride(), like.storage_offset()), like)


class Swapping(Runner):
    """Moves the arguments of every operation to the device, and its results to host memory."""

    def run_node(self, n):
        if n.op in ("placeholder", "get_attr"):
            value = super().run_node(n)
            is_here = isinstance(value, torch.Tensor) and n.meta.get("val", value).device.type == self.device.type
            return Parked.of(_bytes(value).to("cpu", copy=True), value) if is_here else value
        if n.op != "call_function" or allocates(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        seen = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Parked)]
        if not seen or n.target is operator.getitem:
            return self.call_function(n.target, args, kwargs)
        args, kwargs = tree_map_only(Parked, lambda parked: parked.layout, (args, kwargs))
        views = self.call_function(n.target, args, kwargs)
        return tree_map_only(torch.Tensor, lambda view: Parked(seen[0].host, view), views)

    def measured(self, node, args, kwargs):
        hosts = {id(leaf.host): leaf.host for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Parked)}
        on_device = {key: host.to(self.device, copy=True) for key, host in hosts.items()}
        args, kwargs = tree_map_only(Parked, lambda parked: parked.among(on_device[id(parked.host)]), (args, kwargs))
        result = super().measured(node, args, kwargs)
        places = {storage.data_ptr(): hosts[key] for key, storage in on_device.items()}
        for argument in written(node, args):
            places[_bytes(argument).data_ptr()].copy_(_bytes(argument))

        def park(tensor):
            if tensor.device.type != self.device.type:
                return tensor
            storage = _bytes(tensor)
            if storage.data_ptr() not in places:
                places[storage.data_ptr()] = storage.to("cpu", copy=True)
            return Parked.of(places[storage.data_ptr()], tensor)

        return tree_map_only(torch.Tensor, park, result)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of a tensor, uint8[bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


_FILLS = (0, 1)  # of integers, as in `workspace`
_SECONDS = 0.001  # per operation, after one call to warm up; at least one call


def measured_rates(graph: JointGraph, base: Device) -> Device:
    """`base` with the measured time of every operation of `graph`; for other shapes, its average rate counts."""
    if not graph.has_data:
        raise ValueError(
            "costs='measured' times operations on the model's device, but this model has no data: give real tensors, "
            "or name a device with device_profile="
        )
    timed = _timed(graph)
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for each in timed.values():
        totals[each.operation, each.dtype][0] += each.work
        totals[each.operation, each.dtype][1] += max(each.seconds - base.seconds_per_call, 0.1 * each.seconds)
    rates: dict[str, dict[str, float]] = {name: dict(by_dtype) for name, by_dtype in base.by_operation.items()}
    for (name, kind), (work, seconds) in totals.items():
        if work:
            rates.setdefault(name, {})[kind] = work / seconds
    by_call = {key: each.seconds for key, each in timed.items()}
    return replace(base, name=f"{base.name}, measured", by_operation=rates, seconds_by_call=by_call)


class _Timed(NamedTuple):
    """A call that was timed; ``work``: FLOPs, or elements if it has none."""

    operation: str
    dtype: str
    work: int
    seconds: float


@once_per_graph
def _timed(graph: JointGraph) -> dict[str, _Timed]:
    """The distinct calls of `graph` by `call_of`."""
    stage("timing the operations of the model")
    device = device_of(graph)

    def run() -> dict[str, _Timed]:
        timed: dict[str, _Timed] = {}
        for node in graph.analysis.fx.values():
            if node.op != "call_function" or not runs_alone(node):
                continue
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda argument: value_of(graph, argument))
            key = call_of(node.target, args, kwargs)
            if key not in timed and (seconds := _seconds(node.target, args, kwargs, device)) is not None:
                result = node.meta.get("val")
                work = flops(node, args, kwargs, result) or elements(args, kwargs, result)
                timed[key] = _Timed(operation_name(node.target), dtype(args, kwargs), work, seconds)
        return timed

    return in_own_thread(run, [device] if device.type == "cuda" else [])


def _seconds(target, args, kwargs, device: torch.device) -> float | None:
    """Seconds of the fastest of a few calls; None if the operation does not run with made-up arguments."""
    leaves, spec = tree_flatten((args, kwargs))
    clock = cuda_meter.clock if device.type == "cuda" else cpu_meter.clock
    for fill in _FILLS:
        try:
            made, options = tree_unflatten([_made(leaf, fill) for leaf in leaves], spec)
            return _fastest(lambda: target(*made, **options), clock, device)  # noqa: B023
        except (RuntimeError, IndexError):
            continue
    return None


def _fastest(call: Callable[[], Any], clock, device: torch.device) -> float:
    call()
    times: list[float] = []
    while sum(times) < _SECONDS and len(times) < 20:
        times.append(clock(call, device))
    return min(times)


def _made(leaf, fill: int):
    if isinstance(leaf, torch.Tensor):
        return stand_in(leaf, fill, str(leaf.device))
    return leaf.clone_state() if isinstance(leaf, torch.Generator) else leaf
