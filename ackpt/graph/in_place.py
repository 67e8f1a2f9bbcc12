"""Find what eager computes in place; the captured graph computes it out of place, so its peak may be higher.

AOTAutograd turns ``x.add_(y)`` into ``add(x, y)``, whose result has its own memory. Fractional budgets are relative
to the peak of the model's own step, where ``x`` and the result share one storage. `eager_graph` merges such storages,
so that simulating it gives that peak.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from unittest import mock

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .facts import RESIDENT
from .joint import BACKWARD, JointGraph, with_accesses

_KEY = "ackpt_in_place"
# What functionalization makes of a write to a part of a tensor when the whole is read: operation(whole, part, ...).
_INTO_WHOLE = ("aten::slice_scatter", "aten::select_scatter", "aten::diagonal_scatter", "aten::as_strided_scatter")
_FILLED = "ackpt_graph::filled"
# Derivative formulas write in place into zeros that they allocate, except for the kind of tensors that a capture uses:
# see areAnyTensorSubclassLike in torch's FunctionsManual.cpp and TensorAdvancedIndexing.cpp.
_INTO_ZEROS = ("aten::index_add", "aten::scatter_add", "aten::scatter", "aten::index_put", "aten::masked_scatter")
_ZEROS = ("aten::new_zeros", "aten::zeros", "aten::zeros_like")


@contextlib.contextmanager
def noted_writes():
    """Mark the nodes that are captured inside for operations that write to their first argument."""
    dispatch = FunctionalTensorMode.__torch_dispatch__

    def noted(self, func, types, args=(), kwargs=None):
        capture = get_proxy_mode() if _changes_its_first_argument(func) else None
        if capture is None:
            return dispatch(self, func, types, args, kwargs)
        nodes = capture.tracer.graph.nodes
        last = next(iter(reversed(nodes)), None)
        result = dispatch(self, func, types, args, kwargs)
        for node in itertools.takewhile(lambda node: node is not last, reversed(nodes)):
            if _name(node).removesuffix("_functional") in (func._schema.name.removesuffix("_"), _FILLED):
                node.meta[_KEY] = True
        return result

    with mock.patch.object(FunctionalTensorMode, "__torch_dispatch__", noted):
        yield


def _name(node) -> str:
    schema = getattr(node.target, "_schema", None)  # higher-order operations have none
    return "" if schema is None else schema.name


def _changes_its_first_argument(func) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.name.endswith("_") or not schema.arguments:
        return False
    return schema.arguments[0].alias_info is not None and schema.arguments[0].alias_info.is_write


def _overwritten(fx, phase: str):
    """The node whose memory eager reuses for the result of the node `fx`; None if eager allocates memory."""
    whole = fx.args[0] if fx.args else None
    if not isinstance(whole, torch.fx.Node):
        return None
    own_zeros = phase == BACKWARD and _name(whole) in _ZEROS and len(whole.users) == 1
    is_into_zeros = own_zeros and _name(fx) in _INTO_ZEROS
    return whole if fx.meta.get(_KEY) or _name(fx) in _INTO_WHOLE or is_into_zeros else None


def eager_graph(graph: JointGraph) -> JointGraph:
    """`graph` with the storages that eager uses: for simulating the peak of the model's own step, not for running."""
    fx = {node.meta["ackpt_id"]: node for node in graph.module.graph.nodes}
    lies_in = [node.storages for node in graph.nodes]
    merged = {storage.id: storage.id for storage in graph.storages}
    results = set()
    for node in graph.nodes:
        source = _overwritten(fx[node.id], node.phase)
        if source is None or len(node.storages) != 1 or len(lies_in[source.meta["ackpt_id"]]) != 1:
            continue
        (own,), (into,) = node.storages, lies_in[source.meta["ackpt_id"]]
        into = merged[into]
        # Backward receives a resident storage with its content from before the write. If it reads the new content, that
        # needs a storage of its own.
        if graph.storages[into].category in RESIDENT and graph.storages[own].first_bw_access is not None:
            continue
        merged[own] = into
        if graph.storages[own].bytes == graph.storages[into].bytes:
            results.add(node.id)
    if all(storage == into for storage, into in merged.items()):
        return graph
    ids = {storage: at for at, storage in enumerate(sorted(set(merged.values())))}
    lies_in = [tuple(dict.fromkeys(ids[merged[storage]] for storage in node.storages)) for node in graph.nodes]
    nodes = [replace(node, storages=storages) for node, storages in zip(graph.nodes, lies_in)]
    sizes = {ids[storage]: graph.storages[storage].bytes for storage in ids}
    storages = with_accesses(nodes, sizes, fx, graph.outputs, graph.gradients)
    own = JointGraph(graph.module, nodes, storages, graph.outputs, graph.gradients, has_data=graph.has_data)
    own.optimizer_bytes, own.optimizer_step_bytes = graph.optimizer_bytes, graph.optimizer_step_bytes
    own.overwriting = frozenset(results)
    return own
