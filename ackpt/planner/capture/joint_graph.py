"""The joint graph: forward and backward of one step as one list of operations, and the storages that they use.

Capture returns a `JointGraph` to all later stages. Its parts are in `operations`, and the tables that several
stages derive from it in `analysis`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from .analysis import Analysis
from .dynamic_sizes import is_whole_slice
from .operations import BACKWARD, CATEGORIES, FORWARD, Node, Storage


@dataclass(frozen=True, eq=False, repr=False)
class JointGraph:
    """Nodes and storages of one step, over the ``torch.fx`` graph that runs it; complete when built, and never changed.

    ``nodes[i].id == i`` in the order of execution, ``storages`` likewise. ``module`` is the ``fx.GraphModule``, whose
    nodes carry their id in ``meta["ackpt_id"]``. ``outputs``: ids of the nodes that the model returns; ``gradients``:
    ``{parameter: id of the node that is its gradient}``. ``on_cpu``: whether all tensors of the step are in host
    memory. ``optimizer_bytes``: of the optimizer's state, ``optimizer_step_bytes``: the most its step allocates beyond
    that and the gradients, 0 without an optimizer. ``accumulated_bytes``: of the gradients of earlier steps, to which
    this step adds; 0 without accumulation. ``scaled_loss_bytes``: of the scaled loss, which the caller holds during
    backward; 0 without a scaler. ``has_data``: whether it was traced from real tensors, not fake or
    meta ones. ``replays_random``: whether whatever runs the graph can draw the same random numbers a second time.
    ``made_for``: the call it was captured for, in words, as `ackpt.planner.capture.inspection.calls.described` gives
    them; None if unknown. ``as_compiled``: why it was captured as ``torch.compile`` runs the model; "" if it was not.
    ``overwriting``: nodes whose result replaces the content of its storage, as eager writes in place.
    ``keeps_outputs``: whether the caller holds all outputs during backward, or only those that get a gradient.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> sorted(graph.gradients), graph.bytes()["parameter"]
        (['0.bias', '0.weight', '2.bias', '2.weight'], 324)
        >>> all(node.phase == "forward" for node in graph.nodes[: graph.boundary])
        True
    """

    module: torch.fx.GraphModule
    nodes: tuple[Node, ...]
    storages: tuple[Storage, ...]
    outputs: tuple[int, ...]
    gradients: Mapping[str, int]
    on_cpu: bool
    optimizer_bytes: int = 0
    optimizer_step_bytes: int = 0
    accumulated_bytes: int = 0
    scaled_loss_bytes: int = 0
    has_data: bool = True
    replays_random: bool = True
    made_for: Mapping[str, str] | None = None
    as_compiled: str = ""
    overwriting: frozenset[int] = frozenset()
    keeps_outputs: bool = True

    def __repr__(self) -> str:
        kinds = ", ".join(f"{sum(node.phase == phase for node in self.nodes)} {phase}" for phase in (FORWARD, BACKWARD))
        return f"<JointGraph {self.hash[:12]}: {kinds} nodes, {len(self.storages)} storages>"

    @property
    def resident_bytes(self) -> int:
        """Bytes of parameters, buffers, inputs, the optimizer's state and accumulated gradients."""
        own = sum(self.analysis.bytes[storage] for storage in self.analysis.resident)
        return own + self.optimizer_bytes + self.accumulated_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of the parameters, which stay allocated after the step."""
        storages = {storage for node in self.gradients.values() for storage in self.nodes[node].storages}
        return sum(self.analysis.bytes[storage] for storage in storages)

    @cached_property
    def boundary(self) -> int:
        """The id of the first backward node; everything below runs in the forward."""
        return next((node.id for node in self.nodes if node.phase == BACKWARD), len(self.nodes))

    def bytes(self) -> dict[str, int]:
        """Bytes by category, each storage once; those of activations are saved for backward by a baseline step."""
        sizes: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        for storage in self.storages:
            sizes[storage.category] += storage.bytes
        sizes["optimizer state"] += self.optimizer_bytes
        return sizes

    @cached_property
    def analysis(self) -> Analysis:
        """Tables derived from the graph (readers, aliases, what may be recomputed), each built at its first use."""
        return Analysis(self)

    def resized(self, sizes: Sequence[int]) -> JointGraph:
        """This graph with other bytes of its storages, for simulations; the shapes of its operations are unchanged."""
        pairs = zip(self.storages, sizes, strict=True)
        storages = tuple(each if each.bytes == size else replace(each, bytes=size) for each, size in pairs)
        resized = replace(self, storages=storages)
        vars(resized)["analysis"] = self.analysis.resized(resized)
        return resized

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the operations with their arguments, shapes, dtypes, devices and storages.

        Names do not matter; whether two values share a storage does, and which outputs the caller drops.
        """
        storages = [*(node.storages for node in self.nodes), ()]
        identities = [(_identity(node), storages[node.meta["ackpt_id"]]) for node in self.module.graph.nodes]
        dropped = sorted(self.analysis.dropped_outputs)
        text = json.dumps([identities, dropped] if dropped else identities, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain data: the hash, nodes, storages, outputs and gradients."""
        return {
            "schema": "ackpt.joint-graph",
            "version": 1,
            "hash": self.hash,
            "nodes": [asdict(node) for node in self.nodes],
            "storages": [asdict(storage) for storage in self.storages],
            "outputs": list(self.outputs),
            "gradients": self.gradients,
        }


def operations_in(module: torch.fx.GraphModule) -> list[tuple[str, str]]:
    """The operations of a joint graph and its results as text, each with its source line.

    The texts are equal for captures that differ only in unread inputs. An alias, or a slice of the whole tensor, counts
    as its argument, because captures with integer sizes and with symbolic ones differ in these.
    """
    texts: list[tuple[str, str]] = []
    places: dict[torch.fx.Node, int] = {}
    numbers = itertools.count()
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.alias.default or is_whole_slice(node):
            places[node] = places[node.all_input_nodes[0]]
        elif node.op == "output":
            texts.append((json.dumps([places[result] for result in node.args[0] if result is not None]), ""))
        elif node.op != "placeholder" or node.users:
            places[node] = next(numbers)
            if node.op != "placeholder":
                text = json.dumps(_identity(node, places.__getitem__), sort_keys=True)
                texts.append((text, (node.meta.get("custom") or {}).get("source") or ""))
    return texts


def _identity(node, id_of: Callable[[torch.fx.Node], int] = lambda node: node.meta["ackpt_id"]) -> list:
    """The properties in which equal nodes agree; names are not among them."""

    def argument(value):
        if isinstance(value, torch.fx.Node):
            return {"node": id_of(value)}
        if isinstance(value, (list, tuple)):
            return [argument(item) for item in value]
        if isinstance(value, dict):
            return {str(key): argument(item) for key, item in value.items()}
        return value if value is None or isinstance(value, (bool, int, float)) else str(value)

    values = node.meta.get("val")
    values = values if isinstance(values, (list, tuple)) else [values]
    shapes = [
        [list(value.shape), list(value.stride()), str(value.dtype), str(value.device)]
        for value in values
        if isinstance(value, torch.Tensor)
    ]
    target = str(node.meta.get("desc", "")) if node.op == "placeholder" else str(node.target)
    return [node.op, target, argument(node.args), argument(node.kwargs), shapes]


_INPUTS = {"ParamAOTInput": "parameter", "BufferAOTInput": "buffer", "TangentAOTInput": "gradient"}


def with_accesses(nodes, sizes, ordered, returned, gradients):
    """The storages of these `sizes`, with the nodes that use them; ``ordered``: the fx node of each id."""
    touched: dict[int, list[int]] = {key: [] for key in sizes}
    members: dict[int, list[int]] = {key: [] for key in sizes}
    for node in nodes:
        for key in node.storages:
            members[key].append(node.id)
        read = {key for node_id in node.inputs for key in nodes[node_id].storages}
        for key in {*read, *node.storages}:
            touched[key].append(node.id)
    given_back = {key for node_id in gradients.values() for key in nodes[node_id].storages}
    returned_storages = {key for node_id in returned for key in nodes[node_id].storages}
    for key in sorted(sizes):
        producer = members[key][0]
        forward = [node_id for node_id in touched[key] if nodes[node_id].phase == FORWARD]
        backward = [node_id for node_id in touched[key] if nodes[node_id].phase == BACKWARD]
        if ordered[producer].op == "placeholder":
            category = _INPUTS.get(type(ordered[producer].meta["desc"]).__name__, "input")
        elif ordered[producer].op == "get_attr":  # a constant of the model's code, which the graph references
            category = "buffer"
        elif key in given_back:
            category = "gradient"
        else:
            category = "activation" if forward and (backward or key in returned_storages) else "temporary"
        yield Storage(
            id=key,
            bytes=sizes[key],
            category=category,
            producer=producer,
            nodes=tuple(members[key]),
            last_fw_access=forward[-1] if forward else None,
            first_bw_access=backward[0] if backward else None,
            last_bw_access=backward[-1] if backward else None,
        )
