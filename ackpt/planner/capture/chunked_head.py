"""The language-model head of a captured step in chunks of tokens, so that the logits never exist as a whole.

The head is the last matrix product before the loss. `_Head` follows its result, a row for each token, through the
forward and the backward, up to sums over tokens (the loss, gradients of weights) and to the gradient of the hidden
states. `_Writer` writes the step with these operations once for each chunk, forward and backward together, so that no
product runs twice. The backward of a chunk is linear in the gradient that the loss will get. It runs with 1 in its
place, and the results are scaled in backward.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils.flop_counter import flop_registry

from ackpt.core.errors import TraceError
from ackpt.metering.flops import formula

from .joint_graph import JointGraph, once_per_graph
from .operations import BACKWARD, FORWARD, may_draw, storage_keys
from .patches.kernels import true_results
from .tracing import described_graph

aten, prims = torch.ops.aten, torch.ops.prims

# The operations that accumulate write into their first argument. Named as those of ATen, whose rates they have.
for _definition in (
    "addmm(Tensor(a!) total, Tensor rows, Tensor columns) -> Tensor(a!)",
    "add(Tensor(a!) total, Tensor x) -> Tensor(a!)",
    "put_rows(Tensor(a!) whole, Tensor rows, SymInt start) -> Tensor(a!)",
    "mul(Tensor(a!) x, Tensor scale) -> Tensor(a!)",
):
    torch.library.define("ackpt_graph::" + _definition.split("(")[0], _definition[_definition.index("(") :])


def _implemented(name: str):
    def register(function):
        torch.library.impl(f"ackpt_graph::{name}", "CompositeExplicitAutograd")(function)
        torch.library.register_fake(f"ackpt_graph::{name}")(lambda changed, *_: changed)
        return function

    return register


@_implemented("addmm")
def _add_product(total, rows, columns):
    return total.addmm_(rows, columns)


@_implemented("add")
def _add(total, x):
    return total.add_(x)


@_implemented("put_rows")
def _put_rows(whole, rows, start):
    whole[start : start + rows.shape[0]] = rows
    return whole


@_implemented("mul")
def _scale(x, scale):
    """In place, unless a second backward may follow."""
    is_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportAttributeAccessIssue]
    if is_backward and torch._C._autograd._get_current_graph_task_keep_graph():  # pyright: ignore[reportAttributeAccessIssue]
        return x * scale
    return x.mul_(scale)


ours: Any = torch.ops.ackpt_graph
flop_registry[ours.addmm] = lambda total, rows, columns, **_: 2 * rows.shape[0] * rows.shape[1] * columns.shape[1]


class HeadError(TraceError):
    """The head of this step cannot run in chunks; names the operation that prevents it.

    Example:
        >>> import torch, ackpt
        >>> issubclass(ackpt.planner.capture.chunked_head.HeadError, ackpt.TraceError)
        True
    """


def chunked(graph: JointGraph, count: int) -> JointGraph:
    """`graph` with its head in `count` chunks of tokens; fewer if it has not that many tokens.

    Raises:
        HeadError: if an operation between the last matrix product and the loss is not known.
    """
    return graph if count == 1 else _written(graph, count)


def most_chunks(graph: JointGraph) -> int:
    """The largest number of chunks that makes sense: a token in each."""
    return head_of(graph).count


@once_per_graph
def head_of(graph: JointGraph) -> _Head:
    return _Head(graph)


@once_per_graph
def _written(graph: JointGraph, count: int) -> JointGraph:
    return _Writer(graph, head_of(graph), count).finished()


class Rows(NamedTuple):
    """How a tensor has a row for each token.

    ``lead``: the leading dimensions that number the tokens: 1, or 2 for sequences and their tokens. ``start``, ``end``:
    the tokens of every sequence that it has. ``is_last``: transposed, with the tokens in its last dimension.
    ``is_linear``: whether it is proportional to the gradient of the loss.
    """

    lead: int
    start: int
    end: int
    is_last: bool = False
    is_linear: bool = False

    @property
    def place(self) -> tuple:
        return self[:4]


_PRODUCTS = (aten.mm.default, aten.addmm.default)
_SAME = {aten.clone.default, aten._to_copy.default, aten.detach.default, aten.alias.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_TURNS = {aten.t.default, aten.transpose.int, aten.permute.default}
_SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim}
_ALONG_DIM = {  # act on every row by itself if their dimension is none of the leading ones
    *(aten._softmax.default, aten._log_softmax.default, aten.logsumexp.default, aten.amax.default),
    *(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, aten.gather.default),
    *(aten.scatter.value, aten.scatter.src, aten.scatter_add.default, aten.squeeze.dim, aten.unsqueeze.default),
}
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
_FILLED = {aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default}
_MADE = {*_ZEROS, *_FILLED, aten.ones.default, aten.ones_like.default, aten.empty.memory_format}
_SIZES = ("size", "input_sizes")
# Of one factor that is proportional to the gradient, whose place is given; None: any one.
_LINEAR = {
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar, aten.neg.default), None),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), 0),
}


class _Head:
    """The operations of the head in `graph`: what is computed for every token, and the sums over tokens.

    ``rows``: by node, those of the first kind; ``sides``: nodes outside of the head of which a chunk reads a part.
    ``exits``: by node, those of the second kind, with how they end: "sum", "mean", "rows" (gradients of the hidden
    states), "loss" or "count" (the results of ``nll_loss``). ``withheld``: outputs of the model that are not computed.
    ``gradient``: the scalar that stands in for the gradient of the loss, and the count by which it is divided.
    """

    def __init__(self, graph: JointGraph):
        self.graph, self.fx = graph, graph.analysis.fx
        self.product = self._last_product()
        shape = self._value(self.product).shape
        views = (self._value(node) for node in self._views_of_product())
        wide = next((value.shape for value in views if value.dim() == 3), (1, shape[0]))
        self.sequences, self.tokens = int(wide[0]), int(wide[1])
        self.has_slices = False
        self.rows: dict[int, Rows] = {self.product: Rows(1, 0, self.tokens)}
        self.sides: dict[int, Rows] = {}
        self.exits: dict[int, str] = {}
        self.gradient: tuple[int, int | None] | None = None
        self._after_exits: set[int] = set()
        self._after_tangents = set(graph.analysis.tangents)
        hidden = graph.nodes[self.product].inputs[-2]
        self._part(hidden, Rows(1, 0, self.tokens), graph.nodes[self.product])
        for node in graph.nodes[self.product + 1 :]:
            if not self._after_tangents.isdisjoint(node.inputs):
                self._after_tangents.add(node.id)
            if not self.rows.keys().isdisjoint(node.inputs):
                self._classify(node)
            elif any(source in self.exits or source in self._after_exits for source in node.inputs):
                self._after_exits.add(node.id)
        self.withheld = self._outputs()
        if self.gradient is None or not any(self.rows_of_exit(each).is_linear for each in self.exits):
            raise self._refused(graph.nodes[self.product], "its backward computes no gradient")

    @property
    def count(self) -> int:
        """The most chunks."""
        return self.sequences * self.tokens

    def rows_of_exit(self, node: int) -> Rows:
        return self._of_exit[node]

    # What is where

    def _last_product(self) -> int:
        """The largest of the matrix products from which a path leads to the loss without another one."""
        analysis = self.graph.analysis
        described = self.fx[len(self.graph.nodes)].meta["desc"]
        with_gradient = [getattr(self.fx[node].meta.get("desc"), "output", None) for node in analysis.tangents]
        losses = [node for what, node in zip(described, analysis.outputs) if what in with_gradient and node is not None]
        if len(losses) != 1 or self._value(losses[0]).numel() != 1:
            raise HeadError(
                f"chunk_head needs a step with one loss, a scalar, and this one differentiates {len(losses)} outputs"
                + ("" if len(losses) != 1 else f", of shape {list(self._value(losses[0]).shape)}")
                + ": pass the labels, so that the model computes its loss"
            )
        todo, seen, products = [*losses], set(), []
        while todo:
            node = todo.pop()
            if node in seen or node in analysis.sources:
                continue
            seen.add(node)
            target = self.fx[node].target
            if formula(getattr(target, "overloadpacket", target)) is not None:
                products.append(node)
            else:
                todo += self.graph.nodes[node].inputs
        if not products:
            raise HeadError("chunk_head found no matrix product before the loss")
        last = max(products, key=lambda node: (self._numel(node), node))
        if self.fx[last].target not in _PRODUCTS:
            raise self._refused(self.graph.nodes[last], "the last matrix product before the loss is no linear layer")
        if self._value(last).dtype == torch.float16:
            raise self._refused(
                self.graph.nodes[last], "in float16, gradients without the scale of the loss may overflow; use bfloat16"
            )
        return last

    def _views_of_product(self) -> list[int]:
        views = [self.product]
        for node in self.graph.nodes[self.product + 1 :]:
            if node.inputs and node.inputs[0] in views and self.fx[node.id].target in _VIEWS | _SAME:
                views.append(node.id)
        return views

    def _value(self, node: int) -> Any:
        return self.fx[node].meta.get("val")

    def _numel(self, node: int) -> int:
        value = self._value(node)
        return value.numel() if isinstance(value, torch.Tensor) else 0

    def _outputs(self) -> list[int]:
        """Places of the outputs that are rows: they are not computed."""
        graph = self.graph
        places = [place for place, node in enumerate(graph.analysis.outputs) if node in self.rows]
        if places and graph.keeps_outputs:
            raise HeadError(
                f"output {places[0]} of the model has a row for every token, and a head in chunks never has all rows: "
                "plan with outputs='drop', or without chunk_head"
            )
        for node in graph.analysis.bw_outputs:
            if node in self.rows:
                raise self._refused(graph.nodes[node], "it is a gradient of the step")
        return places

    def _refused(self, node, why: str) -> HeadError:
        where = ", ".join(part for part in (node.module, node.source) if part)
        return HeadError(
            f"chunk_head cannot split this model's head: {why}. It is {node.name} ({node.target}){where and f', {where}'}."
            " Compute the loss with F.cross_entropy, or with log_softmax and gather, or leave chunk_head out."
        )

    # Rules

    def _part(self, source: int, rows: Rows, reader) -> Rows:
        """`source`, which `reader` reads row by row, as `rows` if it is not known yet."""
        known = self.rows.get(source) or self.sides.get(source)
        if known is not None:
            if known.place != rows.place:
                raise self._refused(reader, "it reads a tensor whose rows are other tokens")
            return known
        node, fx_node = self.graph.nodes[source], self.fx[source]
        if source in self._after_exits or source in self.exits:
            raise self._refused(reader, "it reads a sum over all tokens")
        tensors = [each for each in node.inputs if self._numel(each) > 1 and fx_node.target not in _MADE]
        if fx_node.target in _MADE and not tensors:
            self.rows[source] = rows._replace(is_linear=False)
        elif source in self._after_tangents:
            if fx_node.target is aten.expand.default and self._numel(node.inputs[0]) == 1:
                self._begin(node.inputs[0], None, reader)
                self.rows[source] = rows._replace(is_linear=True)
            else:
                for each in tensors:
                    if self._value(each).shape[: rows.lead] != self._value(source).shape[: rows.lead]:
                        raise self._refused(node, "it computes gradients of tokens in an unknown way")
                    self._part(each, rows, node)
                self._classify(node)
        elif self._numel(source) >= self._numel(self.product):
            raise self._refused(reader, "it reads a tensor as large as the logits that is computed elsewhere")
        else:
            self.sides[source] = rows
        return self.rows.get(source) or self.sides[source]

    def _begin(self, gradient: int, count: int | None, reader) -> None:
        """Note that backward begins with the scalar `gradient`, divided by `count`."""
        if self.gradient not in (None, (gradient, count)):
            raise self._refused(reader, "the loss is a sum of several terms, each with a gradient of its own")
        self.gradient = gradient, count

    def _whole(self, node, source: int) -> None:
        """Refuse `source` as an argument of which every chunk reads all."""
        if source in self._after_exits or source in self.exits:
            raise self._refused(node, "it reads a sum over all tokens")
        if source in self._after_tangents:
            raise self._refused(node, "it multiplies by the gradient of the loss")

    _of_exit: dict[int, Rows]

    def _classify(self, node) -> None:
        target = self.fx[node.id].target
        if node.id in self.rows or node.id in self.exits:
            return
        if may_draw(target, *self.fx[node.id].args):
            raise self._refused(node, "it draws random numbers")
        if not hasattr(self, "_of_exit"):
            self._of_exit = {}
        if target is operator.getitem:
            self._result_of_loss(node)
        elif target is aten.nll_loss_forward.default:
            self._loss(node)
        elif target is aten.nll_loss_backward.default:
            self._loss_backward(node)
        elif target is aten.mm.default:
            self._product(node)
        elif target in _SUMS:
            self._sum(node)
        else:
            self.rows[node.id] = self._rule(node, target)

    def _rule(self, node, target) -> Rows:
        arguments, value = _arguments(self.fx[node.id]), self._value(node.id)
        if not isinstance(value, torch.Tensor):
            raise self._refused(node, "it is not known")
        first = node.inputs[0]
        rows = self.rows.get(first)
        if target in _MADE:
            return self.rows[next(filter(self.rows.__contains__, node.inputs))]._replace(is_linear=False)
        if rows is not None and (target in _VIEWS):
            return self._viewed(node, rows, value)
        if rows is not None and target in _SAME:
            return rows
        if rows is not None and target in _TURNS:
            if value.dim() != 2 or rows.lead != 1 or value.shape == self._value(first).shape:
                raise self._refused(node, "it moves the dimension of the tokens")
            return rows._replace(is_last=not rows.is_last)
        if rows is not None and target in (aten.slice.Tensor, aten.slice_backward.default):
            return self._sliced(node, rows, arguments)
        if rows is not None and target is aten.expand.default and value.dim() == self._value(first).dim():
            return rows
        if target in _ALONG_DIM:
            return self._along(node, target, arguments)
        if torch.Tag.pointwise in getattr(target, "tags", ()):
            return self._elementwise(node, target, value)
        raise self._refused(node, "this operation is not known")

    def _viewed(self, node, rows: Rows, value) -> Rows:
        tokens = self.sequences * (rows.end - rows.start)
        if value.shape and value.shape[0] == tokens and not rows.is_last:
            return rows._replace(lead=1)
        if value.dim() > 1 and tuple(value.shape[:2]) == (self.sequences, rows.end - rows.start) and not rows.is_last:
            return rows._replace(lead=2)
        raise self._refused(node, "it mixes tokens with other dimensions")

    def _sliced(self, node, rows: Rows, arguments) -> Rows:
        source, result = self._value(node.inputs[0]).shape, self._value(node.id).shape
        dim = arguments.get("dim", 0) % len(source)
        if dim >= rows.lead or source[dim] == result[dim]:
            return rows
        is_token = dim == rows.lead - 1 and (rows.lead == 2 or self.sequences == 1)
        if not is_token or arguments.get("step", 1) != 1:
            raise self._refused(node, "it selects tokens in an unknown way")
        self.has_slices = True
        begin = arguments.get("start") or 0
        if self.fx[node.id].target is aten.slice.Tensor:
            begin = begin + source[dim] if begin < 0 else begin
            return rows._replace(start=rows.start + begin, end=rows.start + begin + result[dim])
        begin = begin + result[dim] if begin < 0 else begin
        return rows._replace(start=rows.start - begin, end=rows.start - begin + result[dim])

    def _along(self, node, target, arguments) -> Rows:
        """Rules of operations along one dimension; tensors beside the first have the same tokens."""
        rows, value = self._rows_of_reader(node, self._value(node.id))
        dims = arguments["dim"]
        dims = dims if isinstance(dims, (list, tuple)) else [dims]
        ranks = value.dim() if target is aten.unsqueeze.default else self._value(node.inputs[0]).dim()
        if rows.is_last or any(dim % ranks < rows.lead for dim in dims):
            raise self._refused(node, "it works along the dimension of the tokens")
        parts = [self._part(source, rows, node) for source in node.inputs]
        linear = [at for at, part in enumerate(parts) if part.is_linear]
        is_gradient = str(target).removesuffix(".default").endswith("_backward_data") and linear == [0]
        adds = (
            target in (aten.scatter_add.default, aten.scatter.src) and linear == [2] and self._is_zero(node.inputs[0])
        )
        moves = target in (aten.squeeze.dim, aten.unsqueeze.default, aten.gather.default) and linear == [0]
        if linear and not (is_gradient or adds or moves):
            raise self._refused(node, "it is not linear in the gradient of the loss")
        return rows._replace(is_linear=bool(linear))

    def _rows_of_reader(self, node, value) -> tuple[Rows, Any]:
        """The rows of an operation's result: those of the arguments that are rows."""
        given = [self.rows[source] for source in node.inputs if source in self.rows]
        if any(rows.place != given[0].place for rows in given):
            raise self._refused(node, "it combines tensors whose rows are other tokens")
        return given[0], value

    def _elementwise(self, node, target, value) -> Rows:
        rows, _ = self._rows_of_reader(node, value)
        if rows.is_last:
            raise self._refused(node, "it follows a transposition of the logits")
        linear = []
        for at, source in enumerate(node.inputs):
            shape = self._value(source).shape
            has_tokens = len(shape) == value.dim() and shape[: rows.lead] == value.shape[: rows.lead]
            if source in self.rows and not has_tokens:
                raise self._refused(node, "it broadcasts over tokens")
            if has_tokens and any(size > 1 for size in shape[: rows.lead]):
                if self._part(source, rows, node).is_linear:
                    linear.append(at)
            elif len(shape) <= value.dim() - rows.lead or all(
                size == 1 for size in shape[: len(shape) - value.dim() + rows.lead]
            ):
                self._whole(node, source)
            else:
                raise self._refused(node, "it broadcasts a tensor over some tokens")
        if linear and not self._is_linear(node, target, linear):
            raise self._refused(node, "it is not linear in the gradient of the loss")
        return rows._replace(is_linear=bool(linear))

    def _is_linear(self, node, target, linear: list[int]) -> bool:
        if target in _LINEAR:
            return len(linear) == 1 and _LINEAR[target] in (None, linear[0])
        if target in (aten.add.Tensor, aten.sub.Tensor):
            return len(linear) == len(node.inputs) == 2
        if target is aten.where.self:
            return 0 not in linear and all(at in linear or self._is_zero(node.inputs[at]) for at in (1, 2))
        if target is aten.masked_fill.Scalar:
            return linear == [0] and self.fx[node.id].args[2] == 0
        return linear == [0] and str(target).removesuffix(".default").endswith("_backward")

    def _is_zero(self, node: int) -> bool:
        fx_node = self.fx[node]
        fill = fx_node.args[-1] if fx_node.target in _FILLED else None
        return fx_node.target in _ZEROS or (isinstance(fill, (int, float)) and fill == 0)

    # Ends

    def _end(self, node, how: str, rows: Rows) -> None:
        if rows.is_linear != (node.phase == BACKWARD):
            raise self._refused(node, "it is a sum over tokens that is neither a loss nor a gradient")
        self.exits[node.id], self._of_exit[node.id] = how, rows

    def _loss(self, node) -> None:
        log, target, *_ = node.inputs
        rows = self.rows.get(log)
        if rows is None or rows.lead != 1 or rows.is_linear:
            raise self._refused(node, "it is a loss of other dimensions than tokens and classes")
        self._part(target, rows, node)
        self.rows[node.id] = rows

    def _result_of_loss(self, node) -> None:
        loss = self.graph.nodes[node.inputs[0]]
        if self.fx[loss.id].target is not aten.nll_loss_forward.default:
            raise self._refused(node, "it takes one of several results")
        index, reduction = self.fx[node.id].args[1], self.fx[loss.id].args[3]
        if reduction == 0 and index == 0:
            self.rows[node.id] = self.rows[loss.id]
        elif reduction == 0:
            self._after_exits.add(node.id)
        else:
            self._end(node, "count" if index else "loss", self.rows[loss.id])

    def _loss_backward(self, node) -> None:
        gradient, log, target, *_ = self.fx[node.id].args
        gradient, log, target = (each.meta["ackpt_id"] for each in (gradient, log, target))
        if log not in self.rows:
            raise self._refused(node, "its logits are no rows")
        rows = self.rows[log]
        self._part(target, rows, node)
        if self.fx[node.id].args[4] == 0:
            if not self._part(gradient, rows, node).is_linear:
                raise self._refused(node, "it does not depend on the gradient of the loss")
        else:
            count = self.fx[node.id].args[6].meta["ackpt_id"]
            if self.exits.get(count) != "count":
                raise self._refused(node, "its number of tokens is computed elsewhere")
            self._begin(gradient, count if self.fx[node.id].args[4] == 1 else None, node)
        self.rows[node.id] = rows._replace(is_linear=True)

    def _product(self, node) -> None:
        left, right = node.inputs if len(node.inputs) == 2 else node.inputs * 2
        rows, others = self.rows.get(left), self.rows.get(right)
        if rows is not None and not rows.is_last and others is None:
            self._whole(node, right)
            if (rows.start, rows.end, rows.is_linear) != (0, self.tokens, True):
                raise self._refused(node, "it is another product of the logits")
            self._end(node, "rows", rows)
            return
        if rows is not None and rows.is_last:
            others = self._part(right, rows._replace(is_last=False), node)
        elif others is not None and not others.is_last and rows is None:
            rows = self._part(left, others._replace(is_last=True), node)
        else:
            raise self._refused(node, "it is another product of the logits")
        if rows.is_linear and others.is_linear:
            raise self._refused(node, "it is not linear in the gradient of the loss")
        self._end(node, "sum", rows._replace(is_linear=rows.is_linear or others.is_linear))

    def _sum(self, node) -> None:
        rows, x = self.rows[node.inputs[0]], self._value(node.inputs[0])
        dims = _arguments(self.fx[node.id]).get("dim")
        dims = range(x.dim()) if dims is None or not len(dims) else sorted(dim % x.dim() for dim in dims)
        is_mean = self.fx[node.id].target in (aten.mean.default, aten.mean.dim)
        if all(dim >= rows.lead for dim in dims) and not rows.is_last:
            self.rows[node.id] = rows
        elif rows.is_last or list(dims)[: rows.lead] != list(range(rows.lead)):
            raise self._refused(node, "it sums over some dimensions of the tokens")
        elif is_mean and len(dims) != x.dim():
            raise self._refused(node, "it is a mean over tokens alone")
        else:
            self._end(node, "mean" if is_mean else "sum", rows)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by their names."""
    schema: Any = getattr(node.target, "_schema")
    given = {argument.name: value for argument, value in zip(schema.arguments, node.args)}
    return {**given, **node.kwargs}


class _Chunk(NamedTuple):
    """Tokens ``tokens`` of the sequences ``sequences``, both as (start, end); ``number``: of the chunk."""

    number: int
    sequences: tuple[int, int]
    tokens: tuple[int, int]


def _split(length: int, parts: int) -> list[tuple[int, int]]:
    size = -(-length // min(parts, length))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


class _Writer:
    """Writes `graph` with `head` in `count` chunks. ``made``: the new nodes by the ids of the old ones."""

    def __init__(self, graph: JointGraph, head: _Head, count: int):
        self.graph, self.head = graph, head
        self.fx = graph.analysis.fx
        self.new = fx.Graph()
        self.made: dict[int, fx.Node] = {}
        self.totals: dict[int, fx.Node] = {}
        self.moved: set[int] = set()  # storages of values that a new node replaces
        self.is_written = self.is_writing = False
        self._scale: fx.Node | None = None
        if head.has_slices:
            sequences = _split(head.sequences, count)
            pieces = _split(head.tokens, -(-count // head.sequences) if count > head.sequences else 1)
            self.chunks = [_Chunk(0, each, piece) for each in sequences for piece in pieces]
        else:
            self.chunks = [_Chunk(0, (0, 1), piece) for piece in _split(head.count, count)]
        self.chunks = [each._replace(number=number) for number, each in enumerate(self.chunks)]

    def finished(self) -> JointGraph:
        graph, analysis = self.graph, self.graph.analysis
        fake_mode = detect_fake_mode([node.meta.get("val") for node in graph.module.graph.nodes])
        region = self.head.rows.keys() | self.head.exits.keys()
        with torch.no_grad(), true_results(fake_mode):
            for node in graph.nodes:
                ends_forward = node.phase == BACKWARD or node.id in analysis.mutated.values()
                if ends_forward and not self.is_written:
                    self._write_chunks()
                if node.id not in region:
                    self._copied(node.id)
            output = self.fx[len(graph.nodes)]
            returned = list(output.args[0])
            for place in self.head.withheld:
                returned[place] = self._withheld(returned[place])
            given = [each if each is None or each.graph is self.new else self._value(each) for each in returned]
            self.new.create_node("output", "output", (type(output.args[0])(given),)).meta.update(output.meta)
        for place, node in enumerate(self.new.nodes):
            node.meta["ackpt_id"] = place
        module = fx.GraphModule(graph.module, self.new)
        names = ("has_data", "replays_random", "made_for", "as_compiled", "keeps_outputs")
        made = described_graph(module, **{name: getattr(graph, name) for name in names})
        names = ("on_cpu", "optimizer_bytes", "optimizer_step_bytes", "accumulated_bytes", "scaled_loss_bytes")
        fields = {name: getattr(graph, name) for name in names}
        return replace(made, **fields, head_chunks=len(self.chunks))

    def _value(self, node: fx.Node) -> fx.Node:
        return self._copied(node.meta["ackpt_id"])

    def _copied(self, node_id: int) -> fx.Node:
        """The new node for an old one outside of the head, or for a result of the head."""
        if node_id in self.made:
            return self.made[node_id]
        if node_id in self.head.exits:
            if not self.is_written:
                self._write_chunks()
            if node_id not in self.made:
                total = self.totals[node_id]
                self.made[node_id] = self._add(ours.mul.default, (total, self._gradient()), node_id, phase=BACKWARD)
            return self.made[node_id]
        old = self.fx[node_id]
        for source in old.all_input_nodes:
            self._value(source)
        node = self.new.node_copy(old, self._value)
        if self.is_writing:  # a view of a weight, say, that only the backward made
            node.meta.pop("partitioner_tag", None)
        if not self.moved.isdisjoint(storage_keys(old)):
            node.meta["val"] = self._run(node)
        self.made[node_id] = node
        return node

    def _gradient(self) -> fx.Node:
        """The gradient of the loss by which the results of the chunks are scaled."""
        if self._scale is None:
            assert self.head.gradient is not None
            gradient, count = self.head.gradient
            self._scale = self._copied(gradient)
            if count is not None:  # without tokens that count, gradients are 0
                total = self._copied(count)
                is_zero = self._add(aten.eq.Scalar, (total, 0), gradient, phase=BACKWARD)
                total = self._add(aten.masked_fill.Scalar, (total, is_zero, 1.0), gradient, phase=BACKWARD)
                self._scale = self._add(aten.div.Tensor, (self._scale, total), gradient, phase=BACKWARD)
        return self._scale

    def _withheld(self, old: fx.Node) -> fx.Node:
        """An empty tensor in place of an output that has a row for each token."""
        value = old.meta["val"]
        node = self._add(aten.empty.memory_format, ([0],), old.meta["ackpt_id"], dtype=value.dtype, device=value.device)
        node.meta[WITHHELD] = tuple(value.shape)
        first_of_backward = next(each for each in self.new.nodes if each.meta.get("partitioner_tag") == "is_backward")
        first_of_backward.prepend(node)
        return node

    def _add(self, target, args, like: int, number: int | None = None, phase: str = FORWARD, **kwargs) -> fx.Node:
        old = self.fx[like]
        name = f"{old.name}_head" if number is None else f"{old.name}_chunk_{number}"
        node = self.new.create_node("call_function", target, tuple(args), kwargs, name)
        node.meta.update({key: old.meta[key] for key in ("custom", "stack_trace") if key in old.meta})
        node.meta["val"] = self._run(node)
        if phase == BACKWARD:
            node.meta["partitioner_tag"] = "is_backward"
        return node

    def _run(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._fake)
        fake_mode = detect_fake_mode([self.fx[self.head.product].meta["val"]])
        assert fake_mode is not None
        with fake_mode:
            return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    def _fake(self, node: fx.Node) -> Any:
        return node.meta["val"] if "val" in node.meta else getattr(self.graph.module, str(node.target))

    # Chunks

    def _write_chunks(self) -> None:
        self.is_written = self.is_writing = True
        head, graph = self.head, self.graph
        assert head.gradient is not None
        needed = set(head.exits)
        for node_id in sorted(needed | head.rows.keys(), reverse=True):
            if node_id in needed:
                needed.update(source for source in graph.nodes[node_id].inputs if source in head.rows)
        value = self.fx[head.gradient[0]].meta["val"]
        self.one = self._add(aten.full.default, ([], 1.0), head.product, dtype=value.dtype, device=value.device)
        for source in head.sides:
            self._copied(source)
        for chunk in self.chunks:
            self.local: dict[int, fx.Node] = {}
            for node_id in sorted(needed):
                if node_id in head.exits:
                    self._accumulate(node_id, chunk)
                else:
                    self.local[node_id] = self._of_chunk(node_id, chunk)
        self.is_writing = False
        for node_id, how in head.exits.items():
            self.moved.update(storage_keys(self.fx[node_id]))
            if head.rows_of_exit(node_id).is_linear:
                continue
            total = self.totals[node_id]
            if how == "mean":
                count = self.fx[node_id].args[0].meta["val"].numel()
                total = self._add(aten.div.Scalar, (total, count), node_id)
            self.made[node_id] = total
        for node_id, how in head.exits.items():
            loss = self.fx[node_id].args[0]
            if how == "loss" and loss.args[3] == 1:
                count = next(
                    each for each, what in head.exits.items() if what == "count" and loss in self.fx[each].args
                )
                args = self.totals[node_id], self.totals[count]
                self.made[node_id] = self._add(aten.div.Tensor, args, node_id)

    def _length(self, rows: Rows, chunk: _Chunk) -> tuple[int, int]:
        """The first and last token of a chunk's sequences that `rows` has, from its own first one."""
        start, end = (min(max(token, rows.start), rows.end) - rows.start for token in chunk.tokens)
        return start, end

    def _lead(self, rows: Rows, chunk: _Chunk) -> list[int]:
        """The leading sizes of `rows` in a chunk."""
        sequences, (start, end) = chunk.sequences[1] - chunk.sequences[0], self._span(rows, chunk)
        return [sequences * (end - start)] if rows.lead == 1 else [sequences, end - start]

    def _span(self, rows: Rows, chunk: _Chunk) -> tuple[int, int]:
        return self._length(rows, chunk) if self.head.has_slices else chunk.tokens

    def _part(self, source: int, rows: Rows, chunk: _Chunk) -> fx.Node:
        """The rows of a chunk of a tensor that exists as a whole."""
        whole, (start, end) = self._copied(source), self._span(rows, chunk)
        if rows.lead == 2 and self.head.has_slices:
            part = self._add(aten.slice.Tensor, (whole, 0, *chunk.sequences), source, chunk.number)
            return self._add(aten.slice.Tensor, (part, 1, start, end), source, chunk.number)
        if rows.lead == 2:
            trailing = list(whole.meta["val"].shape[2:])
            if not whole.meta["val"].is_contiguous():
                whole = self._add(aten.clone.default, (whole,), source, memory_format=torch.contiguous_format)
                self.made[source] = whole
            flat = self._add(aten.view.default, (whole, [-1, *trailing]), source, chunk.number)
            part = self._add(aten.slice.Tensor, (flat, 0, start, end), source, chunk.number)
            return self._add(aten.view.default, (part, [1, end - start, *trailing]), source, chunk.number)
        tokens = rows.end - rows.start
        begin = (chunk.sequences[0] * tokens if self.head.has_slices else 0) + start
        length = self._lead(rows, chunk)[0]
        dim = 1 if rows.is_last else 0
        return self._add(aten.slice.Tensor, (whole, dim, begin, begin + length), source, chunk.number)

    def _argument(self, chunk: _Chunk, node: fx.Node) -> fx.Node:
        node_id = node.meta["ackpt_id"]
        if node_id in self.local:
            return self.local[node_id]
        if node_id in self.head.sides:
            self.local[node_id] = self._part(node_id, self.head.sides[node_id], chunk)
            return self.local[node_id]
        if node_id == self.head.gradient[0]:  # pyright: ignore[reportOptionalSubscript]
            return self.one
        return self._copied(node_id)

    def _of_chunk(self, node_id: int, chunk: _Chunk) -> fx.Node:
        """An operation of the head on the rows of a chunk."""
        old, head = self.fx[node_id], self.head
        rows, target = head.rows[node_id], old.target
        if target in (aten.nll_loss_forward.default, aten.nll_loss_backward.default):
            args = list(old.args)
            at = 3 if target is aten.nll_loss_forward.default else 4
            args[at] = 2 if args[at] else 0
            if target is aten.nll_loss_backward.default:
                args[6] = self.one
        else:
            args = [*old.args]
        args = fx.map_arg(tuple(args), lambda node: node if node.graph is self.new else self._argument(chunk, node))
        kwargs = fx.map_arg(dict(old.kwargs), lambda node: self._argument(chunk, node))
        if target is not operator.getitem:
            args = self._resized(old, rows, chunk, list(args))
        return self._add(target, args, node_id, chunk.number, **kwargs)

    def _resized(self, old: fx.Node, rows: Rows, chunk: _Chunk, args: list) -> list:
        """`args` with the sizes of a chunk."""
        names = [argument.name for argument in old.target._schema.arguments]  # pyright: ignore
        for name in _SIZES:
            if name in names[: len(args)]:
                trailing = old.meta["val"].shape[rows.lead :]
                args[names.index(name)] = [*self._lead(rows, chunk), *trailing]
        if old.target not in (aten.slice.Tensor, aten.slice_backward.default):
            return args
        source: Any = old.args[0]
        before = self.head.rows[source.meta["ackpt_id"]]
        if before.place != rows.place:
            is_slice = old.target is aten.slice.Tensor
            whole, part = (before, rows) if is_slice else (rows, before)
            begin = self._span(part, chunk)[0] + part.start - self._span(whole, chunk)[0] - whole.start
            length = self._lead(part, chunk)[-1]
            args[names.index("start") : names.index("start") + 2] = begin, begin + length
        return args

    def _accumulate(self, node_id: int, chunk: _Chunk) -> None:
        old, how, number = self.fx[node_id], self.head.exits[node_id], chunk.number
        args = fx.map_arg(tuple(old.args), lambda node: self._argument(chunk, node))
        kwargs = fx.map_arg(dict(old.kwargs), lambda node: self._argument(chunk, node))
        total = self.totals.get(node_id)
        if how == "rows":
            if total is None:
                value = old.meta["val"]
                total = self._add(
                    aten.empty.memory_format, (list(value.shape),), node_id, dtype=value.dtype, device=value.device
                )
                self.totals[node_id] = total
            part = self._add(old.target, args, node_id, number, **kwargs)
            start = chunk.sequences[0] * self.head.tokens + chunk.tokens[0]
            self._add(ours.put_rows.default, (total, part, start), node_id, number)
        elif total is not None and old.target is aten.mm.default:
            self._add(ours.addmm.default, (total, *args), node_id, number)
        else:
            target = old.target
            if how == "mean":
                target, args = aten.sum.default, args[:1]
                kwargs = {"dtype": old.meta["val"].dtype}
            part = self._add(target, args, node_id, number, **kwargs)
            if total is None:
                self.totals[node_id] = part
            else:
                self._add(ours.add.default, (total, part), node_id, number)


WITHHELD = "ackpt_withheld"  # on an output that is not computed: the shape that the model gives it
