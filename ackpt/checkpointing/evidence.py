"""Facts about the regions of one function, and the evidence by which small regions are compared.

``Evidence`` is what the graph of a run shows of its path; ``Subject`` stores what comparisons have shown about a
function: whether evidence suffices, and which of its calls are dead.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import types
import weakref
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn

from .dead_calls import DeadCalls, Liveness
from .guards import PLAIN_TENSORS
from .reachable import Graph
from .rng import MEMORY

#: A small region is recorded until this number of its recomputations have been compared call by call.
RECORDED_RUNS = 3
#: The bytes of the inputs and constants of a small region at most, and of the pieces in which outputs are hashed. For
#: larger ones, leaving out dead calls saves more time than the record of calls takes.
SMALL_BYTES = 1 << 18


class Evidence(NamedTuple):
    """What the graph of a run shows of its path: ``kinds``, the classes of its nodes; ``links`` between them, and
    ``ends``, the tensors at which it ends; ``order``, their sequence numbers, of which the ranks count; and ``values``,
    hashes of the bytes of the outputs. ``regions``: the paths of nested regions.

    Runs with the same evidence have the same gradients, unless a number or tensor differs and changes no bit of an
    output, for example in a branch that is multiplied by zero.
    """

    kinds: list[type]
    links: list
    ends: list
    values: list
    regions: list
    order: list[int]


def evidence_of(graph: Graph, outputs: list[torch.Tensor]) -> Evidence:
    """The `Evidence` of a run whose graph of `outputs` is `graph`, with the ids of the tensors in ``ends``."""
    kinds = list(map(type, graph.nodes))
    regions = [] if REGION_NODES.isdisjoint(kinds) else [n.region.path for n in graph.nodes if type(n) in REGION_NODES]
    return Evidence(kinds, graph.links, [*map(id, graph.ends)], list(map(_hash, outputs)), regions, graph.order)


def number_ends(evidence, starts, leaves) -> None:
    """Replace the ids of tensors in ``ends`` by numbers: of the inputs, by id, and of the leaves, from -1 downwards."""
    numbers = dict(zip(starts, itertools.count())) | dict(zip(map(id, leaves), itertools.count(-1, -1)))
    evidence.ends[:] = map(numbers.get, evidence.ends)


REGION_NODES: set[type] = set()  # the class of the nodes of regions, which have an attribute `region`


def names_of(graph: Graph) -> dict[int, str]:
    """The names of a graph's nodes, by their sequence number."""
    return {node._sequence_nr(): node.name() for node in graph.nodes}


def checksum(tensor: torch.Tensor) -> Any:
    """A number that tells two outputs apart, on the tensor's device; None for one without plain bytes."""
    if tensor.is_cpu or tensor.is_meta or type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
        return _hash(tensor)
    words = tensor.detach().contiguous().flatten().view(torch.uint8 if tensor.element_size() == 1 else torch.int16)
    return words.sum(dtype=torch.int64)


def _hash(tensor: torch.Tensor) -> int | None:
    if type(tensor) not in PLAIN_TENSORS or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    tensor = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    address, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    if tensor.nbytes <= SMALL_BYTES:
        return hash(MEMORY[address:end])
    return hash(tuple([hash(MEMORY[at : min(at + SMALL_BYTES, end)]) for at in range(address, end, SMALL_BYTES)]))


def is_same(before: Evidence, now: Evidence) -> bool:
    """Whether two runs took the same path as far as their evidence shows."""
    if before.kinds != now.kinds and node_names(before.kinds) != node_names(now.kinds):
        return False
    return before[1:5] == now[1:5] and (before.order == now.order or _ranks(before.order) == _ranks(now.order))


def node_names(kinds: list[type]) -> list[str]:
    """The names of classes of nodes, without differences that dispatch modes cause."""
    # `reshape` makes a view under a mode: ``isTensorSubclassLike`` in ``aten/src/ATen/native/TensorShape.cpp``.
    return [kind.__name__.replace("ReshapeAlias", "View") for kind in kinds]


def difference_between(before: Evidence, now: Evidence) -> str:
    """The difference between two runs, for an error."""
    names = [node_names(each.kinds) for each in (before, now)]
    if Counter(names[0]) != Counter(names[1]):
        return other_nodes(*names)
    for name, what in zip(Evidence._fields, ("operations", "arguments", "inputs", "values in its outputs", "regions")):
        if getattr(before, name) != getattr(now, name):
            return f"the same operations have other {what}"
    return "the same operations have another order"


def _ranks(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


class Subject:
    """Facts about the regions of one function or module.

    ``passed``: how many recomputations have passed a comparison of all calls, with equal `Evidence`. ``kinds``: the
    classes of their nodes. ``counts``: of the tensors that names reach. ``changes_unseen``: whether buffers change
    where no recorder sees it; None before the first run. ``dead``: the dead calls of each kind of run; ``learns``:
    whether the next run finds out its own; ``skips``: whether recomputations leave out dead calls.
    """

    def __init__(self, reference):
        self.reference, self.passed, self.kinds, self.counts = reference, 0.0, set(), set()
        self.changes_unseen: bool | None = None
        self.dead: dict[Any, DeadCalls] = {}
        self.learns = self.skips = True

    def dead_calls(self, region, inputs, leaves) -> DeadCalls | None:
        """The dead calls of a region whose first run on `inputs` was recorded, and whose graph ends at `leaves`."""
        recorder = region.recorder
        needs_grad = *region.needs_grad, *(leaf.requires_grad for leaf in leaves)
        modes = None if region.autocast is None else tuple(region.autocast.modes)
        layouts = tuple([(each.dtype, each.is_contiguous()) for each in inputs])
        key = recorder.kind, needs_grad, layouts, modes, tuple(place for place, _, _ in region.left_facts)
        for saved in recorder.dead_calls.saved if isinstance(recorder.dead_calls, Liveness) else ():
            saved.tensor = None  # hooks of FlopCounterMode refer to the graph's nodes until the garbage collection
        dead = self.dead.get(key)
        if dead is None and isinstance(recorder.dead_calls, Liveness):
            outputs = *region.output_values[: len(region.node_outputs)], *filter(torch.is_tensor, region.other_outputs)
            dead = self.dead[key] = recorder.dead_calls.dead(inputs, outputs, region.left, region.opaque)
            self.learns = False
        elif dead is None:
            self.learns = len(self.dead) < _MOST_KINDS
        return dead

    def add(self, before: Evidence | None, now: Evidence | None, is_repeatable: bool) -> None:
        """Take note of the evidence of two recorded runs with equal calls."""
        if before is None or now is None:
            return
        if not is_repeatable or any(map(is_opaque, before.kinds)) or None in before.values or not is_same(before, now):
            self.passed = -math.inf  # its values are others each time, or the evidence does not show all that it does
        self.passed += 1
        self.kinds.update(before.kinds)


_MOST_KINDS = 16  # of runs of one function
# The nodes of operations of torch, rather than of functions in Python or C++.
_NODE = re.compile(r"\w+Backward\d+|CopySlices|CopyBackwards")


def is_opaque(kind: type) -> bool:
    """Whether nodes of this class belong to functions in Python or C++, which may read any tensor."""
    return kind not in REGION_NODES and not _NODE.fullmatch(kind.__name__)


_subjects: dict[int, Subject] = {}  # by id of a function's code or of a module, until it is gone


def subject_of(function) -> Subject | None:
    """The `Subject` of a region's function; None if no weak reference to it is possible."""
    while type(function) is functools.partial:
        function = function.func
    if type(function) is types.MethodType:
        function = function.__self__ if isinstance(function.__self__, nn.Module) else function.__func__
    key = function.__code__ if type(function) is types.FunctionType else function
    place = id(key)
    if place not in _subjects and type(key).__weakrefoffset__:
        _subjects[place] = Subject(weakref.ref(key, lambda _: _subjects.pop(place, None)))
    return _subjects.get(place)


def other_nodes(before, now) -> str:
    """The names that only one of two graphs has, for an error."""
    missing, extra = Counter(before) - Counter(now), Counter(now) - Counter(before)
    return f"only the forward has {', '.join(missing) or 'none'}, only the recompute {', '.join(extra) or 'none'}"
