"""The backend ``"ackpt"`` of ``torch.compile``: ``torch.compile(model, backend="ackpt", options={"budget": ...})``.

Without Inductor, the model is not given to Dynamo: `without_dynamo` runs it as a `PlannedStep`, which serves all sizes.

With ``compiler="inductor"``, Dynamo captures the model, the plan goes through Inductor's partitioner hook, and Inductor
compiles both halves, for every shape separately. It fuses and reorders operations, so the peak is not exactly the
simulated one. It draws its own random numbers, so results of random operations are saved, never recomputed.

Before torch 2.13 Dynamo loses gradients of some autograd.Functions. This module refuses one that returns a tensor which
it changed in place. It cannot recognize one that is called with the same tensor twice, or that changes its input and
whose result is unused. Without Inductor, these cases are right, too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import BufferAOTInput, GradAOTOutput, ParamAOTInput
from torch._guards import CompileContext, TracingContext, detect_fake_mode
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_leaves

from ackpt.core.budget import is_share
from ackpt.core.errors import BudgetError, TraceError
from ackpt.planner.capture.inspection.outside_values import warn_of_checkpoints
from ackpt.planner.capture.outputs import no_gradient, without_gradient
from ackpt.planner.capture.patches.eager_settings import like_eager
from ackpt.planner.capture.patches.python_kernels import cast_once, is_weight
from ackpt.planner.capture.tracing import described_graph, prepared
from ackpt.planner.choose import check_runs, default_profile, plan_by_policy
from ackpt.planner.costs.profiles import default_rates, fused
from ackpt.planner.request import Request
from ackpt.planner.step.compiled_schedule import (
    backward_node,
    before_backward,
    depends_on,
    gradient_strides,
    gradients_as_planned,
    leave_undefined,
    refuse_other_modes,
    rewritten_for,
)

from .dynamo_calls import check_compiled_here, checked, install, runs_graph

_CHECKPOINT: Any = torch.ops.higher_order.tag_activation_checkpoint
_FUNCTION: Any = torch.ops.higher_order.autograd_function_apply


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend ``"ackpt"`` of ``torch.compile``: training steps run as planned; evaluation runs the model itself.

    ``torch.compile(model, backend="ackpt", options=...)`` and ``model.compile(...)`` use it by its name. A function
    that contains models, such as one that computes a loss, may take the place of the model.

    Args:
        gm: the graph that Dynamo has captured, for the compiler ``"inductor"``; it must be the complete model.
        example_inputs: fake tensors.
        options: ``budget``, ``policy`` and the options of the policy, as in `ackpt.plan`; ``differentiate``,
            ``device_profile``, ``outputs``, ``optimizer``, ``accumulation`` and ``cache``, as in `ackpt.compile`;
            ``on_plan``, a function that is called with every plan before it runs; ``compiler``: ``"eager"``, the
            default, runs the planned operations one by one, as `ackpt.compile` does. ``"inductor"`` compiles them, and
            takes none of the options from ``outputs`` to ``cache``.
        mode: of ``torch.compile``, which is Inductor's own: refused.

    Raises:
        BudgetError: by a call whose budget is infeasible. One capture serves all sizes, and a fraction is relative to
            the baseline of the same call.
        TraceError: by a call that cannot be captured as one graph; names the line. With Inductor also where
            DistributedDataParallel has the graph cut, and by every call that needs gradients and that Dynamo would run
            without a plan, as it does after ``torch._dynamo.config.recompile_limit`` shapes.
        TypeError, ValueError: for an option that is wrong, and for what cannot be captured, as in `ackpt.compile`.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> plans = []
        >>> options = {"policy": "full", "on_plan": plans.append}
        >>> step = torch.compile(model, backend="ackpt", options=options)
        >>> step(torch.ones(4, 8)).sum().backward()
        >>> plans[0].policy
        'full'
    """
    use = checked(options, mode)
    check_compiled_here(use.compiler)
    _refuse_pieces()
    _refuse_lost_gradients(gm)
    if not torch.is_grad_enabled():  # evaluation, which needs no plan
        return _by_inductor(gm, example_inputs)
    for value in example_inputs:
        # A plan is valid for one shape: guard on it, so that another shape is compiled and planned again.
        for size in value.shape if isinstance(value, torch.Tensor) else [value]:
            int(size)
    if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs):
        return _counted(gm.forward, planned=False)  # nothing requires grad
    graphs = [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)]
    if any(graph.find_nodes(op="call_function", target=_CHECKPOINT) for graph in graphs):
        warn_of_checkpoints()
    partition = _Partition(gm, use)
    output = next(node for node in gm.graph.nodes if node.op == "output")
    returned = output.args[0]
    refused = without_gradient([node.meta.get("example_value") for node in returned], use.differentiate)
    for place in refused:
        with gm.graph.inserting_before(output):
            detached = gm.graph.call_method("detach", (returned[place],))
            detached.meta["example_value"] = returned[place].meta["example_value"].detach()
        returned = (*returned[:place], detached, *returned[place + 1 :])
    output.args = (returned,)
    if torch.is_autocast_cache_enabled():
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        weights = [node for node in placeholders if is_weight(node.meta.get("example_value"))]
        with gm.graph.inserting_after(placeholders[-1]):
            gm.graph.call_function(cast_once, tuple(weights))
        with gm.graph.inserting_before(output):
            gm.graph.call_function(cast_once)
    gm.recompile()
    # A cached step would contain the plan of another budget.
    with like_eager(detect_fake_mode(example_inputs)), functorch_config.patch(enable_autograd_cache=False):
        run = _by_inductor(gm, example_inputs, custom_partitioner_fn=partition, fx_graph_cache=False)

    def call(*args):
        outputs = list(run(*args))
        if (node := backward_node(outputs)) is not None:
            before_backward(node, [refuse_other_modes, gradients_as_planned(node, outputs, partition.strides)])
            leave_undefined(node, outputs, partition.depends)
        for place in refused:
            outputs[place] = no_gradient(outputs[place])
        return outputs

    return _counted(call, planned=True)


install(backend)


def _by_inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, example_inputs, config_patches=settings or None)


def _counted(run, planned: bool):
    def call(*args):
        runs_graph(planned)
        return run(*args)

    return call


class _Partition(CustomPartitionerFn):
    """Plans the joint graph that Inductor passes, and splits it as planned."""

    def __init__(self, gm: fx.GraphModule, request: Request):
        self.request = request
        self.kinds = {}
        self.depends: tuple[frozenset[int] | None, ...] = ()
        self.strides: dict[int, tuple[int, ...]] = {}
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        for index, node in enumerate(placeholders):
            value = node.meta.get("example_value")
            if isinstance(value, nn.Parameter):
                self.kinds[index] = ParamAOTInput(node.name)
            elif "buffers" in node.name:
                self.kinds[index] = BufferAOTInput(node.name)

    def __call__(self, joint, joint_inputs, *, num_fwd_outputs, **_):
        for node in joint.graph.nodes:
            what = node.meta.get("desc")
            if node.op == "placeholder" and getattr(what, "idx", None) in self.kinds:
                node.meta["desc"] = self.kinds[what.idx]
            elif node.op == "output":
                node.meta["desc"] = [self._gradient(what) for what in node.meta["desc"]]
        # Inductor's passes keep the old shapes and aliases of nodes that they replace.
        again = FakeTensorProp(joint, detect_fake_mode(joint_inputs))
        with torch.no_grad():
            again.propagate_dont_convert_inputs(*tree_leaves(joint_inputs))  # inputs, tangents
        prepared(joint)
        graph = described_graph(joint, replays_random=False)
        self.depends, self.strides = depends_on(graph), gradient_strides(graph.analysis)
        use = self.request
        try:
            device = use.device or default_rates(graph)
            profile = default_profile(graph, device)
            if device is not None:
                profile = fused(graph, profile, device)
            made = check_runs(graph, plan_by_policy(graph, use, profile))
        except BudgetError as error:
            compile_id = CompileContext.current_compile_id()
            is_first = compile_id is None or not compile_id.frame_compile_id  # of this code, for any shapes
            if is_first or not is_share(use.budget):
                raise
            raise BudgetError(
                f"{error} The model was compiled before, for other arguments or in another mode, and a fraction is "
                "relative to the baseline's dynamic peak with the current arguments: give bytes, such as '6GiB', or a "
                "larger fraction, leave a smaller last batch out, as a DataLoader with drop_last=True does, and "
                "evaluate under torch.no_grad().",
                error.least_bytes,
                use.budget,
            ) from None
        if use.on_plan is not None:
            use.on_plan(made)
        rewritten = rewritten_for(num_fwd_outputs, graph, made.schedule)
        return rewritten.forward, rewritten.backward

    def _gradient(self, what):
        kind = self.kinds.get(getattr(getattr(what, "grad_of", None), "idx", None))
        return what if kind is None else GradAOTOutput(kind)

    def uuid(self):
        return None


def _refuse_pieces() -> None:
    """Refuse graphs within DistributedDataParallel, where Dynamo compiles one for each bucket of gradients."""
    if TracingContext.get().fakify_first_call:  # what torch asks of such a piece alone
        raise TraceError(
            "in DistributedDataParallel, torch.compile cuts the model where a bucket of gradients ends. A budget holds "
            "for a whole step: set torch._dynamo.config.optimize_ddp = False, or use "
            "DistributedDataParallel(ackpt.compile(model, ...))."
        )


def _refuse_lost_gradients(gm: fx.GraphModule) -> None:
    """Torch 2.11 gives zeros as the gradient of an autograd.Function that returns what it changed in place.

    Dynamo then returns that tensor twice. Source: pytorch#180642.
    """
    for part in gm.modules():  # the bodies of checkpointed regions are modules of it
        found = part.graph.find_nodes(op="call_function", target=_FUNCTION) if isinstance(part, fx.GraphModule) else []
        for node in found:
            body: Any = part.get_submodule(node.args[0].target)
            (output,) = body.graph.find_nodes(op="output")
            returned = [getattr(value, "meta", {}).get("example_value") for value in output.args[0][0]]
            for value in [returned[user.args[1]] for user in node.users if user.users]:
                if isinstance(value, torch.Tensor) and sum(other is value for other in returned) > 1:
                    raise TraceError(
                        "this version of torch loses the gradient of an autograd.Function that returns a tensor which "
                        f"it changed in place, here of shape {list(value.shape)}:\n{(node.stack_trace or '').rstrip()}"
                        "\nReturn the result of an operation out of place, use a newer torch, or use ackpt.compile, "
                        "which captures the model without dynamo."
                    )
