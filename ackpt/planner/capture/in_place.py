"""Find what eager mode does in place, to simulate the peak of the eager step.

AOTAutograd turns ``x.add_(y)`` into ``add(x, y)``, whose result has its own memory. The same is true of the sums of
gradients that autograd's engine makes in place. Fractional budgets are relative to the peak of the model's own step,
where ``x`` and the result share one storage. `eager_graph` merges such storages, so that simulating it gives that peak.
`in_place_as_eager` marks such operations during a capture, and gives their results the strides of the first argument;
for strides of all other results see `patches.kernels`. `autocast_of` says under which autocast eager mode runs the
kernels of other libraries.
"""

import contextlib
import itertools
import operator
import sys
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_leaves

from ackpt.checkpointing.rng import Autocast
from ackpt.metering.autograd_engine import INTO_ZEROS, ZEROS, is_dense, sums_own_gradients

from .inspection.source_lines import line, not_repeated
from .joint_graph import RESIDENT, JointGraph
from .operations import BACKWARD, with_accesses

_KEY = "ackpt_in_place"
AUTOCAST = "ackpt_autocast"  # on nodes of operations of others: the autocast under which the model calls them
_RUNS_IN = "ackpt_autograd_node"  # on nodes of the backward: the autograd node that runs while they are captured
_RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default
_SUM, _SUMS_OWN = "ackpt_gradient_sum", "ackpt_sums_own_gradients"
# The result of functionalizing a write to a slice of a tensor that is then read in full: operation(whole, part, ...).
_INTO_WHOLE = ("aten::slice_scatter", "aten::select_scatter", "aten::diagonal_scatter", "aten::as_strided_scatter")
_INTO_WHOLE += ("ackpt_graph::with_strides",)  # eager's tensor has these strides already
_FILLED = "ackpt_graph::filled"
_OF_TORCH = {"aten", "prim", "prims", "ackpt_graph", "higher_order"}
_has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def in_place_as_eager():
    """Inside, a capture restores the strides of tensors that are changed in place, and marks what eager does in place.

    Marked are writes to a first argument and sums of gradients. Recurrent layers under no_grad are refused.
    """
    dispatch = FunctionalTensorMode.__torch_dispatch__

    def noted(self, func, types, args=(), kwargs=None):
        if func is _RECURRENT and not torch.is_grad_enabled():
            raise not_repeated(
                f"a recurrent layer runs under torch.no_grad(){line()}, which a captured step cannot do: oneDNN has "
                "another kernel there. Freeze the layer by requires_grad_(False) instead"
            )
        writes, autograd_node = _changes_its_first_argument(func), torch._C._current_autograd_node()
        autocast = autocast_of(func) if autograd_node is None else ()
        capture = get_proxy_mode() if writes or autocast or autograd_node is not None else None
        if capture is None:
            return _with_eager_strides(dispatch, self, func, types, args, kwargs)
        nodes = capture.tracer.graph.nodes
        last = next(iter(reversed(nodes)), None)
        # C++ has called: autograd's engine for a sum of gradients, or a derivative formula.
        by_cpp = sys._getframe(1).f_globals.get("__name__") == "torch.autograd.graph"
        result = _with_eager_strides(dispatch, self, func, types, args, kwargs)
        for node in itertools.takewhile(lambda node: node is not last, reversed(nodes)):
            if writes and _name(node).removesuffix("_functional") in (func._schema.name.removesuffix("_"), _FILLED):
                node.meta[_KEY] = True
            if autocast and func in (node.target, *node.args):  # `auto_functionalized` has it as its argument
                node.meta[AUTOCAST] = autocast
            if autograd_node is not None:
                node.meta[_RUNS_IN] = autograd_node._sequence_nr()
                node.meta[_SUM] = by_cpp and func is torch.ops.aten.add.Tensor
                node.meta[_SUMS_OWN] = sums_own_gradients(autograd_node)
        return result

    with mock.patch.object(FunctionalTensorMode, "__torch_dispatch__", noted):
        yield


def autograd_node(node: torch.fx.Node) -> int | None:
    """The sequence number of the autograd node in which an operation of the backward ran; None if it ran in none."""
    return node.meta.get(_RUNS_IN)


def _name(node) -> str:
    schema = getattr(node.target, "_schema", None)  # higher-order operations have none
    return "" if schema is None else schema.name


def _overwritten(fx, phase: str):
    """The node whose memory eager reuses for the result of the node `fx`; None if eager allocates memory."""
    whole = fx.args[0] if fx.args else None
    if not isinstance(whole, torch.fx.Node):
        return None
    own_zeros = phase == BACKWARD and _name(whole) in ZEROS and len(whole.users) == 1
    is_into_zeros = own_zeros and _name(fx) in INTO_ZEROS
    return whole if fx.meta.get(_KEY) or _name(fx) in _INTO_WHOLE or is_into_zeros else None


def _summed_into(fx, graph: JointGraph):
    """The node whose memory the engine reuses for the sum of gradients `fx`; None if it is no such sum.

    The engine adds in place to a gradient that nothing else references (``can_accumulate_inplace`` in torch's
    input_buffer.cpp): not to a view, to a tensor that the caller references, or to one that a later operation reads.
    """
    first = fx.args[0] if fx.meta.get(_SUM) else None
    if not isinstance(first, torch.fx.Node):
        return None
    if first.meta.get(_RUNS_IN) == fx.meta[_RUNS_IN] and not fx.meta[_SUMS_OWN]:
        return None  # a derivative formula adds to its own temporary
    (storage,) = (graph.storages[key] for key in graph.nodes[first.meta["ackpt_id"]].storages)
    made: Any = first.args[0] if first.target is operator.getitem else first
    is_alone = storage.category == "temporary" and storage.last_bw_access == fx.meta["ackpt_id"]
    is_whole = storage.producer == made.meta["ackpt_id"] and is_dense(first.meta["val"])
    return first if is_alone and is_whole else None


def eager_graph(graph: JointGraph) -> JointGraph:
    """`graph` with the storages that eager uses: for simulating the peak of the model's own step, not for running."""
    fx = {node.meta["ackpt_id"]: node for node in graph.module.graph.nodes}
    lies_in = [node.storages for node in graph.nodes]
    merged = {storage.id: storage.id for storage in graph.storages}
    results = set()
    for node in graph.nodes:
        source = _overwritten(fx[node.id], node.phase) or _summed_into(fx[node.id], graph)
        if source is None or len(node.storages) != 1 or len(lies_in[source.meta["ackpt_id"]]) != 1:
            continue
        (result,), (into,) = node.storages, lies_in[source.meta["ackpt_id"]]
        into = merged[into]
        # Backward receives a resident storage with its content from before the write. If it reads the new content, that
        # needs a storage of its own.
        if graph.storages[into].category in RESIDENT and graph.storages[result].first_bw_access is not None:
            continue
        merged[result] = into
        if graph.storages[result].bytes == graph.storages[into].bytes:
            results.add(node.id)
    if all(storage == into for storage, into in merged.items()):
        return graph
    ids = {storage: at for at, storage in enumerate(sorted(set(merged.values())))}
    lies_in = [tuple(dict.fromkeys(ids[merged[storage]] for storage in node.storages)) for node in graph.nodes]
    nodes = [replace(node, storages=storages) for node, storages in zip(graph.nodes, lies_in)]
    sizes = {ids[storage]: graph.storages[storage].bytes for storage in ids}
    storages = with_accesses(nodes, sizes, fx, graph.outputs, graph.gradients)
    return replace(graph, nodes=tuple(nodes), storages=tuple(storages), overwriting=frozenset(results))


# A tensor that was changed in place has the strides that it has in eager mode. When captured, ``x.relu_()`` becomes
# ``relu(x)``, whose result is contiguous where `x` has gaps, as the parts of a split tensor have, or where `x` is
# channels last with sizes of 1. Strides decide how later operations round: a vectorized loop runs over a row or over
# all elements, and convolutions and resizing take the memory format from them.
#
# Torch: functionalization keeps the strides of the functional result (``aten/src/ATen/FunctionalTensorWrapper.cpp``);
# loops are in ``aten/src/ATen/native/cpu/Loops.h``. Versions: 2.11 to 2.13.
# Test: ``tests/planner/capture/test_eager.py``.
_LOOP_BYTES = 128  # a multiple of the bytes of one iteration of a vectorized loop, two registers of at most 64 bytes
# The same bits in a vectorized loop and in one over single elements, whatever the strides. Not: a * b + c, which one
# of them rounds once, and functions such as exp.
_EXACT = {
    *("add", "sub", "mul", "div", "neg", "abs", "relu", "clamp", "clamp_min", "clamp_max", "maximum", "minimum"),
    *("fill", "zero", "copy", "masked_fill", "where", "sqrt", "reciprocal", "floor", "ceil", "round", "sign"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "clone", "_to_copy", "threshold"),
}

torch.library.define("ackpt_graph::with_strides", "(Tensor x, SymInt[] strides) -> Tensor")


torch.library.register_fake("ackpt_graph::with_strides")(lambda x, to: x.new_empty_strided(x.shape, to))
torch.library.impl("ackpt_graph::with_strides", "CompositeExplicitAutograd")(
    lambda x, to: x.new_empty_strided(x.shape, to).copy_(x)
)


def _with_eager_strides(dispatch, mode, func, types, args, kwargs):
    kind = _kind(func)
    if kind != "exact":
        _restore_gaps(kind, args, kwargs)
    result = dispatch(mode, func, types, args, kwargs)
    if _changes_its_first_argument(func):
        _restore_format(args[0])
    return result


def _changes_its_first_argument(func) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.name.endswith("_") or not schema.arguments:
        return False
    return schema.arguments[0].alias_info is not None and schema.arguments[0].alias_info.is_write


def _restore_gaps(kind: str, args, kwargs) -> None:
    """Before an operation reads them: tensors that have gaps in eager mode, where gaps change how it rounds."""
    for x in tree_leaves((args, kwargs)):
        if not isinstance(x, FunctionalTensor) or x.device.type != "cpu" or x.layout != torch.strided:
            continue
        torch._sync(x)
        value = torch._from_functional_tensor(x.elem)
        if _at_example(x.stride()) == _at_example(value.stride()) or x.dim() != value.dim():
            continue
        if not _is_dense(value) or _is_dense(x) or (kind == "loop" and _is_whole_iterations(x)):
            continue
        torch._functionalize_replace(x.elem, torch.ops.ackpt_graph.with_strides(value, _short_gaps(x)))


def _restore_format(x) -> None:
    """After an operation in place: the memory format that `x` has in eager mode."""
    if not isinstance(x, FunctionalTensor) or x.dim() not in (4, 5) or x.layout != torch.strided:
        return
    value = torch._from_functional_tensor(x.elem)
    if value.dim() != x.dim() or suggest_memory_format(value) == suggest_memory_format(x):
        return
    sizes, eagers, captured = (_at_example(each) for each in (x.shape, x.stride(), value.stride()))
    if all(size == 1 or stride == its for size, stride, its in zip(sizes, eagers, captured)):
        value = torch.ops.aten.as_strided.default(value, x.shape, x.stride())
    elif _is_dense(x):
        value = torch.ops.ackpt_graph.with_strides(value, x.stride())
    else:
        return
    torch._functionalize_replace(x.elem, value)


@cache
def _kind(func) -> str:
    """``"exact"``: strides do not change the result's bits; ``"loop"``: they do in a vectorized loop; else ``""``."""
    schema = getattr(func, "_schema", None)
    if schema is None or func in FunctionalTensor.metadata_fns:
        return "exact"
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.arguments)
    if is_view or schema.name.removeprefix("aten::").removesuffix("_") in _EXACT:
        return "exact"
    return "loop" if torch.Tag.pointwise in func.tags else ""


def _is_whole_iterations(x) -> bool:
    """Whether every contiguous run of `x` is a multiple of what a vectorized loop takes at once."""
    return x.stride(-1) == 1 and _at_example(x.shape)[-1] * x.element_size() % _LOOP_BYTES == 0


def _is_dense(x) -> bool:
    return is_dense(torch.empty_strided(_at_example(x.shape), _at_example(x.stride()), device="meta"))


def _short_gaps(x) -> list[int]:
    """Strides for which loops run as over `x`: in the same order, with gaps at the same places, but short ones."""
    sizes, eagers = _at_example(x.shape), _at_example(x.stride())
    strides, was, now = [0] * x.dim(), 1, 1  # the next stride without a gap, in `x` and in the result
    for at in sorted(range(x.dim()), key=eagers.__getitem__):
        if sizes[at] != 1:
            now = now + int(eagers[at] != was)
            strides[at], was, now = now, eagers[at] * sizes[at], now * x.shape[at]
    return strides


def _at_example(sizes) -> list[int]:
    """`sizes` as numbers; symbols have those of the example inputs, so that no guard on them arises."""
    return [size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes]


def autocast_of(func: Any) -> tuple[tuple[str, torch.dtype], ...]:
    """In a dispatch mode, ``((device, dtype), ...)``: the autocast under which eager runs the kernel of `func`.

    Only operations of others than torch have one; those with a kernel for autocast run below it.
    """
    if func.namespace in _OF_TORCH:
        return ()
    # Torch excludes autocast in a mode, and so in kernels that it calls (`pythonFallback` in PythonFallbackKernel.cpp).
    with enable_reentrant_dispatch():
        modes = [(device, dtype) for device, is_on, dtype in Autocast().modes if is_on]
    return tuple(each for each in modes if not _has_kernel(func.name(), f"Autocast{each[0].upper()}"))


def as_in_eager(func: Any) -> Any:
    """In a dispatch mode, a function that runs `func` under the autocast of eager mode."""
    autocast = autocast_of(func)
    return partial(run_under, func, autocast) if autocast else func


def run_under(operation: Any, autocast: tuple[tuple[str, torch.dtype], ...], *args: Any, **kwargs: Any) -> Any:
    """``operation(*args, **kwargs)`` under `autocast`, from `autocast_of`."""
    with contextlib.ExitStack() as stack:
        for device, dtype in autocast:
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
        return operation(*args, **kwargs)
