"""What every schedule of a graph must respect, derived once: who reads what, what lies where, what may run again."""

from __future__ import annotations

import operator
from functools import cached_property

import torch

from .gradients import in_memory
from .joint_graph import BACKWARD, FORWARD, JointGraph

_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_RESULTS_WITHOUT_STATISTICS = 3  # of its five; the others are the new running statistics
RESIDENT = ("parameter", "buffer", "input")


class Facts:
    """Tables over node and storage ids.

    ``resident``: storages that the caller owns. ``tangents``: nodes that come with backward. ``outputs``: of the
    model, ``bw_outputs``: all that backward returns. ``effects``: nodes that run exactly once whatever is planned.
    ``cover[storage]``: the first node whose value is one tensor in it; every other value in it is a view of this one.
    ``fixed``: why a node cannot run again, by its id.
    """

    def __init__(self, graph: JointGraph):
        self.graph = graph
        self.fx = {node.meta["ackpt_id"]: node for node in graph.module.graph.nodes}
        output = self.fx[len(graph.nodes)]
        places = [None if node is None else node.meta["ackpt_id"] for node in output.args[0]]
        # Of the gradients, those that nobody needs have no description.
        count = sum(what is not None and not hasattr(what, "grad_of") for what in output.meta["desc"])
        self.outputs: tuple[int | None, ...] = tuple(places[:count])
        self.bw_outputs: tuple[int | None, ...] = tuple(places[count:])
        self.resident = {s.id for s in graph.storages if s.category in RESIDENT}
        self.placeholders = [n.id for n in graph.nodes if self.fx[n.id].op == "placeholder"]
        self.given = [n.id for n in graph.nodes if self.fx[n.id].op in ("placeholder", "get_attr")]
        self.tangents = [place for place in self.placeholders if graph.nodes[place].phase == BACKWARD]
        self.bytes = [storage.bytes for storage in graph.storages]

    @cached_property
    def restrided(self) -> set[int]:
        """Tangents that torch makes: its copies of gradients that cannot come with the strides of their outputs."""
        values = {place: self.fx[place].meta["val"] for place in self.tangents}
        return {place for place, value in values.items() if value.numel() and in_memory(value) is None}

    @cached_property
    def incoming_bytes(self) -> int:
        """Of the gradients that torch copies; the caller holds them to the end of the step."""
        return sum(value.numel() * value.element_size() for value in (self.fx[p].meta["val"] for p in self.restrided))

    @cached_property
    def held(self) -> set[int]:
        """Storages that live to the end of the step once they exist: outputs, tangents and returned gradients."""
        places = [*self.outputs, *self.bw_outputs, *(p for p in self.tangents if p not in self.restrided)]
        held = {s for place in places if place is not None for s in self.graph.nodes[place].storages}
        return held - self.dropped

    @cached_property
    def dropped(self) -> set[int]:
        """Storages of outputs that die with the forward: it copies them into an input that it changes, of which the
        caller is then given a view."""
        writes = (self.fx[place] for place in self.mutated.values())
        written = [fx.args[1].meta["ackpt_id"] for fx in writes if fx.target is torch.ops.aten.copy_.default]
        places = [place for place in self.outputs if place is not None]
        copied, returned = ({s for p in found for s in self.graph.nodes[p].storages} for found in (written, places))
        return (copied & returned) - self.resident

    @cached_property
    def cover(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for node in self.graph.nodes:
            if isinstance(self.fx[node.id].meta.get("val"), torch.Tensor):
                for storage in node.storages:
                    if storage not in found or node.id in self.graph.overwriting:
                        found[storage] = node.id
        return found

    @cached_property
    def savable(self) -> frozenset[int]:
        """Storages of the forward that could be kept for backward."""
        forward = (s for s in self.graph.storages if self.graph.nodes[s.producer].phase == FORWARD)
        return frozenset(s.id for s in forward if s.id not in self.resident and s.id in self.cover)

    def ancestors(self, roots) -> list[int]:
        """The nodes `roots` and what they are computed from, in order."""
        found = set()
        todo = list(roots)
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += self.graph.nodes[node].inputs
        return sorted(found)

    @cached_property
    def needed_backward(self) -> tuple[int, ...]:
        """Backward nodes that the gradients depend on, in order."""
        nodes, given = self.graph.nodes, set(self.given)
        roots = [place for place in self.bw_outputs if place is not None]
        roots += [place for place in self.effects if nodes[place].phase == BACKWARD]
        return tuple(n for n in self.ancestors(roots) if nodes[n].phase == BACKWARD and n not in given)

    @cached_property
    def effects(self) -> set[int]:
        """Nodes that change something outside of the graph, or the state of a random generator."""
        return {n.id for n in self.graph.nodes if n.is_random or _writes(self.fx[n.id]) or communicates(self.fx[n.id])}

    @cached_property
    def mutated(self) -> dict[int, int]:
        """``{input: the node that overwrites it}``."""
        changed = {}
        for place in sorted(self.effects):
            if _writes(self.fx[place]):
                changed[self.fx[place].args[0].meta["ackpt_id"]] = place
        return changed

    @cached_property
    def fixed(self) -> dict[int, str]:
        reasons = {}
        nodes = self.graph.nodes
        overwritten = {storage: nodes[place] for place in self.mutated for storage in nodes[place].storages}
        for node in nodes:
            if node.phase != FORWARD or node.id in self.given:
                continue
            fx = self.fx[node.id]
            if _writes(fx):
                reasons[node.id] = "it changes its argument"
            elif communicates(fx):
                reasons[node.id] = "it is a collective, which all ranks must run equally often"
            elif node.is_random and not self.graph.replays_random:
                reasons[node.id] = "its random numbers cannot be replayed by this compiler"
            elif node.is_random and fx.kwargs.get("generator") is not None:
                reasons[node.id] = "it draws from a generator of its own, whose state cannot be replayed"
            elif changed := [s for i in self.reads_again(node.id) for s in self.storages(i, True) if s in overwritten]:
                reasons[node.id] = f"it reads {overwritten[changed[0]].target}, which the forward changes"
            elif is_getitem(fx) and is_training_batch_norm(fx.args[0]) and fx.args[1] >= _RESULTS_WITHOUT_STATISTICS:
                reasons[node.id] = "it is a running statistic, which is updated once"
        return reasons

    @cached_property
    def pinned(self) -> frozenset[int]:
        """Savable storages of what cannot run again. Running statistics are none: a second run makes no others, and to
        save them must not keep what the batch norm gives beside them."""
        found = (storage for place in self.fixed for storage in self.graph.nodes[place].storages)
        producers = ((s, self.graph.storages[s].producer) for s in found if s in self.savable)
        return frozenset(s for s, producer in producers if s in self.storages(producer, again=True))

    def reads(self, place: int, again: bool = False) -> tuple[int, ...]:
        """The nodes that `place` reads; a batch norm that runs again reads no running statistics."""
        return self.reads_again(place) if again else self.graph.nodes[place].inputs

    def reads_again(self, place: int) -> tuple[int, ...]:
        if place in self._batch_norms:
            fx = self.fx[place]
            return tuple(a.meta["ackpt_id"] for a in fx.args[:3] if isinstance(a, torch.fx.Node))
        return self.graph.nodes[place].inputs

    def storages(self, place: int, again: bool = False) -> tuple[int, ...]:
        """The storages in which the result of `place` lies."""
        storages = self.graph.nodes[place].storages
        return storages[:_RESULTS_WITHOUT_STATISTICS] if again and place in self._batch_norms else storages

    @cached_property
    def born(self) -> dict[int, frozenset[int]]:
        """Storages that a node allocates; the others of its result are its arguments' (a view)."""
        found: dict[int, set[int]] = {}
        for storage in self.graph.storages:
            found.setdefault(storage.producer, set()).add(storage.id)
        return {place: frozenset(storages) for place, storages in found.items()}

    @cached_property
    def born_bytes(self) -> list[int]:
        """Bytes that a node allocates for its results, by its number."""
        return [sum(self.bytes[s] for s in self.born.get(place, ())) for place in range(len(self.graph.nodes))]

    @cached_property
    def born_again_bytes(self) -> list[int]:
        """The same in backward: a batch norm of the forward that runs again makes no statistics."""
        found = list(self.born_bytes)
        for place in self._batch_norms:
            found[place] = sum(self.bytes[s] for s in self.storages(place, again=True) if s in self.born[place])
        return found

    @cached_property
    def touched(self) -> dict[str, list[tuple[int, ...]]]:
        """By the part that runs and node: storages beside the resident ones that the node reads or writes there."""
        nodes = self.graph.nodes
        found: dict[str, list[tuple[int, ...]]] = {FORWARD: [], BACKWARD: []}
        for part, tables in found.items():
            again = [part == BACKWARD and node.phase == FORWARD for node in nodes]
            for place in range(len(nodes)):
                read = {s for i in self.reads(place, again[place]) for s in self.storages(i, again[i])}
                tables.append(tuple(sorted(read.union(self.storages(place, again[place])) - self.resident)))
        return found

    @cached_property
    def _batch_norms(self) -> set[int]:
        return {place for place, fx in self.fx.items() if is_training_batch_norm(fx)}


def facts(graph: JointGraph) -> Facts:
    """The facts of `graph`, computed once."""
    if "_facts" not in graph.__dict__:
        graph.__dict__["_facts"] = Facts(graph)
    return graph.__dict__["_facts"]


def is_training_batch_norm(node) -> bool:
    return node.target is _BATCH_NORM and node.args[5] is True


def _writes(node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def communicates(node) -> bool:
    return getattr(node.target, "namespace", "") in ("_c10d_functional", "c10d", "c10d_functional")


def is_getitem(node) -> bool:
    return node.target is operator.getitem
