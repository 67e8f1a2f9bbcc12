"""The language-model head of a captured step in chunks of tokens, so that the logits never exist as a whole.

The head is the last matrix product before the loss. `Head` follows its result, a row for each token, through forward
and backward, up to sums over tokens (the loss, gradients of weights) and to the gradient of the hidden states.
`chunked` writes the step with these operations once for each chunk, its forward and backward together, so that nothing
runs twice. The backward of a chunk is linear in the gradient that the loss will get: it runs with 1 in its place, and
the backward of the step scales the results.
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
from .operations import BACKWARD, FORWARD, Node, may_draw, storage_keys
from .patches.kernels import true_results
from .tracing import described_graph

aten: Any = torch.ops.aten
ours: Any = torch.ops.ackpt_graph
WITHHELD = "ackpt_withheld"  # on an output that is not computed: the shape that the model gives it


def _scaled(x, scale):
    """In place, unless a second backward may follow."""
    engine: Any = torch._C
    if engine._current_graph_task_id() != -1 and engine._autograd._get_current_graph_task_keep_graph():
        return x * scale
    return x.mul_(scale)


def _with_rows(whole, rows, start):
    whole[start : start + rows.shape[0]] = rows
    return whole


# They write into their first argument, so that none of them can be recomputed. Their names are those of ATen's
# operations, whose rates they have.
for _name, _arguments, _function in (
    ("addmm", "Tensor a, Tensor b", lambda total, a, b: total.addmm_(a, b)),
    ("add", "Tensor x", lambda total, x: total.add_(x)),
    ("slice_scatter", "Tensor rows, SymInt start", _with_rows),
    ("mul", "Tensor scale", _scaled),
):
    torch.library.define(f"ackpt_graph::{_name}", f"(Tensor(a!) x, {_arguments}) -> Tensor(a!)")
    torch.library.impl(f"ackpt_graph::{_name}", "CompositeExplicitAutograd")(_function)
    torch.library.register_fake(f"ackpt_graph::{_name}")(lambda x, *_: x)
flop_registry[ours.addmm] = lambda total, a, b, **_: 2 * a.shape[0] * a.shape[1] * b.shape[1]


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


_SAME = {aten.clone.default, aten._to_copy.default, aten.detach.default, aten.alias.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_TURNS = {aten.t.default, aten.transpose.int, aten.permute.default}
_SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim}
_SLICES = {aten.slice.Tensor, aten.slice_backward.default}
_ALONG_DIM = {  # every row by itself, unless the dimension is a leading one
    *(aten._softmax.default, aten._log_softmax.default, aten.logsumexp.default, aten.amax.default),
    *(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, aten.gather.default),
    *(aten.scatter.value, aten.scatter.src, aten.scatter_add.default, aten.squeeze.dim, aten.unsqueeze.default),
}
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
_LIKE = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
_MADE = {*_ZEROS, *_LIKE, aten.full.default, aten.ones.default, aten.scalar_tensor.default}
# Linear in one of several factors: its place, or None for any.
_LINEAR = {
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar, aten.neg.default), None),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), 0),
    **dict.fromkeys((aten.squeeze.dim, aten.unsqueeze.default, aten.gather.default), 0),
}


class Head:
    """The operations of the head in `graph`: what is computed for every token, and the sums over tokens.

    ``rows``: by node, those of the first kind; ``sides``: nodes outside of the head of which a chunk reads a part.
    ``exits``: by node, those of the second kind: their rows, and how they end: "sum", "mean", "rows" (gradients of
    hidden states), "loss" or "count" (the results of ``nll_loss``). ``withheld``: places of the model's outputs that
    are not computed. ``gradient``: the scalar that backward begins with, and the count by which it is divided.
    ``sequences``, ``tokens``: tokens are numbered by both if some are left out, otherwise as those of one sequence.

    Raises:
        TraceError: if an operation between the last matrix product and the loss is not known; names it.
    """

    def __init__(self, graph: JointGraph):
        self.graph, self.fx = graph, graph.analysis.fx
        self.rows: dict[int, Rows] = {}
        self.sides: dict[int, Rows] = {}
        self.exits: dict[int, tuple[str, Rows]] = {}
        self.gradient: tuple[int, int | None] | None = None
        self._has_slices = False
        self._after_exits: set[int] = set()
        self._after_tangents = set(graph.analysis.tangents)
        self.product = self._last_product()
        reader = next(node.id for node in graph.nodes if self.product.id in node.inputs)
        shape = self.value(reader).shape
        self.sequences, self.tokens = shape[:2] if len(shape) == 3 else (1, shape[0])
        self.rows[self.product.id] = Rows(1, 0, self.tokens)
        self._part(self.product.inputs[-2], self.rows[self.product.id], self.product)
        for node in graph.nodes[self.product.id + 1 :]:
            if not self._after_tangents.isdisjoint(node.inputs):
                self._after_tangents.add(node.id)
            if not self.rows.keys().isdisjoint(node.inputs):
                self._classify(node)
            elif any(source in self.exits or source in self._after_exits for source in node.inputs):
                self._after_exits.add(node.id)
        self.withheld = [place for place, node in enumerate(graph.analysis.outputs) if node in self.rows]
        if self.withheld and graph.keeps_outputs:
            self._refuse(self.product, "outputs='keep' keeps an output with a row for every token, such as logits")
        if self.gradient is None or not any(rows.is_linear for _, rows in self.exits.values()):
            self._refuse(self.product, "its backward computes no gradient")
        if not self._has_slices:
            self.sequences, self.tokens = 1, self.sequences * self.tokens
            for table in (self.rows, self.sides):
                table.update({node: rows._replace(end=self.tokens) for node, rows in table.items()})
            self.exits = {node: (how, rows._replace(end=self.tokens)) for node, (how, rows) in self.exits.items()}

    def value(self, node: int) -> Any:
        return self.fx[node].meta.get("val")

    def numel(self, node: int) -> int:
        value = self.value(node)
        return value.numel() if isinstance(value, torch.Tensor) else 0

    def _last_product(self) -> Node:
        """The largest of the matrix products from which a path leads to the loss without another one."""
        graph, analysis = self.graph, self.graph.analysis
        described = self.fx[len(graph.nodes)].meta["desc"]
        with_gradient = [getattr(self.fx[node].meta.get("desc"), "output", None) for node in analysis.tangents]
        losses = [node for what, node in zip(described, analysis.outputs) if what in with_gradient and node is not None]
        if [self.numel(each) for each in losses] != [1]:
            raise TraceError(
                "chunk_head needs a model that returns one loss, a scalar, and this step differentiates outputs of "
                f"{[self.numel(each) for each in losses]} elements: pass the labels to the model"
            )
        todo, seen, products = [*losses], set(), []
        while todo:
            node = todo.pop()
            if node in seen or node in analysis.sources:
                continue
            seen.add(node)
            if formula(getattr(self.fx[node].target, "overloadpacket", None)) is not None:
                products.append(node)
            else:
                todo += graph.nodes[node].inputs
        if not products:
            raise TraceError("chunk_head found no matrix product from which the loss is computed")
        last = graph.nodes[max(products, key=lambda node: (self.numel(node), node))]
        if self.fx[last.id].target not in (aten.mm.default, aten.addmm.default):
            self._refuse(last, "the last matrix product before the loss is no linear layer")
        if self.value(last.id).dtype == torch.float16:
            self._refuse(
                last, "in float16, the gradients of a chunk may overflow before the loss is scaled", "Use bfloat16"
            )
        return last

    def _refuse(self, node: Node, why: str, fix: str = "Compute the loss by F.cross_entropy"):
        where = ", ".join(part for part in (node.module, node.source) if part)
        raise TraceError(
            f"chunk_head cannot split the head of this model: {why}. The operation is {node.name} ({node.target})"
            f"{where and f' of {where}'}. {fix}, or leave chunk_head out."
        )

    def _part(self, source: int, rows: Rows, reader: Node) -> Rows:
        """`source`, which `reader` reads row by row: as it is known, or else as `rows`."""
        known = self.rows.get(source) or self.sides.get(source)
        if known is not None:
            if known[:4] != rows[:4]:
                self._refuse(reader, "it combines rows of other tokens")
            return known
        node, target, shape = self.graph.nodes[source], self.fx[source].target, self.value(source).shape
        rows = rows._replace(is_linear=source in self._after_tangents)
        if source in self._after_exits or source in self.exits:
            self._refuse(reader, "it reads a sum over all tokens")
        if target in _MADE:
            for each in node.inputs if target in _LIKE else ():
                self._part(each, rows, node)
            self.rows[source] = rows._replace(is_linear=False)
        elif target is aten.expand.default and rows.is_linear and self.numel(node.inputs[0]) == 1:
            self._begin(node.inputs[0], None, reader)
            self.rows[source] = rows
        elif rows.is_linear:
            for each in node.inputs:
                if self.numel(each) > 1 and self.value(each).shape[: rows.lead] == shape[: rows.lead]:
                    self._part(each, rows, node)
            self._classify(node)
        elif self.numel(source) >= self.numel(self.product.id):
            self._refuse(reader, "it reads a tensor as large as the logits that is computed elsewhere")
        else:
            self.sides[source] = rows
        return self.rows.get(source) or self.sides[source]

    def _whole(self, source: int, reader: Node) -> None:
        """Check a `source` of which every chunk reads all."""
        if source in self._after_exits or source in self.exits or source in self._after_tangents:
            self._refuse(reader, "it reads a sum over all tokens, or the gradient of one")

    def _begin(self, gradient: int, count: int | None, reader: Node) -> None:
        if self.gradient not in (None, (gradient, count)):
            why = "the loss is a sum of several terms, each with a gradient of its own, as with label_smoothing"
            self._refuse(reader, why, "Leave label_smoothing and other terms of the loss out")
        self.gradient = gradient, count

    def _classify(self, node: Node) -> None:
        if node.id in self.rows or node.id in self.exits:
            return
        fx_node = self.fx[node.id]
        target, first = fx_node.target, self.rows.get(node.inputs[0])
        if may_draw(target, *fx_node.args):
            self._refuse(node, "it draws random numbers")
        if target is operator.getitem:
            self._result_of_loss(node)
        elif target is aten.nll_loss_forward.default and first is not None and first.lead == 1:
            self._part(fx_node.args[1].meta["ackpt_id"], first, node)
            self.rows[node.id] = first
        elif target is aten.nll_loss_backward.default:
            self._loss_backward(node, *(each.meta["ackpt_id"] for each in (*fx_node.args[:3], fx_node.args[6])))
        elif target is aten.mm.default:
            self._product(node, *(each.meta["ackpt_id"] for each in fx_node.args))
        elif target in _SUMS and first is not None:
            self._sum(node, first)
        else:
            self.rows[node.id] = self._rule(node, target, first, self.value(node.id))

    def _rule(self, node: Node, target, first: Rows | None, value) -> Rows:
        if target in _ALONG_DIM or torch.Tag.pointwise in getattr(target, "tags", ()):
            return self._row_by_row(node, target, value)
        if first is None or target in _SAME or not isinstance(value, torch.Tensor):
            return first or self._refuse(node, "it is not known")
        before, shape = self.value(node.inputs[0]).shape, value.shape
        if target in _VIEWS and not first.is_last:
            tokens = self.sequences * (first.end - first.start)
            if shape[:1] == (tokens,):
                return first._replace(lead=1)
            if shape[:2] == (self.sequences, first.end - first.start):
                return first._replace(lead=2)
        elif target in _TURNS and first.lead == 1 and len(shape) == 2 and shape == before[::-1]:
            return first._replace(is_last=not first.is_last)
        elif target in _SLICES and not first.is_last:
            return self._sliced(node, first, before, shape)
        elif (target in _MADE or target is aten.expand.default) and shape[: first.lead] == before[: first.lead]:
            return first._replace(is_linear=first.is_linear and target not in _MADE)
        return self._refuse(node, "it is not known, or mixes tokens with other dimensions")

    def _sliced(self, node: Node, rows: Rows, before, after) -> Rows:
        arguments = arguments_of(self.fx[node.id])
        dim = arguments.get("dim", 0) % len(before)
        if dim >= rows.lead or before[dim] == after[dim]:
            return rows
        if dim != rows.lead - 1 or (rows.lead == 1 and self.sequences > 1) or arguments.get("step", 1) != 1:
            self._refuse(node, "it selects tokens in an unknown way")
        self._has_slices = True
        is_slice = self.fx[node.id].target is aten.slice.Tensor
        start = arguments.get("start") or 0
        start += max(before[dim], after[dim]) if start < 0 else 0
        start = rows.start + (start if is_slice else -start)
        return rows._replace(start=start, end=start + after[dim])

    def _row_by_row(self, node: Node, target, value) -> Rows:
        """Elementwise, or along a dimension that is no leading one."""
        rows = next((self.rows[source] for source in node.inputs if source in self.rows), None)
        if rows is None or rows.is_last:
            self._refuse(node, "it is not known, or follows a transposition")
        if target in _ALONG_DIM:
            dims = arguments_of(self.fx[node.id])["dim"]
            rank = value.dim() if target is aten.unsqueeze.default else self.value(node.inputs[0]).dim()
            if any(dim % rank < rows.lead for dim in (dims if isinstance(dims, (list, tuple)) else [dims])):
                self._refuse(node, "it works along the dimension of the tokens")
        linear = []
        sources = [each.meta["ackpt_id"] for each in self.fx[node.id].args if isinstance(each, fx.Node)]
        for at, source in enumerate(sources):
            shape = self.value(source).shape
            aligned = len(shape) - value.dim() + rows.lead if target not in _ALONG_DIM else rows.lead
            if aligned == rows.lead and shape[: rows.lead] == value.shape[: rows.lead]:
                if self._part(source, rows, node).is_linear:
                    linear.append(at)
            elif source not in self.rows and all(size == 1 for size in shape[: max(0, aligned)]):
                self._whole(source, node)
            else:
                self._refuse(node, "it broadcasts over tokens")
        if linear and not self._is_linear(node, target, linear, sources):
            self._refuse(node, "it is not linear in the gradient of the loss")
        return rows._replace(is_linear=bool(linear))

    def _is_linear(self, node: Node, target, linear: list[int], sources: list[int]) -> bool:
        """Whether the result is linear in the arguments at these places of `sources`, together."""
        if target in _LINEAR:
            return len(linear) == 1 and _LINEAR[target] in (None, linear[0])
        if target in (aten.add.Tensor, aten.sub.Tensor):
            return linear == [0, 1]
        if target is aten.where.self:
            return 0 not in linear and all(at in linear or self._is_zero(sources[at]) for at in (1, 2))
        if target in (aten.scatter_add.default, aten.scatter.src):
            return linear == [2] and self._is_zero(sources[0])
        if target is aten.masked_fill.Scalar:
            return linear == [0] and self.fx[node.id].args[2] == 0
        return linear == [0] and "_backward" in str(target)

    def _is_zero(self, node: int) -> bool:
        made = self.fx[node]
        fill = made.args[-1] if made.target in _MADE and made.args else None
        return made.target in _ZEROS or (isinstance(fill, (int, float)) and fill == 0)

    def _end(self, node: Node, how: str, rows: Rows) -> None:
        if rows.is_linear != (node.phase == BACKWARD):
            self._refuse(node, "it is a sum over tokens that is neither a loss nor a gradient")
        self.exits[node.id] = how, rows

    def _result_of_loss(self, node: Node) -> None:
        loss, index = self.fx[node.id].args
        if loss.target is not aten.nll_loss_forward.default:
            self._refuse(node, "it takes one of several results")
        if loss.args[3]:  # a sum or a mean
            self._end(node, "count" if index else "loss", self.rows[node.inputs[0]])
        elif index == 0:
            self.rows[node.id] = self.rows[node.inputs[0]]

    def _loss_backward(self, node: Node, gradient: int, logits: int, targets: int, count: int) -> None:
        rows, reduction = self.rows.get(logits), self.fx[node.id].args[4]
        if rows is None or (reduction == 0 and not self._part(gradient, rows, node).is_linear):
            self._refuse(node, "it is no gradient of the logits")
        if reduction != 0:
            self._begin(gradient, count if reduction == 1 else None, node)
        self._part(targets, rows, node)
        self.rows[node.id] = rows._replace(is_linear=True)

    def _product(self, node: Node, left: int, right: int) -> None:
        """The gradient of the hidden states, or that of the weight, which is a sum over tokens."""
        rows, others = self.rows.get(left), self.rows.get(right)
        if rows is not None and not rows.is_last and others is None and rows[1:3] == (0, self.tokens):
            self._whole(right, node)
            self._end(node, "rows", rows)
            return
        if rows is not None and rows.is_last:
            others = self._part(right, rows._replace(is_last=False), node)
        elif rows is None and others is not None and not others.is_last:
            rows = self._part(left, others._replace(is_last=True), node)
        if rows is None or others is None or not rows.is_last or (rows.is_linear and others.is_linear):
            self._refuse(node, "it is another matrix product of the logits")
        self._end(node, "sum", rows._replace(is_linear=rows.is_linear or others.is_linear))

    def _sum(self, node: Node, rows: Rows) -> None:
        rank = self.value(node.inputs[0]).dim()
        dims = arguments_of(self.fx[node.id]).get("dim") or range(rank)
        dims = sorted(dim % rank for dim in dims)
        how = "mean" if "mean" in node.target else "sum"
        if dims[0] >= rows.lead and not rows.is_last:
            self.rows[node.id] = rows
        elif rows.is_last or dims[: rows.lead] != list(range(rows.lead)) or (how == "mean" and len(dims) < rank):
            self._refuse(node, "it sums over some of the tokens' dimensions")
        else:
            self._end(node, how, rows)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by their names."""
    operation: Any = node.target
    given = zip((argument.name for argument in operation._schema.arguments), node.args)
    return {**dict(given), **node.kwargs}


@once_per_graph
def chunked(graph: JointGraph, count: int) -> JointGraph:
    """`graph` with its head in about `count` chunks of tokens; raises as `Head`."""
    return _Writer(graph, Head(graph), count).finished()


_Chunk = tuple[tuple[int, int], tuple[int, int]]  # sequences and tokens of each, as (start, end)


def _split(length: int, parts: int) -> list[tuple[int, int]]:
    size = -(-length // parts)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


class _Writer:
    """Writes `graph` with `head` in `count` chunks.

    ``made``: the new nodes by the ids of the old ones; ``local``: those of the current chunk; ``totals``: sums over
    chunks, by exit. ``moved``: storages of old results that new nodes replace. ``phase``: of what is written.
    """

    def __init__(self, graph: JointGraph, head: Head, count: int):
        self.graph, self.head, self.fx = graph, head, graph.analysis.fx
        self.new = fx.Graph()
        self.made: dict[int, fx.Node] = {}
        self.local: dict[int, fx.Node] = {}
        self.totals: dict[int, fx.Node] = {}
        self.moved: set[int] = set()
        self.phase = FORWARD
        self.fake_mode: Any = detect_fake_mode([head.value(head.product.id)])
        pieces = _split(head.tokens, -(-count // head.sequences))
        self.chunks = [(each, piece) for each in _split(head.sequences, count) for piece in pieces]

    def finished(self) -> JointGraph:
        graph, head = self.graph, self.head
        output, writes = self.fx[len(graph.nodes)], set(graph.analysis.mutated.values())
        returned = list(output.args[0])
        with torch.no_grad(), true_results(self.fake_mode), self.fake_mode:
            for node in graph.nodes:
                ends_forward = node.phase == BACKWARD and self.phase == FORWARD
                if not self.totals and (ends_forward or node.id in writes):
                    self._write_chunks()
                for place in head.withheld if ends_forward else ():
                    old, returned[place] = returned[place], self._empty([0], returned[place].meta["ackpt_id"])
                    returned[place].meta[WITHHELD] = tuple(old.meta["val"].shape)
                self.phase = node.phase
                if node.id not in head.rows and node.id not in head.exits:
                    self._copied(node.id)
            given = [each if each is None or each.graph is self.new else self._value(each) for each in returned]
        self.new.create_node("output", "output", (type(output.args[0])(given),)).meta.update(output.meta)
        for place, node in enumerate(self.new.nodes):
            node.meta["ackpt_id"] = place
        made = described_graph(fx.GraphModule(graph.module, self.new))
        new = {name: getattr(made, name) for name in ("module", "nodes", "storages", "outputs", "gradients")}
        return replace(graph, **new, head_chunks=len(self.chunks))

    def _value(self, node: fx.Node) -> fx.Node:
        return self._copied(node.meta["ackpt_id"])

    def _copied(self, node_id: int) -> fx.Node:
        """The new node for an old one outside of the head, or for a result of the head."""
        if node_id not in self.made and node_id in self.head.exits:
            if not self.totals:
                self._write_chunks()
            if node_id not in self.made:
                self.made[node_id] = self._add(ours.mul.default, (self.totals[node_id], self._scale()), node_id)
        if node_id not in self.made:
            old = self.fx[node_id]
            for source in old.all_input_nodes:
                self._value(source)
            node = self.made[node_id] = self.new.node_copy(old, self._value)
            if self.phase == FORWARD:  # a view of a weight, say, that only the backward made
                node.meta.pop("partitioner_tag", None)
            if not self.moved.isdisjoint(storage_keys(old)):
                node.meta["val"] = self._run(node)
        return self.made[node_id]

    def _scale(self) -> fx.Node:
        """The gradient by which the results of the chunks are scaled."""
        assert self.head.gradient is not None
        gradient, count = self.head.gradient
        if count is None:
            return self._copied(gradient)
        if gradient not in self.local:  # without tokens that count, gradients are 0
            total = self._copied(count)
            is_zero = self._add(aten.eq.Scalar, (total, 0), gradient)
            total = self._add(aten.masked_fill.Scalar, (total, is_zero, 1.0), gradient)
            self.local[gradient] = self._add(aten.div.Tensor, (self._copied(gradient), total), gradient)
        return self.local[gradient]

    def _empty(self, shape, like: int) -> fx.Node:
        value = self.head.value(like)
        return self._add(aten.empty.memory_format, (shape,), like, dtype=value.dtype, device=value.device)

    def _add(self, target, args, like: int, **kwargs) -> fx.Node:
        """A call in the place of the old node `like`, or in a chunk's place."""
        old = self.fx[like]
        node = self.new.create_node("call_function", target, tuple(args), kwargs, f"{old.name}_chunk")
        node.meta.update({key: old.meta[key] for key in ("custom", "stack_trace") if key in old.meta})
        node.meta["val"] = self._run(node)
        if self.phase == BACKWARD:
            node.meta["partitioner_tag"] = "is_backward"
        return node

    def _run(self, node: fx.Node) -> Any:
        def value(each: fx.Node) -> Any:
            return each.meta["val"] if "val" in each.meta else getattr(self.graph.module, str(each.target))

        operation: Any = node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        return operation(*args, **kwargs)

    def _write_chunks(self) -> None:
        head, phase, self.phase = self.head, self.phase, FORWARD
        assert head.gradient is not None
        value = head.value(head.gradient[0])
        one = self._add(aten.full.default, ([], 1.0), head.product.id, dtype=value.dtype, device=value.device)
        needed = set(head.exits)
        for node_id in sorted(needed | head.rows.keys(), reverse=True):
            if node_id in needed:
                needed.update(source for source in self.graph.nodes[node_id].inputs if source in head.rows)
        for source in head.sides:
            self._copied(source)
        for chunk in self.chunks:
            self.local = {head.gradient[0]: one}
            for node_id in sorted(needed):
                args, kwargs = self._arguments(node_id, chunk)
                if node_id in head.exits:
                    self._accumulate(node_id, chunk, args, kwargs)
                else:
                    self.local[node_id] = self._add(self.fx[node_id].target, args, node_id, **kwargs)
        self.local = {}
        for node_id, (how, rows) in head.exits.items():
            self.moved.update(storage_keys(self.fx[node_id]))
            if rows.is_linear:
                continue
            total, old = self.totals[node_id], self.fx[node_id].args[0]
            if how == "mean":
                total = self._add(aten.div.Scalar, (total, old.meta["val"].numel()), node_id)
            elif how == "loss" and old.args[3] == 1:
                counts = (each for each, (what, _) in head.exits.items() if what == "count")
                (count,) = (self.totals[each] for each in counts if self.fx[each].args[0] is old)
                total = self._add(aten.div.Tensor, (total, count), node_id)
            self.made[node_id] = total
        self.phase = phase

    def _accumulate(self, node_id: int, chunk: _Chunk, args, kwargs) -> None:
        """Add a chunk's part of an exit to the total."""
        target, (how, _) = self.fx[node_id].target, self.head.exits[node_id]
        if how == "mean":
            target, args, kwargs = aten.sum.default, args[:1], {"dtype": self.head.value(node_id).dtype}
        if how == "rows" and node_id not in self.totals:
            self.totals[node_id] = self._empty(list(self.head.value(node_id).shape), node_id)
        total = self.totals.get(node_id)
        if total is None:
            self.totals[node_id] = self._add(target, args, node_id, **kwargs)
        elif how == "rows":
            start = chunk[0][0] * self.head.tokens + chunk[1][0]
            self._add(ours.slice_scatter.default, (total, self._add(target, args, node_id), start), node_id)
        elif target is aten.mm.default:
            self._add(ours.addmm.default, (total, *args), node_id)
        else:
            self._add(ours.add.default, (total, self._add(target, args, node_id, **kwargs)), node_id)

    def _arguments(self, node_id: int, chunk: _Chunk) -> tuple[list, dict[str, Any]]:
        """The arguments of an operation of the head in a chunk, with its sizes."""
        old, head = self.fx[node_id], self.head
        given = list(old.args)
        if old.target is aten.nll_loss_forward.default:
            given[3] = 2 if given[3] else 0  # a sum, of which the mean is computed afterwards
        elif old.target is aten.nll_loss_backward.default:
            given[4], given[6] = 2 if given[4] else 0, self.fx[head.gradient[0]]  # pyright: ignore
        args, kwargs = fx.map_arg((given, dict(old.kwargs)), lambda node: self._argument(node.meta["ackpt_id"], chunk))
        args, rows = list(args), head.rows.get(node_id)
        if rows is None or old.target is operator.getitem:
            return args, kwargs
        names = [argument.name for argument in old.target._schema.arguments][: len(args)]  # pyright: ignore
        for name in {"size", "input_sizes"} & set(names):
            args[names.index(name)] = [*self._lead(rows, chunk), *old.meta["val"].shape[rows.lead :]]
        if old.target in _SLICES and rows[:3] != (before := head.rows[self.graph.nodes[node_id].inputs[0]])[:3]:
            whole, part = (before, rows) if old.target is aten.slice.Tensor else (rows, before)
            start, end = (part.start - whole.start + token for token in self._span(part, chunk))
            first = self._span(whole, chunk)[0]
            args[names.index("start") : names.index("start") + 2] = start - first, end - first
        return args, kwargs

    def _argument(self, node_id: int, chunk: _Chunk) -> fx.Node:
        if node_id in self.head.sides and node_id not in self.local:
            self.local[node_id] = self._part(node_id, self.head.sides[node_id], chunk)
        return self.local[node_id] if node_id in self.local else self._copied(node_id)

    def _span(self, rows: Rows, chunk: _Chunk) -> tuple[int, int]:
        """The tokens of a chunk's sequences that `rows` has, counted from its own first one."""
        return tuple(min(max(token, rows.start), rows.end) - rows.start for token in chunk[1])  # pyright: ignore

    def _lead(self, rows: Rows, chunk: _Chunk) -> list[int]:
        """The leading sizes of `rows` in a chunk."""
        sequences, (start, end) = chunk[0][1] - chunk[0][0], self._span(rows, chunk)
        return [sequences * (end - start)] if rows.lead == 1 else [sequences, end - start]

    def _part(self, source: int, rows: Rows, chunk: _Chunk) -> fx.Node:
        """The rows of a chunk of a tensor that exists as a whole."""
        whole, (start, end), tokens = self._copied(source), self._span(rows, chunk), rows.end - rows.start
        if rows.lead == 1:
            start += chunk[0][0] * tokens
            end = start + self._lead(rows, chunk)[0]
            return self._add(aten.slice.Tensor, (whole, 1 if rows.is_last else 0, start, end), source)
        shape = (self.head.sequences, tokens, *whole.meta["val"].shape[2:])
        if shape != tuple(whole.meta["val"].shape):
            whole = self._add(aten.clone.default, (whole,), source, memory_format=torch.contiguous_format)
            whole = self._add(aten.view.default, (whole, shape), source)
        part = self._add(aten.slice.Tensor, (whole, 0, *chunk[0]), source)
        return self._add(aten.slice.Tensor, (part, 1, start, end), source)
