"""Capture a model's step with AOTAutograd: functional aten operations, forward and backward, in one graph.

Nothing is computed: parameters and inputs are fake tensors, so models of any size can be captured.
"""

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._functorch._aot_autograd.descriptors import BufferAOTInput
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.node import map_arg
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ackpt.checkpointing.recorder import Recorder
from ackpt.checkpointing.standing_in import call_own
from ackpt.core.autograd_state import version
from ackpt.core.errors import TraceError, warn
from ackpt.core.progress import stage
from ackpt.metering.cpu_meter import no_collection
from ackpt.metering.resident import inner_tensors, tensor_at
from ackpt.metering.without_data import found_packed

from .dynamic_sizes import Dimension, Symbols, empty_tensor, integers, is_sized, layout, symbolic
from .inspection.attributes import arguments_unchanged, tensor_attributes
from .inspection.branches import Branch, Branches
from .inspection.calls import described
from .inspection.kept_tensors import OF_SHAPES, Held, HoldsTensors, places
from .inspection.model_checks import call_named, check_call, has_data, is_tensor, require_traceable, tensor_facts
from .inspection.outside_values import Reads, in_own_context
from .inspection.source_lines import Where, explained, not_repeated, saving_hooks_refused
from .outputs import (
    Withheld,
    check_choices,
    flatten_outputs,
    no_gradient,
    refuse_overlaps,
    refuse_views_of_changed,
    without_gradient,
)
from .patches.eager_settings import fused_attention_refused, like_eager
from .patches.python_kernels import casting_once, is_weight
from .patches.size_arithmetic import SizeEnv, python_arithmetic
from .shapes import Shapes, off_meta

# Held during a capture, which replaces functions of torch in all threads.
CAPTURING = threading.RLock()
_HELD = "held by the model's code"  # not a valid attribute name


@dataclass(frozen=True, eq=False)
class Capture:
    """A captured step, and how a call of the model maps to it.

    ``joint``: torch's joint graph with descriptors. ``given``: indices of the step's input tensors among the leaves of
    a call's arguments, each tensor once; ``numbers``: those of integers that are dynamic, for each of which an empty
    tensor of that length is an input; ``held``: input tensors that the model's code references itself, with their
    facts. ``spec``: the pytree of the model's outputs; ``constants``: ``{index in it: value}`` for outputs that are not
    tensors; ``refused``: indices of outputs that were captured without a gradient although the model gives them one;
    ``branches``: what the model's code decides by the values of integer arguments.
    ``made_for``: the call in words, from `ackpt.planner.capture.inspection.calls`; ``has_data``: whether no
    tensor of the call or the model is fake or on the meta device; ``reads``: values outside of its modules that the
    model's code reads. ``reason``: why the model was captured as ``torch.compile`` runs it; empty if it was not.
    ``symbols``: of dynamic dimensions. ``keeps_outputs``: whether the caller does.
    """

    joint: Any
    given: tuple[int, ...]
    held: tuple[torch.Tensor, ...]
    held_facts: list[tuple]
    spec: TreeSpec
    constants: dict[int, Any]
    refused: tuple[int, ...]
    branches: tuple[Branch, ...]
    made_for: dict[str, str]
    has_data: bool
    reads: Reads
    reason: str
    symbols: Symbols | None
    numbers: frozenset[int]
    keeps_outputs: bool

    def serves(self, leaves: Sequence[Any]) -> bool:
        """Whether the model takes the same way in a call with `leaves`, which has the sizes of the capture."""
        return self._is_current() and self.other_branch(leaves) is None

    def other_branch(self, leaves: Sequence[Any]) -> Branch | None:
        """The first branch that the model takes otherwise in such a call."""
        return next((branch for branch in self.branches if not branch.holds(leaves, self.symbols)), None)

    @property
    def tangents(self) -> list[torch.Tensor]:
        """The gradients that backward begins with, as fake tensors."""
        inputs = self.joint.graph_module.graph.find_nodes(op="placeholder")
        return [node.meta["val"] for node in inputs if type(node.meta.get("desc")).__name__ == "TangentAOTInput"]

    def first_change(self) -> str:
        """The first value or tensor of the model's code that differs from the capture, in words; empty if none does."""
        label = self.reads.first_change()
        return label or ("" if self._is_current() else "a tensor that is neither a parameter nor a buffer")

    def _is_current(self) -> bool:
        return self.reads.are_same() and _facts_of(self.held) == self.held_facts

    def inputs(self, modules: dict[str, nn.Module], leaves) -> list[torch.Tensor]:
        """The inputs of the captured step in a call with `leaves`: parameters, buffers, and tensors of the call."""
        named = []
        for path, attribute in self._names:
            if path == _HELD:
                named.append(self.held[int(attribute)])
                continue
            module = modules[path]
            tensors = module._parameters if attribute in module._parameters else module._buffers
            if attribute in tensors:
                named.append(tensors[attribute])
            else:  # of `_mirror`; looked up in every call, since merging an adapter replaces the weight
                name, _, inner = attribute.partition("/")
                named.append(tensor_at(module._parameters[name], inner))
        given = (empty_tensor(leaves[at], leaves) if at in self.numbers else leaves[at] for at in self.given)
        return [*named, *given]

    @cached_property
    def _names(self) -> list[tuple[str, str]]:
        """(path of the module, attribute) of every parameter and buffer."""
        return [name.rpartition(".")[::2] for name in (*self.joint.params_spec, *self.joint.buffers_spec)]

    def outputs(self, tensors, withheld: Mapping[int, tuple[Any, torch.dtype]]) -> Any:
        """What the model returns, from what the captured step returns; `withheld`: by place, outputs without values."""
        left = iter([Withheld.like(*withheld[at]) if at in withheld else each for at, each in enumerate(tensors)])
        leaves = [
            self.constants[index] if index in self.constants else next(left) for index in range(self.spec.num_leaves)
        ]
        for index in self.refused:
            leaves[index] = no_gradient(leaves[index])
        return tree_unflatten(leaves, self.spec)


def _facts_of(tensors: Sequence[torch.Tensor]) -> list[tuple]:
    return [(tensor_facts(tensor), tensor_attributes(tensor)) for tensor in tensors]


@dataclass(frozen=True)
class _Call:
    """The call that is captured, and what its captures have in common; the fields of a `Capture` have their names.

    ``leaves``: of the arguments, ``arguments`` their pytree; ``values``: those with data, for `Branches`; none if the
    call has no data.
    """

    model: nn.Module
    leaves: list[Any]
    values: list[Any]
    arguments: TreeSpec
    made_for: dict[str, str]
    has_data: bool
    reads: Reads
    symbols: Symbols | None
    numbers: frozenset[int]
    differentiate: str
    keeps_outputs: bool
    reason: str = ""

    @property
    def fake_mode(self) -> FakeTensorMode | None:
        """The mode of the parameters and arguments, if they are fake."""
        return detect_fake_mode([*self.model.parameters(), *self.leaves])


class _Forward:
    """The forward of the model as a function of tensors that returns a tuple of tensors.

    ``references``: (dict, name, tensor) of parameters, buffers and held tensors. ``returned``: after the forward, the
    fields ``spec``, ``constants``, ``refused`` and ``branches`` of a `Capture`.
    """

    def __init__(self, call: _Call, modules):
        self.call = call
        self.references = [
            (named, name, tensor)
            for module in modules
            for named in (module._parameters, module._buffers)
            for name, tensor in named.items()
            if tensor is not None
        ]
        self.where = Where(call.model, call.reads.kept.add)
        self.held: Any = None
        self.returned: tuple = ()
        self._casts_once = torch.is_autocast_cache_enabled()  # torch disables the cache while it captures
        self._is_anomaly_enabled = torch.is_anomaly_enabled()  # torch enables it while it captures
        self._attributes: list[tuple[torch.Tensor, str, dict[str, Any]]] = []

    def require_same_attributes(self) -> None:
        """Raise a TraceError if code that gets traced tensors, such as a custom backward, has set attributes of one."""
        for tensor, name, before in self._attributes:
            now = vars(tensor)
            if new := sorted(key for key in now if key[0] != "_" and now[key] is not before.get(key)):
                raise not_repeated(
                    f"the model's code sets attribute {new[0]!r} of parameter {name!r}, which a captured step would "
                    "not repeat. Set an attribute of the module, register a buffer"
                )
        self._attributes.clear()

    def __call__(self, tensors):
        call = self.call
        call.reads.start()
        places = given_places(call.leaves)
        inputs = list(call.leaves)
        for at, tensor in zip(places, tensors):
            if at in call.numbers:
                inputs[at] = tensor.shape[0]
        args, kwargs = tree_unflatten(inputs, call.arguments)
        # Of a tied tensor, torch replaces only the first name.
        pairs = [(tensor, named[name], name) for named, name, tensor in self.references if named[name] is not tensor]
        for tensor, traced, _ in pairs:
            vars(traced).update({**vars(tensor), **vars(traced), "_is_param": isinstance(tensor, nn.Parameter)})
        self._attributes = [(traced, name, dict(vars(traced))) for _, traced, name in pairs]
        own = [tensor for tensor, *_ in pairs] + [call.leaves[at] for at in places]
        self.held = held = Held(own, [traced for _, traced, _ in pairs] + [*tensors], call.reads.paused, self.where)
        versions = [(tensor, version(tensor)) for tensor in held.traced.values()]
        weights = [held.traced[id(tensor)] for tensor in own if is_weight(tensor)]
        once = casting_once(weights if self._casts_once else ())
        same_arguments = arguments_unchanged([*args, *kwargs.values()])
        given = {at: tensor for at, tensor in zip(places, tensors) if call.values and at not in call.numbers}
        branches = Branches(call.values, given, call.symbols, held.traced)
        with same_arguments, _stores_none(own[len(pairs) :]) as returned, once, held, held.in_functions():
            anomaly = mock.patch.object(torch, "is_anomaly_enabled", lambda: self._is_anomaly_enabled)
            with found_packed(), anomaly, call.reads.watched(call.leaves):
                with fused_attention_refused(), saving_hooks_refused(), branches:
                    outputs, out_spec = flatten_outputs(in_own_context(lambda: call_own(call.model, *args, **kwargs)))
            returned += outputs
        outputs: list[Any] = [held.traced.get(id(value), value) for value in outputs]
        buffers = [(traced, tensor) for tensor, traced, _ in pairs if not tensor.requires_grad]
        call.reads.kept.note_operations(buffers)
        if held.new_inputs:
            raise HoldsTensors(held.new_inputs)
        for value in outputs:
            if not is_tensor(value) and not isinstance(value, (type(None), bool, int, float, str)):
                raise TraceError(
                    f"the model returns a {type(value).__name__}, which a captured step cannot rebuild. Return tensors "
                    "in tuples, lists, dicts or registered pytrees (for transformers models: use_cache=False)."
                )
        refused = without_gradient(outputs, call.differentiate)
        refuse_overlaps(outputs, held.traced.values(), refused)
        refuse_views_of_changed(outputs, versions)
        constants = {index: value for index, value in enumerate(outputs) if not is_tensor(value)}
        self.returned = out_spec, constants, refused, tuple(branches.branches)
        return tuple(
            value.detach() if index in refused else value for index, value in enumerate(outputs) if is_tensor(value)
        )


@contextlib.contextmanager
def _stores_none(tensors: list[torch.Tensor]):
    """Refuse a forward that stores one of the `tensors` of its call, wherever; what it returns goes into the list."""
    returned: list[Any] = []
    before = [sys.getrefcount(each) for each in tensors]
    yield returned

    def stored() -> list[int]:
        """The places of tensors to which there are more references than before and in the two lists of outputs."""
        counts = [sys.getrefcount(each) for each in tensors]
        twice = [2 * sum(value is each for value in returned) for each in tensors]
        return [at for at, (now, was, more) in enumerate(zip(counts, before, twice)) if now - more > was]

    if stored():
        gc.collect()  # a cycle, such as that of a caught error, may hold a frame with the tensor
    if places := stored():
        raise not_repeated(
            f"the forward stores an argument, a tensor of shape {list(tensors[places[0]].shape)}, in an object, which "
            "a captured step would not do. Return it from the forward"
        )


class _Flat(nn.Module):
    """The model of a call as torch captures it; its parameters keep their names."""

    def __init__(self, call: _Call, held):
        super().__init__()
        buffers = nn.Module()
        for number, tensor in enumerate(held):
            buffers.register_buffer(str(number), tensor)
        # In one attribute, of a name that no submodule has: torch looks submodules up as attributes.
        vars(self).update(vars(_mirror(call.model, {})))
        self._modules[_HELD] = buffers
        self._ackpt_forward = _Forward(call, self.modules())

    def forward(self, *tensors):
        return self._ackpt_forward(tensors)

    # Torch would make a tied tensor one input for every name, and sum its gradients outside of the graph.
    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        return super().named_parameters(prefix, recurse)

    def named_buffers(self, prefix="", recurse=True, remove_duplicate=True):
        return super().named_buffers(prefix, recurse)


def _mirror(module: nn.Module, seen: dict[int, nn.Module]) -> nn.Module:
    """A module with the names and tensors of `module`, in which torch replaces tensors; the model keeps its own."""
    if id(module) not in seen:
        mirror = seen[id(module)] = nn.Module()
        children = {name: child if child is None else _mirror(child, seen) for name, child in module._modules.items()}
        inner = {
            f"{name}/{path}": tensor
            for name, parameter in module._parameters.items()
            if parameter is not None
            for path, tensor in inner_tensors(parameter).items()
        }
        own = {"_parameters": {**module._parameters, **inner}, "_buffers": {**module._buffers}, "_modules": children}
        vars(mirror).update(own)
    return seen[id(module)]


def given_places(leaves) -> tuple[int, ...]:
    """The index of the first occurrence of each tensor among `leaves`."""
    first: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if is_tensor(leaf):
            first.setdefault(id(leaf), index)
    return tuple(first.values())


@contextlib.contextmanager
def capture(model, args, kwargs, differentiate="loss", outputs="keep", dynamic: Sequence[Dimension] = ()):
    """A `Capture` of `model` called with `args` and `kwargs`; it can be compiled inside of the context or later.

    Inside, the state of torch for captures stays active, and so does the arithmetic of symbols: make its graph there.
    `dynamic`: the dimensions whose sizes become symbols. The caller holds `CAPTURING`.
    """
    check_choices(differentiate, outputs)
    if any(isinstance(mode, Recorder) for mode in torch.overrides._get_current_function_mode_stack()):
        raise TraceError(
            f"{type(model).__name__} is to be captured inside a region of ackpt.checkpoint, which cannot record a "
            "capture. Leave out the region: the plan alone decides what is recomputed."
        )
    stage("capturing the step")
    leaves, arguments = tree_flatten((args, kwargs))
    if not any(tensor.requires_grad for tensor in (*model.parameters(), *filter(is_tensor, leaves))):
        raise TraceError(
            "no parameter of the model requires grad, nor does an argument, so there is no backward to plan"
        )
    check_call(model, args, kwargs)
    require_traceable(model, args, kwargs)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=SizeEnv() if dynamic else None)
    numbers = integers(leaves, dynamic)
    unused = [layout(leaf)[-1] for leaf in leaves if is_sized(leaf)] if dynamic else []
    traced_model, traced_leaves = off_meta(model, leaves, fake_mode)
    if dynamic:
        traced_leaves = symbolic(traced_leaves, dynamic, fake_mode)
    call = _Call(
        traced_model,
        traced_leaves,
        values=leaves if has_data(model, leaves) else [],
        arguments=arguments,
        made_for=described(model, args, kwargs, differentiate),
        has_data=has_data(model, leaves),
        reads=Reads(model, leaves),
        symbols=Symbols(dynamic, traced_leaves, numbers, unused) if dynamic else None,
        numbers=numbers,
        differentiate=differentiate,
        keeps_outputs=outputs == "keep",
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_collection())
        stack.enter_context(_use_lazy_graph_module(True))  # their code never runs: 6 % of the time
        stack.enter_context(like_eager(call.fake_mode))
        if dynamic:
            stack.enter_context(python_arithmetic())
        try:
            with call_named(model, args, kwargs):
                captured = _stable(stack, call)
        except TraceError as error:  # many models read tensor values unless they are compiled
            if call.has_data:  # nobody could say how the results of that way differ
                raise
            reason = error.reason or f"the capture of the model as it is fails ({error})"
            try:
                with mock.patch.object(torch.compiler, "_is_compiling_flag", True):
                    captured = _stable(stack, replace(call, reason=reason))
            except TraceError as again:
                if str(again) == str(error):
                    raise
                raise TraceError(
                    f"{error} Many models do not look at values while torch.compiler.is_compiling() is True, but "
                    f"capturing this one that way fails, too: {again}",
                    reason=error.reason,
                    module=error.module,
                    can_split=error.can_split,
                ) from error
        if not captured.has_data:
            captured.reads.undo()  # what the model's code keeps is real, but what it would keep is not
        if captured.reason and captured.reason not in _WARNED.setdefault(model, set()):
            _WARNED[model].add(captured.reason)  # once: a model may have many captures
            warn(f"The model was {compiling_note(captured.reason)}.")
        captured.reads.finish()
        _drop_weak_references(captured.joint.graph_module)
        yield captured


def _drop_weak_references(graph_module) -> None:
    """Drop the fake mode's weak references to the model's tensors, which ``torch.utils.swap_tensors`` refuses."""
    fake_mode = detect_fake_mode([node.meta.get("val") for node in graph_module.graph.nodes])
    if fake_mode is not None:
        describer = fake_mode.fake_tensor_converter.meta_converter.describer
        describer.lookup_tensor.clear()
        describer.lookup_storage.clear()


def _stable(stack, call: _Call) -> Capture:
    """A capture that holds for later calls, too: a second one if the first call changes what the code reads."""
    reads = call.reads
    try:
        with contextlib.ExitStack() as first:
            captured = _captured(first, call)
            if reads.is_stable():
                stack.enter_context(first.pop_all())
                return captured
            computed = _computed(captured, reads.kept.alive())
        with reads.after_first_call(contextlib.nullcontext() if call.has_data else call.fake_mode) as refused:
            captured = _captured(stack, call)
            inputs = captured.inputs(dict(call.model.named_modules()), call.leaves)
            if _computed(captured, reads.kept.given) != computed or _writes(captured, inputs, reads.kept.given):
                raise refused
        return captured
    except BaseException:
        reads.undo()
        raise


def _computed(captured: Capture, kept) -> str:
    """What a capture computes, comparable; without what it computes of buffers and constants if tensors are `kept`."""
    if not kept:
        return captured.joint.graph_module.code
    nodes = [*captured.joint.graph_module.graph.nodes]
    needed, of_call, lines = {nodes[-1]}, set(), []
    for node in reversed(nodes):
        if node in needed and node.target not in OF_SHAPES:
            needed.update(node.all_input_nodes)
    for node in filter(needed.__contains__, nodes):
        is_input = node.op == "placeholder" and not isinstance(node.meta["desc"], BufferAOTInput)
        if is_input or (node.target not in OF_SHAPES and not of_call.isdisjoint(node.all_input_nodes)):
            of_call.add(node)
            given = map_arg((node.args, node.kwargs), lambda each: "of the call" if each in of_call else "constant")
            lines.append(f"{node.target}{given}" if node.op == "call_function" else node.op)
    return "\n".join(lines)


def _writes(captured: Capture, inputs, tensors) -> bool:
    """Whether the captured step, whose inputs are `inputs`, writes to one of `tensors`."""
    written = {
        id(tensor) for tensor, how in zip(inputs, captured.joint._aot_state.fw_metadata.input_info) if how.mutates_data
    }
    return any(id(tensor) in written for tensor in tensors)


def _captured(stack, call: _Call) -> Capture:
    """A capture of the model; if its code references tensors itself, a second one with these as inputs."""
    is_as_it_is = call.symbols is None and not call.reason  # otherwise the way of the capture may be the cause
    with explained(call.model, is_as_it_is), torch.inference_mode(False), torch.enable_grad():
        found: dict[int, tuple[torch.Tensor, str]] = {}
        held: tuple[torch.Tensor, ...] = ()
        for _ in range(2):
            try:
                return _exported(stack, call, held)
            except HoldsTensors as error:
                line = next(iter(error.tensors.values()))[1]
                found.update(error.tensors)
            call.reads.places = places(found)
            held = tuple(tensor for tensor, _ in found.values())
            if (fake_mode := call.fake_mode) is not None:
                with fake_mode:
                    held = tuple(Shapes()(tensor) if tensor.is_meta else tensor for tensor in held)
        raise TraceError(
            f"every forward creates a tensor{line} from data that a captured step cannot follow, such as a NumPy "
            "array. Create it once and register it as a buffer, or pass it as an argument."
        )


def _exported(stack, call: _Call, held) -> Capture:
    flat, given = _Flat(call, held), given_places(call.leaves)
    forward = flat._ackpt_forward
    tensors = tuple(call.leaves[index] for index in given)
    with contextlib.ExitStack() as inner, forward.where, call.reads.watched_backward(lambda: forward.held.modes()):
        joint = aot_export_joint_with_descriptors(inner, flat, tensors, keep_inference_input_mutations=True)
        stack.enter_context(inner.pop_all())
    forward.require_same_attributes()
    call.reads.refuse_new_generators(joint.graph_module)
    forward.references.clear()  # torch keeps the module, but these hold tensors
    forward.held = None
    call.reads.kept.add_backward()
    shared = {name: getattr(call, name) for name in _SHARED}
    return Capture(joint, given, held, _facts_of(held), *forward.returned, **shared)


_SHARED = tuple({each.name for each in fields(Capture)} & {each.name for each in fields(_Call)})

# A model without data is captured as `torch.compile` runs it if it cannot be captured otherwise. Many models read
# tensor values unless ``torch.compiler.is_compiling()`` returns True. Captured that way, they may use other formulas,
# so a step that is planned from such a capture never runs.
_WARNED: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()


def compiling_note(reason: str) -> str:
    """The note in a plan from a capture as ``torch.compile`` runs the model; `reason`: why."""
    return f"captured as torch.compile runs it, because {reason}; the model's own step may differ"
