"""What an operation takes and gives back within itself on the CPU: every different operation is run once, alone.

Two nodes with the same operation and constants, whose arguments have the same shapes, dtypes and places in memory, take
the same, so the cost grows with the kinds of layers of a model, not with their number.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import ProfilerConfig, ProfilerState
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ackpt.capture.analysis import communicates, facts
from ackpt.capture.example_values import stand_in
from ackpt.capture.joint_graph import JointGraph
from ackpt.metering.cpu_meter import no_collection
from ackpt.metering.timeline import MeterError

from .operation_costs import allocates

_FILLS = (0, 1)  # of integers: 0 is valid as an index of anything, 1 as a divisor


@dataclass(frozen=True)
class Taken:
    """What one run of an operation took from the CPU allocator, in bytes.

    ``workspace``: its peak beyond what it left behind; ``left``: that, its fresh results; ``results``: of each result
    the dtype and the bytes of its storage, None for what is no tensor.
    """

    workspace: int
    left: int
    results: tuple[tuple[torch.dtype, int] | None, ...]


@dataclass(frozen=True)
class Disagreement:
    """A storage that takes other bytes in fact than in the graph.

    ``node``: what brings it along. ``storage``: its id; None if the node leaves bytes behind that the graph knows
    nothing of, or brings nothing along where the graph says so.
    """

    node: int
    target: str
    storage: int | None
    graph_bytes: int
    real_bytes: int


def workspace_bytes(graph: JointGraph) -> tuple[int, ...]:
    """Bytes by node id that each operation takes and gives back within itself, beyond its results.

    Exact to the byte for what torch's CPU allocator hands out in the operation's own thread; what a library (oneDNN,
    MKL) takes elsewhere is not in it, as it is not in ``ackpt.measure``. Some kernels take a buffer for each of
    ``torch.get_num_threads()`` threads, so the sizes hold for that number. They are found with arguments made of
    0.5, True and 0: a workspace that depends on values (``index_put`` by a mask, ``ctc_loss``) is that of these
    values. A collective cannot run alone and counts nothing. Needs the memory of the largest operation.

    Raises:
        MeterError: if the graph is not on the CPU, or an operation cannot run with made-up arguments.
    """
    found = _taken(graph)
    return tuple(found[node.id].workspace if node.id in found else 0 for node in graph.nodes)


def disagreements(graph: JointGraph) -> tuple[Disagreement, ...]:
    """The storages that take other bytes in fact than in the graph, in the order of execution.

    Torch's shape functions and its CPU kernels do not always agree. Layer norm of bfloat16 with float32 weights is
    said to give its statistics in bfloat16; the result of ``mse_loss`` lies in a storage as large as its input.
    Raises as `workspace_bytes` does.
    """
    known = facts(graph)
    different = []
    for place, taken in _taken(graph).items():
        node, born = graph.nodes[place], known.born.get(place, frozenset())
        values = tree_leaves(known.fx[place].meta.get("val"))
        keys = [value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None for value in values]
        ids = dict(zip(dict.fromkeys(key for key in keys if key is not None), node.storages))
        real = {ids[key]: 0 if found is None else found[1] for key, found in zip(keys, taken.results) if key in ids}
        for storage in sorted(born):
            if real[storage] != known.bytes[storage]:
                different.append(Disagreement(place, node.target, storage, known.bytes[storage], real[storage]))
        size = sum(real[storage] for storage in born)
        if size != taken.left:
            different.append(Disagreement(place, node.target, None, size, taken.left))
    return tuple(different)


def watched(function: Callable[[], Any]) -> tuple[Any, Taken]:
    """The result of `function` and what it took from the CPU allocator in this thread."""
    # The older of torch's profilers is a thread's own: it also works while the user's profiler runs in another one.
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(config)
    try:
        result = function()
    finally:
        records = _disable_profiler_legacy()
    live = peak = 0
    for record in (record for thread in records for record in thread):
        if record.kind() == "memory_alloc":
            live += record.cpu_memory_usage()
            peak = max(peak, live)
    return result, Taken(peak - live, live, results(result))


def alone(function: Callable[[], Any], devices=()) -> Any:
    """`function()` in a thread of its own, without gradients, leaving the caller's random numbers as they are.

    There the caller's autocast, fake tensors, FLOP counters and profilers do not reach it. `devices`: GPUs whose
    random numbers it may draw, beside the CPU's.
    """

    def run():
        with torch.no_grad(), no_collection():
            return function()

    with torch.random.fork_rng(devices), ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()


def runs_alone(node: torch.fx.Node) -> bool:
    """Whether a node is an operation with results of its own that needs no other process."""
    return allocates(node) and not communicates(node)


def _taken(graph: JointGraph) -> dict[int, Taken]:
    """What every operation takes, by node id; views and the like are left out. Found once for a graph."""
    threads = torch.get_num_threads()
    kept = graph.__dict__.setdefault("_taken", {})
    if threads not in kept:
        kept[threads] = _measured(graph)
    return kept[threads]


def _measured(graph: JointGraph) -> dict[int, Taken]:
    known = facts(graph)
    values = tree_leaves([node.meta.get("val") for node in graph.module.graph.nodes])
    others = {str(v.device) for v in values if isinstance(v, torch.Tensor) and v.device.type != "cpu"}
    if others:
        raise MeterError(
            f"the workspace of operations is measured on the CPU, and this graph is on {', '.join(sorted(others))}: "
            'profile it there with mode="measured"'
        )

    def run():
        memory: dict[Any, tuple[Taken, Any]] = {}
        found: dict[int, Taken] = {}
        real: dict[torch.fx.Node, Any] = {}  # values that are not what the graph says, which later ones depend on

        def value(argument):
            return real[argument] if argument in real else value_of(graph, argument)

        for place in sorted(known.fx):
            node = known.fx[place]
            if node.op != "call_function":
                continue
            call = torch.fx.map_arg((node.args, node.kwargs), value)
            if runs_alone(node):
                key = _signature(node.target, call)
                if key not in memory:
                    memory[key] = _run(graph.nodes[place], node.target, call)
                found[place], result = memory[key]
                if tree_map(_described, result) != tree_map(_described, node.meta.get("val")):
                    real[node] = result
            elif any(argument in real for argument in node.all_input_nodes):
                args, kwargs = tree_map(_shape_only, call)
                real[node] = node.target(*args, **kwargs)
        return found

    return alone(run)


def value_of(graph: JointGraph, node: torch.fx.Node):
    """What stands for a node's value: its shape, or the constant that it is."""
    return node.meta["val"] if "val" in node.meta else getattr(graph.module, str(node.target))


def _run(node, target, call) -> tuple[Taken, Any]:
    """What an operation takes, and its result without data."""
    leaves, spec = tree_flatten(call)
    reasons = []
    for fill in _FILLS:
        try:
            for _ in range(2):  # the first call may fill caches that stay
                args, kwargs = tree_unflatten([_made(leaf, fill) for leaf in leaves], spec)
                result, taken = watched(lambda: target(*args, **kwargs))  # noqa: B023
            return taken, tree_map(_shape_only, result)
        except RuntimeError as error:
            reasons.append(error)
    raise MeterError(
        f"{node.name} ({node.target}) of module {node.module or 'the model itself'!r} does not run on arguments of its "
        f"shapes and dtypes: {str(reasons[0]).splitlines()[0]}. If the plain model fails so too, mend the model or "
        "what it is called with; else its workspace cannot be measured alone: give ackpt.plan a profile, of "
        'ackpt.profile(graph, inputs=..., mode="measured") or, without workspaces, of workspace="given".'
    ) from reasons[0]


def _shape_only(value):
    return stand_in(value, device="meta") if isinstance(value, torch.Tensor) else value


def _made(leaf, fill: int):
    if isinstance(leaf, torch.Tensor):
        return stand_in(leaf, fill, "cpu")
    return leaf.clone_state() if isinstance(leaf, torch.Generator) else leaf


def _signature(target, call) -> tuple:
    """What two calls must share to take the same bytes."""
    leaves, spec = tree_flatten(call)
    return target, spec, tuple(map(_described, leaves))


def _described(leaf):
    if isinstance(leaf, torch.Tensor):
        lies = tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.untyped_storage().nbytes()
        return leaf.dtype, *lies, leaf.is_conj(), leaf.is_neg()
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str)):
        return type(leaf), repr(leaf)
    return type(leaf), leaf


def results(value) -> tuple[tuple[torch.dtype, int] | None, ...]:
    """Of each part of a result the dtype and the bytes of its storage, None for what is no tensor."""
    return tuple(
        (leaf.dtype, leaf.untyped_storage().nbytes()) if isinstance(leaf, torch.Tensor) else None
        for leaf in tree_leaves(value)
    )
