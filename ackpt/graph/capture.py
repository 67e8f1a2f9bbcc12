"""Capture a model's step with AOTAutograd: functional aten operations, forward and backward, in one graph.

Nothing is computed: parameters and inputs stand for their shapes, so a model that does not fit anywhere can be traced.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from . import casts
from .attributes import arguments_unchanged, unchanged
from .caches import flatten_outputs
from .calls import described
from .eager import like_eager
from .held import Held
from .joint import TraceError
from .outputs import check_differentiate, no_gradient, refuse_overlaps, without_gradient
from .packed import found_packed
from .where import Where, explained

_HELD = "held by the model's code"  # no attribute can be called so


@dataclass
class Capture:
    """A captured step, and how a call of the model maps to it.

    ``joint``: torch's joint graph with descriptors. ``given``: places of the tensors that the step takes among the
    leaves of a call's arguments, each tensor once; ``held``: tensors that the model's code holds itself. ``spec``:
    structure of the model's outputs; ``constants``: ``{place in it: value}`` for outputs that are no tensors;
    ``refused``: places of outputs that were captured without a gradient although the model gives them one.
    ``made_for``: the call in words, from `ackpt.graph.calls`.
    """

    joint: Any
    given: tuple[int, ...]
    held: tuple[torch.Tensor, ...]
    spec: TreeSpec
    constants: dict[int, Any]
    refused: tuple[int, ...]
    made_for: dict[str, str] = field(default_factory=dict)

    def inputs(self, modules: dict[str, nn.Module], leaves) -> list[torch.Tensor]:
        """What the captured step takes when its model, of these `modules`, is called with `leaves`: its parameters and
        buffers as they are."""
        named = []
        for name in (*self.joint.params_spec, *self.joint.buffers_spec):
            path, _, attribute = name.rpartition(".")
            if path == _HELD:
                named.append(self.held[int(attribute)])
                continue
            module = modules[path]
            tensors = module._parameters if attribute in module._parameters else module._buffers
            named.append(tensors[attribute])
        return [*named, *(leaves[place] for place in self.given)]

    def outputs(self, tensors) -> Any:
        """What the model returns, from the tensors that the captured step returns."""
        left = iter(tensors)
        leaves = [
            self.constants[place] if place in self.constants else next(left) for place in range(self.spec.num_leaves)
        ]
        for place in self.refused:
            leaves[place] = no_gradient(leaves[place])
        return tree_unflatten(leaves, self.spec)


class _Flat(nn.Module):
    """`model` as a function of tensors that returns a tuple of tensors; with the model's own names of parameters."""

    def __init__(self, model, leaves, spec, differentiate, held):
        super().__init__()
        buffers = nn.Module()
        for place, tensor in enumerate(held):
            buffers.register_buffer(str(place), tensor)
        self.__dict__.update(
            _parameters=model._parameters, _buffers=model._buffers, _modules={**model._modules, _HELD: buffers}
        )
        self.__dict__["call"] = (model, leaves, spec, differentiate)
        self.__dict__["casts_once"] = torch.is_autocast_cache_enabled()  # not while torch captures
        self.__dict__["ties"] = [*_ties(model, "_parameters"), *_ties(model, "_buffers")]
        self.__dict__["own"] = [
            (named, name, tensor)
            for module in (*model.modules(), buffers)
            for named in (module._parameters, module._buffers)
            for name, tensor in named.items()
            if tensor is not None
        ]

    # Torch would take a tied tensor once for every name, and sum its gradients outside of the graph.
    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        return super().named_parameters(prefix, recurse)

    def named_buffers(self, prefix="", recurse=True, remove_duplicate=True):
        return super().named_buffers(prefix, recurse)

    def forward(self, *tensors):
        model, leaves, spec, differentiate = self.__dict__["call"]
        traced = dict(zip((id(leaves[place]) for place in given_places(leaves)), tensors))
        args, kwargs = tree_unflatten([traced[id(leaf)] if is_tensor(leaf) else leaf for leaf in leaves], spec)
        with _tied(self.__dict__["ties"]):
            stands_for = {id(own): named[name] for named, name, own in self.__dict__["own"]}
            held = Held({**traced, **stands_for})
            real = (*(leaf for leaf in leaves), *(own for _, _, own in self.__dict__["own"]))
            weights = [held.traced[id(tensor)] for tensor in real if casts.is_weight(tensor)]
            once = casts.once(weights if self.__dict__["casts_once"] else ())
            same_arguments = arguments_unchanged([*args, *kwargs.values()])
            with unchanged(model, held.is_same), same_arguments, once, held, found_packed():
                found, out_spec = flatten_outputs(model(*args, **kwargs))
        if held.found:
            raise _HoldsTensors(held.found.values())
        for value in found:
            if not is_tensor(value) and not isinstance(value, (type(None), bool, int, float, str)):
                raise TraceError(
                    f"the model returns a {type(value).__name__}, which a captured step cannot rebuild. Return tensors "
                    "in tuples, lists, dicts or registered pytrees (for transformers models: use_cache=False)."
                )
        refused = without_gradient(found, differentiate)
        refuse_overlaps(found, held.traced.values(), refused)
        self.__dict__["returned"] = (
            out_spec,
            {place: value for place, value in enumerate(found) if not is_tensor(value)},
            refused,
        )
        return tuple(
            value.detach() if place in refused else value for place, value in enumerate(found) if is_tensor(value)
        )


class _HoldsTensors(Exception):
    """The model's code holds tensors that must be captured as inputs: (tensor, line) of each."""

    def __init__(self, found):
        super().__init__()
        self.found = list(found)


def _ties(model, kind: str):
    """Places of tensors that another place, the first, holds too: (dict, name, first dict, first name)."""
    first: dict[int, tuple[dict, str]] = {}
    for module in model.modules():
        named = getattr(module, kind)
        for name, tensor in named.items():
            if tensor is None:
                continue
            if id(tensor) in first:
                yield (named, name, *first[id(tensor)])
            first.setdefault(id(tensor), (named, name))


@contextlib.contextmanager
def _tied(ties):
    """Inside, every tied place holds what torch has put into the first one."""
    were = [named[name] for named, name, _, _ in ties]
    for named, name, first, first_name in ties:
        named[name] = first[first_name]
    try:
        yield
    finally:
        for (named, name, _, _), was in zip(ties, were):
            named[name] = was


def is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


def given_places(leaves) -> tuple[int, ...]:
    """Where each tensor stands first among `leaves`."""
    first: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if is_tensor(leaf):
            first.setdefault(id(leaf), place)
    return tuple(first.values())


@contextlib.contextmanager
def capture(model, args, kwargs, differentiate="loss"):
    """A `Capture` of `model` called with `args` and `kwargs`; it can be compiled as long as the context is open."""
    check_differentiate(differentiate)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TraceError("no parameter of the model requires grad, so there is no backward to plan")
    leaves, spec = tree_flatten((args, kwargs))
    _require_traceable((*model.parameters(), *model.buffers(), *leaves))
    made_for = described(model, args, kwargs, differentiate)
    model, leaves, spec = _off_meta(model, leaves, spec)
    with contextlib.ExitStack() as stack:
        stack.enter_context(like_eager(detect_fake_mode([*model.parameters(), *leaves])))
        try:
            captured = _captured(stack, model, leaves, spec, differentiate)
        except TraceError:  # many models look at values unless they are compiled
            with _compiling():
                captured = _captured(stack, model, leaves, spec, differentiate)
        captured.made_for = made_for
        yield captured


def _captured(stack, model, leaves, spec, differentiate) -> Capture:
    """Captured once; once more if that finds tensors which the model's code holds, now with these as inputs."""
    with explained(), torch.inference_mode(False), torch.enable_grad():
        try:
            return _exported(stack, _Flat(model, leaves, spec, differentiate, ()), leaves, ())
        except _HoldsTensors as error:
            held = tuple(tensor for tensor, _ in error.found)
        fake_mode = detect_fake_mode([*model.parameters(), *leaves])
        if fake_mode is not None:
            with fake_mode:
                held = tuple(_shape_of(tensor) if tensor.is_meta else tensor for tensor in held)
        try:
            return _exported(stack, _Flat(model, leaves, spec, differentiate, held), leaves, held)
        except _HoldsTensors as error:
            _, line = error.found[0]
            raise TraceError(
                f"a tensor is made anew in every forward{line}, of data that a captured step cannot follow, such as a "
                "numpy array. Make it once and register it as a buffer, or pass it as an argument."
            ) from error


def _exported(stack, flat: _Flat, leaves, held) -> Capture:
    given = given_places(leaves)
    tensors = tuple(leaves[place] for place in given)
    with contextlib.ExitStack() as inner, Where(flat.__dict__["call"][0]) as where:
        joint = aot_export_joint_with_descriptors(inner, flat, tensors, keep_inference_input_mutations=True)
        stack.enter_context(inner.pop_all())
    where.require_none_kept()
    return Capture(joint, given, held, *flat.__dict__["returned"])


def _shape_of(tensor):
    """A tensor, a parameter if it is one, that only has a shape: to be made where tensors have no data."""
    shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    needs_grad = tensor.requires_grad
    return nn.Parameter(shape, needs_grad) if isinstance(tensor, nn.Parameter) else shape.requires_grad_(needs_grad)


def _require_traceable(leaves) -> None:
    """Tensors of one shape, on devices that are there: fake ones need not be, and torch would crash on them."""
    tensors = [leaf for leaf in leaves if is_tensor(leaf)]
    if any(tensor.is_nested for tensor in tensors):
        raise TraceError("a nested tensor cannot be planned: give a padded one, by tensor.to_padded_tensor(0.0)")
    types = {tensor.device.type for tensor in tensors}
    if "cuda" in types and not torch.cuda.is_available():
        raise TraceError(
            "the model or its inputs lie on a CUDA device, but there is none here. To plan for it without one, put "
            "them on the meta device."
        )


def _off_meta(model, leaves, spec):
    """On a meta device torch chooses other kernels, so what lies there is replaced by tensors that only have shapes."""
    tensors = [*model.parameters(), *model.buffers(), *leaves]
    if not any(is_tensor(tensor) and tensor.is_meta for tensor in tensors):
        return model, leaves, spec
    replaced: dict[int, torch.Tensor] = {}  # tied parameters stay tied

    def off_meta(tensor):
        if id(tensor) not in replaced:
            replaced[id(tensor)] = _shape_of(tensor)
        return replaced[id(tensor)]

    # A copy of the modules, without one of the tensors.
    model = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for named in (module._parameters, module._buffers):
                named.update({name: off_meta(tensor) for name, tensor in named.items() if tensor is not None})
        return model, [off_meta(leaf) if is_tensor(leaf) else leaf for leaf in leaves], spec


@contextlib.contextmanager
def _compiling():
    """Inside, ``torch.compiler.is_compiling()`` holds: models ask it before they look at values."""
    was, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = was
