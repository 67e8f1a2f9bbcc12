"""Build the autograd function that runs a captured step with a schedule."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors
from torch.fx._lazy_graph_module import _LazyGraphModule

from ackpt.core.errors import TraceError
from ackpt.core.progress import stage
from ackpt.planner.capture.aot import Capture
from ackpt.planner.capture.chunked_head import WITHHELD
from ackpt.planner.capture.dynamic_sizes import DynamicModule
from ackpt.planner.capture.in_place import AUTOCAST
from ackpt.planner.capture.joint_graph import FORWARD, JointGraph, Node
from ackpt.planner.capture.patches.eager_settings import like_eager
from ackpt.planner.schedule.listing import Line, Listing, boxed, mapped
from ackpt.planner.schedule.rewriting import Rewritten, rewrite
from ackpt.planner.schedule.schedule import COMPUTE, Schedule

from .backward_checks import (
    ARGUMENT,
    backward_node,
    before_backward,
    depends_on,
    gradients_as_planned,
    leave_undefined,
    refuse_other_modes,
    unchanged_outputs,
    unchanged_until_backward,
)
from .uncovered import DROPPED, KEPT, SAVED

Strides = Mapping[int, Sequence[int]]
# Torch: the first call runs in a dispatch mode, which switches autocast off (`_AnalyzeCustomOpInputOutputMode`).
_CHECK = "check_custom_op_aliasing"


def compiled_schedule(
    captured: Capture, graph: JointGraph, schedule: Schedule, dynamic: DynamicModule | None = None
) -> Callable[[Sequence[torch.Tensor], Strides], list[Any]]:
    """A function of the step's inputs, and of the strides of its outputs' gradients, that runs `schedule`.

    Args:
        captured: the step; it may be compiled several times.
        graph: its graph; with dynamic dimensions, an instance of it.
        schedule: of that graph.
        dynamic: the module of a capture with dynamic dimensions.
    """
    functions: list[Callable[..., Any]] = []

    def partition(joint, inputs, *, num_fwd_outputs, **_):
        rewritten = _rewritten(graph, schedule, num_fwd_outputs, dynamic)
        halves = rewritten.forward_listing, rewritten.backward_listing
        outlines = [_outline(half) for half in halves]
        functions.extend(boxed(rewritten.root, half) for half in halves)
        return outlines

    stage("compiling the schedule")
    with like_eager(None if dynamic is None else dynamic.fake_mode):
        run = aot_compile_joint_with_descriptors(
            _fresh(captured.joint),
            partition_fn=partition,
            fw_compiler=lambda gm, example_inputs: functions[0],
            bw_compiler=lambda gm, example_inputs: functions[1],
        ).__wrapped__  # without the pytrees of all inputs
    if any(AUTOCAST in node.meta for node in graph.module.graph.nodes) and hasattr(functorch_config, _CHECK):
        run = functorch_config.patch(_CHECK, False)(run)
    depends, read = depends_on(graph), _read_later(graph, schedule)
    saved_outputs = _saved_outputs(graph, schedule)
    returned = {info.base_idx for info in captured.joint._aot_state.fw_metadata.output_info}
    # Hooks on the gradient accumulators of unused parameters would run, which eager does not call.
    unused = [place for place, needs in enumerate(depends) if needs is None and place not in returned]

    def run_step(inputs, strides: Strides) -> list[Any]:
        differentiated = list(inputs)
        for place in unused:
            if isinstance(inputs[place], torch.Tensor) and inputs[place].requires_grad:
                differentiated[place] = inputs[place].detach()
        outputs = run(differentiated)
        if (node := backward_node(outputs)) is not None:
            checks = [refuse_other_modes, gradients_as_planned(node, outputs, strides)]
            checks += [unchanged_until_backward(inputs, read), unchanged_outputs(outputs, saved_outputs)]
            before_backward(node, checks)
            leave_undefined(node, outputs, depends)
        return outputs

    return run_step


def fates_of_outputs(graph: JointGraph, schedule: Schedule) -> dict[int, str]:
    """By index, what happens to an output that is no input: backward reads it, or the caller drops or keeps it."""
    analysis, saved = graph.analysis, set(schedule.saved)
    dropped = set().union(*analysis.dropped_outputs.values())
    given = analysis.resident | analysis.dropped - dropped  # also what is copied into an input
    return {
        at: SAVED if storages & saved else DROPPED if storages & dropped else KEPT
        for at, storages in _storages_of_outputs(graph)
        if not storages & given
    }


def withheld(graph: JointGraph) -> dict[int, tuple[tuple[int, ...], torch.dtype]]:
    """By index, shape and dtype of the outputs that are not computed because the head runs in chunks."""
    described = graph.analysis.fx[len(graph.nodes)].meta["desc"]
    metas = [{} if node is None else graph.analysis.fx[node].meta for node in graph.analysis.outputs]
    given = [(what.idx, meta) for what, meta in zip(described, metas) if WITHHELD in meta]
    return {at: (meta[WITHHELD], meta["val"].dtype) for at, meta in given}


class _Outline(_LazyGraphModule):
    """A module that never runs. AOTAutograd copies that of the backward, to compile it later; one copy is enough."""

    def __deepcopy__(self, memo):
        return self


def _outline(listing: Listing) -> fx.GraphModule:
    """The inputs and outputs of `listing`, all that AOTAutograd looks at; it never runs, so it needs no code."""
    made: dict[Line, Line] = {}

    def value(line: Line) -> Line:
        if line not in made:
            made[line] = line if line.op == "placeholder" else Line("call_function", print, meta=line.meta)
        return made[line]

    outputs = mapped(listing.output.args, value)
    inputs = listing.placeholders
    others = (line for line in made.values() if line.op != "placeholder")
    return _Outline({}, Listing([*inputs, *others, Line("output", "output", outputs)]).graph())


def _fresh(joint):
    """A copy of torch's joint graph whose state one compilation may change."""
    joint = copy.copy(joint)
    state, captured = copy.copy(joint._aot_state), copy.copy(joint._aot_graph_capture)
    state.aot_config = dataclasses.replace(state.aot_config, enable_log=False)  # a fifth of the time
    state.fw_metadata = copy.copy(state.fw_metadata)
    state.fw_metadata.bw_donated_idxs = []  # backward may run again (retain_graph)
    state.fw_metadata.dynamic_saved_tensors_idxs = {}
    captured.wrappers = [copy.copy(wrapper) for wrapper in captured.wrappers]
    captured.graph_module = fx.GraphModule({}, fx.Graph())  # torch's passes through it take time
    joint._aot_state, joint._aot_graph_capture = state, captured
    return joint


def partitioner(graph: JointGraph, schedule: Schedule):
    """AOTAutograd's ``partition_fn`` that splits `graph` as `schedule` says."""

    def partition(joint, inputs, *, num_fwd_outputs, **_):
        rewritten = _rewritten(graph, schedule, num_fwd_outputs)
        return rewritten.forward, rewritten.backward

    return partition


def _rewritten(
    graph: JointGraph, schedule: Schedule, num_outputs: int, dynamic: DynamicModule | None = None
) -> Rewritten:
    """The modules of `schedule`; to be called in a ``partition_fn``, where the user's autocast is off."""
    rewritten = rewrite(graph, schedule, dynamic)
    if num_outputs != rewritten.num_outputs:
        raise TraceError(f"the graph returns {rewritten.num_outputs} values, but torch expects {num_outputs}")
    return rewritten


def _read_later(graph: JointGraph, schedule: Schedule) -> tuple[tuple[int, str], ...]:
    """(index, name for errors) of the step's inputs that its backward reads, so that they must not change before it."""
    analysis = graph.analysis
    runs = (step.id for step in schedule.backward if step.kind == COMPUTE)
    sources = {source for node in runs for source in analysis.backward_reads[node]}
    read = {storage for source in sources for storage in graph.nodes[source].storages}
    inputs = [node for node in map(graph.nodes.__getitem__, analysis.placeholders) if node.phase == FORWARD]
    return tuple((place, _called(graph, node)) for place, node in enumerate(inputs) if read & set(node.storages))


def _saved_outputs(graph: JointGraph, schedule: Schedule) -> tuple[int, ...]:
    """Indices of the outputs whose memory backward reads."""
    saved = set(schedule.saved)
    return tuple(at for at, storages in _storages_of_outputs(graph) if storages & saved)


def _storages_of_outputs(graph: JointGraph) -> list[tuple[int, set[int]]]:
    """The index and the storages of every output that is a tensor."""
    described = graph.analysis.fx[len(graph.nodes)].meta["desc"]
    returned = [(what, node) for what, node in zip(described, graph.analysis.outputs) if node is not None]
    return [(what.idx, {*graph.nodes[node].storages}) for what, node in returned if hasattr(what, "idx")]


def _called(graph: JointGraph, node: Node) -> str:
    name = getattr(graph.analysis.fx[node.id].meta["desc"], "target", None)
    return ARGUMENT if name is None else f"{graph.storages[node.storages[0]].category} {name!r}"
