"""Turn a schedule into the two modules that run it, and prove that they allocate the simulated bytes.

Every step except a free becomes one line of a `Listing`, in the schedule's order, which reads the latest run of its
arguments. The modules drop each value after its last use, so frees need no code. Both listings are then run on fake
tensors (`proof`): the live bytes after every operation must equal the simulated ones.
"""

import contextlib
import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from ackpt.planner.capture.dynamic_sizes import DynamicModule, Symbols, expression, is_size
from ackpt.planner.capture.in_place import AUTOCAST
from ackpt.planner.capture.joint_graph import FORWARD, JointGraph, is_training_batch_norm
from ackpt.planner.capture.operations import tensors_of
from ackpt.planner.capture.patches.kernels import true_results
from ackpt.planner.schedule.simulator import follow, rng_state_bytes

from . import added_operations
from .added_operations import run_again, run_and_save, run_as_called
from .listing import Line, Listing, mapped
from .proof import RewriteError, fake_results, live_after, storages_in
from .schedule import COMPUTE, FREE, OFFLOAD, PACK, PREFETCH, UNPACK, Schedule, Step

_PACK, _UNPACK = torch.ops.ackpt_graph.pack_bits.default, torch.ops.ackpt_graph.unpack_bits.default
_BATCH_NORM_AGAIN = torch.ops.aten._native_batch_norm_legit.no_stats


@dataclass(frozen=True)
class Rewritten:
    """The modules that run a schedule, made of their listings on first use, which takes time.

    ``forward`` takes the inputs of the graph and returns the model's outputs, followed by what it saves for backward;
    ``backward`` takes the latter and the gradients of the outputs, and returns the gradients. Both take one list and
    empty it, so that every argument can be freed after its last use. With dynamic dimensions, ``forward`` returns their
    ``num_sizes`` sizes last, and ``backward`` takes them first. ``root`` has the tensors that both refer to.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.graph import lower, rewrite
        >>> graph = ackpt.trace(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8))
        >>> modules = rewrite(graph, lower(graph, ()))
        >>> isinstance(modules.forward, torch.fx.GraphModule), modules.num_outputs
        (True, 1)
    """

    root: fx.GraphModule
    forward_listing: Listing
    backward_listing: Listing
    num_outputs: int
    num_sizes: int = 0

    @cached_property
    def forward(self) -> fx.GraphModule:
        return fx.GraphModule(self.root, self.forward_listing.graph())

    @cached_property
    def backward(self) -> fx.GraphModule:
        return fx.GraphModule(self.root, self.backward_listing.graph())


def rewrite(graph: JointGraph, schedule: Schedule, dynamic: Any = None) -> Rewritten:
    """The forward and backward modules of `schedule`.

    `dynamic`: for internal use, the module of a capture with dynamic dimensions of which `graph` is an instance. The
    modules of forward and backward then serve all of its sizes.

    Raises:
        ScheduleError: if the schedule was made for another graph, or cannot run.
        RewriteError: if the modules allocate other bytes than `simulate` says, at any operation.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.graph import lower, rewrite
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> modules = rewrite(graph, lower(graph, ()))
        >>> torch.ops.aten.tanh.default in [node.target for node in modules.backward.graph.nodes]
        True
    """
    expected = follow(graph, schedule, [0] * len(graph.nodes)).after
    rewritten = _rewritten(graph, schedule, dynamic)
    _prove(graph, rewritten, expected)
    return rewritten


def _rewritten(graph: JointGraph, schedule: Schedule, dynamic: DynamicModule | None) -> Rewritten:
    analysis = graph.analysis
    fx_nodes = analysis.fx if dynamic is None else dynamic.fx
    fw = _Builder(analysis, fx_nodes, again=False)
    for node_id in analysis.placeholders:
        if node_id not in analysis.tangents:
            fw.placeholder(node_id)
    given = [] if dynamic is None else [fw.size_of(node_id, dim) for node_id, dim in dynamic.sources]
    fw.sizes = None if dynamic is None else _Sizes(fw.listing, dynamic.symbols, given)
    replayed = set(schedule.replayed)
    for step in schedule.forward:
        fw.run(step, saves_state=step.kind == COMPUTE and step.id in replayed)
    inputs = _inputs_needed(analysis, schedule)
    passed = [*inputs, *(analysis.base_of[s] for s in schedule.saved)]
    outputs = [None if node_id is None else fw.value(node_id) for node_id in analysis.outputs]
    states = [fw.states[node_id] for node_id in schedule.replayed]
    hosts = [fw.hosts[storage] for storage in schedule.offloaded]
    bits = [fw.bits[storage] for storage in schedule.packed]
    fw.output([*outputs, *(fw.value(node_id) for node_id in passed), *hosts, *bits, *states, *given])

    bw = _Builder(analysis, fx_nodes, again=True)
    # AOTAutograd's convention: the forward returns sizes last, the backward receives them first.
    received = [bw.size_input(size) for size in given]
    for node_id in passed:
        bw.placeholder(node_id)
    for storage in schedule.offloaded:
        bw.hosts[storage] = bw.given(f"host_{analysis.fx[analysis.base_of[storage]].name}", {"val": None})
    for storage in schedule.packed:
        bw.bits[storage] = bw.given(f"bits_{analysis.fx[analysis.base_of[storage]].name}", {"val": None})
    for node_id in schedule.replayed:
        bw.states[node_id] = bw.given(f"rng_state_{analysis.fx[node_id].name}", {"val": None})
    for node_id in analysis.tangents:
        bw.placeholder(node_id)
    bw.sizes = None if dynamic is None else _Sizes(bw.listing, dynamic.symbols, received)
    for step in schedule.backward:
        bw.run(step)
    bw.output([None if node_id is None else bw.value(node_id) for node_id in analysis.bw_outputs])
    root = graph.module if dynamic is None else dynamic.module
    return Rewritten(root, fw.finished(), bw.finished(), len(outputs), len(given))


def _prove(graph: JointGraph, rewritten: Rewritten, expected: list[tuple[int, int]]) -> None:
    """Run the modules on fake tensors and compare their live bytes with the simulated ones, operation by operation."""
    analysis, results = graph.analysis, fake_results(graph)
    hosted: set[int] = set()
    fake_mode = detect_fake_mode([node.meta.get("val") for node in graph.module.graph.nodes])
    state = rng_state_bytes(graph)

    def values(node_ids):
        return [results.given(node_id, analysis.fx[node_id].meta["val"]) for node_id in node_ids]

    forward, backward = ((rewritten.root, half) for half in (rewritten.forward_listing, rewritten.backward_listing))
    with fake_mode or contextlib.nullcontext(), true_results(fake_mode):
        inputs = values(node_id for node_id in analysis.placeholders if node_id not in analysis.tangents)
        input_storages = storages_in(inputs)
        live, passed = live_after(*forward, results, inputs, input_storages, 0, state, hosted)
        tangents = values(analysis.tangents)
        callers = [value for node_id, value in zip(analysis.tangents, tangents) if node_id not in analysis.restrided]
        passed, saved = passed[: rewritten.num_outputs], passed[rewritten.num_outputs :]
        saved = [*saved[len(saved) - rewritten.num_sizes :], *saved[: len(saved) - rewritten.num_sizes]]
        nodes = [() if node_id is None else graph.nodes[node_id].storages for node_id in analysis.outputs]
        passed = [value for value, lies_in in zip(passed, nodes) if analysis.dropped.isdisjoint(lies_in)]
        # What the caller holds all through backward: outputs and the gradients that come in.
        held = storages_in([*passed, *callers])
        held = {storage: size for storage, size in held.items() if storage not in input_storages}
        given, others = analysis.incoming_bytes + sum(held.values()), input_storages.keys() | held.keys()
        live += live_after(*backward, results, [*saved, *tangents], others, given, state, hosted)[0]
    if live != expected:
        at = next((i for i, (a, b) in enumerate(zip(live, expected)) if a != b), min(len(live), len(expected)))
        raise RewriteError(
            f"operation {at} of the rewritten step leaves {live[at : at + 1]} bytes live (on the device, in host "
            f"memory), but {expected[at : at + 1]} were simulated. This is a bug in ackpt: please report it with the "
            "model."
        )


def _inputs_needed(analysis, schedule) -> list[int]:
    """Parameters, buffers and inputs that the backward reads."""
    nodes = analysis.graph.nodes
    read = set()
    for step in schedule.backward:
        if step.kind == COMPUTE:
            read.update(analysis.reads(step.id, nodes[step.id].phase == FORWARD))
    read.update(node_id for node_id in analysis.bw_outputs if node_id is not None)
    return [node_id for node_id in analysis.placeholders if node_id in read and node_id not in analysis.tangents]


class _Builder:
    """Builds one listing. ``env``: the latest run of every node; ``hosts``: copies of storages in host memory;
    ``bits``: of packed storages; ``moving``: by storage, the line that started its copy and the line that is copied;
    ``sizes``: the lines of sizes that are expressions."""

    def __init__(self, analysis, fx_nodes, again: bool):
        self.analysis = analysis
        self.fx = fx_nodes
        self.sizes: Any = None
        self.again = again
        self.listing = Listing()
        self.env: dict[int, Line] = {}
        self.states: dict[int, Line] = {}
        self.hosts: dict[int, Line] = {}
        self.bits: dict[int, Line] = {}
        self.moving: dict[int, tuple[Line, Line]] = {}

    def placeholder(self, node_id: int):
        self.env[node_id] = self.given(self.fx[node_id].name, self.fx[node_id].meta)

    def given(self, name: str, meta) -> Line:
        return self.listing.add("placeholder", name, name=name, meta=meta)

    def size_of(self, node_id: int, dim: int) -> Line:
        """A dimension of an input, as a line."""
        meta = {"val": self.fx[node_id].meta["val"].shape[dim]}
        line = self._added(torch.ops.aten.sym_size.int, (self.env[node_id], dim), meta=meta)
        line.name, line.is_size = f"size_{node_id}_{dim}", True
        return line

    def size_input(self, size: Line) -> Line:
        line = self.given(size.name, size.meta)
        line.is_size = True
        return line

    def value(self, node_id: int) -> Line:
        node = self.fx[node_id]
        if node_id not in self.env and node.op == "get_attr":
            self.env[node_id] = self.listing.add(node.op, node.target, name=node.name, meta=node.meta)
        return self.env[node_id]

    def run(self, step: Step, saves_state: bool = False):
        if step.kind == COMPUTE:
            self.compute(step.id, saves_state)
        elif step.kind == PACK:
            self.bits[step.id] = self._added(_PACK, (self.value(self.analysis.base_of[step.id]),))
        elif step.kind == UNPACK:
            self._unpack(step.id)
        elif step.kind != FREE:
            self._copy(*step)

    def compute(self, node_id: int, saves_state: bool = False):
        original = self.fx[node_id]
        target, given = original.target, original.args
        if autocast := original.meta.get(AUTOCAST):
            dtypes = tuple(value.dtype for value in tensors_of(original))
            about = self.analysis.graph.nodes[node_id].module, autocast, dtypes
            target, given = run_as_called, (target, *about, *given)
        is_recomputed = self.again and self.analysis.graph.nodes[node_id].phase == FORWARD
        if is_recomputed and is_training_batch_norm(original):
            target, given = _BATCH_NORM_AGAIN, (*original.args[:3], *original.args[5:])
        args, kwargs = mapped((given, original.kwargs), self._argument)
        if is_recomputed and node_id in self.states:
            line = self._added(run_again, (self.states[node_id], target, *args), kwargs, original.meta)
        elif saves_state:
            both = self._added(run_and_save, (target, *args), kwargs)
            self.states[node_id] = self._added(operator.getitem, (both, 0))
            line = self._added(operator.getitem, (both, 1), meta=original.meta)
        else:
            name = original.name if target is original.target else ""
            line = self._added(target, args, kwargs, original.meta, name)
        line.is_recomputed = is_recomputed
        self.env[node_id] = line

    def output(self, values):
        self.listing.add("output", "output", (tuple(values),))

    def finished(self) -> Listing:
        if self.sizes is not None:
            self.sizes.insert()
        return self.listing

    def _added(self, target, args, kwargs=None, meta=None, name="") -> Line:
        return self.listing.add("call_function", target, args, kwargs, name, meta)

    def _copy(self, kind: str, storage: int):
        base = self.analysis.base_of[storage]
        if kind == OFFLOAD:
            source = self.value(base)
            self.moving[storage] = self._added(added_operations.offload, (source,)), source
        elif kind == PREFETCH:
            source, like = self.hosts[storage], self.fx[base].meta["val"]
            shape, strides, (offset,) = map(self._numbers, (like.shape, like.stride(), (like.storage_offset(),)))
            layout = (like.device, like.dtype, shape, strides, offset)
            self.moving[storage] = self._added(added_operations.prefetch, (source, *layout)), source
        else:
            moved, source = self.moving.pop(storage)
            if moved.target is added_operations.offload:
                self.hosts[storage] = self._added(added_operations.wait, (moved, source))
            else:
                self.env[base] = self._added(added_operations.wait, (moved, source), meta=self.fx[base].meta)

    def _unpack(self, storage: int):
        base, mask = self.analysis.base_of[storage], self.analysis.masks[storage]
        value = self.fx[base].meta["val"]
        layout = self._numbers(value.shape), self._numbers(value.stride()), mask.dtype, mask.one
        self.env[base] = self._added(_UNPACK, (self.bits[storage], *layout), meta=self.fx[base].meta)

    def _argument(self, node: fx.Node) -> Any:
        if not is_size(node):
            return self.value(node.meta["ackpt_id"])
        size = node.meta["val"]
        return int(size) if self.sizes is None else self.sizes.line(size)

    def _numbers(self, sizes) -> tuple[Any, ...]:
        return tuple(size if isinstance(size, int) else self.sizes.line(size) for size in sizes)


class _Sizes:
    """The lines of the sizes that are expressions, in one listing: one line computes them all."""

    def __init__(self, listing: Listing, symbols: Symbols, given: list[Line]):
        self.listing, self.symbols, self.place = listing, symbols, len(listing.lines)
        self.expressions: dict[Any, Line] = {}
        self.all = Line("call_function", None, tuple(given))
        self.all.is_size = True

    def line(self, size) -> Line:
        """The line of a size, such as a SymInt."""
        key = expression(size)
        if key not in self.expressions:
            line = Line("call_function", operator.getitem, (self.all, len(self.expressions)), meta={"val": size})
            line.is_size = True
            self.expressions[key] = line
        return self.expressions[key]

    def insert(self) -> None:
        """Insert the lines, once all sizes are known, where this object was made."""
        if self.expressions:
            self.all.target = self.symbols.function(tuple(self.expressions))
            self.listing.lines[self.place : self.place] = [self.all, *self.expressions.values()]
