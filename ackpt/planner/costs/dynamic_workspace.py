"""Compute the workspace of operations at new sizes, measuring only the operations that depend on them.

An operation is measured at new sizes only if its workspace may depend on them. That of an elementwise operation on
tensors of one dtype does not if it is at most a scalar at the captured sizes: TensorIterator in ATen allocates
temporaries only to convert dtypes, but a kernel such as that of gelu's backward may copy an argument. Nor does that of
the operations in `WITHOUT` that had none at the captured sizes: their CPU kernels allocate nothing but results. For
the operations in `_FORMULAS`, a formula replaces the measurement if it is exact at the captured sizes.
`tests/planner/costs/test_dynamic_workspace.py` compares this with running every operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ackpt.metering.kernel_memory import FLOATS, SCALAR_BYTES, WITHOUT
from ackpt.metering.run_alone import in_own_thread
from ackpt.planner.capture.dynamic_sizes import DynamicModule, expression
from ackpt.planner.capture.joint_graph import JointGraph

from .workspace import allocation_of, results_agree, runs_alone, value_of, workspace_bytes

aten = torch.ops.aten


class _Layout(NamedTuple):
    """A tensor argument; the numbers may be expressions."""

    dtype: torch.dtype
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    bytes: Any
    is_conj: bool
    is_neg: bool


def _safe_softmax(threads: int, x: _Layout, dim: int, *_) -> int:
    """Minus infinity, and a byte for each element and each row: whether it is that number."""
    elements = prod(x.shape)
    return elements + elements // x.shape[dim] + x.dtype.itemsize


def _layer_norm_backward(threads: int, gradient: _Layout, x: _Layout, normalized: list[int], *others) -> int:
    """For each thread its sums of the gradients of weight and bias."""
    *_, (_, *of_parameters) = others
    return 2 * threads * prod(normalized) * x.dtype.itemsize if any(of_parameters) else 0


# Of the number of threads and the operation's arguments.
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
        self._known: dict[tuple, int] = {}

    @property
    def is_exact(self) -> bool:
        """Whether the sizes of all results follow from the graph; otherwise every instance has to be measured."""
        return results_agree(self.reference)

    def at(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Bytes by node id at these sizes of the dynamic dimensions."""
        found = list(self._at_reference)
        numbers = iter(self.dynamic.symbols.evaluated(self._expressions, values))
        todo, threads = [], torch.get_num_threads()
        for places, target, leaves, spec, formula in self._calls:
            call = [_evaluated(leaf, numbers) for leaf in leaves]
            key = target, spec, tuple(map(_key, call)), threads
            if formula is not None and key not in self._known:
                args, _ = tree_unflatten(call, spec)
                self._known[key] = formula(threads, *args)
            todo.append((places, target, call, spec, key))
        if any(key not in self._known for *_, key in todo):
            in_own_thread(lambda: self._measure(todo))
        for places, *_, key in todo:
            for place in places:
                found[place] = self._known[key]
        return tuple(found)

    def _measure(self, todo) -> None:
        for places, target, call, spec, key in todo:
            if key not in self._known:
                arguments = tree_unflatten([_meta(leaf) if isinstance(leaf, _Layout) else leaf for leaf in call], spec)
                self._known[key] = allocation_of(self.reference.nodes[places[0]], target, arguments).workspace

    @cached_property
    def _calls(self) -> list[tuple]:
        """(nodes, operation, leaves of its arguments, their pytree, formula) of every call that depends on sizes, once.

        A call without a formula must run.
        """
        calls: dict[tuple, tuple] = {}
        for node in self.reference.nodes:
            fx = self.dynamic.fx[node.id]
            if not runs_alone(fx) or self._keeps_its_workspace(fx, node.id):
                continue
            call = torch.fx.map_arg((fx.args, fx.kwargs), self._value)
            leaves, spec = tree_flatten(call)
            leaves = [_layout(leaf) for leaf in leaves]
            formula = self._formula(node.id)
            key = fx.target, spec, tuple(map(_key, leaves)), formula
            calls.setdefault(key, ([], fx.target, leaves, spec, formula))[0].append(node.id)
        return list(calls.values())

    @cached_property
    def _expressions(self) -> tuple[Any, ...]:
        return tuple(number for _, _, leaves, _, _ in self._calls for leaf in leaves for number in _numbers(leaf))

    def _value(self, node: torch.fx.Node) -> Any:
        return node.meta["val"] if "val" in node.meta else getattr(self.dynamic.module, str(node.target))

    def _formula(self, place: int) -> Callable[..., int] | None:
        """The formula of an operation, if it gives the workspace at the captured sizes, so that nothing is copied."""
        fx = self.reference.analysis.fx[place]
        if fx.target not in _FORMULAS:
            return None
        call = torch.fx.map_arg((fx.args, fx.kwargs), lambda node: value_of(self.reference, node))
        args, kwargs = tree_map(_layout, call)
        dtypes = {leaf.dtype for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)}
        formula = _FORMULAS[fx.target]
        is_exact = dtypes.issubset(FLOATS) and len(dtypes) == 1 and not kwargs
        return formula if is_exact and formula(self._threads, *args) == self._at_reference[place] else None

    def _keeps_its_workspace(self, fx: torch.fx.Node, place: int) -> bool:
        values = [self._value(node) for node in fx.all_input_nodes]
        tensors = [value for value in tree_leaves((values, fx.meta.get("val"))) if isinstance(value, torch.Tensor)]
        if not any(map(_has_expressions, tree_leaves(values))):
            return not any(map(_has_expressions, tensors))
        dtypes = {tensor.dtype for tensor in tensors}
        if torch.Tag.pointwise in getattr(fx.target, "tags", ()) and len(dtypes) == 1:
            return self._at_reference[place] <= SCALAR_BYTES
        if fx.target is aten.sum.dim_IntList and all(size == 1 for size in fx.meta["val"].shape):
            return False  # the threads may share the elements of one sum, with a result each
        floats = {dtype for dtype in dtypes if dtype.is_floating_point}
        return fx.target in WITHOUT and floats.issubset(FLOATS) and not self._at_reference[place]


def _has_expressions(value) -> bool:
    is_tensor = isinstance(value, torch.Tensor)
    return value._has_symbolic_sizes_strides if is_tensor else isinstance(value, (torch.SymInt, torch.SymFloat))


def _layout(leaf):
    if not isinstance(leaf, torch.Tensor):
        return expression(leaf)
    shape, strides = (tuple(map(expression, sizes)) for sizes in (leaf.shape, leaf.stride()))
    offset, size = expression(leaf.storage_offset()), expression(leaf.untyped_storage().nbytes())
    return _Layout(leaf.dtype, shape, strides, offset, size, leaf.is_conj(), leaf.is_neg())


def _numbers(leaf) -> tuple[Any, ...]:
    if isinstance(leaf, _Layout):
        return (*leaf.shape, *leaf.strides, leaf.offset, leaf.bytes)
    return (leaf,) if _is_expression(leaf) else ()


def _evaluated(leaf, numbers):
    """`leaf` with the next ones of `numbers` in place of its own."""
    if isinstance(leaf, _Layout):
        dims = len(leaf.shape)
        values = [next(numbers) for _ in range(2 * dims + 2)]
        return leaf._replace(
            shape=tuple(values[:dims]), strides=tuple(values[dims:-2]), offset=values[-2], bytes=values[-1]
        )
    return next(numbers) if _is_expression(leaf) else leaf


def _is_expression(leaf) -> bool:
    return hasattr(leaf, "free_symbols")


def _key(leaf):
    return leaf if isinstance(leaf, _Layout) or _is_expression(leaf) else (type(leaf), repr(leaf))


def _meta(layout: _Layout) -> torch.Tensor:
    elements = layout.bytes // layout.dtype.itemsize
    tensor = torch.empty(elements, dtype=layout.dtype, device="meta")
    tensor = tensor.as_strided(layout.shape, layout.strides, layout.offset)
    tensor = tensor.conj() if layout.is_conj else tensor
    return tensor._neg_view() if layout.is_neg else tensor
