"""Build the autograd function that runs a captured step with a schedule, and check its backward when it begins.

``node`` is the autograd node of the step, from `backward_node`. Most functions on it are or return a `Check`; those of
one step run in one hook, `before_backward`. `leave_undefined` leaves gradients undefined where eager mode does.
"""

import contextvars
import copy
import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.utils import GmWrapper
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors
from torch.fx._lazy_graph_module import _LazyGraphModule

from ackpt.checkpointing.guards import BACKWARD_FIRST, Watch
from ackpt.core.autograd_state import version
from ackpt.core.errors import CheckpointError, TraceError
from ackpt.core.progress import stage
from ackpt.metering.run_alone import in_new_thread
from ackpt.planner.capture.aot import Capture
from ackpt.planner.capture.chunked_head import WITHHELD
from ackpt.planner.capture.dynamic_sizes import DynamicModule
from ackpt.planner.capture.in_place import AUTOCAST
from ackpt.planner.capture.joint_graph import FORWARD, Analysis, JointGraph, Node, once_per_graph
from ackpt.planner.capture.patches.eager_settings import like_eager
from ackpt.planner.schedule.listing import Line, Listing, boxed, mapped
from ackpt.planner.schedule.rewriting import rewrite
from ackpt.planner.schedule.schedule import COMPUTE, Schedule

ARGUMENT = "an argument"  # what errors call an input that is neither a parameter nor a buffer
Check = Callable[[Sequence[torch.Tensor | None]], None]  # raises an error, given the gradients of the outputs
_ALWAYS = -1  # represents an output that backward always reaches
SAVED, DROPPED, KEPT = "saved", "dropped", "kept"  # what happens to an output, see `fates_of_outputs`
Strides = Mapping[int, Sequence[int]]
# Torch: the first call runs in a dispatch mode, which switches autocast off (`_AnalyzeCustomOpInputOutputMode`).
_CHECK = "check_custom_op_aliasing"


def compiled_schedule(
    captured: Capture, graph: JointGraph, schedule: Schedule, dynamic: DynamicModule | None = None
) -> Callable[[Sequence[torch.Tensor], Strides], list[Any]]:
    """A function of the step's inputs, and of the strides of its outputs' gradients, that runs `schedule`.

    `captured` may be compiled several times. With dynamic dimensions, `dynamic` is its module and `graph` an instance.
    """
    functions: list[Callable[..., Any]] = []

    def partition(joint, inputs, *, num_fwd_outputs, **_):
        rewritten = rewrite(graph, schedule, dynamic)  # here, because the user's autocast is off
        if num_fwd_outputs != rewritten.num_outputs:
            raise TraceError(f"the graph returns {rewritten.num_outputs} values, but torch expects {num_fwd_outputs}")
        halves = rewritten.forward_listing, rewritten.backward_listing
        outlines = [_outline(half) for half in halves]
        run = boxed if graph.replays_random else ByInductor
        functions.extend(run(rewritten.root, half) for half in halves)
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
    saved_outputs = [at for at, storages in _storages_of_outputs(graph) if not storages.isdisjoint(schedule.saved)]
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


class ByInductor:
    """A half of a step, as a function of one list that it empties; Inductor compiles it in the first call."""

    _boxed_call = True

    def __init__(self, root: torch.nn.Module, half: Listing):
        graph = half.graph()
        for view in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            for node in graph.find_nodes(op="call_function", target=view):
                node.target = torch.ops.aten.reshape.default  # Inductor's strides may differ from eager's
        self._module, self._run = fx.GraphModule(root, graph), None

    def __call__(self, values: list[Any]) -> list[Any]:
        if self._run is None:
            # In another thread no mode of autograd or AOTAutograd is active; the user's settings are in the context.
            settings = contextvars.copy_context()
            self._run = in_new_thread(lambda: settings.run(self._compiled, values))
        with torch.no_grad():
            return list(self._run(values))

    @torch.no_grad()
    def _compiled(self, values: list[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        module: Any = GmWrapper(self._module, list)
        # Random numbers are eager's; operations are recomputed where the plan has them.
        with compile_lock:
            return compile_fx(module, values, config_patches={"fallback_random": True, "reorder_for_locality": False})


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


def _read_later(graph: JointGraph, schedule: Schedule) -> tuple[tuple[int, str], ...]:
    """(index, name for errors) of the step's inputs that its backward reads, so that they must not change before it."""
    analysis = graph.analysis
    runs = (step.id for step in schedule.backward if step.kind == COMPUTE)
    sources = {source for node in runs for source in analysis.backward_reads[node]}
    read = {storage for source in sources for storage in graph.nodes[source].storages}
    inputs = [node for node in map(graph.nodes.__getitem__, analysis.placeholders) if node.phase == FORWARD]
    return tuple((place, _called(graph, node)) for place, node in enumerate(inputs) if read & set(node.storages))


def _storages_of_outputs(graph: JointGraph) -> list[tuple[int, set[int]]]:
    """The index and the storages of every output that is a tensor."""
    described = graph.analysis.fx[len(graph.nodes)].meta["desc"]
    returned = [(what, node) for what, node in zip(described, graph.analysis.outputs) if node is not None]
    return [(what.idx, {*graph.nodes[node].storages}) for what, node in returned if hasattr(what, "idx")]


def _called(graph: JointGraph, node: Node) -> str:
    name = getattr(graph.analysis.fx[node.id].meta["desc"], "target", None)
    return ARGUMENT if name is None else f"{graph.storages[node.storages[0]].category} {name!r}"


def backward_node(outputs) -> Any:
    """The autograd node of the step that returned `outputs`, which is one node; None if no output has it."""
    nodes = (value.grad_fn for value in outputs if isinstance(value, torch.Tensor))
    return next((node for node in nodes if type(node).__name__ == "CompiledFunctionBackward"), None)


def before_backward(node, checks: Sequence[Check]) -> None:
    """Run `checks` when the backward of `node` begins."""

    def run(gradients) -> None:
        for check in checks:
            check(gradients)

    node.register_prehook(run)


@once_per_graph
def depends_on(graph: JointGraph) -> tuple[frozenset[int] | None, ...]:
    """For every input of the step, the outputs on whose gradients its own depends; None if it has none.

    A gradient that is always zero, such as that of `torch.copysign` for the sign, depends on all outputs.
    """
    analysis = graph.analysis
    outputs_of: dict[int, frozenset[int]] = {}
    for node in graph.nodes:
        # A tangent that is not that of one output, such as of the base of several outputs, always has a gradient.
        output = getattr(getattr(analysis.fx[node.id].meta.get("desc"), "output", None), "idx", _ALWAYS)
        outputs_of[node.id] = frozenset({output} if node.id in analysis.tangents else ()).union(
            *(outputs_of[i] for i in node.inputs)
        )
    everything = frozenset().union(*(outputs_of[node_id] for node_id in analysis.bw_outputs if node_id is not None))
    return tuple(None if node_id is None else outputs_of[node_id] or everything for node_id in analysis.bw_outputs)


def leave_undefined(node, outputs, depends) -> None:
    """Return no gradient where eager returns none: for inputs that only influence outputs without a gradient.

    Torch passes zeros for such outputs, so parameters would get zero gradients, which an optimizer with weight decay or
    momentum applies. ``outputs``: what the step returns; ``depends``: from `depends_on`.
    """
    everything = frozenset().union(*filter(None, depends))
    if all(needs is None or needs == everything for needs in depends):
        return
    numbers = _numbers(node, outputs)

    def undefined(gradients, incoming):
        reached = {_ALWAYS, *(at for at, number in numbers.items() if incoming[number] is not None)}
        return tuple(g if needs is None or needs & reached else None for g, needs in zip(gradients, depends))

    node.register_hook(undefined)


def _numbers(node, outputs) -> dict[int, int]:
    """The number that autograd gives each of `outputs`, by its index."""
    tensors = {at: value for at, value in enumerate(outputs) if isinstance(value, torch.Tensor)}
    return {at: value.output_nr for at, value in tensors.items() if value.grad_fn is node}


def refuse_other_modes(gradients) -> None:
    """A `Check` that backward builds no graph and does not run in autocast."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: a planned step cannot be differentiated twice, because its backward builds no "
            "graph. Call the model itself for such a step."
        )
    devices = {gradient.device.type for gradient in gradients if isinstance(gradient, torch.Tensor)}
    if any(map(torch.is_autocast_enabled, devices)):
        raise CheckpointError(
            "backward runs inside torch.autocast, where eager mode also casts the operations of the backward pass, "
            "and a planned step does not: call backward() after the autocast region, as PyTorch recommends"
        )


def gradient_strides(analysis: Analysis, nodes: Mapping[int, fx.Node] | None = None) -> dict[int, tuple[Any, ...]]:
    """By output number, the strides with which its gradient was captured; torch copies all other gradients anyway.

    `nodes`: those of a module whose sizes are expressions, by the ids of the graph.
    """
    nodes = analysis.fx if nodes is None else nodes
    strides = {}
    for node_id in analysis.tangents:
        output: Any = getattr(nodes[node_id].meta["desc"], "output", None)
        if node_id not in analysis.restrided and type(output).__name__ == "PlainAOTOutput":
            strides[output.idx] = nodes[node_id].meta["val"].stride()
    return strides


def gradients_as_planned(node, outputs, strides: Mapping[int, Sequence[int]]) -> Check:
    """Refuse gradients that arrive in a different memory layout than the captured one.

    Torch would copy them into the captured layout. The copy would exceed the plan's peak, and sums over it would round
    differently than in eager. ``outputs``: what the step returned; ``strides``: from `gradient_strides`.
    """
    numbers = _numbers(node, outputs)
    planned = {numbers[at]: wanted for at, wanted in strides.items() if at in numbers}

    def check(gradients) -> None:
        for number, wanted in planned.items():
            gradient = gradients[number]
            if gradient is not None and not _in_one_order(gradient, wanted):
                raise RuntimeError(
                    f"the gradient of an output of shape {list(gradient.shape)} has the strides {gradient.stride()}, "
                    f"but this step was planned for {wanted}: a copy would exceed the plan's peak and change the "
                    "last bits. Compute the loss in the model, or let it return output.contiguous()."
                )

    return check


def _in_one_order(gradient, wanted) -> bool:
    """Whether the strides are equal where they matter: not in dimensions of size 1 or expanded ones."""
    return all(
        size <= 1 or not its or its == stride for size, its, stride in zip(gradient.shape, gradient.stride(), wanted)
    )


def unchanged_until_backward(inputs, read) -> Check:
    """Raise an error that names an input of the step if `Watch` finds that it changed between forward and backward.

    ``read``: index and description of the inputs that backward reads.
    """
    # Arguments may be freed early in backward.
    items = [weakref.ref(inputs[index]) if description == ARGUMENT else inputs[index] for index, description in read]
    watch = Watch(items, [description for _, description in read])

    def check(gradients) -> None:
        for tensor, description, how in watch.changes():
            if how == "changed":  # a frozen one gets no gradient, as in eager mode
                raise CheckpointError(
                    f"{description} of shape {list(tensor.shape)} was changed between the forward of this planned step "
                    f"and its backward, which reads it. {BACKWARD_FIRST}"
                )

    return check


def unchanged_outputs(outputs, places: Sequence[int]) -> Check:
    """Raise an error if backward reads an output that was changed in place, which torch does not detect for all views.

    `places`: indices of the outputs whose memory backward reads.
    """
    tensors = [(at, outputs[at]) for at in places if isinstance(outputs[at], torch.Tensor)]
    held = [(at, tensor.detach(), version(tensor)) for at, tensor in tensors]

    def check(gradients) -> None:
        while held:  # the memory must be free after its last use in backward
            at, tensor, before = held.pop()
            if version(tensor) != before:
                raise CheckpointError(
                    f"output {at} of shape {list(tensor.shape)} was changed in place between the forward of this "
                    "planned step and its backward, which reads it. Change a copy, as in output.clone()."
                )

    return check
