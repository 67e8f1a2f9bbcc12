"""Capture a model's step with AOTAutograd: functional aten operations, forward and backward, in one graph.

Nothing is computed: parameters and inputs stand for their shapes, so a model that does not fit anywhere can be traced.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback
from torch import nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .eager import like_eager
from .joint import TraceError

_LOOKS_AT_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
_CALL = nn.Module._call_impl.__code__
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_DIFFERENTIATE = ("loss", "all")


@dataclass
class Capture:
    """A captured step, and how a call of the model maps to it.

    ``joint``: torch's joint graph with descriptors. ``spec``: structure of the model's outputs; ``constants``:
    ``{place in it: value}`` for outputs that are no tensors; ``refused``: places of outputs that were captured
    without a gradient although the model gives them one.
    """

    joint: Any
    spec: TreeSpec
    constants: dict[int, Any]
    refused: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        """Parameters, then buffers, as the captured step takes them, before the tensors among the arguments."""
        return [*self.joint.params_spec, *self.joint.buffers_spec]

    def outputs(self, tensors) -> Any:
        """What the model returns, from the tensors that the captured step returns."""
        left = iter(tensors)
        leaves = [
            self.constants[place] if place in self.constants else next(left) for place in range(self.spec.num_leaves)
        ]
        for place in self.refused:
            leaves[place] = no_gradient(leaves[place])
        return tree_unflatten(leaves, self.spec)


class _NoGradient(torch.autograd.Function):
    """The identity, for an output whose gradient nobody planned for."""

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(
            "backward reaches an output other than the loss, which this step was planned without: it keeps nothing "
            'for that gradient. Plan it with differentiate="all", or detach what you compute from that output.'
        )


def no_gradient(value):
    """`value` as an output that requires grad, though its gradient ends in an error."""
    return _NoGradient.apply(value.requires_grad_())


class _Flat(nn.Module):
    """`model` as a function of tensors that returns a tuple of tensors; with the model's own names of parameters."""

    def __init__(self, model, spec, leaves, differentiate):
        super().__init__()
        self.__dict__.update(_parameters=model._parameters, _buffers=model._buffers, _modules=model._modules)
        self.__dict__["call"] = (model, spec, leaves, differentiate)
        self.__dict__["ties"] = [*_ties(model, "_parameters"), *_ties(model, "_buffers")]

    # Torch would take a tied tensor once for every name, and sum its gradients outside of the graph.
    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        return super().named_parameters(prefix, recurse)

    def named_buffers(self, prefix="", recurse=True, remove_duplicate=True):
        return super().named_buffers(prefix, recurse)

    def forward(self, *tensors):
        model, spec, leaves, differentiate = self.__dict__["call"]
        given = iter(tensors)
        args, kwargs = tree_unflatten([next(given) if is_tensor(leaf) else leaf for leaf in leaves], spec)
        with _tied(self.__dict__["ties"]):
            found, out_spec = tree_flatten(model(*args, **kwargs))
        for value in found:
            if not is_tensor(value) and not isinstance(value, (type(None), bool, int, float, str)):
                raise TraceError(
                    f"the model returns a {type(value).__name__}, which a captured step cannot rebuild. Return tensors "
                    "in tuples, lists, dicts or registered pytrees (for transformers models: use_cache=False)."
                )
        refused = without_gradient(found, differentiate)
        self.__dict__["returned"] = (
            out_spec,
            {place: value for place, value in enumerate(found) if not is_tensor(value)},
            refused,
        )
        return tuple(
            value.detach() if place in refused else value for place, value in enumerate(found) if is_tensor(value)
        )


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


def without_gradient(found, differentiate) -> tuple[int, ...]:
    """Outputs beside the loss: if exactly one of the differentiable ones is a scalar, the others get no gradient."""
    places = [place for place, value in enumerate(found) if is_tensor(value) and value.requires_grad]
    scalars = [place for place in places if found[place].dim() == 0]
    return tuple(p for p in places if p not in scalars) if differentiate == "loss" and len(scalars) == 1 else ()


def is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


def check_differentiate(differentiate) -> str:
    if differentiate not in _DIFFERENTIATE:
        raise ValueError(f"differentiate must be 'loss' or 'all', got {differentiate!r}")
    return differentiate


@contextlib.contextmanager
def capture(model, args, kwargs, differentiate="loss"):
    """A `Capture` of `model` called with `args` and `kwargs`; it can be compiled as long as the context is open."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_differentiate(differentiate)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TraceError("no parameter of the model requires grad, so there is no backward to plan")
    leaves, spec = tree_flatten((args, kwargs))
    _require_devices((*model.parameters(), *model.buffers(), *leaves))
    model, leaves, spec = _off_meta(model, leaves, spec)
    flat = _Flat(model, spec, leaves, differentiate)
    with contextlib.ExitStack() as stack:
        stack.enter_context(like_eager(detect_fake_mode([*model.parameters(), *leaves])))
        captured: Any = None
        try:
            with _quiet(), _compiling(), _Where(model), torch.enable_grad():
                captured = aot_export_joint_with_descriptors(
                    stack, flat, tuple(filter(is_tensor, leaves)), keep_inference_input_mutations=True
                )
        except TraceError:
            raise
        except (RuntimeError, TypeError, AttributeError, IndexError, KeyError, ValueError, AssertionError) as error:
            raise _explained(error) from error
        yield Capture(captured, *flat.__dict__["returned"])


def _require_devices(tensors) -> None:
    """Fake tensors can lie on devices that are not there; torch would crash on them."""
    types = {tensor.device.type for tensor in tensors if is_tensor(tensor)}
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
            shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            needs_grad = tensor.requires_grad
            replaced[id(tensor)] = nn.Parameter(shape, needs_grad) if is_parameter else shape.requires_grad_(needs_grad)
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


class _Where(TorchFunctionMode):
    """Notes with every operation the module that calls it and the line of the model's code."""

    def __init__(self, model):
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        module = source = None
        frame = sys._getframe(1)
        while frame is not None and (module is None or source is None):
            if source is None and _is_users(frame.f_code.co_filename):
                source = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if module is None and frame.f_code is _CALL:
                module = self._names.get(id(frame.f_locals["self"]))
            frame = frame.f_back
        if module is None:  # what is done to tensors outside of the model's code
            return func(*args, **(kwargs or {}))
        with torch.fx.traceback.annotate({"module": module, "source": source or ""}):
            return func(*args, **(kwargs or {}))


def _is_users(path: str) -> bool:
    return not path.startswith((_TORCH, _OWN))


_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def _quiet():
    """One error is raised; torch would log the same before."""
    was, _LOG.disabled = _LOG.disabled, True
    try:
        yield
    finally:
        _LOG.disabled = was


def _explained(error) -> TraceError:
    """The error with the line of the model's code that caused it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, _LOOKS_AT_VALUES):
        return TraceError(
            f"the model cannot be captured as one graph: it looks at the values of a tensor{where}, by {reason}. "
            "Control flow and shapes must not depend on values: move such code out of the model, or use "
            "ackpt.checkpoint on its blocks."
        )
    return TraceError(f"the model fails when it is called like this{where}: {reason}")
