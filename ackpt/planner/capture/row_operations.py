"""Which operations compute each row of logits by itself: the rule by which `chunked_head` finds the head of a step.

`rows_of` gives the rows of the result of an operation and those that it reads of every argument: it may work element by
element, along dimensions that do not number tokens, or be a matrix product of rows with a whole matrix.
"""

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from .operations import may_draw

aten: Any = torch.ops.aten


class Rows(NamedTuple):
    """Which dimensions of a tensor number the tokens.

    ``dims``: one dimension for all tokens (several rows for each are possible), or that of the sequences and that of
    their tokens; None where one entry serves all. ``start``, ``end``: the tokens of every sequence that it has.
    """

    dims: tuple[Any, ...]
    start: int
    end: int


class MixesRows(Exception):
    """An operation does not compute each row by itself; says why."""


SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim}
SLICES = {aten.slice.Tensor, aten.slice_backward.default}
PRODUCTS = {aten.mm.default, aten.addmm.default}
_FILLED = {aten.full.default, aten.full_like.default, aten.scalar_tensor.default}
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
_MADE = {aten.zeros.default, aten.new_zeros.default, aten.full.default, aten.ones.default, aten.scalar_tensor.default}
_SAME = {aten._to_copy.default, aten.detach.default, aten.alias.default, aten.expand.default, aten.clone.default}
_SAME |= {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default}
_TURNS = {aten.t.default, aten.transpose.int, aten.permute.default}
_ROWS_OF = {  # by operation, its arguments that have rows
    aten.nll_loss_forward.default: ("self", "target"),
    aten.nll_loss_backward.default: ("grad_output", "self", "target"),
    aten.mm.default: ("self",),
    aten.addmm.default: ("mat1",),
}
# Their ``dim`` is not a dimension along which every other index is computed by itself.
_OTHER_DIM = {aten.renorm.default, aten._weight_norm_interface.default, aten._weight_norm_interface_backward.default}
_LINEAR_IN_FIRST = {*_SAME, *_VIEWS, *_TURNS, *SUMS, *SLICES, aten.neg.default, aten.mul.Scalar, aten.gather.default}
_LINEAR_IN_FIRST |= {aten.div.Tensor, aten.div.Scalar, operator.getitem}


def rows_of(
    node: fx.Node, known: Mapping[fx.Node, Rows], wanted: Rows | None, sequences: int, tokens: int
) -> tuple[Rows, dict[fx.Node, Rows | None]]:
    """The rows of the result of `node`, and those that it reads of its arguments (none of what is read as a whole).

    `known`: the rows of arguments. `wanted`: of the result, if no argument is known. The step has `tokens` tokens in
    each of its `sequences`.

    Raises:
        MixesRows: if it does not compute each row by itself.
    """
    target: Any = node.target
    value, sources = node.meta["val"], node.all_input_nodes
    first = next(iter(known.values()), wanted)
    assert first is not None
    rows: Rows = first
    reads: dict[fx.Node, Rows | None] = {**known}
    if may_draw(target, *node.args):
        raise MixesRows("it draws random numbers")
    if target is operator.getitem:
        return rows, reads
    shapes = {source: source.meta["val"].shape for source in sources}
    shape = shapes[sources[0]] if sources else ()
    if torch.Tag.pointwise in target.tags or target in _SAME:
        if wanted is None:
            more = value.dim() - len(shapes[next(iter(known))])
            rows = first._replace(dims=tuple(dim + more for dim in first.dims))
        reads = {source: _broadcast(its, value.shape, rows) for source, its in shapes.items()}
    elif target in _MADE:
        rows = _leading(value.shape, first, sequences)
    elif target in _VIEWS:
        rows, reads = _leading(value.shape, first, sequences), {sources[0]: _leading(shape, first, sequences)}
    elif target in SLICES:
        before = known.get(sources[0]) or _leading(shape, Rows((), 0, tokens), sequences)
        rows, reads = _sliced(node, before, shape, value.shape, sequences), {sources[0]: before}
    elif target in _TURNS:
        numbered = torch.empty(tuple(range(1, value.dim() + 1)), device="meta")
        order = [size - 1 for size in target(numbered, *node.args[1:]).shape]
        rows = first._replace(dims=tuple(order.index(dim) for dim in first.dims))
    elif target in _ROWS_OF:
        names = arguments_of(node)
        read = [names[name] for name in _ROWS_OF[target] if not (name == "grad_output" and names["reduction"])]
        reads = dict.fromkeys(read, first)
        if first.dims != (0,):
            raise MixesRows("it mixes tokens with other dimensions")
    else:
        results = value if isinstance(value, (tuple, list)) else [value]
        rows = _along_dims(node, len(shape), results[0].dim(), first)
        reads = {source: first for source, its in shapes.items() if len(its) == len(shape)}
    for source, its in reads.items():
        _check_sizes(shapes[source], its, sequences)
    return rows, {**dict.fromkeys(sources), **reads}


def _check_sizes(shape, rows: Rows | None, sequences: int) -> None:
    if rows is not None:
        tokens = rows.end - rows.start
        sizes = (sequences, tokens) if len(rows.dims) > 1 else (sequences * tokens,)
        if any(dim is not None and shape[dim] % size for dim, size in zip(rows.dims, sizes)):
            raise MixesRows("it combines rows of different tokens")


def _broadcast(shape, result, rows: Rows) -> Rows | None:
    """The rows of an argument of this shape; sizes of 1 serve all tokens."""
    fewer = len(result) - len(shape)
    shape = (1,) * fewer + tuple(shape)
    dims = tuple(dim - fewer if dim >= fewer and shape[dim] == result[dim] else None for dim in rows.dims)
    return None if set(dims) == {None} else rows._replace(dims=dims)


def _along_dims(node: fx.Node, before: int, after: int, rows: Rows) -> Rows:
    """An operation with an argument ``dim``: every index of the other dimensions is computed by itself."""
    dims = dims_of(node, max(before, after))
    target: Any = node.target
    if dims is None or target in _OTHER_DIM or target.namespace != "aten":  # the user's operation may do anything
        raise MixesRows("it is not known to compute the logits of each token by themselves")
    if after <= before and not dims.isdisjoint(rows.dims):
        raise MixesRows("it works along the dimension of the tokens")
    others = [dim for dim in range(max(before, after)) if dim not in dims]
    if after != before:
        rows = rows._replace(dims=tuple(others.index(at) if after < before else others[at] for at in rows.dims))
    return rows


def _leading(shape, rows: Rows, sequences: int) -> Rows:
    """The rows of a tensor of this shape that has them in its leading dimensions."""
    tokens = rows.end - rows.start
    if shape[:2] == (sequences, tokens):
        return rows._replace(dims=(0, 1))
    if not shape or shape[0] % (sequences * tokens):
        raise MixesRows("it mixes tokens with other dimensions")
    return rows._replace(dims=(0,))


def _sliced(node: fx.Node, rows: Rows, before, after, sequences: int) -> Rows:
    arguments = arguments_of(node)
    dim = arguments["dim"] % len(before)
    if dim not in rows.dims or before[dim] == after[dim]:
        return rows
    if dim != rows.dims[-1] or (len(rows.dims) == 1 and sequences > 1) or arguments["step"] != 1:
        raise MixesRows("it leaves out sequences, or every other token")
    start = arguments["start"] or 0
    start += max(before[dim], after[dim]) if start < 0 else 0
    start = rows.start + (start if node.target is aten.slice.Tensor else -start)
    return rows._replace(start=start, end=start + after[dim])


def is_linear(node: fx.Node, variables: set[fx.Node]) -> bool:
    """Whether the result is linear in those of its arguments that are `variables`, together."""
    target, sources = node.target, [each for each in node.args if isinstance(each, fx.Node)]
    linear = [at for at, each in enumerate(sources) if each in variables and not _is_zero(each)]
    if target in (aten.mul.Tensor, aten.mm.default):
        return len(linear) == 1
    if target in (aten.add.Tensor, aten.sub.Tensor):
        return linear == [0, 1]
    if target is aten.where.self:
        return 0 not in linear and all(at in linear or _is_zero(sources[at]) for at in (1, 2))
    if target in (aten.scatter_add.default, aten.scatter.src):
        return linear == [2] and _is_zero(sources[0])
    if target is aten.masked_fill.Scalar:
        return linear == [0] and bool(node.args[2] == 0)
    return _is_zero(node) or (linear == [0] and (target in _LINEAR_IN_FIRST or "_backward" in str(target)))


def _is_zero(node: fx.Node) -> bool:
    return node.target in _ZEROS or (node.target in _FILLED and bool(node.args[-1] == 0))


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by their names, with defaults."""
    operation: Any = node.target
    expected = operation._schema.arguments
    defaults = {argument.name: argument.default_value for argument in expected if argument.has_default_value()}
    return {**defaults, **dict(zip((argument.name for argument in expected), node.args)), **node.kwargs}


def dims_of(node: fx.Node, rank: int) -> Any:
    """The set of dimensions along which an operation works, all without ``dim=``; None if it has no such argument."""
    arguments = arguments_of(node)
    dims = arguments.get("dim", arguments.get("dims", None if node.target in SUMS else ...))
    if dims is ...:
        return None
    return {dim % max(rank, 1) for dim in ([dims] if isinstance(dims, int) else dims or range(rank))}
