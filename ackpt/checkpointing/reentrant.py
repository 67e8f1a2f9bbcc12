"""Activation checkpointing from scratch: keep a region's inputs, forget everything inside, recompute it in backward.

The idea is ten lines. Run the function and keep only its inputs; when the gradient of its output arrives, run it
again, now keep the graph, and send the gradient through:

    class Checkpoint(torch.autograd.Function):
        def forward(ctx, function, x):
            ctx.function = function
            ctx.save_for_backward(x)
            with torch.no_grad():
                return function(x)
        def backward(ctx, grad):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.function(x)
            return None, *torch.autograd.grad(y, [x], grad)

The rest is what makes these lines give the plain model's gradients bit for bit, or an error: here the call and its
autograd node, in ``region.py`` what happens in the two runs of the function, in ``reach.py``, ``guards.py``,
``recorder.py``, ``rng.py`` and ``autocast.py`` what must be the same in both. The inner backward runs inside the outer
one, hence *reentrant*; the idea is Chen et al. 2016 (arXiv:1604.06174), section 3.

Two decisions differ from ``torch.utils.checkpoint(use_reentrant=True)``. The first forward runs with grad mode on and
its graph is dropped when the region ends: the same kernels run as in the plain model, and it is known exactly which
outputs need a gradient and which parameters receive one. Those parameters become inputs of the autograd node, so
their gradients leave through the outer graph: hooks fire once, DDP's bookkeeping holds, shared parameters are summed
by the engine. The transient memory of a region's first forward never exceeds that of its recompute.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

from ackpt.autograd_state import phase
from ackpt.errors import CheckpointError
from ackpt.offloading.placeholders import saved_tensors_of
from ackpt.offloading.saved_tensors import Offload, resolve

from .region import Region

__all__ = ["checkpoint"]

_NOTHING = contextlib.nullcontext()
_Result = TypeVar("_Result")


def checkpoint(
    function: Callable[..., _Result],
    /,
    *args: object,
    preserve_rng_state: bool = True,
    offload: Offload | Literal["sync", "async"] | None = None,
    **kwargs: object,
) -> _Result:
    """Call ``function(*args, **kwargs)`` keeping only its input tensors; backward recomputes the rest.

    Args:
        function: any callable. Tensors may sit in dicts, lists, tuples and dataclasses of its arguments and outputs.
            Parameters and closed-over tensors get their gradients like arguments do.
        preserve_rng_state: replay in the recompute every random number stream the region drew from (torch on all
            devices, Python's ``random``, numpy, generator objects in reach of the arguments).
        offload: where the saved inputs wait: ``None`` on their device, ``"sync"`` or ``"async"`` in host memory, or as
            an :func:`offload_saved_tensors` object says.

    Returns:
        What `function` returns, bit for bit.

    Raises:
        CheckpointError: in forward, if the region changes its own inputs or parameters in place, or puts tensors into
            an object that it got as an argument; in backward, for ``create_graph=True``, ``torch.autograd.grad`` and
            ``backward(inputs=...)``, if a parameter, a buffer, an input or a closed-over tensor changed since the
            forward, or if the recompute takes another path: other operations, other numbers, other outputs.

    With grad mode off the function is simply called. Regions nest. What a module keeps (buffers, tensors and numbers
    as attributes) changes once per step, as in the plain model; other side effects of the function, such as appending
    to a list, happen in the recompute as well (see :func:`is_recomputing`). A sum of gradients that plain autograd
    would build from several uses inside *and* outside of one region is grouped per region, which may differ in the
    last bit.

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
    if not callable(function) or not _TORCHS.isdisjoint(kwargs):
        _check_call(function, kwargs)
    if torch._C._are_functorch_transforms_active():
        raise CheckpointError(
            "checkpoint() was called inside a torch.func transform (grad, vmap, jvp, ...), which cannot look into a "
            "region. Apply the transform to the function without checkpoint()."
        )
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    run: Any = _run if "torch._dynamo" not in sys.modules else _outside_dynamo()
    return run(function, args, kwargs, preserve_rng_state, offload)


_TORCHS = frozenset({"use_reentrant", "context_fn", "determinism_check", "early_stop"})  # torch's checkpoint has these


def _check_call(function, kwargs) -> None:
    if not callable(function):
        raise TypeError(
            f"checkpoint() takes a function and its arguments, got {type(function).__name__}: write "
            "checkpoint(layer, x), not checkpoint(layer(x))"
        )
    try:
        taken = inspect.signature(getattr(function, "forward", function)).parameters.values()
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        return
    if foreign := sorted(_TORCHS & kwargs.keys() - {parameter.name for parameter in taken}):
        raise TypeError(
            f"{foreign[0]!r} is an option of torch's checkpoint; ackpt.checkpoint has one implementation and no such "
            "option: drop it"
        )


_ran: weakref.WeakSet[Any] = weakref.WeakSet()  # modules whose forward has run as a region


def _run(function, args, kwargs, preserve_rng_state, offload) -> Any:
    if isinstance(owner := getattr(function, "__self__", None), torch.nn.Module):
        _ran.add(owner)
    region = Region(function, args, kwargs, preserve_rng_state)
    inputs, leaves = region.first_forward()
    if not region.own:
        return region.result(())
    # A leaf that requires grad, for a region whose parameters get their gradients inside.
    anchor = None if any(region.needs_grad) or leaves else torch.zeros((), requires_grad=True)
    needed = [tensor for tensor, needs_grad in zip(inputs, region.needs_grad) if needs_grad]
    with offload.for_region().hooks if offload is not None else _NOTHING:
        made = _apply(region, inputs, leaves, anchor, *needed, *leaves)
    if phase.recorder is not None and region.path is not None:
        phase.recorder.record_region(region.path, made[0])
    return region.result(made)


_disabled = []


def _outside_dynamo():
    """`_run` as a clean graph break for ``torch.compile``, which cannot trace a region."""
    if not _disabled:
        _disabled.append(torch._dynamo.disable(_run))
    return _disabled[0]


class _Recompute(torch.autograd.Function):
    """The autograd node of a region: inputs are its tensors and parameters, outputs its outputs."""

    @staticmethod
    def forward(ctx, region, inputs, leaves, anchor, *needed):
        ctx.region = region
        ctx.leaves = leaves
        ctx.set_materialize_grads(False)
        # Something is saved in any case: a second backward must find it released.
        ctx.save_for_backward(*inputs) if inputs else ctx.save_for_backward(torch.empty(0))
        return region.take_values()

    @staticmethod
    def backward(ctx, *grad_outputs):
        region = ctx.region
        _refuse_unsupported(region)
        region.check_unchanged()
        with region.state.as_before() if region.state is not None else _NOTHING:
            saved, later = saved_tensors_of(ctx)
            starts, outputs = region.recompute(saved, ctx.leaves)
            del saved
            if later is not None:
                _halfway(outputs).register_prehook(later)
            used = [i for i, output in enumerate(outputs) if grad_outputs[i] is not None and output.requires_grad]
            if len(used) < len(outputs):
                outputs, grad_outputs = [outputs[i] for i in used], [grad_outputs[i] for i in used]
            if region.inside:
                if used:
                    torch.autograd.backward(outputs, grad_outputs)
                return None, None, None, None, *(start.grad for start in starts)
            hooked = [leaf for leaf in ctx.leaves if leaf.grad_fn is None and leaf._backward_hooks]
            with _silenced(hooked) if hooked else _NOTHING:
                found = _gradients(outputs, grad_outputs, [*starts, *region.left])
            return None, None, None, None, *found[: len(starts)]


# Without the Python wrapper around ``apply``, which looks for functorch transforms: checkpoint() has done that.
_apply: Any = super(torch.autograd.Function, _Recompute).apply  # pyright: ignore[reportAttributeAccessIssue]


def _refuse_unsupported(region):
    if torch.is_grad_enabled():
        raise CheckpointError(
            "backward with create_graph=True reached a checkpointed region, whose gradients are computed outside the "
            "graph and cannot be differentiated again. Call the function without checkpoint() where you need second "
            "derivatives."
        )
    if not region.nested and not torch.autograd._is_checkpoint_valid():
        raise CheckpointError(
            "torch.autograd.grad() or backward(inputs=...) reached a checkpointed region, which supports only a full "
            "backward pass. Call loss.backward() without inputs= and read .grad, or call the function without "
            "checkpoint() here."
        )


def _halfway(outputs):
    """The node of a graph that backward runs when half of the others are done."""
    nodes = {output.grad_fn for output in outputs if output.grad_fn is not None}
    stack = list(nodes)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in nodes and node.next_functions:  # those without end the graph
                nodes.add(node)
                stack.append(node)
    return sorted(nodes, key=lambda node: node._sequence_nr(), reverse=True)[len(nodes) // 2]


def _gradients(outputs, grads, inputs):
    """``torch.autograd.grad`` less its checks of the gradients' shapes, which the engine has just made itself."""
    return torch.autograd.Variable._execution_engine.run_backward(
        tuple(outputs), tuple(grads), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )


@contextlib.contextmanager
def _silenced(leaves):
    """No tensor hooks while gradients are captured: they fire on the way out, through the outer graph."""
    kept = [dict(leaf._backward_hooks) for leaf in leaves]
    for leaf in leaves:
        leaf._backward_hooks.clear()
    try:
        yield
    finally:
        for leaf, hooks in zip(leaves, kept):
            leaf._backward_hooks.update(hooks)
