"""`Listing`: the program of one module, one `Line` for each operation; `boxed` generates a Python function from it.

It holds what `torch.fx.Graph` holds, without its linked lists and tables of users: building one takes a fraction of the
time, and it is freed without the garbage collector.

The generated code has little Python overhead per operation, and no other bits or bytes. Torch's Python bindings parse
their arguments in two thirds of the time of an ``OpOverload``. Views that only undo earlier ones are left out.
Operations run below autograd, which has nothing to record here; AOTAutograd counts the versions of inputs that change.
Calls around recomputed operations let a meter tell what was recomputed.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch._higher_order_ops import auto_functionalize
from torch._ops import HigherOrderOperator, OpOverload

from ackpt.core.autograd_state import recomputation_begins, recomputation_ends

CALLS = "call_function", "call_method"
_PLAIN = frozenset({int, float, bool, str, type(None)})


@dataclass(eq=False, repr=False, slots=True)
class Line:
    """One operation, like an fx node, but its arguments and ``inputs`` are lines.

    ``meta`` is the captured node's and must not be changed. ``is_size``: whether it computes sizes, not tensors.
    ``is_recomputed``: whether it is an operation of the forward that the backward repeats.
    """

    op: str
    target: Any
    args: Any = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    is_size: bool = False
    is_recomputed: bool = False
    inputs: "tuple[Line, ...]" = field(init=False)

    def __post_init__(self) -> None:
        inputs: dict[Line, None] = {}
        mapped((self.args, self.kwargs), inputs.setdefault)
        self.inputs = tuple(inputs)

    def __repr__(self) -> str:
        return f"<{self.name} = {self.target}>"


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
        line = Line(op, target, args, kwargs or {}, name, meta or {})
        self.lines.append(line)
        return line

    def graph(self) -> fx.Graph:
        """This listing as an fx graph."""
        graph = fx.Graph()
        made: dict[Line, fx.Node] = {}
        for line in self.lines:
            args, kwargs = mapped(line.args, made.__getitem__), mapped(line.kwargs, made.__getitem__)
            made[line] = graph.create_node(line.op, line.target, args, kwargs, line.name or None)
            made[line].meta = dict(line.meta)
        graph.lint()
        return graph


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
_LEFT_OUT = {*_VIEWS, _ATEN.detach.default}  # if nothing reads the result
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
# The operations whose kernels never need autograd. Kernels of others may, if they were registered without a derivative.
_BELOW_AUTOGRAD = {"aten", "prims", "ackpt_graph"}
# Operations that write into an argument. Called as higher-order operators, they would fail under a mode, such as
# a counter of FLOPs.
WITHOUT_MODES: dict[HigherOrderOperator, Callable] = {
    auto_functionalize.auto_functionalized: auto_functionalize.auto_functionalized_dense,
    auto_functionalize.auto_functionalized_v2: auto_functionalize.auto_functionalized_v2_dense,
}


def boxed(root: nn.Module, listing: Listing):
    """`listing`, of the module `root`, as a function of one list, which it empties."""
    call = _function(root, simplified(listing))
    call._boxed_call = True
    return call


def simplified(listing: Listing) -> Listing:
    """`listing` without views that undo others, and with marks around recomputed operations."""
    return Listing(_with_marks(_without_undone_views(listing)))


def _without_undone_views(listing: Listing) -> list[Line]:
    """Use an earlier tensor for a view that has its sizes and strides, and for a detach: here no value has a gradient.

    A view keeps the storage of its base, so nothing lives longer. Returned values stay: torch tells them apart.
    """
    returned = set(listing.output.inputs)
    renamed: dict[Line, Line] = {}
    lines: list[Line] = []
    for line in listing.lines:
        original = line
        if any(each in renamed for each in line.inputs):
            args, kwargs = mapped((line.args, line.kwargs), lambda each: renamed.get(each, each))
            line = renamed[original] = replace(line, args=args, kwargs=kwargs)
        lines.append(line)
        if line.op != "call_function" or original in returned:
            continue
        if line.target is _ATEN.detach.default:
            renamed[original] = line.args[0]
        elif line.target in _VIEWS and (same := next((base for base in _bases(line) if _is_same(line, base)), None)):
            renamed[original] = same
    read: set[Line] = set()
    needed: list[Line] = []
    for line in reversed(lines):
        if line in read or line.op != "call_function" or line.target not in _LEFT_OUT:
            read.update(line.inputs)
            needed.append(line)
    return needed[::-1]


def _with_marks(lines: list[Line]) -> Iterator[Line]:
    """`lines` with `recomputation_begins` before recomputed operations and `recomputation_ends` after each."""
    follows_mark = False
    for line in lines:
        allocates = line.op == "call_function" and line.target is not operator.getitem and line.target not in _VIEWS
        if allocates and line.is_recomputed and not follows_mark:
            yield Line("call_function", recomputation_begins)
        yield line
        if allocates and line.is_recomputed:
            yield Line("call_function", recomputation_ends)
        follows_mark = line.is_recomputed if allocates else follows_mark


def _bases(line: Line) -> Iterator[Line]:
    """The tensors that `line` is a view of, the nearest first."""
    while line.op == "call_function" and line.target in _VIEWS:
        line = line.args[0]
        yield line


def _is_same(line: Line, base: Line) -> bool:
    one, other = line.meta.get("val"), base.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.dim() != other.dim():
        return False
    numbers = *one.shape, *one.stride()
    others = *other.shape, *other.stride()
    return all(type(a) is type(b) is int and a == b for a, b in zip(numbers, others))


def direct(line: Line) -> tuple[Any, tuple[Any, ...]]:
    """What to call for `line`, a function or the name of a method, and its positional arguments."""
    target, args = line.target, line.args
    if line.op != "call_function":
        return target, args
    if target in METHODS:
        return METHODS[target], args
    if target in SIZES and len(args) == 2 and not line.kwargs and isinstance(args[1], (list, tuple)) and args[1]:
        return SIZES[target], (args[0], *args[1])
    if target in FUNCTIONS and _has_tensors(line):
        return FUNCTIONS[target], args
    return target, args


def _has_tensors(line: Line) -> bool:
    """Whether every argument that its schema calls a tensor is one: a number may be another overload's."""
    schema = line.target._schema.arguments
    values = [*zip(schema, line.args), *((each, line.kwargs[each.name]) for each in schema if each.name in line.kwargs)]
    return all(
        isinstance(value, Line) and isinstance(value.meta.get("val"), torch.Tensor)
        for each, value in values
        if each.type.kind() == "TensorType"
    )


def _function(root: nn.Module, listing: Listing) -> Any:
    """`listing` as a function of one list, which it empties, that drops every value after its last use.

    The generator of code in torch.fx does the same in several times the time.
    """
    code = _Code(root)
    lines = ["def call(args):"]
    if inputs := listing.placeholders:
        lines += [f" {''.join(f'{code.name(line)},' for line in inputs)} = args", " args.clear()"]
    dropped = _dropped(listing)
    read = {*listing.output.inputs}.union(*(line.inputs for line in listing.lines))
    if unread := [code.name(line) for line in inputs if line not in read]:  # perhaps by a view that is left out
        lines.append(f" del {','.join(unread)}")
    indent = ""
    if all(map(_runs_below_autograd, listing.lines)):
        lines += [f" with {code.constant(_C._AutoDispatchBelowADInplaceOrView)}():", "  pass"]
        indent = " "
    for line in listing.lines:
        if line.op in CALLS:
            is_read = line not in dropped[line]
            lines.append(f"{indent} {f'{code.name(line)} = ' if is_read else ''}{code.call(line)}")
            if names := [code.name(each) for each in dropped[line] if each is not line]:
                lines.append(f"{indent} del {','.join(names)}")
    lines.append(f" return {code.text(listing.output.args[0])}")
    exec("\n".join(lines), code.globals)  # noqa: S102
    return code.globals["call"]


def _runs_below_autograd(line: Line) -> bool:
    operations = [each for each in (line.target, *line.args) if isinstance(each, (OpOverload, HigherOrderOperator))]
    return all(isinstance(each, OpOverload) and each.namespace in _BELOW_AUTOGRAD for each in operations)


def _dropped(listing: Listing) -> dict[Line, list[Line]]:
    """By line, the values that nothing reads after it."""
    dropped: dict[Line, list[Line]] = {}
    seen = set(listing.output.inputs)
    for line in reversed(listing.lines):
        if line.op in CALLS:
            dropped[line] = [each for each in (line, *line.inputs) if each not in seen and each.op != "get_attr"]
            seen.update(dropped[line])
    return dropped


class _Code:
    """The text of lines and constants. ``globals``: what the text names, apart from the values of lines."""

    def __init__(self, root: nn.Module):
        self.root = root
        self.globals: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
        self._constants: dict[int, str] = {}
        self._names: dict[Line, str] = {}

    def name(self, line: Line) -> str:
        if line not in self._names:
            if line.op == "get_attr":  # a constant of the captured graph
                name = self.constant(operator.attrgetter(line.target)(self.root))
            else:
                name = f"v{len(self._names)}"
            self._names[line] = name
        return self._names[line]

    def call(self, line: Line) -> str:
        target, args = direct(line)
        args = [self.text(each) for each in args]
        named = [f"{name}={self.text(value)}" for name, value in line.kwargs.items()]
        if isinstance(target, str):
            return f"{args[0]}.{target}({', '.join([*args[1:], *named])})"
        if target is operator.getitem:
            return f"{args[0]}[{args[1]}]"
        if type(target) is OpOverload:
            target = target._op  # which `OpOverload.__call__` calls
        return f"{self.constant(target)}({', '.join([*args, *named])})"

    def text(self, value: Any) -> str:
        if isinstance(value, Line):
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
        return self.constant(value)

    def constant(self, value: Any) -> str:
        """The name of a global; `globals` keeps the object, so that its address stays its own."""
        if isinstance(value, HigherOrderOperator):
            value = WITHOUT_MODES.get(value, value)
        if id(value) not in self._constants:
            self._constants[id(value)] = f"c{len(self._constants)}"
            self.globals[self._constants[id(value)]] = value
        return self._constants[id(value)]
