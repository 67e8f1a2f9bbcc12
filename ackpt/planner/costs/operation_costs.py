"""FLOPs and memory traffic of one operation, from shapes alone."""

import operator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ackpt.metering.flops import formula
from ackpt.metering.timeline import MeterError

aten = torch.ops.aten


# Operation -> (index of the argument of which only a part is read, how many bytes of it).
_PARTLY_READ = {
    **dict.fromkeys(
        (aten.embedding, aten.index, aten.index_select, aten.gather), (0, lambda args, result: _bytes(result))
    ),
    aten.nll_loss_forward: (0, lambda args, result: args[1].numel() * args[0].element_size()),  # one of each row
    aten.nll_loss_backward: (1, lambda args, result: 0),
    aten.copy_: (0, lambda args, result: 0),
}


def _bytes(tensor) -> int:
    return tensor.numel() * tensor.element_size()  # `nbytes` fails for symbolic sizes


def allocates(node: torch.fx.Node) -> bool:
    """Whether a node is an operation that allocates its result: not an input, a view, or a part of another's result."""
    return (
        node.op == "call_function"
        and node.target is not operator.getitem
        and not getattr(node.target, "is_view", False)
    )


def flops(node: torch.fx.Node, args, kwargs, result) -> int:
    """FLOPs of one operation, as `ackpt.count_flops` counts them: 0 for elementwise operations and views."""
    target: Any = getattr(node.target, "overloadpacket", node.target)
    count = formula(target)
    if count is None:
        return 0
    try:
        return int(count(*args, **kwargs, out_val=result))
    except Exception as error:  # no error may be replaced by a wrong count
        raise MeterError(f"the FLOP formula for {node.target} fails on {node.name}: {error!r}") from error


def traffic(node: torch.fx.Node, args, kwargs, result) -> tuple[int, int]:
    """(bytes read, bytes written) by one operation: its arguments and its new results, each once; 0 for views.

    An expanded tensor counts with its bytes in memory, an indexed table with the bytes that are read.
    """
    if not allocates(node) or node.target is aten._unsafe_view.default:  # a view that is not called one
        return 0, 0
    given = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    sizes = {key: min(_bytes(tensor), tensor.untyped_storage().nbytes()) for key, tensor in given.items()}
    target: Any = getattr(node.target, "overloadpacket", node.target)
    if target in _PARTLY_READ:
        index, partly = _PARTLY_READ[target]
        sizes[id(args[index])] = min(sizes[id(args[index])], partly(args, result))
    argument_storages = {tensor.untyped_storage()._cdata for tensor in given.values()}
    fresh = {t.untyped_storage()._cdata: t for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
    new = [tensor.untyped_storage().nbytes() for key, tensor in fresh.items() if key not in argument_storages]
    return sum(sizes.values()), sum(new) + sum(map(_bytes, written(node, args)))


def elements(args, kwargs, result) -> int:
    """Elements of the largest tensor that an operation reads or returns, 0 without one."""
    tensors = (leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor))
    return max((tensor.numel() for tensor in tensors), default=0)


def written(node: torch.fx.Node, args) -> list[torch.Tensor]:
    """The arguments that an operation writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    return [
        value
        for argument, value in zip(schema.arguments, args)
        if argument.is_write and isinstance(value, torch.Tensor)
    ]


def dtype(args, kwargs) -> str:
    """Name of the dtype that an operation computes in: that of its first floating-point argument."""
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return next((str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point() or t.is_complex()), "")
