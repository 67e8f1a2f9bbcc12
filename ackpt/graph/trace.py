"""Capture a model's training step as a `JointGraph`, by AOTAutograd: functional aten operations, forward and backward.

Nothing is computed: parameters and inputs stand for their shapes, so a model that does not fit anywhere can be traced.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import os
import sys
import traceback
from typing import Any

import torch
import torch.fx.traceback
from torch import nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .joint import BACKWARD, FORWARD, JointGraph, Node, Storage, TraceError

_LOOKS_AT_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
_CALL = nn.Module._call_impl.__code__
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep


def trace(model, *args, **kwargs) -> JointGraph:
    """The graph of one training step of `model`, called with `args` and `kwargs`.

    Args:
        model: an ``nn.Module`` with real, fake or meta parameters; it is not changed and nothing of it is computed.
        args, kwargs: what the model is called with; tensors may be real, fake or meta, nested in containers.

    Returns:
        The graph from parameters and inputs to outputs and gradients of the parameters. The gradients of the outputs
        that require one are inputs of its backward part.

    Raises:
        TypeError: if `model` is no module.
        TraceError: if no parameter or no output requires grad, or if the model decides by the values of tensors
            (``if x.sum() > 0``, ``.item()``, ``nonzero``), naming the line.

    Source: AOTAutograd's joint graph, ``torch._functorch.aot_autograd``.

    Example:
        >>> import torch, ackpt
        >>> graph = ackpt.trace(torch.nn.Linear(8, 2), torch.ones(4, 8))
        >>> [node.target for node in graph.nodes if node.phase == "forward" and node.inputs]
        ['aten.t.default', 'aten.addmm.default']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TraceError("no parameter of the model requires grad, so there is no backward to plan")
    model, args, kwargs = _off_meta(model, args, kwargs)
    with contextlib.ExitStack() as stack:
        captured: Any = None
        try:
            with _quiet(), _compiling(), _Where(model), torch.enable_grad():
                captured = aot_export_joint_with_descriptors(
                    stack, model, args, kwargs, keep_inference_input_mutations=True
                )
        except RuntimeError as error:
            raise _explained(error) from error
        return _joint_graph(captured.graph_module)


def _off_meta(model, args, kwargs):
    """On a meta device torch chooses other kernels, so what lies there is replaced by tensors that only have shapes."""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs))]
    if not any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in tensors):
        return model, args, kwargs
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
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: off_meta(tensor) for name, tensor in tensors.items() if tensor is not None})
        return model, *tree_map_only(torch.Tensor, off_meta, (args, kwargs))


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


def _joint_graph(module) -> JointGraph:
    """Mint the ids, in the order of execution, and derive phases and storages."""
    ordered = _in_order(module)
    for place, node in enumerate(ordered):
        node.meta["ackpt_id"] = place
    output = next(node for node in module.graph.nodes if node.op == "output")
    output.meta["ackpt_id"] = len(ordered)
    returned, gradients = _returned(output)
    if not any(_phase(node) == BACKWARD for node in ordered):
        raise TraceError("no output of the model requires grad, so there is no backward to plan")
    keys: dict[int, int] = {}
    lies_in = []
    for node in ordered:
        found = [keys.setdefault(storage._cdata, len(keys)) for storage in _storages(node)]
        lies_in.append(tuple(dict.fromkeys(found)))
    nodes = [
        Node(
            id=place,
            name=node.name,
            target=_target(node),
            phase=_phase(node),
            inputs=tuple(argument.meta["ackpt_id"] for argument in node.all_input_nodes),
            storages=lies_in[place],
            module=_where(node, "module"),
            source=_where(node, "source"),
            is_random=_is_random(node),
        )
        for place, node in enumerate(ordered)
    ]
    sizes = {keys[storage._cdata]: storage.nbytes() for node in ordered for storage in _storages(node)}
    return JointGraph(module, nodes, _with_accesses(nodes, sizes, ordered, returned, gradients), returned, gradients)


def _in_order(module):
    """Nodes as they run: inputs, forward, gradients of the outputs, backward.

    What changes buffers stands behind everything in the captured graph; it belongs to the end of the forward.
    """
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    ordered = sorted(nodes, key=lambda node: (_phase(node) == BACKWARD, node.op != "placeholder"))
    last = next(node for node in reversed(nodes) if node.op == "placeholder")
    for node in ordered:
        if node.op != "placeholder":
            last.append(node)
            last = node
    module.graph.lint()
    module.recompile()
    return ordered


def _phase(node) -> str:
    return BACKWARD if node.meta.get("partitioner_tag") == "is_backward" else FORWARD


def _target(node) -> str:
    if node.op == "placeholder":
        return str(node.meta["desc"])
    return "getitem" if node.target is operator.getitem else str(node.target)


def _storages(node):
    values = node.meta.get("val")
    values = values if isinstance(values, (list, tuple)) else [values]
    return [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]


def _where(node, what: str) -> str:
    return (node.meta.get("custom") or {}).get(what) or ""


def _is_random(node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _returned(output):
    """Ids of the nodes that the model returns, and of the gradients by the parameters' names."""
    returned, gradients = [], {}
    for node, what in zip(output.args[0], output.meta["desc"]):
        if node is None:
            continue
        if not hasattr(what, "grad_of"):
            returned.append(node.meta["ackpt_id"])
        elif hasattr(what.grad_of, "target"):
            gradients[what.grad_of.target] = node.meta["ackpt_id"]
    return returned, gradients


_INPUTS = {"ParamAOTInput": "parameter", "BufferAOTInput": "buffer", "TangentAOTInput": "gradient"}


def _with_accesses(nodes, sizes, ordered, returned, gradients):
    touched: dict[int, list[int]] = {key: [] for key in sizes}
    members: dict[int, list[int]] = {key: [] for key in sizes}
    for node in nodes:
        for key in node.storages:
            members[key].append(node.id)
        read = {key for place in node.inputs for key in nodes[place].storages}
        for key in {*read, *node.storages}:
            touched[key].append(node.id)
    given_back = {key for place in gradients.values() for key in nodes[place].storages}
    kept = {key for place in returned for key in nodes[place].storages}
    for key in sorted(sizes):
        producer = members[key][0]
        forward = [place for place in touched[key] if nodes[place].phase == FORWARD]
        backward = [place for place in touched[key] if nodes[place].phase == BACKWARD]
        if ordered[producer].op == "placeholder":
            category = _INPUTS.get(type(ordered[producer].meta["desc"]).__name__, "input")
        elif key in given_back:
            category = "gradient"
        else:
            category = "activation" if forward and (backward or key in kept) else "temporary"
        yield Storage(
            id=key,
            bytes=sizes[key],
            category=category,
            producer=producer,
            nodes=tuple(members[key]),
            last_fw_access=forward[-1] if forward else None,
            first_bw_access=backward[0] if backward else None,
            last_bw_access=backward[-1] if backward else None,
        )
