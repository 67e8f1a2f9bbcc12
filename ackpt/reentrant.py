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

The rest of this file is what makes these lines give the plain model's gradients bit for bit, or an error. The inner
backward runs inside the outer one, hence *reentrant*; the idea is Chen et al. 2016 (arXiv:1604.06174), section 3.

Two decisions differ from ``torch.utils.checkpoint(use_reentrant=True)``. The first forward runs with grad mode on and
its graph is dropped when the region ends: the same kernels run as in the plain model, and it is known exactly which
outputs need a gradient and which parameters receive one. Those parameters become inputs of the autograd node, so
their gradients leave through the outer graph: hooks fire once, DDP's bookkeeping holds, shared parameters are summed
by the engine. The transient memory of a region's first forward never exceeds that of its recompute.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref

import torch

from . import guards, rng
from .autocast import OFF, Autocast, any_enabled
from .closure import Cut, current_cut, frozen
from .errors import CheckpointError
from .reach import Reach, graph_inputs, held
from .tree import Tensors, fill, fill_arguments, is_plain, strip_arguments, strip_result

_local = threading.local()
_NOTHING = contextlib.nullcontext()
_NOT_WALKED = Reach()


def checkpoint(function, /, *args, preserve_rng_state=True, offload=None, **kwargs):
    """Call ``function(*args, **kwargs)`` keeping only its input tensors; backward recomputes the rest.

    Args:
        function: any callable. Tensors may sit in dicts, lists, tuples and dataclasses of its arguments and outputs.
            Parameters and closed-over tensors get their gradients like arguments do.
        preserve_rng_state: replay in the recompute every random number stream the region drew from (torch on all
            devices, Python's ``random``, numpy, generator objects in reach of the arguments).
        offload: where the saved inputs wait; ``None`` leaves them on their device (bytes: the inputs' storages).

    Returns:
        What `function` returns, bit for bit.

    Raises:
        CheckpointError: in forward, if the region changes its own inputs or parameters in place; in backward, for
            ``create_graph=True``, ``torch.autograd.grad`` and ``backward(inputs=...)``, if a parameter, a buffer, an
            input or a closed-over tensor changed since the forward, or if the recompute returns other outputs.

    With grad mode off the function is simply called. Regions nest. A sum of gradients that plain autograd would build
    from several uses inside *and* outside of one region is grouped per region, which may differ in the last bit.

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
    check_offload(offload)
    if torch._C._are_functorch_transforms_active():
        raise CheckpointError(
            "checkpoint() was called inside a torch.func transform (grad, vmap, jvp, ...), which cannot look into a "
            "region. Apply the transform to the function without checkpoint()."
        )
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    run = _run if "torch._dynamo" not in sys.modules else _outside_dynamo()
    return run(function, args, kwargs, preserve_rng_state)


def check_offload(offload):
    if offload is not None:
        raise ValueError(f"offload={offload!r} is not available in this version; only offload=None is")


def _run(function, args, kwargs, preserve_rng_state):
    return _Region(function, args, kwargs, preserve_rng_state).run()


_disabled = []


def _outside_dynamo():
    """`_run` as a clean graph break for ``torch.compile``, which cannot trace a region."""
    if not _disabled:
        _disabled.append(torch._dynamo.disable(_run))
    return _disabled[0]


def is_recomputing() -> bool:
    """Whether the calling code runs inside a recompute: a forward hook that must act once per step can ask.

    Example:
        >>> import ackpt
        >>> ackpt.is_recomputing()
        False
    """
    return getattr(_local, "recomputing", False)


class _Region:
    """One call of ``checkpoint``: what its recompute needs besides the saved inputs."""

    __slots__ = (
        *("function", "template", "names", "has_containers", "given", "needs_grad", "saved_marks", "nested"),
        *("preserve_rng_state", "streams", "autocast", "guarantees", "state", "watch", "inside"),
        *("pending", "expected", "count", "cut"),
    )

    def __init__(self, function, args, kwargs, preserve_rng_state):
        self.given = Tensors()
        self.names = tuple(kwargs)
        self.template, self.has_containers = strip_arguments((*args, *kwargs.values()), self.given)
        self.function = function
        self.preserve_rng_state = preserve_rng_state
        self.guarantees = guards.current()
        self.nested = is_recomputing()
        self.autocast = Autocast() if any_enabled() else None
        self.streams = ()
        self.state = self.watch = None
        self.cut = current_cut()
        if self.cut is not None:
            self.given[:] = self.cut.replaced(list(self.given))

    def run(self):
        given = self.given
        self.needs_grad = [tensor.requires_grad for tensor in given]
        reach = self._reach()
        if self.guarantees.unchanged:
            self.state = guards.State(reach)
        aliases, starts = given, []
        if self.guarantees.exact_graph:
            aliases = _aliases(given, self.needs_grad)
            starts = [weakref.ref(alias) for alias, needed in zip(aliases, self.needs_grad) if needed]
        marks = [guards.version(tensor) for tensor in given]
        template, handed, own, leaves = self._forward(given, aliases, marks, reach)
        del aliases
        # The graph of the first forward ends there and should be gone.
        for start in starts:
            if (alias := start()) is not None:
                alias.register_hook(_refuse_leak)
        if not own:
            return fill(template, handed)
        leaves = [leaf for leaf in map(_still_there, leaves) if leaf is not None]
        self._remember(given, marks, leaves, reach)
        inputs = [tensor for tensor, needed in zip(given, self.needs_grad) if needed] + leaves
        # A leaf that requires grad, for a region whose parameters get their gradients inside.
        anchor = None if inputs else torch.zeros((), requires_grad=True)
        made = _apply(self, given, leaves, anchor, *inputs)
        if len(own) == len(handed):
            return fill(template, made)
        for place, output in zip(own, made):
            handed[place] = output
        return fill(template, handed)

    def _forward(self, given, aliases, marks, reach):
        """Run the function once; of its graph only the tensors in which it ends are returned, in ``leaves``."""
        started = torch.autograd._get_sequence_nr()
        result = self._first_forward(aliases, reach)
        self._check_inputs(given, marks)
        outputs, template = strip_result(result)
        if self.guarantees.exact_graph:
            own = [i for i, output in enumerate(outputs) if _made_since(started, output) and id(output) not in reach.tensors]
        else:
            own = [i for i, output in enumerate(outputs) if _may_need_grad(output) and not _is_among(output, aliases)]
        handed = [None] * len(outputs) if len(own) == len(outputs) else _handed_through(outputs, aliases, given)
        if not own:
            return template, handed, own, []
        starts = [alias for alias, needed in zip(aliases, self.needs_grad) if needed]
        leaves = self._leaves([outputs[place] for place in own], starts, reach, started)
        if reach.walked:  # what no walk finds and dies with the graph is a leaf that the function made for itself
            leaves = [leaf if id(leaf) in reach.tensors else weakref.ref(leaf) for leaf in leaves]
        self.expected = {place: self._signature(outputs[place]) for place in own}
        self.count = len(outputs)
        self.pending = _detached([outputs[place] for place in own])
        for place in own:
            handed[place] = None
        return template, handed, own, leaves

    def _reach(self):
        wanted = self.guarantees.unchanged or self.guarantees.other_rng or "torch.distributed.fsdp" in sys.modules
        return Reach(self.function, self.template) if wanted else _NOT_WALKED

    def _first_forward(self, aliases, reach):
        if self.autocast is not None:
            torch.clear_autocast_cache()
        try:
            with rng.LOCK if self.preserve_rng_state else _NOTHING, _no_saved_tensor_hooks():
                before = rng.snapshot(reach.streams, self.guarantees.other_rng) if self.preserve_rng_state else []
                with _NOTHING if self.guarantees.exact_graph else torch.no_grad():
                    result = self._call(aliases)
                self.streams = rng.drawn_from(before)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise _changes_inputs("a tensor that requires grad: an input of the region or a parameter") from error
            raise
        finally:
            if self.autocast is not None:
                torch.clear_autocast_cache()
        return result

    def _call(self, tensors):
        values = fill_arguments(self.template, tensors)
        if self.names:
            split = len(values) - len(self.names)
            result = self.function(*values[:split], **dict(zip(self.names, values[split:])))
        else:
            result = self.function(*values)
        if self.has_containers:
            after = Tensors()
            strip_arguments(values, after)
            if [id(tensor) for tensor in after] != [id(tensor) for tensor in tensors]:
                raise CheckpointError(
                    "this region adds, removes or replaces tensors in a list, dict or dataclass that it got as an "
                    "argument; a recompute would do it twice. Return the tensors instead."
                )
        return result

    def _check_inputs(self, given, marks):
        for place, (tensor, mark) in enumerate(zip(given, marks)):
            if guards.version(tensor) != mark:
                raise _changes_inputs(f"its input tensor number {place} ({guards.describe(tensor)})")

    def _leaves(self, outputs, aliases, reach, started):
        """Parameters and closed-over tensors that take part: they become inputs of the autograd node."""
        # FSDP reduces gradients in hooks inside the region, so they must be accumulated there.
        self.inside = reach.sharded or not self.guarantees.exact_graph
        if self.inside:
            return []
        leaves, node = graph_inputs(outputs, aliases, _tensors(reach), started)
        if node is not None and not reach.walked:
            reach = Reach(self.function, self.template)
            leaves, node = graph_inputs(outputs, aliases, _tensors(reach), started)
        if node is not None:
            raise CheckpointError(
                f"this region uses a tensor that requires grad and was computed before it (by {node.name()}), but is "
                "neither an argument nor found in the function's closure, defaults or attributes, so its gradient "
                "could not be handed on. Pass that tensor as an argument of checkpoint()."
            )
        return leaves

    def _remember(self, given, marks, leaves, reach):
        """Keep what the recompute needs and what must not change until then; let go of the input tensors."""
        self.given = None
        self.function = frozen(self.function)
        if self.state is not None:
            self.saved_marks = [(weakref.ref(tensor), mark) for tensor, mark in zip(given, marks)]
            changed = self.state.after_forward(leaves)
            watched = {id(leaf): (leaf, reach.tensors.get(id(leaf), (None, ""))[1]) for leaf in leaves}
            for key, (tensor, name) in reach.tensors.items():
                if not tensor.requires_grad and key not in changed:
                    watched[key] = (tensor, name)
            self.watch = guards.Watch(watched.values())

    def recompute(self, saved, leaves):
        """Run the function again: ``(where its graph starts, own outputs)``."""
        aliases = _aliases(saved, self.needs_grad)
        closed_over = [leaf for leaf in leaves if leaf.grad_fn is not None]
        cut = self._cut(closed_over)
        started = torch.autograd._get_sequence_nr()
        holders = [item for item in self.template if not is_plain(item)] if self.guarantees.unchanged else []
        before = held(holders) if holders else None
        try:
            with cut or _NOTHING:
                result = self._call_again(_not_leaves(aliases, self.needs_grad))
        except RuntimeError as error:  # of shapes that do not fit because of such a change, perhaps
            if holders and held(holders).keys() != before.keys():
                raise _changes_argument(holders) from error
            raise
        if holders and held(holders).keys() != before.keys():
            raise _changes_argument(holders)
        outputs, _ = strip_result(result)
        if len(outputs) != self.count or any(self._signature(outputs[i]) != mark for i, mark in self.expected.items()):
            raise self._other_outputs(outputs)
        own = [outputs[place] for place in self.expected]
        starts = [alias for alias, needed in zip(aliases, self.needs_grad) if needed]
        if cut is not None:
            starts += cut.replaced(leaves)
            found, node = graph_inputs(own, [], closed_over, started)
            if node is not None or any(tensor.grad_fn is not None for tensor in found):
                raise CheckpointError(
                    "this checkpointed region hands a closed-over tensor that was computed before it straight to a "
                    "torch.autograd.Function or a compiled function. Pass that tensor as an argument of checkpoint()."
                )
        else:
            starts += leaves
        return starts, own

    def _cut(self, closed_over):
        if not closed_over and self.cut is None:
            return None
        known = {} if self.cut is None else self.cut.leaves
        return Cut({**known, **{id(tensor): (tensor, tensor.detach().requires_grad_()) for tensor in closed_over}})

    def _call_again(self, aliases):
        """The call of the forward once more, in the surroundings it had then."""
        was = is_recomputing()
        _local.recomputing = True
        try:
            with torch.enable_grad():
                if not self.streams and self.autocast is None and not any_enabled():
                    return self._call(aliases)
                with rng.replay(self.streams), (self.autocast or OFF).restored():
                    return self._call(aliases)
        finally:
            _local.recomputing = was

    def _signature(self, tensor):
        needs_grad = tensor.requires_grad or not self.guarantees.exact_graph
        return tensor.shape, tensor.dtype, tensor.device, needs_grad

    def _other_outputs(self, outputs):
        different = [
            f"output {place}: {_describe(expected)} in forward, {_describe(self._signature(outputs[place]))} in recompute"
            for place, expected in self.expected.items()
            if place < len(outputs) and self._signature(outputs[place]) != expected
        ]
        if len(outputs) != self.count:
            different.insert(0, f"{self.count} tensors in forward, {len(outputs)} in recompute")
        return CheckpointError(
            "the recompute of a checkpointed region returned other outputs than its forward ("
            + "; ".join(different)
            + "). The function must do the same both times: look for a condition on a counter, a flag, a cache or a "
            "random number that checkpoint() cannot replay."
        )

    def check_unchanged(self):
        if self.watch is None:
            return
        for place, (reference, mark) in enumerate(self.saved_marks):
            tensor = reference()
            if tensor is not None and guards.version(tensor) != mark:
                raise guards.changed_between(f"input tensor number {place}, {guards.describe(tensor)},")
        self.watch.check()


class _Recompute(torch.autograd.Function):
    """The autograd node of a region: inputs are its tensors and parameters, outputs its outputs."""

    @staticmethod
    def forward(ctx, region, given, leaves, anchor, *inputs):
        ctx.region = region
        ctx.leaves = leaves
        ctx.set_materialize_grads(False)
        # `anchor` or a parameter stands in when there is no input tensor: a second backward must find it released.
        ctx.save_for_backward(*given) if given else ctx.save_for_backward(torch.empty(0))
        pending, region.pending = region.pending, None
        return pending

    @staticmethod
    def backward(ctx, *grad_outputs):
        region = ctx.region
        _refuse_unsupported(region)
        region.check_unchanged()
        with region.state.as_before() if region.state is not None else _NOTHING:
            starts, outputs = region.recompute(ctx.saved_tensors, ctx.leaves)
            used = [i for i, output in enumerate(outputs) if grad_outputs[i] is not None and output.requires_grad]
            if len(used) < len(outputs):
                outputs, grad_outputs = [outputs[i] for i in used], [grad_outputs[i] for i in used]
            if region.inside:
                if used:
                    torch.autograd.backward(outputs, grad_outputs)
                return None, None, None, None, *(start.grad for start in starts)
            hooked = [leaf for leaf in ctx.leaves if leaf.grad_fn is None and leaf._backward_hooks]
            with _silenced(hooked) if hooked else _NOTHING:
                return None, None, None, None, *_gradients(outputs, grad_outputs, starts)


# Without the Python wrapper around ``apply``, which looks for functorch transforms: checkpoint() has done that.
_apply = super(torch.autograd.Function, _Recompute).apply


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


def _tensors(reach):
    return [tensor for tensor, _ in reach.tensors.values()]


def _aliases(tensors, needs_grad):
    """Leaves over the same storage, so that the region's graph starts here and not in the caller's history."""
    return [
        tensor.detach().requires_grad_(True) if needed else tensor for tensor, needed in zip(tensors, needs_grad)
    ]


def _detached(outputs):
    """The values without the graph; views of each other stay views, which torch then protects from in-place changes."""
    values = [output.detach() for output in outputs]
    if len(values) > 1 and len({guards.storage(value) or id(value) for value in values}) < len(values):
        with torch.no_grad():
            return tuple([value.view_as(value) for value in values])
    return tuple(values)


def _refuse_leak(grad):
    raise CheckpointError(
        "a tensor computed inside a checkpointed region left it other than through its return value (kept as an "
        "attribute, in a list, or in a returned object that is no list, tuple, dict or dataclass) and takes part in "
        "the loss, so its gradient could not be handed on to the inputs of the region. Return the tensor."
    )


def _still_there(leaf):
    return leaf() if type(leaf) is weakref.ref else leaf


def _not_leaves(aliases, needs_grad):
    """Views of the aliases while a dispatch mode is on: FlopCounterMode and its like hook the tensors that modules
    get, and torch does not run such hooks of a leaf whose gradient is being captured."""
    if not torch._C._len_torch_dispatch_stack():
        return aliases
    with torch.enable_grad():
        return [alias.view_as(alias) if needed else alias for alias, needed in zip(aliases, needs_grad)]


def _handed_through(outputs, aliases, given) -> list:
    """Outputs that need no gradient or existed before the region, as the plain function would return them."""
    originals = {id(alias): tensor for alias, tensor in zip(aliases, given)}
    return [originals.get(id(output), output) for output in outputs]


def _may_need_grad(output) -> bool:
    return (output.is_floating_point() or output.is_complex()) and not output.requires_grad


def _is_among(tensor, others) -> bool:
    return any(tensor is other for other in others)


def _describe(signature) -> str:
    shape, dtype, device, requires_grad = signature
    dtype = str(dtype).removeprefix("torch.")
    return f"shape {list(shape)} {dtype} on {device}{'' if requires_grad else ' without grad'}"


def _changes_inputs(what: str) -> CheckpointError:
    return CheckpointError(
        f"this checkpointed region changes {what} in place, so the old value is lost for the recompute. Work on a "
        "clone inside the region, use the out-of-place operation (nn.ReLU(inplace=False) as first layer, for "
        "example), or start the region after the change."
    )


def _changes_argument(holders) -> CheckpointError:
    names = ", ".join(sorted({type(holder).__name__ for holder in holders}))
    return CheckpointError(
        f"this checkpointed region changes an object that it got as an argument (one of: {names}): it puts tensors into "
        "it or replaces some, and its recompute did so again, on what the forward had left. Do not pass it "
        "(transformers: use_cache=False), or return the tensors instead."
    )


def _made_since(started: int, tensor) -> bool:
    return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= started


@contextlib.contextmanager
def _saved_tensors_kept():
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
        yield


def _no_saved_tensor_hooks():
    """Keep a surrounding ``saved_tensors_hooks`` (an offload, say) away from a graph that is dropped at once."""
    return _NOTHING if torch._C._autograd._top_saved_tensors_default_hooks(False) is None else _saved_tensors_kept()
