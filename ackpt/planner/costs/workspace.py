"""Measure the CPU workspace of operations by running each distinct operation once.

Nodes with the same operation and constants, and arguments of the same shapes, dtypes and strides, have the same
workspace. So the time grows with the kinds of layers of a model, not with their number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ackpt.core.progress import stage
from ackpt.metering.run_alone import (
    Allocations,
    cannot_run,
    described,
    in_own_thread,
    run_operation,
    shape_only,
    signature,
)
from ackpt.metering.timeline import MeterError
from ackpt.planner.capture.joint_graph import JointGraph, communicates, once_per_graph

from .operation_costs import allocates

_OWN = ("aten", "prims", "ackpt_graph")
_KERNELS = ("CPU", "CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


@dataclass(frozen=True)
class Disagreement:
    """A storage whose real size is not that in the graph.

    ``node``: the node that allocates it. ``storage``: its id; None if the difference is in the sum of what the node
    allocates and does not free.
    """

    node: int
    target: str
    storage: int | None
    graph_bytes: int
    real_bytes: int


def workspace_bytes(graph: JointGraph) -> tuple[int, ...]:
    """The workspace of every node in bytes: what it allocates and frees internally, beyond its results.

    Exact to the byte for what torch's CPU allocator hands out in the operation's own thread; memory that a library
    (oneDNN, MKL) allocates elsewhere is not included, nor in ``ackpt.measure``. Some kernels allocate a buffer for
    each of ``torch.get_num_threads()`` threads, so sizes depend on that number. The arguments consist of 0.5, True
    and 0, and a workspace that depends on values (``index_put`` by a mask, ``ctc_loss``) is that of these values. A
    collective, which cannot run alone, counts as 0, and so does an operation whose kernel is the user's Python code,
    which planning does not run. Results that take more than in the graph, as those of ``EmbeddingBag``, count at every
    node. Needs the memory of the largest operation.

    Raises:
        MeterError: if the graph is not on the CPU, or an operation cannot run with made-up arguments.
    """
    allocations, _ = _measured(graph, torch.get_num_threads(), runs_alone)
    beyond = sum(max(0, taken.left - _allocated_bytes(graph, node_id)) for node_id, taken in allocations.items())
    return tuple(beyond + (allocations[node.id].workspace if node.id in allocations else 0) for node in graph.nodes)


def _allocated_bytes(graph: JointGraph, node_id: int) -> int:
    """What a node's results take in the graph."""
    analysis = graph.analysis
    return sum(analysis.bytes[storage] for storage in analysis.allocated.get(node_id, ()))


def disagreements(graph: JointGraph) -> tuple[Disagreement, ...]:
    """The storages whose real size is not that in the graph, in the order of execution.

    Torch's shape functions and its CPU kernels do not always agree: by the shape function, layer norm of bfloat16 with
    float32 weights returns bfloat16 statistics; the result of ``mse_loss`` has a storage as large as its input.
    Raises as `workspace_bytes` does.
    """
    analysis = graph.analysis
    different = []
    allocations, _ = _measured(graph, torch.get_num_threads(), _can_run)
    for node_id, taken in allocations.items():
        node, born = graph.nodes[node_id], analysis.allocated.get(node_id, frozenset())
        values = tree_leaves(analysis.fx[node_id].meta.get("val"))
        keys = [value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None for value in values]
        ids = dict(zip(dict.fromkeys(key for key in keys if key is not None), node.storages))
        real = {ids[key]: 0 if result is None else result[1] for key, result in zip(keys, taken.results) if key in ids}
        for storage in sorted(born):
            if real[storage] != analysis.bytes[storage]:
                different.append(Disagreement(node_id, node.target, storage, analysis.bytes[storage], real[storage]))
        size = sum(real[storage] for storage in born)
        if size != taken.left:
            different.append(Disagreement(node_id, node.target, None, size, taken.left))
    return tuple(different)


def runs_alone(node: torch.fx.Node) -> bool:
    """Whether a node is an operation that allocates its results, needs no other process, and is not the user's code."""
    return _can_run(node) and not has_users_kernel(node)


def _can_run(node: torch.fx.Node) -> bool:
    return allocates(node) and not communicates(node)


def has_users_kernel(node: torch.fx.Node) -> bool:
    """Whether a node's operation runs Python code from outside torch and ackpt, which may have side effects."""
    operation: Any = node.target
    if not isinstance(operation, torch._ops.OpOverload) or operation.namespace in _OWN:
        return False
    name = str(operation).removesuffix(".default").replace(".", "/", 1)
    return any(f"{name}/{key}" in torch.library._impls for key in _KERNELS)


def results_agree(graph: JointGraph) -> bool:
    """Whether all operations return results with the shapes, strides and storages of the graph."""
    return _measured(graph, torch.get_num_threads(), runs_alone)[1]


@once_per_graph
def _measured(graph: JointGraph, threads: int, runs: Callable) -> tuple[dict[int, Allocations], bool]:
    """The bytes that each operation allocates with so many threads, by node id; whether all results match the graph.

    `runs`: whether to run a node; others have no entry.
    """
    analysis = graph.analysis
    stage("measuring the workspace of operations")
    values = tree_leaves([node.meta.get("val") for node in graph.module.graph.nodes])
    others = {str(v.device) for v in values if isinstance(v, torch.Tensor) and v.device.type != "cpu"}
    if others:
        raise MeterError(
            f"the workspace of operations is measured on the CPU, and this graph is on {', '.join(sorted(others))}: "
            'profile it there with mode="measured"'
        )

    def run():
        memory: dict[Any, tuple[Allocations, Any]] = {}
        allocations: dict[int, Allocations] = {}
        real: dict[torch.fx.Node, Any] = {}  # values that differ from those in the graph; later ones depend on them

        def value(argument):
            return real[argument] if argument in real else value_of(graph, argument)

        for node_id in sorted(analysis.fx):
            node = analysis.fx[node_id]
            if node.op != "call_function":
                continue
            call = torch.fx.map_arg((node.args, node.kwargs), value)
            if runs(node):
                key = signature(node.target, call)
                if key not in memory:
                    memory[key] = _run(graph.nodes[node_id], node.target, call)
                allocations[node_id], result = memory[key]
                if tree_map(described, result) != tree_map(described, node.meta.get("val")):
                    real[node] = result
            elif any(argument in real for argument in node.all_input_nodes):
                args, kwargs = tree_map(shape_only, call)
                real[node] = node.target(*args, **kwargs)
        return allocations, not real

    return in_own_thread(run)


def value_of(graph: JointGraph, node: torch.fx.Node):
    """The fake value of a node, or the constant that it is."""
    return node.meta["val"] if "val" in node.meta else getattr(graph.module, str(node.target))


def allocation_of(node, target, call) -> Allocations:
    """What one operation allocates that ran at other sizes before, called with tensors without data as arguments.

    ``call`` is (args, kwargs).
    """
    return _run(node, target, call, runs=1)[0]


def _run(node, target, call, runs: int = 2) -> tuple[Allocations, Any]:
    """As `run_operation`; the error names the node and its module."""
    try:
        return run_operation(target, call, runs)
    except (RuntimeError, IndexError) as error:
        raise cannot_run(
            node,
            " on arguments of its shapes and dtypes",
            error,
            "If the model itself fails in the same way, correct the model or its arguments. Otherwise give ackpt.plan "
            'a profile, from ackpt.profile(graph, inputs=..., mode="measured") or, without workspaces, from '
            'ackpt.profile(graph, workspace="given").',
        ) from error
