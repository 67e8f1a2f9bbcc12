"""`Listing`: the operations of one module, one line each, from which code is generated.

It holds what `torch.fx.Graph` holds, without its linked lists and tables of users: building one takes a fraction of the
time, and it is freed without the garbage collector. `Listing.graph` and `Listing.of` convert from and to fx graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

IS_RECOMPUTED = "ackpt_recomputed"  # in the meta of an fx node whose line is `is_recomputed`
CALLS = "call_function", "call_method"
_PLAIN = frozenset({int, float, bool, str, type(None)})


class Line:
    """One operation, like an fx node, but its arguments and ``inputs`` are lines.

    ``meta`` is the captured node's and must not be changed. ``is_size``: whether it computes sizes, not tensors.
    ``is_recomputed``: whether it is an operation of the forward that the backward repeats.
    """

    __slots__ = ("args", "inputs", "is_recomputed", "is_size", "kwargs", "meta", "name", "op", "target")

    def __init__(self, op: str, target: Any, args: Any = (), kwargs: Any = None, name: str = "", meta: Any = None):
        self.op: str = op
        self.target: Any = target
        self.name: str = name
        self.args: Any = args
        self.kwargs: dict[str, Any] = kwargs or {}
        self.meta: dict[str, Any] = {} if meta is None else meta
        self.is_size: bool = False
        self.is_recomputed: bool = False
        inputs: dict[Line, None] = {}
        _collect(args, inputs)
        if kwargs:
            _collect(tuple(kwargs.values()), inputs)
        self.inputs: tuple[Line, ...] = tuple(inputs)

    def __repr__(self) -> str:
        return f"<{self.name} = {self.target}>"

    def reading(self, args: Any, kwargs: Any) -> Line:
        """This line with other arguments."""
        line = Line(self.op, self.target, args, kwargs, self.name, self.meta)
        line.is_size, line.is_recomputed = self.is_size, self.is_recomputed
        return line


class Listing:
    """Lines in the order in which they run; the last one is the output."""

    def __init__(self, lines: Iterable[Line] = ()):
        self.lines: list[Line] = list(lines)

    @property
    def placeholders(self) -> list[Line]:
        return [line for line in self.lines if line.op == "placeholder"]

    @property
    def output(self) -> Line:
        return self.lines[-1]

    def add(self, op: str, target: Any, args: Any = (), kwargs: Any = None, name: str = "", meta: Any = None) -> Line:
        line = Line(op, target, args, kwargs, name, meta)
        self.lines.append(line)
        return line

    def copy(self, node: fx.Node, argument: Callable[[Any], Any]) -> Line:
        """Add a line for an fx node, with ``argument(n)`` for every node n among its arguments."""
        kwargs = mapped(node.kwargs, argument) if node.kwargs else {}
        return self.add(node.op, node.target, mapped(node.args, argument), kwargs, node.name, node.meta)

    def graph(self) -> fx.Graph:
        """This listing as an fx graph."""
        graph = fx.Graph()
        made: dict[Line, fx.Node] = {}
        for line in self.lines:
            args, kwargs = mapped(line.args, made.__getitem__), mapped(line.kwargs, made.__getitem__)
            made[line] = graph.create_node(line.op, line.target, args, kwargs, line.name or None)
            made[line].meta = {**line.meta, IS_RECOMPUTED: True} if line.is_recomputed else dict(line.meta)
        graph.lint()
        return graph

    @staticmethod
    def of(graph: fx.Graph) -> Listing:
        """The listing of an fx graph."""
        listing = Listing()
        made: dict[fx.Node, Line] = {}
        for node in graph.nodes:
            made[node] = listing.copy(node, made.__getitem__)
            made[node].is_recomputed = IS_RECOMPUTED in node.meta
        return listing


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with ``function(n)`` for every line or fx node n in it."""
    kind = type(value)
    if kind is Line or kind is fx.Node:
        return function(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, tuple):
        return tuple([mapped(each, function) for each in value])
    if isinstance(value, list):
        return [mapped(each, function) for each in value]
    if isinstance(value, dict):
        return {name: mapped(each, function) for name, each in value.items()}
    if kind is slice:
        return slice(*(mapped(each, function) for each in (value.start, value.stop, value.step)))
    return value


def _collect(value: Any, lines: dict[Line, None]) -> None:
    """Add the lines in `value` to `lines`."""
    kind = type(value)
    if kind is Line:
        lines[value] = None
    elif kind in _PLAIN:
        return
    elif isinstance(value, (tuple, list)):
        for each in value:
            _collect(each, lines)
    elif isinstance(value, dict):
        _collect(tuple(value.values()), lines)
    elif kind is slice:
        _collect((value.start, value.stop, value.step), lines)
