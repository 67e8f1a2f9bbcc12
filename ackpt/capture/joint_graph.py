"""The joint graph: forward and backward of one step as one list of operations, with one identity for each.

A node's id is its place in the order of execution, minted once; whatever is said about a node later (a cost, a fate,
a schedule) is said of its id, never of a name, a shape or an address. What can be freed or kept is not a node but a
*storage*: views, and what several results share, are one. "Forward" and "backward" are derived here, once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

FORWARD, BACKWARD = "forward", "backward"
CATEGORIES: tuple[str, ...] = (
    "parameter",
    "buffer",
    "input",
    "activation",
    "gradient",
    "optimizer state",
    "temporary",
)


@dataclass(frozen=True)
class AsCompiled:
    """Why a step was captured as ``torch.compile`` runs the model, and how it differs from the model's own step.

    ``reason``: where the model looks at values. ``baseline_bytes``: the dynamic peak of the model's own step, measured;
    None where there are no data. ``difference``: what differs most, empty where outputs, gradients and buffers are
    bit-equal; None where they were not compared, as on a CUDA device.

    Example:
        >>> print(AsCompiled("module 'head' looks at values", 1024, ""))
        module 'head' looks at values; its results are bit-equal to the model's own
    """

    reason: str
    baseline_bytes: int | None = None
    difference: str | None = None

    def __str__(self) -> str:
        if self.baseline_bytes is None:
            return f"{self.reason}; without data it cannot be compared with the model's own step"
        if self.difference is None:
            return f"{self.reason}; perhaps not bit-equal: it was not compared with the model's own step on this device"
        if self.difference:
            return f"{self.reason}; not bit-equal: {self.difference}"
        return f"{self.reason}; its results are bit-equal to the model's own"


@dataclass(frozen=True)
class Node:
    """One operation, or one input of the step.

    ``inputs``: ids of the nodes it reads, in the order of its arguments. ``storages``: ids of those its result lies
    in. ``module``: the qualified name of the module that called it (``""``: the model itself), ``source``: file and
    line; a backward node has those of the forward operation it belongs to. ``is_random``: it draws random numbers.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> (tanh,) = (node for node in graph.nodes if node.target == "aten.tanh.default")
        >>> tanh.phase, tanh.module, [graph.nodes[place].target for place in tanh.inputs]
        ('forward', '1', ['aten.addmm.default'])
    """

    id: int
    name: str
    target: str
    phase: str
    inputs: tuple[int, ...]
    storages: tuple[int, ...]
    module: str
    source: str
    is_random: bool


@dataclass(frozen=True)
class Storage:
    """Memory that is born and dies as one.

    ``bytes``: its size. ``producer``: the node that brings it along. ``nodes``: all nodes whose results lie in it.
    ``last_fw_access``, ``first_bw_access``, ``last_bw_access``: nodes that read or write it, in the words of
    Purandare et al. 2023, mu-TWO; None where there is none.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> (kept,) = (storage for storage in graph.storages if storage.category == "activation")
        >>> kept.bytes, graph.nodes[kept.producer].target
        (128, 'aten.tanh.default')
    """

    id: int
    bytes: int
    category: str
    producer: int
    nodes: tuple[int, ...]
    last_fw_access: int | None
    first_bw_access: int | None
    last_bw_access: int | None


class JointGraph:
    """Nodes and storages of one step, over the ``torch.fx`` graph that runs it.

    ``nodes[i].id == i`` in the order of execution, ``storages`` likewise. ``module`` is the ``fx.GraphModule``, whose
    nodes carry their id in ``meta["ackpt_id"]``. ``outputs``: ids of the nodes that the model returns; ``gradients``:
    ``{parameter: id of the node that is its gradient}``. ``optimizer_bytes``: of the optimizer's state,
    ``optimizer_step_bytes``: the most its step takes beside that and the gradients, 0 without an optimizer;
    ``has_data``: whether it was traced from real tensors, not fake or meta ones;
    ``replays_random``: whether what runs the graph can draw random numbers a second time. ``made_for``: what it was
    captured for, in words, as `ackpt.capture.inspection.calls.described` gives them; None where that is not known.
    ``overwriting``: nodes whose result is a new content of its storage, as eager writes in place.
    ``as_compiled``: an `AsCompiled` where the model could only be captured as ``torch.compile`` runs it.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> sorted(graph.gradients), graph.bytes()["parameter"]
        (['0.bias', '0.weight', '2.bias', '2.weight'], 324)
        >>> all(node.phase == "forward" for node in graph.nodes[: graph.boundary])
        True
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        nodes: Iterable[Node],
        storages: Iterable[Storage],
        outputs: Iterable[int],
        gradients: Mapping[str, int],
        *,
        has_data: bool = True,
        made_for: dict[str, str] | None = None,
        as_compiled: AsCompiled | None = None,
    ):
        self.module: torch.fx.GraphModule = module
        self.nodes: tuple[Node, ...] = tuple(nodes)
        self.storages: tuple[Storage, ...] = tuple(storages)
        self.outputs: tuple[int, ...] = tuple(outputs)
        self.gradients: dict[str, int] = dict(gradients)
        self.optimizer_bytes: int = 0
        self.optimizer_step_bytes: int = 0
        self.replays_random: bool = True
        self.has_data: bool = has_data
        self.made_for: dict[str, str] | None = made_for
        self.as_compiled: AsCompiled | None = as_compiled
        self.overwriting: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        kinds = ", ".join(f"{sum(node.phase == phase for node in self.nodes)} {phase}" for phase in (FORWARD, BACKWARD))
        return f"<JointGraph {self.hash[:12]}: {kinds} nodes, {len(self.storages)} storages>"

    @cached_property
    def boundary(self) -> int:
        """The id of the first backward node; everything below runs in the forward."""
        return next((node.id for node in self.nodes if node.phase == BACKWARD), len(self.nodes))

    def bytes(self) -> dict[str, int]:
        """Bytes by category, each storage once; those of activations are what a plain step keeps for backward."""
        sizes: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        for storage in self.storages:
            sizes[storage.category] += storage.bytes
        sizes["optimizer state"] += self.optimizer_bytes
        return sizes

    @cached_property
    def on_cpu(self) -> bool:
        """Whether all of its tensors lie in host memory."""
        values = (node.meta.get("val") for node in self.module.graph.nodes)
        return all(value.device.type == "cpu" for value in values if isinstance(value, torch.Tensor))

    @cached_property
    def hash(self) -> str:
        """SHA-256 of what is computed from what (operations, arguments, shapes, dtypes, devices) and lies where.

        Names do not matter; whether two values share a storage does.
        """
        storages = [*(node.storages for node in self.nodes), ()]
        identities = [(_identity(node), storages[node.meta["ackpt_id"]]) for node in self.module.graph.nodes]
        text = json.dumps(identities, sort_keys=True)
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


def _identity(node) -> list:
    """What makes two nodes the same, whatever they are called."""

    def argument(value):
        if isinstance(value, torch.fx.Node):
            return {"node": value.meta["ackpt_id"]}
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
    """The storages of these `sizes`, with what touches them; ``ordered``: the fx node of each id."""
    touched: dict[int, list[int]] = {key: [] for key in sizes}
    members: dict[int, list[int]] = {key: [] for key in sizes}
    for node in nodes:
        for key in node.storages:
            members[key].append(node.id)
        read = {key for place in node.inputs for key in nodes[place].storages}
        for key in {*read, *node.storages}:
            touched[key].append(node.id)
    given_back = {key for place in gradients.values() for key in nodes[place].storages}
    kept = {key for place in returned for key in nodes[place].storages}
    for key in sorted(sizes):
        producer = members[key][0]
        forward = [place for place in touched[key] if nodes[place].phase == FORWARD]
        backward = [place for place in touched[key] if nodes[place].phase == BACKWARD]
        if ordered[producer].op == "placeholder":
            category = _INPUTS.get(type(ordered[producer].meta["desc"]).__name__, "input")
        elif ordered[producer].op == "get_attr":  # a constant of the model's code, held by the graph
            category = "buffer"
        elif key in given_back:
            category = "gradient"
        else:
            category = "activation" if forward and (backward or key in kept) else "temporary"
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
