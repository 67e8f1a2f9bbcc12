"""``Region``: the two runs of a region's function, and the state that the second run needs to repeat the first.

``first_forward`` runs the function with a graph, reads from the graph which outputs need a gradient and at which
tensors the graph ends, and drops the graph. ``recompute`` runs the function again on the saved inputs and returns the
new graph.
"""

import contextlib
import functools
import itertools
import math
import sys
import threading
import weakref
from itertools import compress
from typing import Any

import torch

from ackpt.core.autograd_state import phase, recomputation_begins
from ackpt.core.errors import CheckpointError

from . import guards, rng
from .dead_calls import Dead, DeadCalls, DeadRead, Liveness, Skipping, dropping_hooks, top_hooks
from .evidence import (
    RECORDED_RUNS,
    SMALL_BYTES,
    Path,
    check_same_path,
    checksum,
    evidence_of,
    is_small,
    names_of,
    number_ends,
    opaque_nodes,
    other_left,
    other_outputs,
    subject_of,
)
from .reachable import DetachClosedOver, ReachableState, frozen, graph_of, is_data, tensors_in
from .recorder import Recorder, data_restored
from .rng import AUTOCAST_OFF, Autocast
from .tree import Slot, Tensors, fill, is_plain, strip_arguments, strip_result

#: The gradient of a tensor that a region uses more often than this (a weight at every step of a loop) is summed inside
#: the region, because its contributions would take too much memory one by one.
MOST_USES = 8
_PythonNode = torch.autograd.function.BackwardCFunction
_NOTHING = contextlib.nullcontext()
_any_autocast = torch._C._is_any_autocast_enabled
_set_compiler = torch._C._dynamo.eval_frame.set_eval_frame  # pyright: ignore[reportAttributeAccessIssue]
_swap: Any = torch._C._swap_tensor_impl  # pyright: ignore[reportAttributeAccessIssue]


class Region:
    """One call of ``checkpoint``, with everything that its recomputation needs except the saved inputs.

    ``template``, ``names``: its arguments with slots for the ``inputs``, and the names of keywords. ``state``,
    ``watch``: what the recomputation restores, and what it checks. ``recorder``, ``is_small``: how the ``path`` of the
    first run is observed; ``subject``: what is known of other regions of the function. ``node_outputs``: the indices of
    the outputs that the autograd node returns; ``left``: the tensors that it returns after them, which the function has
    stored elsewhere, and ``left_facts``: for each its place among the calls, its signature, and its graph's nodes.
    ``dead``: the calls that the recomputation leaves out, and ``unread``: tensors in place of unsaved inputs.
    ``compiler``: Dynamo's callback that compiles the function, or None.
    """

    def __init__(self, function, args, kwargs, preserve_rng_state, compiler=None):
        self.inputs = Tensors()
        self.names = tuple(kwargs)
        self.template, self.has_containers = strip_arguments((*args, *kwargs.values()), self.inputs)
        self.function, self.compiler = function, compiler
        self.preserve_rng_state = preserve_rng_state
        self.guarantees = guards.current()
        # Arguments that are objects, in which the region's code can replace tensors.
        self.objects = [item for item in self.template if not is_plain(item)] if self.guarantees.unchanged else []
        self.is_nested = phase.recomputing
        self.autocast = Autocast() if _any_autocast() else None
        self.streams = []
        self.state: Any = None
        self.path: Any = None
        self.subject: Any = None
        self.recorder: Any = None
        self.watch = self.unread_changes = self.accumulators = self.checksums = self.recomputed = None
        self.is_small = self.accumulates_inside = self.can_skip = False
        self.is_recomputed = self.is_over = self.is_other = False
        self.left, self.left_facts = [], []
        self.hidden_generators: set[int] = set()
        self.dead: DeadCalls | None = None
        self.unread: dict[int, Dead] = {}
        self.opaque: list[int] = []
        self.detached = phase.detached
        if self.detached is not None:
            self.inputs[:] = self.detached.replaced(list(self.inputs))

    def first_forward(self):
        """Run the function, count ``uses``, and return the inputs of the autograd node, ``(arguments, leaves)``."""
        inputs = self.inputs
        self.needs_grad = [tensor.requires_grad for tensor in inputs]
        self.is_computed = [not tensor.is_leaf and tensor.layout is torch.strided for tensor in inputs]
        is_walked = self.guarantees.unchanged or self.guarantees.other_rng or "torch.distributed.fsdp" in sys.modules
        reachable = ReachableState(self.function, self.template) if is_walked else ReachableState()
        if self.guarantees.unchanged:
            subject: Any = subject_of(self.function)
            self.subject = subject
            if not reachable.opaque:
                self.is_small = is_small(self, reachable)
                # Other closures of one code may hold what the walk does not find.
                is_known = subject is not None and len(reachable.tensors) in subject.counts
                if not self.is_small or subject is None or subject.passed < RECORDED_RUNS or not is_known:
                    self.recorder = Recorder(named=reachable.tensors, copies_writes=not reachable.sharded)
                    skips = subject is not None and subject.skips
                    self.can_skip = skips and not self.is_small and self.guarantees.exact_graph
                    if self.can_skip and (subject.learns or torch._C._len_torch_dispatch_stack()):  # meters add calls  # pyright: ignore
                        self.recorder.dead_calls = self.recorder.liveness = Liveness()
            copies = SMALL_BYTES if self.recorder is None or (subject and subject.changes_unseen is None) else -1
            if reachable.sharded or subject is None or subject.changes_unseen:
                copies = math.inf
            with torch._C.DisableTorchFunction():  # the recorder of an outer region would see reads and writes here
                self.state = guards.MutableState(reachable, self.recorder is not None, copies)
        aliases, starts, retained = inputs, [], []
        if self.guarantees.exact_graph:
            # Leaves, or views of leaves, because torch refuses to change these in place before it has done so.
            aliases = _aliases(inputs, self.needs_grad)
            aliases = [each.view_as(each) if flag else each for each, flag in zip(aliases, self.is_computed)]
            if self.recorder is not None:
                self.recorder.record_inputs(aliases)
            starts = [*map(weakref.ref, compress(aliases, self.needs_grad))]
            for index in compress(range(len(aliases)), self.needs_grad):  # retain_grad does nothing for a leaf
                aliases[index].retain_grad = functools.partial(retained.append, index)
        versions = guards.versions(inputs)
        before = tensors_in(self.objects)
        leaves: Any
        leaves, counts = self._forward(inputs, aliases, versions, reachable)
        starts_by_id = [*map(id, compress(aliases, self.needs_grad))]
        if any(key not in before and item.requires_grad for key, item in tensors_in(self.objects).items()):
            raise guards.changes_argument(self.function, self.objects)
        if self.recorder is not None:
            with torch._C.DisableTorchFunction():
                left = self._take_left(leaves, counts, aliases, reachable)
            phase.leaves_behind = phase.leaves_behind if phase.leaves_behind is None else phase.leaves_behind or left
        uses = [counts.get(alias, 1) for alias in starts_by_id]
        self._move_hooks(aliases, inputs, retained)
        del aliases
        self.inputs = Tensors()  # only the node keeps the inputs alive
        # The graph of the first forward starts at these aliases and should be freed by now, unless code that a recorder
        # does not see has stored something. An alias that was stored itself becomes another view of the input.
        for start, tensor in zip(starts, compress(inputs, self.needs_grad)):
            if (alias := start()) is not None:
                phase.leaves_behind = None if phase.leaves_behind is None else True
                guards.refuse_gradient_of(alias)
                if self.recorder is not None and type(alias) is torch.Tensor:
                    with torch._C.DisableTorchFunction():
                        _swap(alias, tensor.view_as(tensor))
                        alias._backward_hooks = None
                if self.subject is not None:
                    self.subject.passed = -math.inf
        leaves = [leaf for leaf in map(_existing, leaves) if leaf is not None]  # some that the function made are gone
        if self.path is not None and self.path.evidence is not None:
            number_ends(self.path.evidence, starts_by_id, leaves)
        with torch._C.DisableTorchFunction():  # else, these would be calls of an outer region, and read its results
            has_node = bool(self.node_outputs or self.left)
            if self.can_skip and has_node:
                self.dead = subject.dead_calls(self, inputs, leaves)  # pyright: ignore
            if self.recorder is not None:
                self.recorder.forget()
            if has_node:
                self._record_state(inputs, leaves, reachable)
        uses += [counts.get(id(leaf), 1) for leaf in leaves]
        if self.autocast is not None:  # it casts a leaf once for all its uses, and a computed tensor for each
            separate = [*compress(self.is_computed, self.needs_grad), *[False] * len(leaves)]
            uses = [count if each else 1 for count, each in zip(uses, separate)]
        self.uses = [count if count <= MOST_USES else 1 for count in uses]
        return inputs, leaves

    def _take_left(self, leaves, counts, aliases, reachable) -> bool:
        """Return whether the function has stored tensors with a graph; make them outputs of the autograd node.

        Their graph is dropped like that of the other outputs, and its leaves and uses are added to `leaves`, `counts`.
        """
        starts, ends = set(map(id, compress(aliases, self.needs_grad))), {id(_existing(leaf)) for leaf in leaves}
        is_left, numbers = False, set(self.nodes)
        for place, tensor in self.recorder.left_results():  # pyright: ignore[reportOptionalMemberAccess]
            is_left = True
            graph = graph_of([tensor], self._histories(aliases, reachable), self.started)
            self._note_opaque(graph)
            if self.accumulates_inside or graph.older is not None or type(tensor) is not torch.Tensor:
                guards.refuse_gradient_of(tensor)
                continue
            for end, users in zip(graph.ends, graph.users):
                uses = sum(user._sequence_nr() not in numbers for user in users)
                counts[id(end)] = counts.get(id(end), 0) + uses
                if id(end) not in starts and id(end) not in ends:
                    ends.add(id(end))
                    leaves.append(end)
            nodes = names_of(graph)
            numbers.update(nodes)
            self.left.append(tensor)
            self.left_facts.append((place, self._signature(tensor), nodes))
            # The tensor that the user's code refers to loses its graph here and becomes an output of the node later.
            _swap(tensor, tensor.detach())
            del graph, users
        if self.left:
            self.path = Path(self.recorder, self.nodes, None)
            self.output_values = _detached([*self.output_values, *self.left])
            if self.subject is not None:
                self.subject.passed = -math.inf  # without a recorder, they would go unseen
        return is_left

    def _move_hooks(self, aliases, inputs, retained) -> None:
        """Move hooks and ``retain_grad``, at the indices `retained`, from the function's inputs to the caller's."""
        for alias, tensor in zip(aliases, inputs):
            if alias is not tensor and alias._backward_hooks:
                # The dict itself, so that handles can still remove hooks from it.
                tensor.register_hook(functools.partial(_run_hooks, alias._backward_hooks))
                alias._backward_hooks = None
        for index in retained:
            inputs[index].retain_grad()
            inputs[index].register_hook(functools.partial(_set_gradient, weakref.ref(aliases[index])))

    def result(self, outputs):
        """The function's result, with `outputs` of the autograd node inserted."""
        tensors, self.other_outputs = self.other_outputs, []
        for index, output in zip(self.node_outputs, outputs):
            tensors[index] = output
        return fill(self.output_template, tensors)

    def _forward(self, inputs, aliases, versions, reachable):
        """Run the function and drop its graph; return the graph's leaves, and how often it uses each tensor, by id."""
        self.started = started = torch.autograd._get_sequence_nr()
        self.nodes: dict[int, str] = {}
        self.output_signatures, self.output_values = {}, ()
        result = self._first_forward(aliases, reachable)
        for index, (tensor, version) in enumerate(zip(inputs, versions)):
            if guards.version(tensor) != version:
                raise guards.changes_inputs(f"its input tensor number {index} ({guards.describe(tensor)})")
        outputs, template = strip_result(result)
        if self.guarantees.exact_graph:
            computed = [i for i, each in enumerate(outputs) if each.grad_fn and each.grad_fn._sequence_nr() >= started]
            node_outputs = [i for i in computed if id(outputs[i]) not in reachable.tensors]
        else:  # the forward ran without a graph
            computed = [i for i, each in enumerate(outputs) if not any(each is alias for alias in aliases)]
            floats = [i for i in computed if outputs[i].is_floating_point() or outputs[i].is_complex()]
            node_outputs = [i for i in floats if not outputs[i].requires_grad]
        self.node_outputs, self.output_template = node_outputs, template
        # The others need no gradient or existed before: those that a call without checkpoint() returns.
        originals = dict(zip(map(id, aliases), inputs)) if len(node_outputs) < len(outputs) else {}
        self.other_outputs: list[Any] = [originals.get(id(output), output) for output in outputs]
        self.output_count = len(outputs)
        if not node_outputs:
            return [], {}
        computed = [outputs[index] for index in node_outputs]
        if self.can_skip and self.recorder.liveness is not None:
            self._note_opaque(graph_of(computed, self._histories(aliases, reachable)))
        leaves, counts = self._leaves(computed, aliases, reachable, started)
        if reachable.walked:  # leaves that only the graph refers to were created by the function itself
            leaves = [leaf if id(leaf) in reachable.tensors else weakref.ref(leaf) for leaf in leaves]
        self.output_signatures = {index: self._signature(outputs[index]) for index in node_outputs}
        if any(rng.is_of_cpu(stream) for stream, _ in self.streams) and threading.active_count() > 1:
            self.checksums = [checksum(output) for output in computed]
        self.output_values = _detached(computed)
        for index in node_outputs:
            self.other_outputs[index] = None
        return leaves, counts

    def _first_forward(self, aliases, reachable):
        if self.autocast is not None:
            torch.clear_autocast_cache()
        previous, phase.dropping = phase.dropping, True
        try:
            has_hooks = top_hooks(False) is not None or (phase.recorder and phase.recorder.liveness) is not None
            with rng.LOCK if self.preserve_rng_state else _NOTHING, dropping_hooks() if has_hooks else _NOTHING:
                before = rng.snapshot(reachable.streams, self.guarantees.other_rng) if self.preserve_rng_state else []
                if self.recorder is not None:
                    self.recorder.before = [pair for pair in before if isinstance(pair[0], rng.TorchStream)]
                    if self.recorder.liveness is not None:
                        self.recorder.liveness.begin()
                with _NOTHING if self.guarantees.exact_graph else torch.no_grad(), self.recorder or _NOTHING:
                    result = self._call(aliases)
                self.streams = rng.drawn_from(before)
                if self.recorder is not None:  # in ``fork_rng``, for example
                    forked = rng.without(self.recorder.drawn, self.streams)
                    self.streams, self.recorder.before, self.recorder.drawn = self.streams + forked, [], []
                    if forked and self.subject is not None:
                        self.subject.passed = -math.inf  # without a recorder, these draws would go unseen
                if self.recorder is not None and self.preserve_rng_state and self.guarantees.other_rng:
                    hidden = rng.unknown(self.recorder.streams.values(), before)
                    self.hidden_generators = {id(stream.generator) for stream, _ in hidden}
                    self.streams += rng.drawn_from(hidden)
                self.marks = [stream.mark_of(stream.get()) for stream, _ in self.streams]
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                changed = "a tensor that requires grad: an input of the region or a parameter"
                raise guards.changes_inputs(changed) from error
            raise
        finally:
            phase.dropping = previous
            if self.autocast is not None:
                torch.clear_autocast_cache()
        return result

    def _call(self, tensors):
        if self.has_containers:
            values: Any = fill(self.template, tensors)
        else:
            values = [tensors[item] if type(item) is Slot else item for item in self.template]
        split = len(values) - len(self.names)
        keywords = dict(zip(self.names, values[split:]))
        if self.preserve_rng_state and phase.recorder is not None:
            phase.recorder.begin(self.guarantees.other_rng)
        if self.compiler is not None:
            _set_compiler(self.compiler)
        try:
            result = self.function(*values[:split], **keywords)
        finally:
            if self.compiler is not None:
                _set_compiler(None)
        if self.has_containers:
            after = Tensors()
            strip_arguments(values, after)
            if [id(tensor) for tensor in after] != [id(tensor) for tensor in tensors]:
                raise guards.changes_containers()
        return result

    def _leaves(self, outputs, aliases, reachable, started):
        """The parameters and closed-over tensors at which the graph ends, and how often operations use each tensor."""
        # FSDP reduces gradients in hooks inside the region, so gradients must be accumulated there.
        self.accumulates_inside = reachable.sharded or not self.guarantees.exact_graph
        if self.accumulates_inside:
            return [], {}
        while True:
            graph = graph_of(outputs, self._histories(aliases, reachable), started)
            if graph.older is None:
                break
            if reachable.walked:
                raise guards.unreachable(graph.older)
            reachable = ReachableState(self.function, self.template)
        # New nodes of a parameter that is released after its use would expect gradients of its current shape.
        self.accumulators = [node for node, tensor in zip(graph.sources, graph.ends) if id(tensor) in reachable.tensors]
        if self.recorder is not None or self.is_small:
            evidence: Any = evidence_of(graph, outputs) if self.is_small else None
            if self.recorder is None and not self.subject.kinds.issuperset(evidence.kinds):
                self.subject.passed = 0  # it does what it never did while it was recorded
            self.nodes = names_of(graph) if self.recorder is not None else {}
            self.path = Path(self.recorder, self.nodes, evidence)
        starts = set(map(id, compress(aliases, self.needs_grad)))
        return [tensor for tensor in graph.ends if id(tensor) not in starts], graph.counts()

    def _note_opaque(self, graph) -> None:
        if self.recorder is not None and self.recorder.liveness is not None:
            self.opaque += opaque_nodes(graph, self.recorder.liveness)

    def _histories(self, aliases, reachable) -> list:
        """The tensors with a history at which the graph of the first run may end; with a mark, they had none before."""
        reads = () if self.recorder is None else (r.value for r in self.recorder.reads.values() if r.mark is None)
        tensors = itertools.chain(aliases, (tensor for tensor, _ in reachable.tensors.values()), reads)
        return [tensor for tensor in tensors if tensor is not None and tensor.grad_fn is not None]

    def _record_state(self, inputs, leaves, reachable):
        """Freeze the function's closure, and record the versions of all tensors that must not change until backward."""
        self.function = frozen(self.function)
        if self.state is not None:
            # Compiled code may read the statistics of a norm where no recorder sees it.
            is_compiled = "CompiledFunctionBackward" in self.nodes.values()
            unread = () if self.recorder is None or is_compiled else self.recorder.only_updated()
            changed = self.state.after_forward(leaves, self.recorder, self.subject, unread)
            leaves = [leaf for leaf in leaves if id(leaf) not in changed]
            items: list[Any] = [*map(weakref.ref, inputs), *leaves]
            names: list[Any] = [*range(len(inputs))]
            names += [reachable.tensors.get(id(leaf), (None, ""))[1] for leaf in leaves]
            for key, (tensor, name) in reachable.tensors.items():
                if not tensor.requires_grad and key not in changed and key not in reachable.unread:
                    items.append(tensor)
                    names.append(name)
            if self.recorder is not None:
                hidden = self.recorder.reads.keys() - reachable.tensors.keys()
                if self.subject is not None:
                    self.subject.counts.add(len(reachable.tensors))
                if self.subject is not None and (hidden or self.hidden_generators):
                    self.subject.passed = -math.inf  # without a recorder, these reads would go unseen
                for key in hidden.difference(changed, map(id, leaves)):
                    items.append(weakref.ref(self.recorder.reads[key].value))
                    names.append(self.recorder.reads[key].name)  # pyright: ignore[reportArgumentType]
            self.watch = guards.Watch(items, names)

    def recompute(self, saved, leaves, left, is_last):
        """Run the function again; return ``(tensors at which its graph starts, the same or views of them that the
        function received, outputs that need a gradient, their graph if it was looked at)``.

        `left`: the facts of the tensors among ``left_facts`` that have a gradient. If `is_last`, what another
        recomputation would need is freed.
        """
        if self.is_over:
            raise RuntimeError("Trying to backward through a region a second time, after an error in its backward.")
        self.is_recomputed, self.is_other, self.leaked = False, False, []
        aliases = _aliases(saved, self.needs_grad)
        closed_over = [leaf for leaf in leaves if leaf.grad_fn is not None]
        detached = None
        if closed_over or self.detached is not None:
            pairs = {id(tensor): (tensor, tensor.detach().requires_grad_()) for tensor in closed_over}
            detached = DetachClosedOver(pairs if self.detached is None else self.detached.leaves | pairs)
        inputs = self._not_leaves(aliases)
        started = torch.autograd._get_sequence_nr()
        # The attributes of data objects are restored.
        objects = [item for item in self.objects if not is_data(type(item))]
        before = tensors_in(objects).keys()
        recorder = None
        if self.recorder is not None or self.unread_changes:
            recorder = Recorder(self.recorder, refused=self.unread_changes, wanted=[place for place, _, _ in left])
            recorder.record_inputs(inputs)
            if self.dead:
                recorder.dead_calls = Skipping(self.dead)
        recomputation_begins()
        try:
            data = _NOTHING if self.state is None else data_restored(self.state.replaced)
            with data, detached or _NOTHING, recorder or _NOTHING:
                result = self._repeat_call(inputs, is_last and not self.dead)
        except CheckpointError:
            raise
        except Exception as error:
            if tensors_in(objects).keys() != before:
                raise guards.changes_argument(self.function, objects) from error
            guards.note_recomputation(error, self.function)
            raise
        if tensors_in(objects).keys() != before:
            raise guards.changes_argument(self.function, objects)
        outputs, _ = strip_result(result)
        signatures = [self._signature(output) for output in outputs]
        if len(outputs) != self.output_count or any(
            signatures[i] != signature for i, signature in self.output_signatures.items()
        ):
            raise other_outputs(self.output_count, self.output_signatures, signatures)
        computed = [outputs[index] for index in self.output_signatures]
        for place, signature, _ in left:
            tensor = recorder.kept.get(place)  # pyright: ignore[reportOptionalMemberAccess]
            if tensor is None or self._signature(tensor) != signature:
                raise other_left(self.function)
            computed.append(tensor)
        starts = [*compress(aliases, self.needs_grad)]
        received = [*compress(inputs, self.needs_grad)]
        closed_over_starts = leaves if detached is None else detached.replaced(leaves)
        starts += closed_over_starts
        received += closed_over_starts
        for tensor in received:  # the hooks of the forward run for the tensors that it was called with
            if tensor._backward_hooks:
                for key in [key for key, hook in tensor._backward_hooks.items() if not _is_of_torch(hook)]:
                    del tensor._backward_hooks[key]
        graph = None
        if detached is not None or self.path is not None or max(self.uses, default=1) > 1:
            histories = [*closed_over, *(tensor for tensor in inputs if tensor.grad_fn is not None)]
            graph = graph_of(computed, histories, started)
            if graph.older is not None or not set(map(id, closed_over)).isdisjoint(map(id, graph.ends)):
                raise guards.hidden_use()
            if self.unread_changes and any(isinstance(node, _PythonNode) for node in graph.nodes):
                raise guards.changed_between(*next(iter(self.unread_changes.values())))  # the node may read it
            if self.path is not None:
                evidence = None
                if self.path.evidence is not None:
                    evidence = evidence_of(graph, computed)
                    number_ends(evidence, map(id, compress(inputs, self.needs_grad)), closed_over_starts)
                path, nodes = self.path, names_of(graph) if self.path.calls is not None else {}
                if left:
                    all_nodes = functools.reduce(dict.__or__, (facts[2] for facts in left), self.nodes)
                    path = Path(self.recorder, dict(sorted(all_nodes.items())), None)
                    nodes = dict(sorted(nodes.items()))
                present = Path(None if self.path.calls is None else recorder, nodes, evidence)
                if path != present:
                    self.is_other = bool(self.dead) and path.has_other_calls(present)
                    check_same_path(path, present, recorder, self.function)
                if self.subject is not None and self.state is not None and self.path.calls is not None:
                    self.subject.add(self.path.evidence, evidence, self.state.is_repeatable)
        self.is_recomputed, self.is_over = True, is_last
        if is_last:
            self.streams = []
            if self.state is not None:
                self.state.forget()
        return starts, received, computed, graph

    def runs_again_after(self, error: Exception) -> bool:
        """Whether to recompute again as a whole, because `error` may arise from dead calls; so do later regions."""
        is_in_recomputation, may_run_again = not self.is_recomputed, self.may_run_again
        if not self.dead or not isinstance(error, CheckpointError if is_in_recomputation else DeadRead):
            return False
        if (self.dead.is_proven or self.is_other) and not isinstance(error, DeadRead):
            return False
        self.dead, self.subject.skips = None, False
        return (may_run_again or is_in_recomputation) and not self.unread

    @property
    def may_run_again(self) -> bool:
        """Whether backward has not yet been through a recomputation without these dead calls."""
        return bool(self.dead) and not self.dead.is_proven and not self.accumulates_inside

    def _not_leaves(self, aliases):
        """The inputs of the recomputation: the aliases, or views of them where an input must not be a leaf. Autocast
        casts a leaf once and sums the gradients of its uses in the lower precision, and torch runs no hooks of modes
        such as FlopCounterMode on a leaf whose gradient is captured."""
        make_view = self.needs_grad if torch._C._len_torch_dispatch_stack() else self.is_computed
        if True not in make_view:
            return aliases
        with torch.enable_grad():
            return [
                alias.view_as(alias) if needed and view else alias
                for alias, needed, view in zip(aliases, self.needs_grad, make_view)
            ]

    def _repeat_call(self, aliases, is_last):
        """Repeat the forward's call, with its RNG states and autocast settings."""
        previous = phase.recomputing, phase.dropping, phase.function, phase.leaked
        phase.recomputing, phase.dropping, phase.function, phase.leaked = True, False, self.function, self.leaked
        try:
            for tensor in self.unfrozen:
                tensor.requires_grad_(False)
            torch._C._set_grad_enabled(True)
            if not self.streams and self.autocast is None and not _any_autocast():
                return self._call(aliases)
            autocast = self.autocast or (AUTOCAST_OFF if _any_autocast() else None)
            facts = [(stream, stream.mark_of(state), end) for (stream, state), end in zip(self.streams, self.marks)]
            with rng.replay(self.streams), autocast.restored() if autocast is not None else _NOTHING:
                result = self._call(aliases)
                if is_last:  # their present states are read next; that would be one more copy
                    self.is_over = True
                    self.streams.clear()
                if self.hidden_generators and phase.recorder is not None:  # the first run may have made some itself
                    unused = self.hidden_generators - phase.recorder.streams.keys()
                    facts = [each for each in facts if id(getattr(each[0], "generator", None)) not in unused]
                name = rng.ended_elsewhere(facts)
                if name and not self._has_equal_outputs(result):  # else it was another thread that drew
                    raise guards.other_draws(name, self.function)
                return result
        finally:
            torch._C._set_grad_enabled(False)
            for tensor in self.unfrozen:
                tensor.requires_grad_()
            phase.recomputing, phase.dropping, phase.function, phase.leaked = previous

    def _has_equal_outputs(self, result) -> bool:
        outputs = strip_result(result)[0]
        if self.checksums is None or len(outputs) != self.output_count:
            return False
        if any(type(output) is Dead for output in outputs):
            raise DeadRead("random numbers were drawn elsewhere, and the outputs that would show where were left out")
        present = [checksum(outputs[index]) for index in self.node_outputs]
        return None not in present and all(int(before) == int(now) for before, now in zip(self.checksums, present))

    def _signature(self, tensor):
        return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad or not self.guarantees.exact_graph

    def check_unchanged(self, leaves):
        """Raise if a tensor that the recomputation must read has changed; the recomputation checks the others."""
        self.unread_changes, self.unfrozen = {}, []
        needed = set(map(id, leaves))
        for tensor, name, how in () if self.watch is None else self.watch.changes():
            if how == "unfrozen":
                self.unfrozen.append(tensor)
            elif (self.recorder is None and not self.is_small) or type(name) is int or id(tensor) in needed:
                raise guards.changed_between(tensor, name, how)
            else:
                self.unread_changes[id(tensor)] = tensor, name, how


def _existing(leaf):
    return leaf() if type(leaf) is weakref.ref else leaf


def _aliases(tensors, needs_grad):
    """New leaves on the same storages, so that the region's graph starts there and not in the caller's graph."""
    return [tensor.detach().requires_grad_(True) if needed else tensor for tensor, needed in zip(tensors, needs_grad)]


def _detached(outputs):
    """The outputs without their graph; as views if some share a storage, because torch refuses to modify such views."""
    values = [output.detach() for output in outputs]
    if len(values) > 1 and len({guards.storage(value) or id(value) for value in values}) < len(values):
        with torch.no_grad():
            return tuple([value.view_as(value) for value in values])
    return tuple(values)


def _run_hooks(hooks, gradient):
    for hook in [hook for hook in hooks.values() if not _is_of_torch(hook)]:
        result = hook(gradient)
        gradient = gradient if result is None else result
    return gradient


def _is_of_torch(hook) -> bool:
    """Whether a hook is torch's own, such as those of FlopCounterMode, which follow the recomputation."""
    return getattr(hook, "__module__", None) in ("torch.autograd.graph", "torch.utils.module_tracker")


def _set_gradient(reference, gradient) -> None:
    if (alias := reference()) is not None:
        alias.grad = gradient
