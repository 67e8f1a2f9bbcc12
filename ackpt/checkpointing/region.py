"""One region: the two runs of its function, and the state that the second run needs to repeat the first.

``first_forward`` runs the function with a graph, reads from the graph which outputs need a gradient and at which
tensors it ends, and drops the graph. ``recompute`` runs the function again on the saved inputs and keeps the graph.
"""

from __future__ import annotations

import contextlib
import sys
import weakref

import torch

from ackpt.autograd_state import phase

from . import guards, refusals, rng
from .autocast import OFF, Autocast, any_enabled
from .closures import Cut, current_cut, frozen
from .reachable import Reach, graph_inputs, held
from .recorder import Recorder, check_same_path, path
from .tree import Tensors, fill, fill_arguments, is_plain, strip_arguments, strip_result

_NOTHING = contextlib.nullcontext()
_NOT_WALKED = Reach()
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]


class Region:
    """One call of ``checkpoint``: what its recomputation needs besides the saved inputs."""

    __slots__ = (
        *("function", "template", "names", "has_containers", "given", "needs_grad", "saved_marks", "nested"),
        *("computed", "preserve_rng_state", "streams", "autocast", "guarantees", "state", "watch", "inside"),
        *("expected", "count", "cut", "own", "template_out", "handed", "values", "recorder", "path", "left"),
    )

    def __init__(self, function, args, kwargs, preserve_rng_state):
        self.given = Tensors()
        self.names = tuple(kwargs)
        self.template, self.has_containers = strip_arguments((*args, *kwargs.values()), self.given)
        self.function = function
        self.preserve_rng_state = preserve_rng_state
        self.guarantees = guards.current()
        self.nested = phase.recomputing
        self.autocast = Autocast() if any_enabled() else None
        self.streams = []
        self.state = self.watch = self.recorder = self.path = None
        self.cut = current_cut()
        if self.cut is not None:
            self.given[:] = self.cut.replaced(list(self.given))

    def first_forward(self):
        """Run the function; return the tensors that become inputs of the autograd node: ``(arguments, leaves)``."""
        given = self.given
        self.needs_grad = [tensor.requires_grad for tensor in given]
        self.computed = [not tensor.is_leaf for tensor in given] if self.autocast is not None else self.needs_grad
        reach = self._reach()
        if self.guarantees.unchanged:
            self.state = guards.State(reach)
            self.recorder = None if reach.opaque else Recorder()
        aliases, starts = given, []
        if self.guarantees.exact_graph:
            aliases = _aliases(given, self.needs_grad)
            if self.recorder is not None:
                self.recorder.takes(aliases)
            starts = [weakref.ref(alias) for alias, needed in zip(aliases, self.needs_grad) if needed]
        marks = [guards.version(tensor) for tensor in given]
        holders = self._holders()
        before = held(holders) if holders else {}
        leaves = self._forward(given, aliases, marks, reach)
        del aliases
        if holders and any(key not in before and item.requires_grad for key, item in held(holders).items()):
            raise refusals.changes_argument(holders)
        self.given = Tensors()  # only the node keeps the inputs alive
        # The graph of the first forward ends at these aliases and should be gone.
        for start in starts:
            if (alias := start()) is not None:
                refusals.refuse_gradient_of(alias)
        leaves = [leaf for leaf in map(_still_there, leaves) if leaf is not None]
        if self.recorder is not None:
            if any(leaf.grad_fn is not None for leaf in leaves):  # the graph does not end there but goes on
                self.recorder.refuse_gradients_of_what_is_left()
            self.recorder.results.clear()
        if self.own:
            self._remember(given, marks, leaves, reach)
        return given, leaves

    def take_values(self):
        """Return the values of the outputs that need a gradient, and drop them here."""
        values, self.values = self.values, None
        return values

    def result(self, made):
        """What the function returned, with the outputs `made` of the autograd node inserted."""
        handed, self.handed = self.handed, []
        for place, output in zip(self.own, made):
            handed[place] = output
        return fill(self.template_out, handed)

    def _forward(self, given, aliases, marks, reach):
        """Run the function, drop its graph, and return the ``leaves`` at which the graph ended."""
        started = torch.autograd._get_sequence_nr()
        result = self._first_forward(aliases, reach)
        self._check_inputs(given, marks)
        outputs, template = strip_result(result)
        if self.guarantees.exact_graph:
            new = [i for i, output in enumerate(outputs) if _made_since(started, output)]
            own = [i for i in new if id(outputs[i]) not in reach.tensors]
        else:
            own = [i for i, output in enumerate(outputs) if _may_need_grad(output) and not _is_among(output, aliases)]
        self.own, self.template_out = own, template
        self.handed = [None] * len(outputs) if len(own) == len(outputs) else _handed_through(outputs, aliases, given)
        if not own:
            return []
        starts = [alias for alias, needed in zip(aliases, self.needs_grad) if needed]
        leaves = self._leaves([outputs[place] for place in own], starts, reach, started)
        if reach.walked:  # a leaf that no walk finds and that dies with the graph was made by the function itself
            leaves = [leaf if id(leaf) in reach.tensors else weakref.ref(leaf) for leaf in leaves]
        self.expected = {place: self._signature(outputs[place]) for place in own}
        self.count = len(outputs)
        self.values = _detached([outputs[place] for place in own])
        for place in own:
            self.handed[place] = None
        return leaves

    def _reach(self):
        wanted = self.guarantees.unchanged or self.guarantees.other_rng or "torch.distributed.fsdp" in sys.modules
        return Reach(self.function, self.template) if wanted else _NOT_WALKED

    def _first_forward(self, aliases, reach):
        if self.autocast is not None:
            torch.clear_autocast_cache()
        was, phase.dropping = phase.dropping, True
        try:
            with rng.LOCK if self.preserve_rng_state else _NOTHING, _no_saved_tensor_hooks():
                before = rng.snapshot(reach.streams, self.guarantees.other_rng) if self.preserve_rng_state else []
                with _NOTHING if self.guarantees.exact_graph else torch.no_grad(), self.recorder or _NOTHING:
                    result = self._call(aliases)
                self.streams = rng.drawn_from(before)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                what = "a tensor that requires grad: an input of the region or a parameter"
                raise refusals.changes_inputs(what) from error
            raise
        finally:
            phase.dropping = was
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
                raise refusals.changes_containers()
        return result

    def _check_inputs(self, given, marks):
        for place, (tensor, mark) in enumerate(zip(given, marks)):
            if guards.version(tensor) != mark:
                raise refusals.changes_inputs(f"its input tensor number {place} ({guards.describe(tensor)})")

    def _leaves(self, outputs, aliases, reach, started):
        """The parameters and closed-over tensors at which the graph ends: they become inputs of the autograd node."""
        # FSDP reduces gradients in hooks inside the region, so they must be accumulated there.
        self.inside = reach.sharded or not self.guarantees.exact_graph
        if self.inside:
            return []
        leaves, node, nodes = graph_inputs(outputs, aliases, _tensors(reach), started)
        if node is not None and not reach.walked:
            reach = Reach(self.function, self.template)
            leaves, node, nodes = graph_inputs(outputs, aliases, _tensors(reach), started)
        if node is not None:
            raise refusals.unreachable(node)
        if self.recorder is not None:
            self.path = path(self.recorder, nodes, started)
        return leaves

    def _remember(self, given, marks, leaves, reach):
        """Save what the recomputation needs, and record the state of what must not change until then."""
        self.function = frozen(self.function)
        if self.state is not None:
            self.saved_marks = [(weakref.ref(tensor), mark) for tensor, mark in zip(given, marks)]
            changed = self.state.after_forward(leaves, None if self.recorder is None else self.recorder.written)
            watched = {id(leaf): (leaf, reach.tensors.get(id(leaf), (None, ""))[1]) for leaf in leaves}
            for key, (tensor, name) in reach.tensors.items():
                if not tensor.requires_grad and key not in changed and key not in reach.unread:
                    watched[key] = (tensor, name)
            self.watch = guards.Watch(watched.values())

    def recompute(self, saved, leaves):
        """Run the function again; return ``(tensors at which its graph starts, outputs that it computed)``."""
        self.left = []
        aliases = _aliases(saved, self.needs_grad)
        closed_over = [leaf for leaf in leaves if leaf.grad_fn is not None]
        cut = self._cut(closed_over)
        before_inputs = torch.autograd._get_sequence_nr()
        inputs = self._not_leaves(aliases)
        started = torch.autograd._get_sequence_nr()
        holders = self._holders()
        before = held(holders) if holders else {}
        recorder = None if self.recorder is None else Recorder(self.recorder.calls)
        if recorder is not None:
            recorder.takes(inputs)
        try:
            with cut or _NOTHING, recorder or _NOTHING:
                result = self._call_again(inputs)
        except RuntimeError as error:  # perhaps of mismatched shapes, because an argument changed
            if holders and held(holders).keys() != before.keys():
                raise refusals.changes_argument(holders) from error
            raise
        if holders and held(holders).keys() != before.keys():
            raise refusals.changes_argument(holders)
        outputs, _ = strip_result(result)
        if len(outputs) != self.count or any(self._signature(outputs[i]) != mark for i, mark in self.expected.items()):
            raise refusals.other_outputs(self.count, self.expected, [self._signature(output) for output in outputs])
        own = [outputs[place] for place in self.expected]
        starts = [alias for alias, needed in zip(aliases, self.needs_grad) if needed]
        if cut is not None:
            starts += cut.replaced(leaves)
        else:
            starts += leaves
        if cut is not None or self.path is not None:
            ends, node, nodes = graph_inputs(own, [], closed_over, before_inputs)
            if node is not None or any(tensor.grad_fn is not None for tensor in ends):
                raise refusals.hidden_use()
            if self.path is not None and recorder is not None:
                check_same_path(self.path, path(recorder, nodes, started), recorder, self.function)
        return starts, own

    def _holders(self):
        """The arguments that are objects; the region's code can replace the tensors in them."""
        return [item for item in self.template if not is_plain(item)] if self.guarantees.unchanged else []

    def _not_leaves(self, aliases):
        """The inputs of the recomputation: the aliases, or views of them where an input must not be a leaf.

        Autocast casts a leaf once and sums the gradients of its uses in the lower precision. FlopCounterMode and
        similar modes hook the tensors passed to modules, and torch does not run such hooks on a leaf whose gradient is
        captured.
        """
        if torch._C._len_torch_dispatch_stack():
            wanted = self.needs_grad
        elif self.autocast is not None:
            wanted = self.computed
        else:
            return aliases
        with torch.enable_grad():
            return [
                alias.view_as(alias) if needed and view else alias
                for alias, needed, view in zip(aliases, self.needs_grad, wanted)
            ]

    def _cut(self, closed_over):
        if not closed_over and self.cut is None:
            return None
        known = {} if self.cut is None else self.cut.leaves
        return Cut({**known, **{id(tensor): (tensor, tensor.detach().requires_grad_()) for tensor in closed_over}})

    def _call_again(self, aliases):
        """Repeat the call of the forward, under the RNG states and autocast settings that it ran with."""
        was = phase.recomputing, phase.dropping, phase.function, phase.left
        phase.recomputing, phase.dropping, phase.function, phase.left = True, False, self.function, self.left
        try:
            with torch.enable_grad():
                if not self.streams and self.autocast is None and not any_enabled():
                    return self._call(aliases)
                with rng.replay(self.streams), (self.autocast or OFF).restored():
                    return self._call(aliases)
        finally:
            phase.recomputing, phase.dropping, phase.function, phase.left = was

    def _signature(self, tensor):
        needs_grad = tensor.requires_grad or not self.guarantees.exact_graph
        return tensor.shape, tensor.dtype, tensor.device, needs_grad

    def check_unchanged(self):
        if self.watch is None:
            return
        for place, (reference, mark) in enumerate(self.saved_marks):
            tensor = reference()
            if tensor is not None and guards.version(tensor) != mark:
                raise guards.changed_between(f"input tensor number {place}, {guards.describe(tensor)},")
        self.watch.check()


def _tensors(reach):
    return [tensor for tensor, _ in reach.tensors.values()]


def _aliases(tensors, needs_grad):
    """Leaves on the same storage, so that the region's graph starts here and not in the caller's graph."""
    return [tensor.detach().requires_grad_(True) if needed else tensor for tensor, needed in zip(tensors, needs_grad)]


def _detached(outputs):
    """The outputs without their graph; if some share a storage, as views, which torch refuses to change in place."""
    values = [output.detach() for output in outputs]
    if len(values) > 1 and len({guards.storage(value) or id(value) for value in values}) < len(values):
        with torch.no_grad():
            return tuple([value.view_as(value) for value in values])
    return tuple(values)


def _still_there(leaf):
    return leaf() if type(leaf) is weakref.ref else leaf


def _handed_through(outputs, aliases, given) -> list:
    """Outputs that need no gradient or existed before the region, as the function returns them without checkpoint()."""
    originals = {id(alias): tensor for alias, tensor in zip(aliases, given)}
    return [originals.get(id(output), output) for output in outputs]


def _may_need_grad(output) -> bool:
    return (output.is_floating_point() or output.is_complex()) and not output.requires_grad


def _is_among(tensor, others) -> bool:
    return any(tensor is other for other in others)


def _made_since(started: int, tensor) -> bool:
    return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= started


@contextlib.contextmanager
def _saved_tensors_kept():
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
        yield


def _no_saved_tensor_hooks():
    """Shield a graph that will be dropped at once from outer ``saved_tensors_hooks``, such as an offload's."""
    return _NOTHING if _top_hooks(False) is None else _saved_tensors_kept()
