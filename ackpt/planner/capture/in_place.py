"""Find the operations that eager mode runs in place, to simulate the peak of the eager step.

AOTAutograd turns ``x.add_(y)`` into ``add(x, y)``, whose result has its own memory. The same is true of the sums of
gradients that autograd's engine makes in place. Fractional budgets are relative to the peak of the model's own step,
where ``x`` and the result share one storage. `eager_graph` merges such storages, so that simulating it gives that peak.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ackpt.metering.autograd_engine import INTO_ZEROS, ZEROS, is_dense, sums_own_gradients

from .analysis import RESIDENT
from .joint_graph import JointGraph, with_accesses
from .operations import BACKWARD
from .patches.in_place_strides import changes_its_first_argument

_KEY = "ackpt_in_place"
_RUNS_IN = "ackpt_autograd_node"  # on nodes of the backward: the autograd node that runs while they are captured
RECORDS = "ackpt_records"  # on layers of oneDNN: whether autograd records them
_RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default
_SUM, _SUMS_OWN = "ackpt_gradient_sum", "ackpt_sums_own_gradients"
# The result of functionalizing a write to a slice of a tensor that is then read in full: operation(whole, part, ...).
_INTO_WHOLE = ("aten::slice_scatter", "aten::select_scatter", "aten::diagonal_scatter", "aten::as_strided_scatter")
_INTO_WHOLE += ("ackpt_graph::with_strides",)  # eager's tensor has these strides already
_FILLED = "ackpt_graph::filled"


@contextlib.contextmanager
def noted_writes():
    """Mark the nodes captured inside for writes to a first argument, sums of gradients, and layers under no_grad."""
    dispatch = FunctionalTensorMode.__torch_dispatch__

    def noted(self, func, types, args=(), kwargs=None):
        writes, autograd_node = changes_its_first_argument(func), torch._C._current_autograd_node()
        is_recurrent = func is _RECURRENT
        capture = get_proxy_mode() if writes or is_recurrent or autograd_node is not None else None
        if capture is None:
            return dispatch(self, func, types, args, kwargs)
        nodes = capture.tracer.graph.nodes
        last = next(iter(reversed(nodes)), None)
        from_engine = func is torch.ops.aten.add.Tensor and _called_by_engine(sys._getframe(1))
        result = dispatch(self, func, types, args, kwargs)
        for node in itertools.takewhile(lambda node: node is not last, reversed(nodes)):
            if writes and _name(node).removesuffix("_functional") in (func._schema.name.removesuffix("_"), _FILLED):
                node.meta[_KEY] = True
            if is_recurrent and node.target is _RECURRENT:
                node.meta[RECORDS] = torch.is_grad_enabled()
            if autograd_node is not None:
                node.meta[_RUNS_IN] = autograd_node._sequence_nr()
                node.meta[_SUM] = from_engine
                node.meta[_SUMS_OWN] = sums_own_gradients(autograd_node)
        return result

    with mock.patch.object(FunctionalTensorMode, "__torch_dispatch__", noted):
        yield


def autograd_node(node: torch.fx.Node) -> int | None:
    """The sequence number of the autograd node in which an operation of the backward ran; None if it ran in none."""
    return node.meta.get(_RUNS_IN)


def _called_by_engine(frame) -> bool:
    """Whether C++ has called: autograd's engine for a sum of gradients, or a derivative formula."""
    return frame.f_globals.get("__name__") == "torch.autograd.graph"


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
