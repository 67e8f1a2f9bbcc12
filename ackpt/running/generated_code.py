"""Generate the code that runs a schedule's modules, with little Python overhead per operation.

Torch's Python bindings parse their arguments in two thirds of the time of an ``OpOverload``, and dispatch the same
operation with the same arguments. Views that only undo earlier ones are left out. Neither changes a bit or a byte.
Calls around recomputed operations let a meter tell what was recomputed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from ackpt.autograd_state import recomputation_begins, recomputation_ends
from ackpt.planning.rewriting import IS_RECOMPUTED

_ATEN: Any = torch.ops.aten
_C: Any = torch._C
_VIEWS = {
    _ATEN.t.default,
    _ATEN.view.default,
    _ATEN._unsafe_view.default,
    _ATEN.transpose.int,
    _ATEN.permute.default,
    _ATEN.unsqueeze.default,
    _ATEN.squeeze.dim,
}
# By overload, the method that dispatches it. The sizes of the second group are given one by one.
METHODS = {
    _ATEN.t.default: "t",
    _ATEN.transpose.int: "transpose",
    _ATEN.unsqueeze.default: "unsqueeze",
    _ATEN.squeeze.dim: "squeeze",
    _ATEN.select.int: "select",
    _ATEN.clone.default: "clone",
}
SIZES = {_ATEN.view.default: "view", _ATEN.expand.default: "expand", _ATEN.permute.default: "permute"}
# By overload, the function that dispatches it if every argument that may be a tensor is one.
FUNCTIONS: dict[Any, Callable] = {
    _ATEN.add.Tensor: torch.add,
    _ATEN.sub.Tensor: torch.sub,
    _ATEN.mul.Tensor: torch.mul,
    _ATEN.div.Tensor: torch.div,
    _ATEN.mm.default: torch.mm,
    _ATEN.bmm.default: torch.bmm,
    _ATEN.addmm.default: torch.addmm,
    _ATEN.sum.dim_IntList: torch.sum,
    _ATEN.native_layer_norm.default: torch.native_layer_norm,
    _ATEN.relu.default: torch.relu,
    _ATEN.tanh.default: torch.tanh,
    _ATEN.sigmoid.default: torch.sigmoid,
    _ATEN.gelu.default: _C._nn.gelu,
    _ATEN.silu.default: _C._nn.silu,
    _ATEN._softmax.default: torch._softmax,
    _ATEN._log_softmax.default: torch._log_softmax,
    _ATEN.embedding.default: torch.embedding,
    _ATEN.convolution.default: torch.convolution,
    _ATEN.cat.default: torch.cat,
}


def boxed(root: nn.Module, graph: fx.Graph):
    """`graph`, of the module `root`, as a function of one list, which it empties; `graph` is changed."""
    _without_undone_views(graph)
    _mark_recomputed(graph)
    for node in graph.nodes:
        if node.op == "call_function":
            _call_directly(node)
    call = _function(root, graph)
    call._boxed_call = True
    return call


def _without_undone_views(graph: fx.Graph) -> None:
    """Use an earlier tensor for a view that has its sizes and strides, and for a detach: here no value has a gradient.

    A view keeps the storage of its base, so nothing lives longer. Returned values stay: torch tells them apart.
    """
    returned = set(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        if node.op != "call_function" or node in returned:
            continue
        if node.target is _ATEN.detach.default:
            same = node.args[0]
        else:
            same = next((base for base in _bases(node) if _is_same(node, base)), None)
        if same is not None:
            node.replace_all_uses_with(same)
    for node in reversed(graph.nodes):
        if not node.users and node.op == "call_function" and node.target in (*_VIEWS, _ATEN.detach.default):
            graph.erase_node(node)


def _mark_recomputed(graph: fx.Graph) -> None:
    """Insert calls of `recomputation_begins` before recomputed operations and of `recomputation_ends` after each."""
    follows_mark = False
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is operator.getitem or node.target in _VIEWS:
            continue  # allocates nothing
        is_recomputed = IS_RECOMPUTED in node.meta
        if is_recomputed:
            if not follows_mark:
                with graph.inserting_before(node):
                    graph.call_function(recomputation_begins)
            with graph.inserting_after(node):
                graph.call_function(recomputation_ends)
        follows_mark = is_recomputed


def _bases(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that `node` is a view of, the nearest first."""
    base: Any = node
    while base.op == "call_function" and base.target in _VIEWS:
        base = base.args[0]
        yield base


def _is_same(node: fx.Node, base: fx.Node) -> bool:
    one, other = node.meta.get("val"), base.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    numbers = *one.shape, *one.stride(), *other.shape, *other.stride()
    if not all(isinstance(number, int) for number in numbers):
        return False
    return one.shape == other.shape and one.stride() == other.stride()


def _call_directly(node: fx.Node) -> None:
    target: Any = node.target
    if target in METHODS:
        node.op, node.target = "call_method", METHODS[target]
    elif target in SIZES and len(node.args) == 2 and not node.kwargs:
        source, sizes = node.args
        if isinstance(sizes, (list, tuple)) and sizes:
            node.args = source, *sizes
            node.op, node.target = "call_method", SIZES[target]
    elif target in FUNCTIONS and _has_tensors(node):
        node.target = FUNCTIONS[target]


def _has_tensors(node: fx.Node) -> bool:
    """Whether every argument that its schema calls a tensor is one: a number may be another overload's."""
    target: Any = node.target
    schema = target._schema.arguments
    values = [*zip(schema, node.args), *((each, node.kwargs[each.name]) for each in schema if each.name in node.kwargs)]
    return all(
        isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
        for each, value in values
        if each.type.kind() == "TensorType"
    )


def _function(root: nn.Module, graph: fx.Graph) -> Any:
    """`graph` as a function of one list, which it empties, that drops every value after its last use.

    Torch's own generator of code does the same in several times the time.
    """
    code = _Code(root)
    lines = ["def call(args):"]
    if inputs := graph.find_nodes(op="placeholder"):
        lines += [f" {''.join(f'{code.name(node)},' for node in inputs)} = args", " args.clear()"]
    dropped = _dropped(graph)
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            lines.append(f" {code.name(node)} = {code.call(node)}")
            if names := [code.name(each) for each in dropped.get(node, ())]:
                lines.append(f" {' = '.join(names)} = None")
        elif node.op == "output":
            lines.append(f" return {code.text(node.args[0])}")
    exec("\n".join(lines), code.globals)  # noqa: S102
    return code.globals["call"]


def _dropped(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By node, the values that nothing reads after it. Arguments that nothing reads live until the end."""
    dropped: dict[fx.Node, list[fx.Node]] = {}
    seen = set(graph.output_node().all_input_nodes)
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "call_method"):
            last = [each for each in (node, *node.all_input_nodes) if each not in seen and each.op != "get_attr"]
            dropped[node] = list(dict.fromkeys(last))
            seen.update(last)
    return dropped


class _Code:
    """The text of nodes and constants. ``globals``: what the text names, apart from the values of nodes."""

    def __init__(self, root: nn.Module):
        self.root = root
        self.globals: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
        self._constants: dict[int, str] = {}
        self._names: dict[fx.Node, str] = {}

    def name(self, node: fx.Node) -> str:
        if node not in self._names:
            is_constant = node.op == "get_attr"
            name = self._constant(_attribute(self.root, str(node.target))) if is_constant else f"v{len(self._names)}"
            self._names[node] = name
        return self._names[node]

    def call(self, node: fx.Node) -> str:
        first, *others = args = [self.text(each) for each in node.args] or [""]
        named = [f"{name}={self.text(value)}" for name, value in node.kwargs.items()]
        if node.op == "call_method":
            return f"{first}.{node.target}({', '.join([*others, *named])})"
        if node.target is operator.getitem:
            return f"{first}[{others[0]}]"
        return f"{self._constant(node.target)}({', '.join([*filter(None, args), *named])})"

    def text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.name(value)
        if type(value) in (int, float, bool, str) or value is None:
            return repr(value)
        if type(value) is slice:
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        if isinstance(value, (list, tuple)):  # those of fx, too
            items = "".join(f"{self.text(each)}, " for each in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if isinstance(value, dict):
            return f"{{{''.join(f'{key!r}: {self.text(each)}, ' for key, each in value.items())}}}"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        """The name of a global; `globals` keeps the object, so that its address stays its own."""
        if id(value) not in self._constants:
            self._constants[id(value)] = f"c{len(self._constants)}"
            self.globals[self._constants[id(value)]] = value
        return self._constants[id(value)]


def _attribute(root: nn.Module, path: str) -> Any:
    """An attribute of `root` by its path, such as a constant of the captured graph."""
    return operator.attrgetter(path)(root)
