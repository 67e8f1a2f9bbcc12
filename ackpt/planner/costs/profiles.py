"""`Profile`: the cost of every node, modeled from shapes and the rates of a device."""

import operator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from ackpt.core.progress import shown
from ackpt.metering.gpus import BLOCK
from ackpt.metering.kernel_memory import cuda_temporaries
from ackpt.metering.resident import rounded
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.costs import calibration, devices
from ackpt.planner.costs.devices import Device
from ackpt.planner.costs.operation_costs import dtype, elements, flops, traffic
from ackpt.planner.costs.workspace import value_of, workspace_bytes


@dataclass(frozen=True)
class Profile:
    """Costs by node id.

    ``flops``: floating-point operations; ``bytes_in``, ``bytes_out``: of all arguments and of the results, where views
    count 0; ``workspace_bytes``: what the operation allocates and frees internally; ``seconds``: run time, None if it
    is not modeled. ``swap_seconds``: by storage id, one copy between device and host, None as for ``seconds``.
    ``pack_seconds``: by storage id, packing a dropout mask once, or unpacking it; also None without such masks.
    ``graph``: the hash of the graph.

    Example:
        >>> import torch, ackpt
        >>> graph = ackpt.trace(torch.nn.Linear(8, 2), torch.ones(4, 8))
        >>> costs = ackpt.profile(graph)
        >>> sum(costs.flops), costs.seconds
        (256, None)
        >>> len(costs.flops) == len(graph.nodes)
        True
    """

    device: str
    flops: tuple[int, ...]
    bytes_in: tuple[int, ...]
    bytes_out: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    seconds: tuple[float, ...] | None
    swap_seconds: tuple[float, ...] | None = None
    graph: str = ""
    pack_seconds: tuple[float, ...] | None = None


def profile(
    graph: JointGraph, device: str | devices.Device | None = None, *, workspace: Literal["given", "measured"] = "given"
) -> Profile:
    """Return the costs of every node of `graph`.

    FLOPs follow from torch's formulas, bytes are those of arguments and results, and seconds are the longer of the two
    times at the device's rates.

    Args:
        graph: from `ackpt.trace`.
        device: the name of a device in `ackpt.planner.costs.devices`, such as ``"h200"``, or a `Device`, whose rates
            give the seconds; by default there are no seconds.
        workspace: ``"measured"`` measures the workspaces of operations on the CPU, see
            `ackpt.planner.costs.workspace.workspace_bytes`; ``"given"`` leaves them at 0.

    Raises:
        TypeError: if `graph` is no graph.
        ValueError: for an unknown device or workspace, or a device without a rate for the graph's dtype.
        MeterError: if workspaces cannot be measured here.

    Example:
        >>> import torch, ackpt
        >>> graph = ackpt.trace(torch.nn.Linear(8, 2), torch.ones(4, 8))
        >>> costs = ackpt.profile(graph, "h200")
        >>> sum(costs.flops), len(costs.seconds) == len(graph.nodes)
        (256, True)
    """
    if not isinstance(graph, JointGraph):
        raise TypeError(f"graph must come from ackpt.trace(model, *args), got {type(graph).__name__}")
    if workspace not in ("measured", "given"):
        raise ValueError(f"workspace must be 'measured' or 'given', got {workspace!r}")
    with shown():
        return _analytic(graph, rates(device), workspace)


def device_of(graph: JointGraph) -> torch.device:
    """The device of a graph's tensors: the GPU if there is one, although some tensors may be in host memory."""
    values = tree_leaves([node.meta.get("val") for node in graph.module.graph.nodes])
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    return next((device for device in sorted(devices, key=str) if device.type != "cpu"), torch.device("cpu"))


def default_rates(graph: JointGraph) -> devices.Device | None:
    """The rates of the device that holds the tensors of `graph`, a GPU or the CPU; None if they are unknown."""
    device = device_of(graph)
    if device.type == "cpu":
        return calibration.this_cpu()
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    by_name = devices.rates_of(torch.cuda.get_device_properties(device))
    return None if by_name is None else devices.with_all_dtypes(by_name)


def _analytic(graph: JointGraph, rates: devices.Device | None, workspace: str) -> Profile:
    computed, read, written, seconds = [], [], [], []
    for node, args, kwargs in _calls(graph):
        result = node.meta.get("val")
        computed.append(flops(node, args, kwargs, result))
        bytes_in, bytes_out = traffic(node, args, kwargs, result)
        read.append(bytes_in)
        written.append(bytes_out)
        if rates is not None:
            seconds.append(seconds_of(rates, node, args, kwargs, result, computed[-1], bytes_in + bytes_out))
    swaps = packs = None
    if rates is not None:
        packs = _pack_seconds(graph, rates)
        swaps = tuple(storage.bytes / rates.link_bytes_per_second for storage in graph.storages)
    return Profile(
        device="any" if rates is None else rates.name,
        flops=tuple(computed),
        bytes_in=tuple(read),
        bytes_out=tuple(written),
        workspace_bytes=workspace_bytes(graph) if workspace == "measured" else (0,) * len(computed),
        seconds=None if rates is None else tuple(seconds),
        swap_seconds=swaps,
        graph=graph.hash,
        pack_seconds=packs,
    )


def _pack_seconds(graph: JointGraph, rates: devices.Device) -> tuple[float, ...] | None:
    """The mean of packing and unpacking, each of which moves a mask and its bits; None without dropout masks."""
    masks = graph.analysis.masks
    if not masks:
        return None
    seconds = [0.0] * len(graph.storages)
    for storage, mask in masks.items():
        size = graph.storages[storage].bytes
        moved, elements = size + mask.packed_bytes, size // mask.dtype.itemsize
        dtype = str(mask.dtype).removeprefix("torch.")
        both = (rates.seconds(0, moved, dtype, name, elements) for name in ("pack_bits", "unpack_bits"))
        seconds[storage] = sum(both) / 2
    return tuple(seconds)


def seconds_of(rates: devices.Device, node, args, kwargs, result, flops: int, moved: int) -> float:
    """The run time of one operation that computes `flops` and moves `moved` bytes."""
    if not moved and not flops:  # a view
        return 0.0
    name = getattr(getattr(node.target, "overloadpacket", node.target), "__name__", "")
    return rates.seconds(flops, moved, dtype(args, kwargs), name, elements(args, kwargs, result))


def with_gpu_workspace(graph: JointGraph, costs: Profile) -> Profile:
    """`costs` with the memory that a GPU's kernels allocate and free internally (`metering.kernel_memory`)."""
    sizes = []
    for node, args, kwargs in _calls(graph):
        sizes.append(sum(rounded(size, BLOCK) for size in cuda_temporaries(node.target, args, kwargs)))
    return replace(costs, workspace_bytes=tuple(sizes))


def _calls(graph: JointGraph):
    """Every node with its arguments, which have shapes and no data."""
    for node_id in range(len(graph.nodes)):
        node = graph.analysis.fx[node_id]
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), partial(value_of, graph.module))
        yield node, args, kwargs


def rates(device: Any) -> devices.Device | None:
    """The rates of a device that is named or passed; None for None. Raises TypeError or ValueError for others."""
    if device is None or isinstance(device, devices.Device):
        return device
    if not isinstance(device, str):
        raise TypeError(f"device must be a name or a Device, got {type(device).__name__}")
    if device == "cpu":
        return calibration.this_cpu()
    if device == "cuda" or device.startswith("cuda:"):
        raise ValueError(f"the rates of {device!r} are not known: name one of {', '.join(devices.DEVICES)}")
    return devices.device(device)


def fused(graph: JointGraph, costs: Profile, rates: Device) -> Profile:
    """`costs` at these `rates`, with the seconds of elementwise operations as Inductor fuses them.

    A chain of them reads once and writes once: a result that only elementwise operations read remains in registers.
    """
    if costs.seconds is None:
        return costs
    seconds = list(costs.seconds)
    for node_id, node in graph.analysis.fx.items():
        if not _is_elementwise(node):
            continue
        moved = sum(_bytes(source) for source in _sources(node) if not _is_elementwise(source))
        is_written = any(not _is_elementwise(reader) for reader in _readers(node))
        alone = costs.bytes_in[node_id] + costs.bytes_out[node_id]
        computing = seconds[node_id] - rates.seconds_per_call - alone / rates.memory_bytes_per_second
        seconds[node_id] = max(0.0, computing) + (moved + is_written * costs.bytes_out[node_id]) / (
            rates.memory_bytes_per_second
        )
        seconds[node_id] += is_written * rates.seconds_per_call
    return replace(costs, seconds=tuple(seconds))


def _is_elementwise(node: torch.fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_view(node: torch.fx.Node) -> bool:
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def _sources(node: torch.fx.Node) -> set[torch.fx.Node]:
    """The nodes whose memory `node` reads: its arguments, or what they are views of."""
    sources = set()
    for argument in node.all_input_nodes:
        while _is_view(argument) and argument.all_input_nodes:
            argument = argument.all_input_nodes[0]
        sources.add(argument)
    return sources


def _readers(node: torch.fx.Node) -> set[torch.fx.Node]:
    """The nodes that read the memory of `node`, through views as well."""
    readers = set()
    for user in node.users:
        readers |= _readers(user) if _is_view(user) else {user}
    return readers


def _bytes(node: torch.fx.Node) -> int:
    values = tree_leaves(node.meta.get("val"))
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
