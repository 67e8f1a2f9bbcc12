"""``checkpoint``, from scratch: save a region's inputs, drop its activations, recompute them in backward.

This file has the call and its autograd node; ``region.py`` has the two runs of the function. The inner backward runs
inside the outer one, hence the name *reentrant*. Two decisions differ from torch's reentrant checkpoint:

- The first forward runs in grad mode, and its graph is dropped when the region ends. So the same kernels run as in the
  baseline, and the graph shows which outputs need a gradient and which parameters receive one.
- These parameters are inputs of the autograd node, so their gradients pass through the outer graph. Hooks fire once,
  DDP counts every gradient once, and the engine sums the gradients of shared parameters.
"""

import contextlib
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from itertools import compress
from threading import get_ident
from typing import Any, Literal, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ackpt.core.autograd_state import phase, recomputation_ends
from ackpt.core.errors import CheckpointError
from ackpt.offloading.saved_tensors import Offload, resolve, saved_tensors_of

from .dead_calls import dead_like
from .evidence import REGION_NODES
from .reachable import ACCUMULATE_GRAD, Graph, graph_of, leave_uncompiled
from .region import Region, _swap
from .rng import LOCK

__all__ = ["checkpoint"]

_NOTHING = contextlib.nullcontext()
_dynamo: Any = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
_keeps_graph: Any = torch._C._autograd._get_current_graph_task_keep_graph  # pyright: ignore[reportAttributeAccessIssue]
_ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__
_Result = TypeVar("_Result")


def checkpoint(
    function: Callable[..., _Result],
    /,
    *args: object,
    preserve_rng_state: bool = True,
    offload: Offload | Literal["sync", "async"] | None = None,
    **kwargs: object,
) -> _Result:
    """Call ``function(*args, **kwargs)`` and save only its input tensors; backward recomputes the activations.

    Args:
        function: any callable. Its arguments and outputs may contain tensors in dicts, lists, tuples and dataclasses.
            Parameters and closed-over tensors receive gradients like arguments.
        preserve_rng_state: whether the recomputation replays every random number stream that the region drew from
            (torch on all devices, Python's ``random``, numpy, and generator objects that the arguments refer to).
        offload: where the saved inputs are until backward: ``None`` for their device, ``"sync"`` or ``"async"`` for
            host memory, or an :func:`offload_saved_tensors` object, whose settings then apply.

    Returns:
        The result of `function`, bit for bit.

    Raises:
        CheckpointError: in the forward, if the region changes its inputs or trainable parameters in place, or stores
            tensors in an object that was passed as an argument. In backward, for ``create_graph=True``,
            ``torch.autograd.grad`` and ``backward(inputs=...)``; if a parameter, a buffer, an input or a closed-over
            tensor that the region reads changed since the forward; or if the recomputation calls other operations, or
            the same ones with other arguments or results.

    The recomputation leaves out operations that backward does not need, such as the last projection of a block, except
    where tensors are small. The two runs are compared call by call; on the CPU, if tensors are small, only until three
    recomputations of the same function have passed. Later ones are compared by their graphs and by the bits of their
    outputs, which misses a number that changes none of these bits, for example in a branch that is multiplied by zero.

    Regions can be nested. With grad mode off, the function runs without a region. Module state (buffers, attributes,
    and attributes of objects in attributes) changes once per step, as in the baseline. Other side effects of the
    function, such as appending to a list, happen again in the recomputation (see :func:`is_recomputing`). If a tensor
    is used inside *and* outside of a region, its gradient is first summed per region; the sum may differ from the
    baseline's in the last bit.

    Source: Chen et al. 2016 (arXiv:1604.06174).

    Example:
        >>> import torch, ackpt
        >>> layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
        >>> y = ackpt.checkpoint(layer, x)
        >>> y.sum().backward()
        >>> layer.weight.grad
        tensor([[1., 1.],
                [1., 1.]])
    """
    offload = resolve(offload)
    if not callable(function) or not _TORCH_OPTIONS.isdisjoint(kwargs):
        _check_call(function, kwargs)
    if torch._C._are_functorch_transforms_active():
        raise CheckpointError(
            "checkpoint() was called inside a torch.func transform (grad, vmap, jvp, ...), which cannot look into a "
            "region. Apply the transform to the function without checkpoint()."
        )
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_dynamo_compiling():
        if _is_in_region():
            return function(*args, **kwargs)
        torch._dynamo.graph_break(msg=_OUTSIDE)
    if (compiler := _dynamo.get_eval_frame_callback()) is None:
        return _run(function, args, kwargs, preserve_rng_state, offload)
    _dynamo.set_eval_frame(None)  # Dynamo broke its graph here: the region runs outside of it, the function inside
    try:
        return _run(function, args, kwargs, preserve_rng_state, offload, compiler)
    finally:
        _dynamo.set_eval_frame(compiler)


leave_uncompiled(checkpoint)


# Options of torch's checkpoint that this one does not have.
_TORCH_OPTIONS = frozenset({"use_reentrant", "context_fn", "determinism_check", "early_stop"})


def _check_call(function, kwargs) -> None:
    if not callable(function):
        raise TypeError(
            f"checkpoint() takes a function and its arguments, got {type(function).__name__}: write "
            "checkpoint(layer, x), not checkpoint(layer(x))"
        )
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters.values()
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    if options := sorted(_TORCH_OPTIONS & kwargs.keys() - {parameter.name for parameter in parameters}):
        raise TypeError(
            f"{options[0]!r} is an option of torch's checkpoint; ackpt.checkpoint has one implementation and no such "
            "option: drop it"
        )


#: The method of a region's node that the engine calls. Since torch 2.13 it can pass gradients in a list, and then frees
#: each as soon as nothing else refers to it.
APPLY = "apply_boxed" if hasattr(torch.autograd.Function, "boxed_grads_call") else "apply"
_modules_run: weakref.WeakSet[Any] = weakref.WeakSet()  # modules whose forward has run as a region
_OUTSIDE = (
    "ackpt.checkpoint runs outside of compiled code and compiles what is inside. With fullgraph=True, compile the "
    "blocks, by block.compile(fullgraph=True) before or after ackpt.apply_activation_checkpointing, not their caller"
)


def _is_in_region() -> bool:
    """Whether Dynamo traces code of a region; regions in it are then a part of that region."""
    return phase.dropping or phase.recomputing


# Dynamo calls it when it traces, and never in compiled code: ``assume_constant_result`` in
# ``torch/_dynamo/decorators.py``, without its import.
setattr(_is_in_region, "_dynamo_marked_constant", True)  # noqa: B010 (pyright does not know it)


def _run(function, args, kwargs, preserve_rng_state, offload, compiler=None) -> Any:
    if type(function) is types.MethodType and isinstance(function.__self__, torch.nn.Module):
        _modules_run.add(function.__self__)
    region = Region(function, args, kwargs, preserve_rng_state, compiler)
    inputs, leaves = region.first_forward()
    if phase.recorder is not None and phase.recorder.liveness is not None:
        for tensor in inputs:
            phase.recorder.liveness.pack(tensor)
    if not region.node_outputs and not region.left:  # no output needs a gradient
        return region.result(())
    # The node needs an input that requires grad. If all gradients are accumulated inside the region, it is this leaf.
    anchor = None if any(region.needs_grad) or leaves else torch.zeros((), requires_grad=True)
    inputs_with_grad = compress(inputs, region.needs_grad)
    if offload is not None and region.dead and region.checksums is None:  # which a recomputation as a whole may read
        region.unread = region.dead.instead_of(inputs)
    with offload.for_region().hooks if offload is not None else _NOTHING:
        # A tensor is an input once for each of its uses: the engine then sums their gradients as in the baseline.
        sources = [*inputs_with_grad, *leaves]
        if max(region.uses, default=1) > 1:
            sources = [tensor for tensor, count in zip(sources, region.uses) for _ in range(count)]
        # Torch takes a weight's lock here while this thread has the GIL; the thread of another region may have the lock
        # and wait for the GIL: ``grad_accumulator`` in ``torch/csrc/autograd/variable.cpp``.
        with LOCK if preserve_rng_state else _NOTHING:
            outputs = _apply(region, inputs, leaves, anchor, *sources)
        del sources
        region.accumulators = None
    count = len(region.node_outputs)
    if phase.recorder is not None and region.path is not None:
        phase.recorder.record_region(region.path, outputs[: count or 1])
    for tensor, output in zip(region.left, outputs[count:]):
        _swap(tensor, output)
    region.left = []
    return region.result(outputs)


class _Recompute(torch.autograd.Function):
    """The autograd node of a region, from its input tensors and parameters to its outputs."""

    @staticmethod
    def forward(ctx, region, inputs, leaves, anchor, *sources):
        ctx.region = region
        ctx.leaves = leaves
        ctx.set_materialize_grads(False)
        if region.unread:
            inputs = [tensor for index, tensor in enumerate(inputs) if index not in region.unread]
        # Always save a tensor, so that a second backward raises torch's error about released tensors.
        ctx.save_for_backward(*inputs) if inputs else ctx.save_for_backward(torch.empty(0))
        values, region.output_values = region.output_values, None
        return values

    boxed_grads_call = APPLY == "apply_boxed"

    @staticmethod
    def backward(ctx, *grad_outputs):
        region = ctx.region
        if type(grad_outputs[0]) is list:
            (grad_outputs,) = grad_outputs
        _refuse_unsupported(region)
        region.check_unchanged(ctx.leaves)
        used_once = _used_once(ctx, region)
        taken = _take_hooks(ctx.leaves)
        try:
            while True:
                try:
                    return _Recompute._gradients_of(ctx, region, grad_outputs, used_once)
                except Exception as error:
                    if not region.runs_again_after(error):
                        raise
        finally:
            _take_hooks(ctx.leaves)  # those that the recomputation has registered
            for hooks, items in taken:
                hooks.update(items)

    @staticmethod
    def _gradients_of(ctx, region, grad_outputs, used_once):
        is_last = not (region.may_run_again or _keeps_graph())
        with _NOTHING if region.state is None or region.state.is_as_before() else region.state.restored():
            # Second run, now with a graph from `graph_inputs` (arguments and parameters) to `outputs`.
            saved, prefetch = saved_tensors_of(ctx)
            if region.unread:
                read = iter(saved)
                saved = [region.unread[i] if i in region.unread else next(read) for i in range(len(region.needs_grad))]
            count = len(region.node_outputs)
            places = [i for i in range(count, len(grad_outputs)) if grad_outputs[i] is not None]
            left = [region.left_facts[i - count] for i in places]
            graph_inputs, received, outputs, graph = region.recompute(saved, ctx.leaves, left, is_last)
            del saved
            if region.state is not None:
                region.state.restore_unread()
            if prefetch is not None:
                _middle_node(outputs, received).register_prehook(prefetch)
            # Backward through that graph; outputs that the loss does not depend on have no gradient.
            used = [i for i, output in enumerate(outputs) if grad_outputs[i] is not None and output.requires_grad]
            outputs, given = [outputs[i] for i in used], [grad_outputs[i] for i in used]
            if used:
                if is_last and type(grad_outputs) is list:
                    grad_outputs.clear()
                with torch.enable_grad():
                    outputs = [_apply_root(given, *outputs)]
                given = [outputs[0].detach()]
            recomputation_ends()
            if region.recomputed is not None:
                region.recomputed()
            if region.accumulates_inside:
                if used:
                    torch.autograd.backward(outputs, given)
                return None, None, None, None, *(tensor.grad for tensor in graph_inputs)
            summands = Summands(region.uses, received, graph)
            del received, graph
            added: set[int] = set()
            for leaf, node in used_once:
                hook = functools.partial(_add_to_gradient, leaf, node, added, get_ident())
                leaf.register_hook(hook)  # `backward` removes it
            gradients = _gradients(outputs, given, [*graph_inputs, *region.leaked])
            gradients = [None if id(at) in added else each for each, at in zip(gradients, graph_inputs)]
            if region.dead:
                region.dead.is_proven = True
            return None, None, None, None, *summands.gradients(gradients)


class _Root(torch.autograd.Function):
    """The node at which a region's own backward begins. It gives the outputs their gradients, so that neither
    stays allocated until the end; the region's peak is then that of torch's checkpoint."""

    @staticmethod
    def forward(ctx, gradients, *outputs):
        ctx.gradients = gradients
        return torch.empty(0, device=outputs[0].device)

    @staticmethod
    def backward(ctx, _):
        gradients, ctx.gradients = ctx.gradients, ()
        given = None, *gradients
        gradients.clear()
        return given


class Summands:
    """Collects the gradients of tensors that a graph uses several times, while the engine runs through that graph.

    The engine adds the gradients of all uses in the model one by one, latest use first. To keep this order, and with it
    the last bits, a region is connected to a tensor once per use, and returns the gradient of every use separately.

    `uses`: how often the first run's graph used each of `tensors`, at which the `graph` of the second run ends.
    """

    def __init__(self, uses: list[int], tensors: list[torch.Tensor], graph: Graph | None):
        self._uses = uses
        self._collected: dict[int, list[torch.Tensor]] = {}
        if graph is None or max(uses, default=1) == 1:
            return
        places = dict(zip(map(id, graph.ends), range(len(graph.ends))))
        wanted: dict[Any, dict[int, list[torch.Tensor]]] = {}
        for index, tensor in enumerate(tensors):
            if uses[index] > 1:
                self._collected[index] = []
                if (place := places.get(id(tensor))) is None:
                    continue
                source = graph.sources[place]
                for node in dict.fromkeys(graph.users[place]):
                    for slot, edge in enumerate(node.next_functions):
                        if edge[0] is source or edge == source:
                            wanted.setdefault(node, {})[slot] = self._collected[index]
        for node, lists in wanted.items():
            node.register_hook(_collector(lists))

    def gradients(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients with those of tensors with several uses replaced by one for each use; None where missing."""
        separate: list[torch.Tensor | None] = []
        for index, count in enumerate(self._uses):
            each = self._collected.pop(index, None)
            if each is None:
                separate.append(gradients[index])
                continue
            while len(each) > count:  # only scripted code has another graph in its second run
                last = each.pop()
                each[-1] = each[-1] + last
            separate += [*each, *[None] * (count - len(each))]
            each.clear()  # the graph's hooks refer to the list, and the model's code may keep the graph
        return separate


def _used_once(ctx, region) -> list[tuple[torch.Tensor, Any]]:
    """The leaves of the node `ctx` whose gradients can be added to existing ones as soon as they are computed, as
    without a region: nothing else in the whole backward uses them, so the sum is the same, and no hook waits for it.
    With the node ``AccumulateGrad`` of each."""
    leaves = [leaf for leaf in ctx.leaves if leaf.grad_fn is None and leaf.grad is not None]
    if not leaves or region.is_nested or region.may_run_again or region.accumulates_inside:
        return []
    task = torch._C._current_graph_task_id()
    if phase.used_once[0] != task:
        graph = _graph_of_backward(ctx)
        uses = () if graph is None else zip(graph.ends, graph.users)
        phase.used_once = task, {id(end) for end, users in uses if len(users) == 1 and not _has_hooks(end)}
    ends = {id(node.variable): node for node, _ in ctx.next_functions if type(node) is ACCUMULATE_GRAD}
    return [(leaf, ends[id(leaf)]) for leaf in leaves if id(leaf) in phase.used_once[1]]


def _has_hooks(leaf) -> bool:
    """Whether hooks of `leaf` receive its gradient, or run after it is accumulated and are not those of a meter."""
    after = (leaf._post_accumulate_grad_hooks or {}).values()
    return bool(leaf._backward_hooks) or not all(
        str(getattr(hook, "__module__", "")).startswith("ackpt.metering") for hook in after
    )


def _graph_of_backward(ctx) -> Graph | None:
    """The graph of the running backward, which has reached the node `ctx`."""
    # Torch tells no node of its roots, but the frame that has called the engine has them: ``_engine_run_backward`` in
    # ``torch/autograd/graph.py``. It is in another thread where the engine has its own, as for a GPU.
    for frame in (sys._getframe(), *sys._current_frames().values()):
        while frame is not None and frame.f_code is not _ENGINE_CODE:
            frame = frame.f_back
        if frame is not None:
            roots = frame.f_locals["t_outputs"]
            graph = graph_of(roots) if all(isinstance(root, torch.Tensor) for root in roots) else None
            if graph is not None and ctx in graph.nodes:
                return graph
    return None


def _add_to_gradient(leaf, node, added, thread, gradient):
    """A hook of a leaf that calls torch's ``AccumulateGrad``, its `node`; a tensor without memory goes on.

    ``thread``: that of the region's backward. Backwards in other threads meet the hook, too.
    """
    existing = leaf.grad
    if gradient is None or existing is None or thread != get_ident():
        return None
    facts = {(type(each), each.shape, each.dtype, each.device, each.layout) for each in (existing, gradient)}
    if len(facts) > 1 or type(gradient) not in (torch.Tensor, FakeTensor):
        return None
    node(gradient)  # under its lock: other threads may add to the same gradient
    added.add(id(leaf))
    return dead_like(gradient)


def _collector(wanted: dict[int, list[torch.Tensor]]):
    """A hook of a node: appends its gradients in these slots to lists, and passes on the first, for other hooks."""

    def collect(gradients, _):
        passed = list(gradients)
        for slot, collected in wanted.items():
            if gradients[slot] is not None:
                if collected:
                    passed[slot] = None
                collected.append(gradients[slot])
        return tuple(passed)

    return collect


REGION_NODES.add(_Recompute._backward_cls)  # pyright: ignore[reportAttributeAccessIssue]
# ``apply`` without its Python wrapper, which checks for functorch transforms: checkpoint() has done that already.
_apply: Any = super(torch.autograd.Function, _Recompute).apply  # pyright: ignore[reportAttributeAccessIssue]
_apply_root: Any = super(torch.autograd.Function, _Root).apply  # pyright: ignore[reportAttributeAccessIssue]


def _refuse_unsupported(region):
    if torch.is_grad_enabled():
        raise CheckpointError(
            "backward with create_graph=True reached a checkpointed region, whose gradients are computed outside the "
            "graph and cannot be differentiated again. Call the function without checkpoint() where you need second "
            "derivatives."
        )
    if not region.is_nested and not torch.autograd._is_checkpoint_valid():
        raise CheckpointError(
            "torch.autograd.grad() or backward(inputs=...) reached a checkpointed region, which supports only a full "
            "backward pass. Call loss.backward() without inputs= and read .grad, or call the function without "
            "checkpoint() here."
        )


def _middle_node(outputs, received):
    """The node of a graph that backward reaches after half of the nodes, without views that only a mode needs."""
    nodes = graph_of(outputs).nodes.keys() - {tensor.grad_fn for tensor in received} or graph_of(outputs).nodes
    return sorted(nodes, key=lambda node: node._sequence_nr(), reverse=True)[len(nodes) // 2]


def _gradients(outputs, grads, inputs):
    """``torch.autograd.grad`` without its checks of the gradients' shapes, which the outer engine has made already."""
    if not inputs:  # the region itself has made all tensors that require grad
        return ()
    return torch.autograd.Variable._execution_engine.run_backward(
        tuple(outputs), tuple(grads), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )


def _take_hooks(leaves) -> list[tuple[dict, dict]]:
    """Remove the hooks of `leaves` without a history, which run in the outer graph; return them with their dicts."""
    taken = []
    for leaf in leaves:
        for hooks in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks):
            if hooks and leaf.grad_fn is None:
                # without those of regions whose backward runs in other threads, which then return the gradient
                items = [item for item in hooks.items() if getattr(item[1], "func", None) is not _add_to_gradient]
                taken.append((hooks, dict(items)))
                hooks.clear()
    return taken
