"""The language-model head of a captured step in chunks of tokens, so that the logits never exist as a whole.

The head is the last matrix product before the loss. `Head` follows its result, a row for each token, through forward
and backward, up to sums over tokens (the loss, gradients of weights) and to the gradient of the hidden states.
`chunked` writes the step with these operations once for each chunk, its forward and backward together, so that nothing
runs twice. The backward of a chunk is linear in the gradient that the loss will get: it runs with 1 in its place, and
the backward of the step scales the results.
"""

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils.flop_counter import flop_registry

from ackpt.core.errors import TraceError
from ackpt.metering.flops import formula

from .joint_graph import JointGraph, once_per_graph
from .operations import BACKWARD, FORWARD, Node, storage_keys
from .patches.kernels import true_results
from .row_operations import PRODUCTS, SLICES, SUMS, MixesRows, Rows, arguments_of, dims_of, is_linear, rows_of
from .tracing import described_graph

aten: Any = torch.ops.aten
ours: Any = torch.ops.ackpt_graph
_SIZES = {"size", "input_sizes", "self_sizes"}  # arguments that give the sizes of the result
WITHHELD = "ackpt_withheld"  # on an output that is not computed: the shape that the model gives it


def _scaled(x, scale):
    """In place, unless a second backward may follow."""
    engine: Any = torch._C
    if engine._current_graph_task_id() != -1 and engine._autograd._get_current_graph_task_keep_graph():
        return x * scale
    return x.mul_(scale)


def _with_rows(whole, rows, start):
    """`whole`, contiguous, with `rows` from this element on."""
    whole.view(-1)[start : start + rows.numel()].view(rows.shape).copy_(rows)
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


class Head:
    """The operations of the head in `graph`, from its last matrix product on: those that compute each row by itself.

    An operation belongs to the head if it works element by element, or along dimensions that do not number tokens, or
    if it is a matrix product of rows with a whole matrix. What other operations read is assembled from all chunks: the
    gradient of the hidden states, sums over tokens, and small tensors with a row for each token, such as losses.

    ``rows``: by node of the head, those of its result. ``reads``: by node and source, the rows that it reads, None for
    all of the source. ``sums``, ``exits``: nodes of which chunks add up, or write their rows of, what others read.
    ``counts``: the second results of ``nll_loss``, which need no logits. ``withheld``: places of the model's outputs
    that are not computed. ``tangent``: the gradient of the loss, if backward is linear in it and reads nothing else
    that a sum over tokens leads to: backward of a chunk then follows its forward. None if backward computes the
    logits of each chunk a second time.

    Raises:
        TraceError: if an operation mixes rows as large as the logits; names it.
    """

    def __init__(self, graph: JointGraph):
        self.graph, self.fx = graph, graph.analysis.fx
        self.after_tangents = set(graph.analysis.tangents)
        for node in graph.nodes:
            if not self.after_tangents.isdisjoint(node.inputs):
                self.after_tangents.add(node.id)
        self.product = self._last_product()
        shapes = [self.value(node.id).shape for node in graph.nodes if self.product.id in node.inputs]
        shape = next((shape for shape in shapes if len(shape) > 2), shapes[0])
        self.sequences, self.tokens = shape[:2] if len(shape) > 2 else (1, shape[0])
        self.rows: dict[int, Rows] = {self.product.id: Rows((0,), 0, self.tokens)}
        self.reads: dict[tuple[int, int], Rows | None] = {(self.product.id, each): None for each in self.product.inputs}
        self.reads[self.product.id, self.product.inputs[-2]] = self.rows[self.product.id]
        self.sums: set[int] = set()
        self.exits: set[int] = set()
        self.counts: dict[int, fx.Node] = {}
        self._closed: set[int] = set()  # of `rows`: their readers are outside of the head
        self._after: dict[int, str] = {}  # phases of the exits from which nodes outside of the head are computed
        for node in graph.nodes[self.product.id + 1 :]:
            self._visit(node)
        outputs = graph.analysis.outputs
        returned = {node for node in outputs if node is not None and self._is_open(node)}
        self.exits.update(node for node in returned if not self._is_large(node, self.rows[node]))
        self.withheld = [place for place, node in enumerate(outputs) if node in returned - self.exits]
        if self.withheld and graph.keeps_outputs:
            self._refuse(self.product, "outputs='keep' keeps an output with a row for every token, such as logits")
        if self.after_tangents.isdisjoint(self.exits | self.sums):
            self._refuse(self.product, "its backward computes no gradient")
        self.tangent = self._only_tangent()
        overwritten = {source for _, source in self.reads} & graph.analysis.mutated.keys()
        if self.tangent is None and overwritten:
            self._refuse(graph.nodes[min(overwritten)], "the head reads it in backward, after the step has changed it")

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
        most = max(map(self.numel, losses))
        if most > 1 and 2 * most > self.numel(last.id):
            raise TraceError(
                "chunk_head needs a model that returns its loss, or a small tensor for each token, and this step "
                f"differentiates an output of {most} elements: pass the labels to the model"
            )
        if self.fx[last.id].target not in PRODUCTS:
            self._refuse(last, "the last matrix product before the loss is no linear layer")
        return last

    def _refuse(self, node: Node, why: object):
        where = ", ".join(part for part in (node.module, node.source) if part)
        raise TraceError(
            f"chunk_head cannot split the head of this model: {why}. The operation is {node.name} ({node.target})"
            f"{where and f' of {where}'}. Reduce each token's logits over the vocabulary before tokens are combined, "
            "as F.cross_entropy does with [tokens, classes], or leave chunk_head out."
        )

    def _is_open(self, node: int) -> bool:
        """Whether operations that read `node` may belong to the head."""
        return node in self.rows and node not in self._closed

    def _is_large(self, node: int, rows: Rows) -> bool:
        """Whether it has more than half as many elements for each token as the logits."""
        return 2 * self.numel(node) * self.tokens > self.numel(self.product.id) * (rows.end - rows.start)

    def _visit(self, node: Node) -> None:
        """Add `node` to the head, or note what it reads of it."""
        fx_node, rows = self.fx[node.id], [source for source in node.inputs if self._is_open(source)]
        try:
            if rows and fx_node.target is operator.getitem and fx_node.args[0].target is aten.nll_loss_forward.default:
                self._result_of_loss(node, fx_node, rows[0])
            elif rows and self._is_sum(node, fx_node, rows[0]):
                self.sums.add(node.id)
            elif rows:
                result = self._rule(node)
                if result.dims not in ((0,), (0, 1)) and not self._is_large(node.id, result):
                    raise MixesRows("it moves the dimension of the tokens")
                self.rows[node.id] = result
                if fx_node.target in PRODUCTS:
                    self.exits.add(node.id)
                    self._closed.add(node.id)
        except MixesRows as why:
            for source in rows:
                if self._is_large(source, self.rows[source]) or not isinstance(self.value(source), torch.Tensor):
                    self._refuse(node, why)
            self.exits.update(rows)
        if not self._in_head(node.id) and (phases := {self._phase(source) for source in node.inputs} - {None}):
            self._after[node.id] = BACKWARD if BACKWARD in phases else FORWARD

    def _in_head(self, node: int) -> bool:
        return node in self.rows or node in self.sums

    def _phase(self, source: int) -> str | None:
        """The phase of the exits from which `source` is computed, as a node outside of the head."""
        is_exit = source in self.sums or source in self.exits
        return self.graph.nodes[source].phase if is_exit else self._after.get(source)

    def _read(self, node: Node, source: int, rows: Rows | None) -> None:
        """Note that `node`, of the head, reads these rows of `source`."""
        if self._is_open(source):
            if rows != self.rows[source]:
                raise MixesRows("it combines rows of different tokens")
        elif self._phase(source) in (node.phase, BACKWARD):
            raise MixesRows("it reads a sum over all tokens")
        elif rows is not None and source not in self.rows:
            self._pull(source, rows)
        self.reads[node.id, source] = rows

    def _pull(self, source: int, rows: Rows) -> None:
        """Compute a tensor as large as the logits in chunks, too, if that is possible."""
        node, hidden = self.graph.nodes[source], self.graph.nodes[self.product.inputs[-2]]
        is_input = source in self.graph.analysis.sources or not set(hidden.storages).isdisjoint(node.storages)
        if is_input or None in rows.dims or not self._is_large(source, rows):
            return
        try:
            if self._rule(node, rows) == rows:
                self.rows[source] = rows
                self._closed.add(source)
        except MixesRows:
            return

    def _result_of_loss(self, node: Node, fx_node, loss: int) -> None:
        self.reads[node.id, loss] = self.rows[loss]
        if fx_node.args[1] == 1:
            self.counts[node.id] = fx_node.args[0]
        elif arguments_of(fx_node.args[0])["reduction"] == 0:
            self.rows[node.id] = self.rows[loss]
        else:
            self.sums.add(node.id)

    def _is_sum(self, node: Node, fx_node, source: int) -> bool:
        """Whether it sums rows as large as the logits over all tokens, or is the gradient of a weight."""
        rows = self.rows[source]
        if fx_node.target is not aten.mm.default:
            self.reads[node.id, source] = rows
            is_large_sum = fx_node.target in SUMS and self._is_large(source, rows)
            return is_large_sum and set(rows.dims) <= dims_of(fx_node, self.value(source).dim())
        both = [each.meta["ackpt_id"] for each in fx_node.args]
        if rows.dims == ((0,) if source == both[0] else (1,)):
            return False
        for dim, each in zip((1, 0), both):
            self._read(node, each, rows._replace(dims=(dim,)))
        return True

    def _rule(self, node: Node, wanted: Rows | None = None) -> Rows:
        """The rows of the result of `node`; notes which rows it reads."""
        known = {self.fx[source]: self.rows[source] for source in node.inputs if self._is_open(source)}
        rows, reads = rows_of(self.fx[node.id], known, wanted, self.sequences, self.tokens)
        for source in node.inputs:
            self._read(node, source, reads[self.fx[source]])
        return rows

    def _only_tangent(self) -> int | None:
        """See ``tangent``."""
        (tangent, *others), todo, seen = self.graph.analysis.tangents, [*self.rows, *self.sums], set()
        variables = {self.fx[node] for node in self.after_tangents}
        if others or self.numel(tangent) != 1 or self.value(self.product.id).dtype == torch.float16:
            return None  # in float16, gradients of a loss that is not scaled yet underflow
        todo += [source for node, source in self.reads if self._in_head(node)]
        while todo:
            node = todo.pop()
            if node in seen or node == tangent:
                continue
            seen.add(node)
            if not self._in_head(node) and self._after.get(node):
                return None
            if node in self.after_tangents:
                if not is_linear(self.fx[node], variables):
                    return None
                todo += self.graph.nodes[node].inputs
        return tangent


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

    ``made``: the new nodes by the ids of the old ones; ``local``: those of the current chunk, by the rows that they
    have; ``totals``: what chunks are assembled in, by exit. ``moved``: storages of old results that new nodes replace.
    ``phase``: of what is written.
    """

    def __init__(self, graph: JointGraph, head: Head, count: int):
        self.graph, self.head, self.fx = graph, head, graph.analysis.fx
        self.new = fx.Graph()
        self.made: dict[int, fx.Node] = {}
        self.local: dict[tuple[int, Rows | None], fx.Node] = {}
        self.totals: dict[int, fx.Node] = {}
        self.moved: set[int] = set()
        self.phase, self.is_of_one = FORWARD, False
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
                    self._write_chunks(FORWARD)
                for place in head.withheld if ends_forward else ():
                    old, returned[place] = returned[place], self._empty([0], returned[place].meta["ackpt_id"])
                    returned[place].meta[WITHHELD] = tuple(old.meta["val"].shape)
                self.phase = node.phase
                if node.id not in head.rows and node.id not in head.sums:
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
        head = self.head
        if node_id in (head.sums | head.exits) - self.made.keys():
            if node_id not in self.totals:
                self._write_chunks(self.graph.nodes[node_id].phase)
            if node_id not in self.made:
                scale = self._copied(head.tangent)  # pyright: ignore[reportArgumentType]
                self.made[node_id] = self._add(ours.mul.default, (self.totals[node_id], scale), node_id)
        if node_id in head.counts and node_id not in self.made:
            self._count(node_id)
        if node_id not in self.made:
            old = self.fx[node_id]
            for source in old.all_input_nodes:
                self._value(source)
            node = self.made[node_id] = self.new.node_copy(old, self._value)
            if self.phase == FORWARD:  # a view of a weight, say, that only the backward made
                node.meta.pop("partitioner_tag", None)
            is_of_one = self.is_of_one and node_id in head.after_tangents
            if is_of_one or not self.moved.isdisjoint(storage_keys(old)):
                node.meta["val"] = self._run(node)
        return self.made[node_id]

    def _count(self, node_id: int) -> None:
        """The divisor of a mean of ``nll_loss``: the sum of the weights of the targets that count."""
        arguments = arguments_of(self.head.counts[node_id])
        target, weight = self._value(arguments["target"]), arguments["weight"]
        total = self._add(aten.ne.Scalar, (target, arguments["ignore_index"]), node_id)
        if weight is not None:
            index = self._add(aten.mul.Tensor, (target, total), node_id)
            chosen = self._add(aten.index_select.default, (self._value(weight), 0, index), node_id)
            total = self._add(aten.mul.Tensor, (chosen, total), node_id)
        dtype = self.head.value(node_id).dtype
        self.made[node_id] = self._add(aten.sum.default, (total,), node_id, dtype=dtype)

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

    def _write_chunks(self, of_phase: str) -> None:
        """Write what the exits of this phase need, those of both phases if backward is linear in the tangent."""
        head, nodes, phase, made = self.head, self.graph.nodes, self.phase, self.made
        is_scaled = head.tangent is not None
        exits = {node for node in head.sums | head.exits if is_scaled or nodes[node].phase == of_phase}
        self.phase = of_phase
        if head.tangent is not None:  # the gradient of the loss is 1 until the results are scaled
            value = head.value(head.tangent)
            one = self._add(aten.full.default, ([], 1.0), head.product.id, dtype=value.dtype, device=value.device)
            self.made, self.is_of_one = {**made, head.tangent: one}, True
        needed = set(exits)
        for node_id in sorted({*exits, *head.rows}, reverse=True):
            if node_id in needed:
                needed.update(each for each in nodes[node_id].inputs if self._is_row(node_id, each))
        for node_id in needed:
            for source in nodes[node_id].inputs:
                if not self._is_row(node_id, source):
                    self._copied(source)
        for chunk in self.chunks:
            self.local = {}
            for node_id in sorted(needed):
                self._write(node_id, chunk, node_id in exits)
        self.local = {}
        for node_id in exits:
            self.moved.update(storage_keys(self.fx[node_id]))
            if not (is_scaled and node_id in head.after_tangents):
                self.made[node_id] = self.totals[node_id]
        if is_scaled:
            of_step = {node: each for node, each in self.made.items() if node not in head.after_tangents}
            self.made, self.is_of_one = {**of_step, **made}, False
        self.phase = phase

    def _is_row(self, reader: int, source: int) -> bool:
        """Whether the chunk computes what `reader` reads."""
        return source in self.head.rows and self.head.reads[reader, source] == self.head.rows[source]

    def _write(self, node_id: int, chunk: _Chunk, is_exit: bool) -> None:
        """An operation of the head in a chunk; of an exit, also what makes its result part of the total."""
        head, total = self.head, self.totals.get(node_id)
        target, args, kwargs = self._call(node_id, chunk)
        if node_id in head.sums and total is not None and target is aten.mm.default:
            self._add(ours.addmm.default, (total, *args), node_id)
            return
        result = self._add(target, args, node_id, **kwargs)
        if node_id in head.sums:
            result = self._divided(node_id, result)
            if total is None:
                self.totals[node_id] = result
            else:
                self._add(ours.add.default, (total, result), node_id)
            return
        rows = head.rows[node_id]
        self.local[node_id, rows] = result
        if is_exit:
            if total is None:
                total = self.totals[node_id] = self._empty(list(head.value(node_id).shape), node_id)
            tokens = rows.end - rows.start
            start = chunk[0][0] * tokens + self._span(rows, chunk)[0]
            start *= head.numel(node_id) // (head.sequences * tokens)
            self._add(ours.slice_scatter.default, (total, result, start), node_id)

    def _divided(self, node_id: int, result: fx.Node) -> fx.Node:
        """A chunk's part of a mean, from its sum."""
        old = self.fx[node_id]
        if old.target in (aten.mean.default, aten.mean.dim):
            share = self.head.numel(self.graph.nodes[node_id].inputs[0]) // self.head.numel(node_id)
            return self._add(aten.div.Scalar, (result, share), node_id)
        if old.target is operator.getitem and arguments_of(old.args[0])["reduction"] == 1:
            count = next(each for each, loss in self.head.counts.items() if loss is old.args[0])
            return self._add(aten.div.Tensor, (result, self._copied(count)), node_id)
        return result

    def _call(self, node_id: int, chunk: _Chunk) -> tuple[Any, list, dict[str, Any]]:
        """An operation of the head in a chunk, with its sizes: what is called, and the arguments."""
        old, head = self.fx[node_id], self.head
        target: Any = old.target
        args, kwargs = fx.map_arg(
            (list(old.args), dict(old.kwargs)), lambda each: self._argument(node_id, each.meta["ackpt_id"], chunk)
        )
        args = list(args)
        if target is operator.getitem:
            return target, args, kwargs
        names = [argument.name for argument in target._schema.arguments][: len(args)]
        if target is aten.nll_loss_forward.default:
            args[3] = 2 if args[3] else 0  # a sum, also for a mean
        elif target is aten.mean.default:  # of all, so it is one of `sums`
            target, args, kwargs = aten.sum.default, args[:1], {"dtype": head.value(node_id).dtype}
        elif target is aten.mean.dim and node_id in head.sums:
            target, kwargs = aten.sum.dim_IntList, {**kwargs, "dtype": head.value(node_id).dtype}
        elif node_id in head.rows:
            rows = head.rows[node_id]
            for name in _SIZES & set(names):
                args[names.index(name)] = self._sizes(list(old.meta["val"].shape), rows, chunk)
            before = head.reads.get((node_id, next(iter(self.graph.nodes[node_id].inputs), -1)))
            if target in SLICES and before is not None and rows[1:] != before[1:]:
                whole, part = (before, rows) if target is aten.slice.Tensor else (rows, before)
                start, end = (part.start - whole.start + token for token in self._span(part, chunk))
                first = self._span(whole, chunk)[0]
                args[names.index("start") : names.index("start") + 2] = start - first, end - first
        return target, args, kwargs

    def _argument(self, reader: int, source: int, chunk: _Chunk) -> fx.Node:
        rows = self.head.reads[reader, source]
        if rows is None:
            return self._copied(source)
        if (source, rows) not in self.local:
            part = whole = self._copied(source)
            for dim, (start, end) in self._ranges(whole.meta["val"].shape, rows, chunk).items():
                part = self._add(aten.slice.Tensor, (part, dim, start, end), source)
            self.local[source, rows] = part
        return self.local[source, rows]

    def _span(self, rows: Rows, chunk: _Chunk) -> tuple[int, int]:
        """The tokens of a chunk's sequences that `rows` has, counted from its own first one."""
        return tuple(min(max(token, rows.start), rows.end) - rows.start for token in chunk[1])  # pyright: ignore

    def _ranges(self, shape, rows: Rows, chunk: _Chunk) -> dict[int, tuple[int, int]]:
        """By dimension of a tensor with `rows`, the indices of a chunk, where it has not all of them."""
        sequences, tokens, whole = chunk[0], self._span(rows, chunk), rows.end - rows.start
        ranges = dict(zip(rows.dims, (sequences, tokens)))
        if len(rows.dims) == 1 and rows.dims[0] is not None:
            each = shape[rows.dims[0]] // (self.head.sequences * whole)
            start = sequences[0] * whole + tokens[0]
            count = (sequences[1] - sequences[0]) * (tokens[1] - tokens[0])
            ranges = {rows.dims[0]: (start * each, (start + count) * each)}
        return {dim: its for dim, its in ranges.items() if dim is not None and its != (0, shape[dim])}

    def _sizes(self, shape: list[int], rows: Rows, chunk: _Chunk) -> list[int]:
        for dim, (start, end) in self._ranges(shape, rows, chunk).items():
            shape[dim] = end - start
        return shape
