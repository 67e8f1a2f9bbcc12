"""The joint graph: forward and backward of one step as one list of operations, and the storages that they use.

Capture returns a `JointGraph` to all later stages. Its parts are in `operations`. `JointGraph.analysis` has the tables
that several stages derive from it: readers, aliases, lifetimes, and what may be recomputed; each is computed when it is
first used. A later stage keeps tables of its own by `once_per_graph`.
"""

import copy
import functools
import hashlib
import json
import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTInput

from .mask_bits import one_of, packed_bytes
from .operations import BACKWARD, CATEGORIES, FORWARD, Node, Storage, has_effect, identity, memory_order
from .patches import python_kernels  # noqa: F401 (defines ackpt_graph::dropout_noise)


@dataclass(frozen=True, eq=False, repr=False)
class JointGraph:
    """Nodes and storages of one step, over the ``torch.fx`` graph that runs it; complete when built, and never changed.

    ``nodes[i].id == i`` in the order of execution, ``storages`` likewise. ``module`` is the ``fx.GraphModule``, whose
    nodes carry their id in ``meta["ackpt_id"]``. ``outputs``: ids of the nodes that the model returns; ``gradients``:
    ``{parameter: id of the node that is its gradient}``. ``on_cpu``: whether all tensors of the step are in host
    memory. ``optimizer_bytes``: of the optimizer's state, ``optimizer_step_bytes``: the most its step allocates beyond
    that and the gradients, 0 without an optimizer. ``accumulated_bytes``: of the gradients of earlier steps, to which
    this step adds; 0 without accumulation. ``scaled_loss_bytes``: of the scaled loss, which the caller holds during
    backward; 0 without a scaler. ``outside_loss_bytes``: the most that a loss in the training loop allocates between
    forward and backward, ``target_bytes``: of the tensors that it alone reads; 0 without ``loss=``.
    ``has_data``: whether it was traced from real tensors, not fake or meta ones. ``replays_random``: whether whatever
    runs the graph can draw the same random numbers a second time.
    ``made_for``: the call it was captured for, in words, as `ackpt.planner.capture.inspection.calls.described` gives
    them; None if unknown. ``as_compiled``: why it was captured as ``torch.compile`` runs the model; "" if it was not.
    ``overwriting``: nodes whose result replaces the content of its storage, as eager writes in place.
    ``keeps_outputs``: whether the caller holds all outputs during backward, or only those that get a gradient.
    ``head_chunks``: in how many chunks of tokens its language-model head runs.

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
    outside_loss_bytes: int = 0
    target_bytes: int = 0
    has_data: bool = True
    replays_random: bool = True
    made_for: Mapping[str, str] | None = None
    as_compiled: str = ""
    overwriting: frozenset[int] = frozenset()
    keeps_outputs: bool = True
    head_chunks: int = 1

    def __repr__(self) -> str:
        kinds = ", ".join(f"{sum(node.phase == phase for node in self.nodes)} {phase}" for phase in (FORWARD, BACKWARD))
        return f"<JointGraph {self.hash[:12]}: {kinds} nodes, {len(self.storages)} storages>"

    @property
    def resident_bytes(self) -> int:
        """Bytes of parameters, buffers, inputs, the optimizer's state and accumulated gradients."""
        tensors = sum(self.analysis.bytes[storage] for storage in self.analysis.resident)
        return tensors + self.optimizer_bytes + self.accumulated_bytes + self.target_bytes

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
    def analysis(self) -> "Analysis":
        """Tables derived from the graph (readers, aliases, what may be recomputed), each built at its first use."""
        return Analysis(self)

    def resized(self, sizes: Sequence[int]) -> "JointGraph":
        """This graph with other bytes of its storages, for simulations; the shapes of its operations are unchanged."""
        pairs = zip(self.storages, sizes, strict=True)
        storages = tuple(each if each.bytes == size else replace(each, bytes=size) for each, size in pairs)
        resized = replace(self, storages=storages)
        vars(resized).update(analysis=self.analysis.resized(resized), hash=self.hash)
        return resized

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the operations with their arguments, shapes, dtypes, devices and storages.

        Names do not matter; whether two values share a storage does, and which outputs the caller drops.
        """
        storages = [*(node.storages for node in self.nodes), ()]
        identities = [(identity(node), storages[node.meta["ackpt_id"]]) for node in self.module.graph.nodes]
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


_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_NATIVE_DROPOUT = torch.ops.aten.native_dropout.default
_NOISE = torch.ops.ackpt_graph.dropout_noise.default
_RESULTS_WITHOUT_STATISTICS = 3  # of its five; the others are the new running statistics
RESIDENT = ("parameter", "buffer", "input")


class Mask(NamedTuple):
    """A dropout mask. ``packed_bytes``: with a bit per element; ``one``: the element that is not 0, as an integer."""

    packed_bytes: int
    dtype: torch.dtype
    one: int


class Analysis:
    """Tables over node and storage ids.

    ``fx``: the node of ``torch.fx`` by id; ``bytes``: of every storage. ``resident``: storages that the caller owns.
    ``placeholders``: inputs; ``sources``: inputs and constants; ``tangents``: the gradients that backward is given.
    ``outputs``: nodes that the model returns, ``bw_outputs``: those that backward returns, None where there is none.
    """

    def __init__(self, graph: JointGraph):
        self.graph = graph
        self.fx = {node.meta["ackpt_id"]: node for node in graph.module.graph.nodes}
        output = self.fx[len(graph.nodes)]
        returned = [None if node is None else node.meta["ackpt_id"] for node in output.args[0]]
        # Unused gradients have no description.
        count = sum(described is not None and not hasattr(described, "grad_of") for described in output.meta["desc"])
        self.outputs: tuple[int | None, ...] = tuple(returned[:count])
        self.bw_outputs: tuple[int | None, ...] = tuple(returned[count:])
        self.resident = {s.id for s in graph.storages if s.category in RESIDENT}
        self.placeholders = [n.id for n in graph.nodes if self.fx[n.id].op == "placeholder"]
        self.sources = [n.id for n in graph.nodes if self.fx[n.id].op in ("placeholder", "get_attr")]
        self.tangents = [node for node in self.placeholders if graph.nodes[node].phase == BACKWARD]
        self.bytes = [storage.bytes for storage in graph.storages]

    def resized(self, graph: JointGraph) -> "Analysis":
        """The tables of `graph`, this one with other bytes of its storages; both share tables without bytes."""
        assert not self.restrided
        for table in ("callers", "effects", "_mask_elements", "allocated", "batch_norms"):
            getattr(self, table)  # built now, once for all sizes
        resized = copy.copy(self)
        resized.graph, resized.bytes = graph, [storage.bytes for storage in graph.storages]
        vars(resized).pop("masks", None)
        return resized

    @property
    def argument_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of every tensor among the arguments of the call, each tensor once."""
        given = [self.fx[node].meta for node in self.placeholders]
        given_values = [meta["val"] for meta in given if isinstance(meta["desc"], PlainAOTInput)]
        return tuple(tuple(each.shape) for each in given_values if isinstance(each, torch.Tensor))

    @cached_property
    def restrided(self) -> set[int]:
        """Tangents that torch copies, since a gradient cannot have the strides of its output."""
        values = {node: self.fx[node].meta["val"] for node in self.tangents}
        return {node for node, value in values.items() if value.numel() and memory_order(value) is None}

    @cached_property
    def incoming_bytes(self) -> int:
        """Bytes that the caller keeps to the end of backward: gradients that torch copies, and a scaled loss."""
        values = (self.fx[node].meta["val"] for node in self.restrided)
        return sum(value.numel() * value.element_size() for value in values) + self.graph.scaled_loss_bytes

    @cached_property
    def live_to_end(self) -> set[int]:
        """Storages that, once allocated, live to the end of the step: outputs, tangents and returned gradients."""
        nodes = [*self.outputs, *self.bw_outputs, *(node for node in self.tangents if node not in self.restrided)]
        return {s for node in nodes if node is not None for s in self.graph.nodes[node].storages} - self.dropped

    @cached_property
    def callers(self) -> set[int]:
        """Storages that the caller references at some time, so that they cannot move."""
        return self.live_to_end | self.dropped

    @cached_property
    def dropped(self) -> set[int]:
        """Storages of outputs that are freed after the forward: copied into an input, or dropped by the caller."""
        return self._copied_outputs.union(*self.dropped_outputs.values())

    @cached_property
    def dropped_outputs(self) -> dict[int, set[int]]:
        """``{place: storages}`` of the model's outputs that the caller drops before backward: they get no gradient."""
        if self.graph.keeps_outputs:
            return {}
        described = self.fx[len(self.graph.nodes)].meta["desc"][: len(self.outputs)]
        with_gradient = [getattr(self.fx[node].meta.get("desc"), "output", None) for node in self.tangents]
        if not all(each in described for each in with_gradient):  # a gradient of what several outputs are views of
            return {}
        lie_in = [set() if node is None else {*self.graph.nodes[node].storages} for node in self.outputs]
        not_dropped = self.resident.union(
            self._copied_outputs, *(storages for output, storages in zip(described, lie_in) if output in with_gradient)
        )
        places = (getattr(output, "idx", None) for output in described)
        return {
            place: storages
            for place, storages in zip(places, lie_in)
            if place is not None and storages and storages.isdisjoint(not_dropped)
        }

    @cached_property
    def _copied_outputs(self) -> set[int]:
        """Storages that the forward copies into an input that it changes; the caller gets a view of that input."""
        writes = (self.fx[node] for node in self.mutated.values())
        sources = [fx.args[1].meta["ackpt_id"] for fx in writes if fx.target is torch.ops.aten.copy_.default]
        copied = {s for node in sources for s in self.graph.nodes[node].storages}
        returned = {s for node in self.outputs if node is not None for s in self.graph.nodes[node].storages}
        return (copied & returned) - self.resident

    @cached_property
    def base_of(self) -> dict[int, int]:
        """By storage, the first node whose value is one tensor in it; all its other values are views of this one."""
        nodes: dict[int, int] = {}
        for node in self.graph.nodes:
            if isinstance(self.fx[node.id].meta.get("val"), torch.Tensor):
                for storage in node.storages:
                    if storage not in nodes or node.id in self.graph.overwriting:
                        nodes[storage] = node.id
        return nodes

    @cached_property
    def savable(self) -> frozenset[int]:
        """Storages of the forward that can be saved for backward."""
        forward = (s for s in self.graph.storages if self.graph.nodes[s.producer].phase == FORWARD)
        return frozenset(s.id for s in forward if s.id not in self.resident and s.id in self.base_of)

    def ancestors(self, roots) -> list[int]:
        """The nodes `roots` and all nodes that they are computed from, in order."""
        seen = set()
        todo = list(roots)
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += self.graph.nodes[node].inputs
        return sorted(seen)

    @cached_property
    def needed_backward(self) -> tuple[int, ...]:
        """Backward nodes that the gradients depend on, in order."""
        nodes, given = self.graph.nodes, set(self.sources)
        roots = [node for node in self.bw_outputs if node is not None]
        roots += [node for node in self.effects if nodes[node].phase == BACKWARD]
        return tuple(n for n in self.ancestors(roots) if nodes[n].phase == BACKWARD and n not in given)

    @cached_property
    def always_computed(self) -> dict[int, None]:
        """Forward nodes that outputs and effects depend on, which every schedule runs; a dict as an ordered set."""
        roots = [node for node in self.outputs if node is not None]
        roots += [node for node in self.effects if self.graph.nodes[node].phase == FORWARD]
        given = set(self.sources)
        return dict.fromkeys(node for node in self.ancestors(roots) if node not in given)

    @cached_property
    def random_forward(self) -> frozenset[int]:
        """Forward nodes that draw random numbers."""
        return frozenset(node.id for node in self.graph.nodes if node.is_random and node.phase == FORWARD)

    @cached_property
    def effects(self) -> set[int]:
        """Nodes that every schedule must run: they write to inputs, communicate, draw random numbers, or have other
        effects, such as an error."""
        fx = self.fx
        acts = {node for node in fx if _writes(fx[node]) or communicates(fx[node]) or has_effect(fx[node].target)}
        return acts.union(node.id for node in self.graph.nodes if node.is_random)

    @cached_property
    def mutated(self) -> dict[int, int]:
        """``{input: the node that overwrites it}``."""
        writes = (node for node in sorted(self.effects) if _writes(self.fx[node]))
        return {self.fx[node].args[0].meta["ackpt_id"]: node for node in writes}

    @cached_property
    def not_recomputable(self) -> dict[int, str]:
        """``{node: why it cannot be recomputed}``."""
        reasons = {}
        nodes = self.graph.nodes
        overwritten = {storage: nodes[changed] for changed in self.mutated for storage in nodes[changed].storages}
        for node in nodes:
            if node.phase != FORWARD or node.id in self.sources:
                continue
            fx = self.fx[node.id]
            if _writes(fx):
                reasons[node.id] = "it changes its argument"
            elif has_effect(fx.target):
                reasons[node.id] = "it has an effect, which must happen once"
            elif communicates(fx):
                reasons[node.id] = "it is a collective, which all ranks must run equally often"
            elif node.is_random and not self.graph.replays_random:
                reasons[node.id] = "its random numbers cannot be replayed by this compiler"
            elif node.is_random and fx.kwargs.get("generator") is not None:
                reasons[node.id] = "it draws from a generator of its own, whose state cannot be replayed"
            elif changed := [
                s for i in self.recompute_reads(node.id) for s in self.storages(i, True) if s in overwritten
            ]:
                reasons[node.id] = f"it reads {overwritten[changed[0]].target}, which the forward changes"
            elif is_getitem(fx) and is_training_batch_norm(fx.args[0]) and fx.args[1] >= _RESULTS_WITHOUT_STATISTICS:
                reasons[node.id] = "it is a running statistic, which is updated once"
        return reasons

    @cached_property
    def must_be_saved(self) -> frozenset[int]:
        """Savable storages of nodes that cannot be recomputed.

        Not those of running statistics: a recomputed batch norm does not update them, and saving them must not save
        the batch norm's other results as well.
        """
        storages = (storage for node in self.not_recomputable for storage in self.graph.nodes[node].storages)
        producers = ((s, self.graph.storages[s].producer) for s in storages if s in self.savable)
        return frozenset(s for s, producer in producers if s in self.storages(producer, again=True))

    def reads(self, node: int, again: bool = False) -> tuple[int, ...]:
        """The nodes that `node` reads, or reads `again` in backward: a batch norm then reads no running statistics."""
        return self.recompute_reads(node) if again else self.graph.nodes[node].inputs

    @cached_property
    def backward_reads(self) -> list[tuple[int, ...]]:
        """By node, the nodes that it reads when it runs in backward."""
        return [self.reads(node.id, again=node.phase == FORWARD) for node in self.graph.nodes]

    def recompute_reads(self, node: int) -> tuple[int, ...]:
        if node in self.batch_norms:
            arguments = self.fx[node].args[:3]
            return tuple(source.meta["ackpt_id"] for source in arguments if isinstance(source, torch.fx.Node))
        return self.graph.nodes[node].inputs

    def storages(self, node: int, again: bool = False) -> tuple[int, ...]:
        """The storages that the result of `node` uses, in the forward or `again` in backward."""
        storages = self.graph.nodes[node].storages
        return storages[:_RESULTS_WITHOUT_STATISTICS] if again and node in self.batch_norms else storages

    @cached_property
    def allocated(self) -> dict[int, frozenset[int]]:
        """By node, the storages that it allocates; other storages of its result belong to its arguments (views)."""
        by_producer: dict[int, set[int]] = {}
        for storage in self.graph.storages:
            by_producer.setdefault(storage.producer, set()).add(storage.id)
        return {node: frozenset(storages) for node, storages in by_producer.items()}

    @cached_property
    def masks(self) -> dict[int, Mask]:
        """By storage, the dropout masks that a schedule may pack: those that are dense and no results of the step."""
        return {
            storage: Mask(packed_bytes(self.bytes[storage] // dtype.itemsize), dtype, one)
            for storage, (dtype, one) in self._mask_elements.items()
        }

    @cached_property
    def _mask_elements(self) -> dict[int, tuple[torch.dtype, int]]:
        """The dtype of every dropout mask that a schedule may pack, and the element that is not 0, as an integer."""
        elements = {}
        for storage, base in self.base_of.items():
            fx, value = self.fx[base], self.fx[base].meta["val"]
            if fx.target is _NOISE:
                dropout = fx
            elif is_getitem(fx) and fx.args[0].target is _NATIVE_DROPOUT and fx.args[1] == 1:
                dropout = fx.args[0]
            else:
                continue
            is_dense = value.numel() * value.element_size() == value.untyped_storage().nbytes()
            can_pack = value.dtype == torch.bool or value.device.type == "cpu"
            if value.numel() and is_dense and can_pack and storage not in self.callers:
                elements[storage] = value.dtype, one_of(value.dtype, dropout.args[1])
        return elements

    @cached_property
    def taken_from(self) -> dict[int, int]:
        """``{node: operation}`` for every node that takes one of the results of an operation with several storages."""
        takes = {node for node, fx in self.fx.items() if is_getitem(fx) and len(self.graph.nodes[node].inputs) == 1}
        operations = {node: self.graph.nodes[node].inputs[0] for node in takes}
        return {node: op for node, op in operations.items() if len(self.allocated.get(op, ())) > 1}

    @cached_property
    def accessed(self) -> dict[str, list[tuple[int, ...]]]:
        """By phase and node, the storages that the node reads or writes when it runs there, but for resident ones."""
        nodes = self.graph.nodes
        tables: dict[str, list[tuple[int, ...]]] = {FORWARD: [], BACKWARD: []}
        for phase, table in tables.items():
            again = [phase == BACKWARD and node.phase == FORWARD for node in nodes]
            for node in range(len(nodes)):
                read = {s for i in self.reads(node, again[node]) for s in self.storages(i, again[i])}
                table.append(tuple(sorted(read.union(self.storages(node, again[node])) - self.resident)))
        return tables

    @cached_property
    def batch_norms(self) -> set[int]:
        return {node for node, fx in self.fx.items() if is_training_batch_norm(fx)}


def once_per_graph(function):
    """Make ``function(graph, *arguments)`` keep its results: computed once for a graph and equal, hashable arguments.

    For tables of later stages, which must not become part of the graph. They are dropped with the graph, so a result
    must not refer to it.
    """
    results: weakref.WeakKeyDictionary[JointGraph, dict[tuple, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def cached(graph: JointGraph, *arguments):
        of_graph = results.setdefault(graph, {})
        if arguments not in of_graph:
            of_graph[arguments] = function(graph, *arguments)
        return of_graph[arguments]

    return cached


def is_training_batch_norm(node) -> bool:
    return node.target is _BATCH_NORM and node.args[5] is True


def _writes(node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def communicates(node) -> bool:
    return getattr(node.target, "namespace", "") in ("_c10d_functional", "c10d", "c10d_functional")


def is_getitem(node) -> bool:
    return node.target is operator.getitem
