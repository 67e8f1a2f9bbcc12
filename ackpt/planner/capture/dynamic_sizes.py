"""Capture a step with symbolic sizes, so that one capture serves all sizes of its dynamic dimensions.

`symbolic` replaces chosen dimensions of a call's tensors, and integers among its arguments, by symbols. An integer is
represented as the length of an empty tensor. A step captured from such tensors has sizes that are expressions in these
symbols, and guards, the conditions under which the capture is valid. `Symbols` evaluates both. `DynamicModule.at`
is the captured module at given sizes, so all later stages see only numbers.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy.printers import PythonPrinter

from ackpt.core.errors import TraceError

from .inspection.model_checks import is_tensor
from .operations import identity, storage_keys, tensors_of
from .patches.size_arithmetic import SizeEnv

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_SLICE_BACKWARD = torch.ops.aten.slice_backward.default
_SLICES = (torch.ops.aten.slice.Tensor, _SLICE_BACKWARD)
SMALLEST = 2  # torch captures the sizes 0 and 1 as numbers
LARGEST = 2**62  # the largest that fits torch's sizes; larger integers remain numbers
# Shape and strides of a tensor, and the bytes of its storage that it does not use, as in a view of a larger tensor.
Layout = tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True, order=True)
class Dimension:
    """Dimension ``dim`` of the tensor at index ``leaf`` among the leaves of a call; 0 of an integer is its value."""

    leaf: int
    dim: int


def is_sized(leaf) -> bool:
    """Whether a leaf of a call is a tensor or an integer."""
    return is_tensor(leaf) or type(leaf) is int


def layout(leaf) -> Layout:
    """The layout of a tensor of a call; the shape of an integer is its value."""
    if type(leaf) is int:
        return (leaf,), (), 0
    shape, strides = tuple(leaf.shape), leaf.stride()
    if leaf.layout is not torch.strided:
        return shape, strides, 0
    elements = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    return shape, strides, leaf.untyped_storage().nbytes() - elements * leaf.itemsize


def empty_tensor(length: int, leaves: Sequence[Any]) -> torch.Tensor:
    """The tensor without elements that represents an integer among `leaves`."""
    device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
    return torch.empty(length, 0, device=device)


def integers(leaves: Sequence[Any], dimensions: Sequence[Dimension]) -> frozenset[int]:
    """Indices of the integers among `leaves` that are dynamic."""
    return frozenset(each.leaf for each in dimensions if type(leaves[each.leaf]) is int)


def _not_a_view(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`; if it covers all of its base, detached from the base, whose sizes would get symbols of their own."""
    is_all = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    if not tensor._is_view() or tensor.requires_grad or not is_all:
        return tensor
    return tensor.new_empty(0).set_(tensor.untyped_storage(), 0, tensor.shape, tensor.stride())


def symbolic(leaves: Sequence[Any], dimensions: Sequence[Dimension], mode: FakeTensorMode) -> list[Any]:
    """`leaves` with fake tensors for all tensors, which torch would otherwise give symbols; one tensor stays one."""
    numbers = integers(leaves, dimensions)
    leaves = [empty_tensor(leaf, leaves) if at in numbers else leaf for at, leaf in enumerate(leaves)]
    dims: dict[int, set[int]] = {}
    for each in dimensions:
        dims.setdefault(id(leaves[each.leaf]), set()).add(each.dim)
    made: dict[int, torch.Tensor] = {}

    def replacement(leaf):
        dynamic = dims.get(id(leaf), set())
        if not isinstance(leaf, torch.Tensor) or (isinstance(leaf, FakeTensor) and not dynamic):
            return leaf
        if id(leaf) not in made:
            kinds = [DimDynamic.DYNAMIC if dim in dynamic else DimDynamic.STATIC for dim in range(leaf.dim())]
            context = StatelessSymbolicContext(dynamic_sizes=kinds)
            if isinstance(leaf, FakeTensor):  # which torch would return as it is
                made[id(leaf)] = _with_symbols(leaf, context, mode)
            else:
                made[id(leaf)] = mode.from_tensor(_not_a_view(leaf), symbolic_context=context)
        return made[id(leaf)]

    return [replacement(leaf) for leaf in leaves]


def _with_symbols(leaf: FakeTensor, context: StatelessSymbolicContext, mode: FakeTensorMode) -> torch.Tensor:
    env: Any = mode.shape_env
    source = ConstantSource(f"without_data_{len(env.source_to_var)}")
    shape, strides, _ = env.create_symbolic_sizes_strides_storage_offset(leaf, source, symbolic_context=context)
    with mode:
        made = torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)


class Symbols:
    """The symbols of a capture: the dimension of each, and what the capture assumes about their values.

    ``all``: the symbols, one for each of ``dimensions``. `leaves`: of the call, with symbolic tensors; `numbers`:
    indices of those that represent integers; `unused`: the unused bytes of each tensor and integer, as in `layout`.
    """

    def __init__(
        self, dimensions: Sequence[Dimension], leaves: Sequence[Any], numbers: frozenset[int], unused: Sequence[int]
    ):
        places = {id(leaf): at for at, leaf in reversed(list(enumerate(leaves)))}  # a tensor may occur twice
        self._first = {each: Dimension(places[id(leaves[each.leaf])], each.dim) for each in dimensions}
        self.dimensions = tuple(dict.fromkeys(self._first.values()))
        sizes = [leaves[each.leaf].shape[each.dim] for each in self.dimensions]
        self.environment: SizeEnv = sizes[0].node.shape_env
        self.all = [size.node._expr for size in sizes]
        self._sized = [at for at, leaf in enumerate(leaves) if is_sized(leaf)]
        sized = [leaves[at].shape[0] if at in numbers else leaves[at] for at in self._sized]
        layouts = [(tuple(leaf.shape), leaf.stride()) if is_tensor(leaf) else ((leaf,), ()) for leaf in sized]
        self._layouts = [tuple(tuple(map(expression, each)) for each in both) for both in layouts]
        self._unused = tuple(unused)
        self._functions: dict[tuple, Callable[..., tuple]] = {}

    def values(self, leaves: Sequence[Any]) -> tuple[int, ...]:
        """The sizes of the dynamic dimensions in a call with `leaves`."""
        return tuple(layout(leaves[each.leaf])[0][each.dim] for each in self.dimensions)

    def values_in(self, sizes: Sequence[Layout]) -> tuple[int, ...] | None:
        """The sizes of the dynamic dimensions in a call with these layouts; None if the capture is not valid for it."""
        values = tuple(sizes[self._sized.index(each.leaf)][0][each.dim] for each in self.dimensions)
        is_valid = self.holds(values) and self.layouts(values) == tuple(sizes)
        return values if is_valid else None

    def holds(self, values: tuple[int, ...]) -> bool:
        """Whether the capture is valid for these sizes."""
        if not all(SMALLEST <= value <= LARGEST for value in values):
            return False
        derived, assumed = tuple(self.environment.derived), self.environment.assumed
        try:
            results = zip(derived, self.evaluated(derived, values))
            return all(repr(value) == repr(assumed.get(symbol, value)) for symbol, value in results) and all(
                self.evaluated(self.guards, values)
            )
        except (ArithmeticError, ValueError, TypeError):  # such as a division by zero
            return False

    def layouts(self, values: tuple[int, ...]) -> tuple[Layout, ...]:
        """The layout of every tensor and integer of the call at these sizes, as in `layout`."""
        flat = tuple(number for layout in self._layouts for numbers in layout for number in numbers)
        numbers = iter(self.evaluated(flat, values))
        return tuple(
            (tuple(next(numbers) for _ in shape), tuple(next(numbers) for _ in strides), unused)
            for (shape, strides), unused in zip(self._layouts, self._unused)
        )

    @property
    def guards(self) -> tuple[Any, ...]:
        """The conditions that the capture found, as sympy expressions in its symbols."""
        conditions = [guard.expr for guard in self.environment.guards]
        return tuple(guard for guard in conditions if guard.free_symbols)

    def fixed(self) -> dict[Dimension, str]:
        """The dimensions that the model turned into constants, with the line that did, or an empty string."""
        symbols = dict(zip(self.dimensions, self.all))
        pairs = ((each, symbols[first]) for each, first in self._first.items())
        fixed = {each: symbol for each, symbol in pairs if self.environment.replace(symbol).is_number}
        return {each: self.environment.constants.get(symbol, "") for each, symbol in fixed.items()}

    def converted(self) -> str:
        """The line at which the model converted a result computed from sizes to a number, or an empty string."""
        lines = self.environment.constants
        return next((lines[symbol] for symbol in self.environment.derived if symbol in lines), "")

    def number(self, size, leaves: Sequence[Any]) -> Any:
        """A symbolic `size` of the capture in a call with `leaves`."""
        return self.evaluated((expression(size),), self.values(leaves))[0]

    def evaluated(self, expressions: Sequence[Any], values: tuple[int, ...]) -> tuple[Any, ...]:
        """Sympy `expressions` at these sizes, as numbers and truth values of Python."""
        return self.function(tuple(expressions))(*values)

    def function(self, expressions: tuple[Any, ...]) -> Callable[..., tuple[Any, ...]]:
        """A function of the sizes of the dynamic dimensions that returns the values of sympy `expressions`."""
        if expressions not in self._functions:
            names = {symbol: sympy.Symbol(f"s{at}", integer=True) for at, symbol in enumerate(self.all)}
            arguments = ", ".join(map(str, names.values()))
            namespace: dict[str, Any] = {**SYMPY_INTERP, "__name__": __name__}

            def code(argument) -> str:
                if isinstance(argument, float):
                    namespace[name := f"float{len(namespace)}"] = argument
                    return name
                return PythonPrinter().doprint(sympy.sympify(argument).xreplace(names))

            lines = []
            for symbol, (function, args) in self._needed(expressions):
                namespace[f"f_{symbol}"] = function
                lines.append(f"    {symbol} = f_{symbol}({', '.join(map(code, args))})\n")
            results = "".join(f"{code(each)}, " for each in expressions)
            exec(f"def sizes({arguments}):\n{''.join(lines)}    return ({results})", namespace)  # noqa: S102
            self._functions[expressions] = namespace["sizes"]
        return self._functions[expressions]

    def _needed(self, expressions):
        """The definitions of the symbols in `expressions` that represent results of float arithmetic, in order."""
        derived = self.environment.derived
        needed = {symbol for each in expressions for symbol in sympy.sympify(each).free_symbols}
        for symbol, (_, args) in reversed(derived.items()):
            if symbol in needed:
                needed |= {each for argument in args for each in sympy.sympify(argument).free_symbols}
        return [(symbol, definition) for symbol, definition in derived.items() if symbol in needed]


@dataclass(frozen=True, eq=False)
class DynamicModule:
    """A captured module whose sizes are expressions in ``symbols``; its operations have ids."""

    module: fx.GraphModule
    symbols: Symbols

    def at(self, values: tuple[int, ...]) -> fx.GraphModule:
        """The module at these sizes: numbers instead of expressions, and no nodes that compute sizes."""
        expressions: dict[Any, int] = {}

        def noted(value):
            expressions.setdefault(expression(value), 0)

        for node in self.module.graph.nodes:
            for value in tree_leaves(node.meta.get("val")):
                if isinstance(value, _SYMBOLIC):
                    noted(value)
                elif is_symbolic(value):
                    for size in (
                        *value.shape,
                        *value.stride(),
                        value.storage_offset(),
                        value.untyped_storage().nbytes(),
                    ):
                        noted(size)
        numbers = dict(zip(expressions, self.symbols.evaluated(tuple(expressions), values)))
        tensors = _Tensors(lambda value: numbers[expression(value)])
        graph = fx.Graph()
        made: dict[fx.Node, Any] = {}
        for node in self.module.graph.nodes:
            if is_size(node):
                made[node] = numbers[expression(node.meta["val"])]
                continue
            if node.op == "output":
                made[node] = graph.output(fx.map_arg(node.args[0], made.__getitem__))
            else:
                made[node] = graph.node_copy(node, made.__getitem__)
            made[node].meta = dict(node.meta)
            if "val" in node.meta:
                made[node].meta["val"] = tree_map(tensors, node.meta["val"])
        return fx.GraphModule(self.module, graph)

    @property
    def fake_mode(self) -> FakeTensorMode:
        values = (node.meta["val"] for node in self.module.graph.find_nodes(op="placeholder"))
        return next(value.fake_mode for value in values if isinstance(value, FakeTensor))

    def require_known_sizes(self) -> None:
        """Refuse a capture with sizes that do not follow from the dynamic dimensions."""
        for node in self.module.graph.nodes:
            sizes = (
                size
                for value in tensors_of(node)
                if is_symbolic(value)
                for size in (*value.shape, *value.stride(), value.untyped_storage().nbytes())
            )
            for size in sizes:
                expr = self.symbols.environment.replace(sympy.sympify(expression(size)))
                if expr.free_symbols.issubset({*self.symbols.all, *self.symbols.environment.derived}):
                    continue
                if node.op == "placeholder":
                    raise TraceError(
                        f"an argument of shape {list(node.meta['val'].shape)} is a part of a larger tensor, whose size "
                        "is not among the arguments: pass a copy, as clone(memory_format=torch.contiguous_format) makes"
                    )
                raise TraceError(f"the size of {node.name} ({node.target}) does not follow from the inputs' sizes")

    @cached_property
    def fx(self) -> dict[int, fx.Node]:
        """The operations by their ids."""
        return {node.meta["ackpt_id"]: node for node in self.module.graph.nodes if "ackpt_id" in node.meta}

    def storage_bytes(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """The bytes of every storage at these sizes, by the ids that the storages of an instance have."""
        return self.symbols.evaluated(self.storage_sizes, values)

    @cached_property
    def storage_sizes(self) -> tuple[Any, ...]:
        """The bytes of every storage, as numbers and expressions."""
        sizes: dict[int, Any] = {}
        for node_id in range(len(self.fx) - 1):  # the last one is the output
            for value in tensors_of(self.fx[node_id]):
                storage = value.untyped_storage()
                sizes.setdefault(storage._cdata, expression(storage.nbytes()))
        return tuple(sizes.values())

    @cached_property
    def sources(self) -> tuple[tuple[int, int], ...]:
        """For every symbol, an input and the dimension of it that has this size."""
        first: dict[Any, tuple[int, int]] = {}
        for node in self.module.graph.find_nodes(op="placeholder"):
            if is_symbolic(node.meta["val"]):
                for dim, size in enumerate(node.meta["val"].shape):
                    if isinstance(size, torch.SymInt):
                        first.setdefault(size.node._expr, (node.meta["ackpt_id"], dim))
        return tuple(first[symbol] for symbol in self.symbols.all)


def expression(value) -> Any:
    """The sympy expression of a size; a number is its own."""
    return value.node.expr if isinstance(value, _SYMBOLIC) else value


def is_size(node: fx.Node) -> bool:
    """Whether a node of a captured module computes a size, not a tensor."""
    return node.op != "placeholder" and isinstance(node.meta.get("val"), _SYMBOLIC)


def is_symbolic(value) -> bool:
    """Whether a tensor or its storage has sizes that are expressions."""
    if not isinstance(value, FakeTensor):
        return False
    others = value.storage_offset(), value.untyped_storage().nbytes()
    return bool(value._has_symbolic_sizes_strides) or any(isinstance(size, torch.SymInt) for size in others)


def without_full_slices(module: fx.GraphModule) -> None:
    """Remove slices of `module` that are the whole tensor, and their backward.

    For sizes that are numbers, torch's indexing returns the tensor itself (``applySlicing`` in TensorIndexing.h), so
    that eager and a capture of one shape have no such operation.
    """
    renewed: set[int] = set()  # storages of removed results, which later nodes may use
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if is_whole_slice(node):
            source = node.args[0]
            renewed |= set(storage_keys(node)) - set(storage_keys(source))
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
        elif not renewed.isdisjoint(storage_keys(node)):
            with torch.no_grad():
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
    module.recompile()


def is_whole_slice(node: fx.Node) -> bool:
    """Whether a node is a slice that covers its whole tensor at every size, or the backward of one."""
    if node.target not in _SLICES:
        return False
    (source, *_), result = (each.meta["val"] for each in node.all_input_nodes), node.meta["val"]
    return [expression(size) for size in source.shape] == [expression(size) for size in result.shape]


class _Tensors:
    """Fake tensors with numbers as sizes for symbolic ones; those that share a storage still do."""

    def __init__(self, number: Callable[[Any], int]):
        self.number = number
        self._bases: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, torch.Tensor] = {}

    def __call__(self, value):
        if not is_symbolic(value):
            return value
        if id(value) not in self._made:
            storage = value.untyped_storage()
            with value.fake_mode, torch.no_grad():
                if isinstance(storage.nbytes(), int):  # such as a part of a parameter
                    base = storage
                else:
                    nbytes = self.number(storage.nbytes())
                    made = torch.empty(nbytes, dtype=torch.uint8, device=value.device)
                    base = self._bases.setdefault(storage._cdata, made.untyped_storage())
                shape, strides = (tuple(map(self.number, sizes)) for sizes in (value.shape, value.stride()))
                flat = torch.empty(0, dtype=value.dtype, device=value.device)
                self._made[id(value)] = flat.set_(base, self.number(value.storage_offset()), shape, strides)
        return self._made[id(value)]


def operations_in(module: torch.fx.GraphModule) -> list[tuple[str, str]]:
    """The operations of a joint graph and its results as text, each with its source line.

    The texts are equal for captures that differ only in unread inputs. An alias, or a slice of the whole tensor, counts
    as its argument, because captures with integer sizes and with symbolic ones differ in these.
    """
    texts: list[tuple[str, str]] = []
    places: dict[torch.fx.Node, int] = {}
    numbers = itertools.count()
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.alias.default or is_whole_slice(node):
            places[node] = places[node.all_input_nodes[0]]
        elif node.op == "output":
            texts.append((json.dumps([places[result] for result in node.args[0] if result is not None]), ""))
        elif node.op != "placeholder" or node.users:
            places[node] = next(numbers)
            if node.op != "placeholder":
                text = json.dumps(identity(node, places.__getitem__), sort_keys=True)
                texts.append((text, (node.meta.get("custom") or {}).get("source") or ""))
    return texts
