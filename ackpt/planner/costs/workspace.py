"""Measure the CPU workspace of operations by running each distinct operation once.

At new sizes, an operation is measured only if its workspace may depend on them. That of an elementwise operation on
tensors of one dtype does not if it is at most a scalar at the captured sizes: TensorIterator in ATen allocates
temporaries only to convert dtypes, but a kernel such as that of gelu's backward may copy an argument. Nor does that of
the operations in `WITHOUT` that had none: their CPU kernels allocate nothing but results.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ackpt.core.progress import stage
from ackpt.metering.kernel_memory import FLOATS, SCALAR_BYTES, WITHOUT, is_safe
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
from ackpt.planner.capture.dynamic_sizes import DynamicModule, Symbols, expression
from ackpt.planner.capture.in_place import AUTOCAST
from ackpt.planner.capture.joint_graph import JointGraph, communicates, once_per_graph
from ackpt.planner.costs.operation_costs import allocates

_OWN = ("aten", "prims", "ackpt_graph", "bitsandbytes")
_KERNELS = ("CPU", "CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


def workspace_bytes(graph: JointGraph) -> tuple[int, ...]:
    """The workspace of every node in bytes: what it allocates and frees internally, beyond its results.

    Exact to the byte for what torch's CPU allocator hands out in the operation's own thread, with 0.5, True and 0 as
    values; memory that a library (oneDNN, MKL) allocates elsewhere is not included, nor in ``ackpt.measure``. A
    collective counts as 0, and so does an operation whose kernel is the user's Python code. Results that take more than
    in the graph, as those of ``EmbeddingBag``, count at every node. Needs the memory of the largest operation. Raises
    MeterError if the graph is not on the CPU, or an operation cannot run with made-up arguments.
    """
    allocations, _ = _measured(graph, torch.get_num_threads())
    sizes, allocated = graph.analysis.bytes, graph.analysis.allocated
    results = {node_id: sum(sizes[storage] for storage in allocated.get(node_id, ())) for node_id in allocations}
    beyond = sum(max(0, taken.left - results[node_id]) for node_id, taken in allocations.items())
    return tuple(beyond + (allocations[node.id].workspace if node.id in allocations else 0) for node in graph.nodes)


def runs_alone(node: torch.fx.Node) -> bool:
    """Whether a node is an operation that allocates its results, needs no other process, and is not the user's code."""
    return allocates(node) and not communicates(node) and not has_users_kernel(node)


def has_users_kernel(node: torch.fx.Node) -> bool:
    """Whether a node's operation does not run on made-up data: Python code from outside torch and ackpt, which may have
    side effects, or a kernel that may take made-up integers for offsets."""
    operation: Any = node.target
    if not isinstance(operation, torch._ops.OpOverload):
        return False
    values = [each.meta.get("val") for each in node.all_input_nodes]
    if not is_safe(operation, values):
        return True
    autocast, first = dict(node.meta.get(AUTOCAST, ())), next((v for v in values if isinstance(v, torch.Tensor)), None)
    if autocast and first is not None and autocast.get(first.device.type) != first.dtype:
        return True  # it may cast inside
    name = str(operation).removesuffix(".default").replace(".", "/", 1)
    return operation.namespace not in _OWN and any(f"{name}/{key}" in torch.library._impls for key in _KERNELS)


@once_per_graph
def _measured(graph: JointGraph, threads: int) -> tuple[dict[int, Allocations], bool]:
    """What each operation that runs alone allocates with so many threads; whether all results match the graph."""
    analysis = graph.analysis
    stage("measuring the workspace of operations")
    values = tree_leaves([node.meta.get("val") for node in graph.module.graph.nodes])
    others = {str(v.device) for v in values if isinstance(v, torch.Tensor) and v.device.type != "cpu"}
    if others:
        raise MeterError(
            f"the workspace of operations is measured on the CPU, and this graph is on {', '.join(sorted(others))}: "
            "leave workspace out"
        )

    def run():
        memory: dict[Any, tuple[Allocations, Any]] = {}
        allocations: dict[int, Allocations] = {}
        real: dict[torch.fx.Node, Any] = {}  # values that differ from those in the graph; later ones depend on them

        def value(argument):
            return real[argument] if argument in real else value_of(graph.module, argument)

        for node_id in sorted(analysis.fx):
            node = analysis.fx[node_id]
            if node.op != "call_function":
                continue
            call = torch.fx.map_arg((node.args, node.kwargs), value)
            if runs_alone(node):
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


def value_of(module: torch.fx.GraphModule, node: torch.fx.Node):
    """The fake value of a node of `module`, or the constant that it is."""
    return node.meta["val"] if "val" in node.meta else getattr(module, str(node.target))


def allocation_of(node, target, call) -> Allocations:
    """What an operation allocates that ran at other sizes before; ``call``: its (args, kwargs), without data."""
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
            "Call the model on these arguments without a plan: if it fails in the same way, correct the arguments. "
            "Otherwise plan with regions=True, or give ackpt.plan a profile without workspaces, from "
            "ackpt.profile(graph).",
        ) from error


aten = torch.ops.aten


class TensorLayout(NamedTuple):
    """A tensor argument; the numbers may be expressions."""

    dtype: torch.dtype
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    bytes: Any
    is_conj: bool
    is_neg: bool


def _safe_softmax(threads: int, x: TensorLayout, dim: int, *_) -> int:
    """Minus infinity, and a byte for each element and each row: whether it is that number."""
    elements = prod(x.shape)
    return elements + elements // x.shape[dim] + x.dtype.itemsize


def _layer_norm_backward(threads: int, gradient: TensorLayout, x: TensorLayout, normalized: list[int], *others) -> int:
    """For each thread its sums of the gradients of weight and bias."""
    *_, (_, *of_parameters) = others
    return 2 * threads * prod(normalized) * x.dtype.itemsize if any(of_parameters) else 0


# Of the number of threads and the operation's arguments; each replaces a measurement if exact at the captured sizes.
_FORMULAS: dict[Any, Callable[..., int]] = {
    aten._safe_softmax.default: _safe_softmax,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}


class DynamicWorkspace:
    """The workspace of every node of an instance of `dynamic`; `reference` is the instance that was captured."""

    def __init__(self, dynamic: DynamicModule, reference: JointGraph):
        self.dynamic, self.reference = dynamic, reference
        self._threads = torch.get_num_threads()
        self._at_reference = workspace_bytes(reference)
        self._measured: dict[tuple, int] = {}

    @property
    def is_exact(self) -> bool:
        """Whether the sizes of all results follow from the graph; otherwise every instance has to be measured."""
        return _measured(self.reference, torch.get_num_threads())[1]

    def at(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Bytes by node id at these sizes of the dynamic dimensions."""
        workspace = list(self._at_reference)
        todo, threads = [], torch.get_num_threads()
        calls = calls_at(self._calls, self.dynamic.symbols, values)
        for (node_ids, fx, call, spec), formula in zip(calls, self._formulas):
            key = fx.target, spec, tuple(map(_key_of, call)), threads
            if formula is not None and key not in self._measured:
                args, _ = tree_unflatten(call, spec)
                self._measured[key] = formula(threads, *args)
            todo.append((node_ids, fx.target, call, spec, key))
        if any(key not in self._measured for *_, key in todo):
            in_own_thread(lambda: self._measure(todo))
        for node_ids, *_, key in todo:
            for node_id in node_ids:
                workspace[node_id] = self._measured[key]
        return tuple(workspace)

    def _measure(self, todo) -> None:
        for node_ids, target, call, spec, key in todo:
            if key not in self._measured:
                allocation = allocation_of(self.reference.nodes[node_ids[0]], target, with_tensors(call, spec))
                self._measured[key] = allocation.workspace

    @cached_property
    def _calls(self) -> list:
        """The calls whose workspace depends on the sizes."""
        nodes = ((node.id, self.dynamic.fx[node.id]) for node in self.reference.nodes)
        run = (each for each in nodes if runs_alone(each[1]) and not self._keeps_its_workspace(*each))
        return distinct_calls(self.dynamic.module, run)

    @cached_property
    def _formulas(self) -> list[Callable[..., int] | None]:
        """The formula of every call; one without must run."""
        return [self._formula(node_ids[0]) for node_ids, *_ in self._calls]

    def _formula(self, node_id: int) -> Callable[..., int] | None:
        """The formula of an operation, if it gives the workspace at the captured sizes, so that nothing is copied."""
        fx = self.reference.analysis.fx[node_id]
        if fx.target not in _FORMULAS:
            return None
        call = torch.fx.map_arg((fx.args, fx.kwargs), partial(value_of, self.reference.module))
        args, kwargs = tree_map(_layout_of, call)
        dtypes = {leaf.dtype for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)}
        formula = _FORMULAS[fx.target]
        is_exact = dtypes.issubset(FLOATS) and len(dtypes) == 1 and not kwargs
        return formula if is_exact and formula(self._threads, *args) == self._at_reference[node_id] else None

    def _keeps_its_workspace(self, node_id: int, fx: torch.fx.Node) -> bool:
        values = [value_of(self.dynamic.module, node) for node in fx.all_input_nodes]
        tensors = [value for value in tree_leaves((values, fx.meta.get("val"))) if isinstance(value, torch.Tensor)]
        if not any(map(_has_expressions, tree_leaves(values))):
            return not any(map(_has_expressions, tensors))
        dtypes = {tensor.dtype for tensor in tensors}
        if torch.Tag.pointwise in getattr(fx.target, "tags", ()) and len(dtypes) == 1:
            return self._at_reference[node_id] <= SCALAR_BYTES
        if fx.target is aten.sum.dim_IntList and all(size == 1 for size in fx.meta["val"].shape):
            return False  # the threads may share the elements of one sum, with a result each
        floats = {dtype for dtype in dtypes if dtype.is_floating_point}
        return fx.target in WITHOUT and floats.issubset(FLOATS) and not self._at_reference[node_id]


def _has_expressions(value) -> bool:
    is_tensor = isinstance(value, torch.Tensor)
    return value._has_symbolic_sizes_strides if is_tensor else isinstance(value, (torch.SymInt, torch.SymFloat))


def distinct_calls(module: torch.fx.GraphModule, nodes: Iterable[tuple[int, torch.fx.Node]], results=False) -> list:
    """Every distinct call of `nodes`, (id, node of `module`), once: (ids, one of the nodes, leaves, their pytree).

    The leaves are those of its arguments, and of its result if `results`; their sizes may be expressions.
    """
    calls: dict[tuple, tuple] = {}
    for node_id, fx in nodes:
        values = torch.fx.map_arg((fx.args, fx.kwargs), partial(value_of, module))
        leaves, spec = tree_flatten((*values, fx.meta.get("val")) if results else values)
        leaves = list(map(_layout_of, leaves))
        calls.setdefault((fx.target, spec, tuple(map(_key_of, leaves))), ([], fx, leaves, spec))[0].append(node_id)
    return list(calls.values())


def calls_at(calls: list, symbols: Symbols | None, values: tuple[int, ...]) -> Iterator[tuple]:
    """`calls` with numbers in place of expressions, at these sizes of the dynamic dimensions."""
    expressions = tuple(number for _, _, leaves, _ in calls for leaf in leaves for number in _numbers_of(leaf))
    numbers = iter(expressions if symbols is None else symbols.evaluated(expressions, values))
    for node_ids, fx, leaves, spec in calls:
        yield node_ids, fx, [_evaluated(leaf, numbers) for leaf in leaves], spec


def with_tensors(leaves: Sequence[Any], spec) -> Any:
    """The pytree of `leaves` with tensors without data in place of layouts."""
    return tree_unflatten([_tensor_of(leaf) if isinstance(leaf, TensorLayout) else leaf for leaf in leaves], spec)


def _layout_of(leaf):
    if not isinstance(leaf, torch.Tensor):
        return expression(leaf)
    shape, strides = (tuple(map(expression, sizes)) for sizes in (leaf.shape, leaf.stride()))
    offset, size = expression(leaf.storage_offset()), expression(leaf.untyped_storage().nbytes())
    return TensorLayout(leaf.dtype, shape, strides, offset, size, leaf.is_conj(), leaf.is_neg())


def _numbers_of(leaf) -> tuple[Any, ...]:
    if isinstance(leaf, TensorLayout):
        return (*leaf.shape, *leaf.strides, leaf.offset, leaf.bytes)
    return (leaf,) if _is_expression(leaf) else ()


def _evaluated(leaf, numbers):
    """`leaf` with the next ones of `numbers` in place of its own."""
    if isinstance(leaf, TensorLayout):
        dims = len(leaf.shape)
        values = [next(numbers) for _ in range(2 * dims + 2)]
        return leaf._replace(
            shape=tuple(values[:dims]), strides=tuple(values[dims:-2]), offset=values[-2], bytes=values[-1]
        )
    return next(numbers) if _is_expression(leaf) else leaf


def _is_expression(leaf) -> bool:
    return hasattr(leaf, "free_symbols")


def _key_of(leaf):
    return leaf if isinstance(leaf, TensorLayout) or _is_expression(leaf) else (type(leaf), repr(leaf))


def _tensor_of(layout: TensorLayout) -> torch.Tensor:
    elements = layout.bytes // layout.dtype.itemsize
    tensor = torch.empty(elements, dtype=layout.dtype, device="meta")
    tensor = tensor.as_strided(layout.shape, layout.strides, layout.offset)
    tensor = tensor.conj() if layout.is_conj else tensor
    return tensor._neg_view() if layout.is_neg else tensor
