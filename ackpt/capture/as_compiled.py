"""Capture a model as `torch.compile` runs it, if that is the only way, and compare the results with eager's.

Many models read tensor values unless ``torch.compiler.is_compiling()`` returns True. Captured that way, they may use
other formulas. The model's own step is the baseline of every budget, so this module runs it, measures its peak and
compares the results.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ackpt.capture.inspection.attributes import every_module, unchanged
from ackpt.capture.inspection.model_checks import own_call
from ackpt.capture.inspection.tensors import is_tensor
from ackpt.capture.inspection.transformers_caches import flatten_outputs
from ackpt.checkpointing.rng import replay, snapshot
from ackpt.errors import TraceError, warn
from ackpt.metering.meter import MeterError, measure
from ackpt.metering.run_alone import stand_in

from .joint_graph import AsCompiled
from .outputs import without_gradient

_WARNED: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def compiling():
    """Make ``torch.compiler.is_compiling()`` return True inside; models check it before they read tensor values."""
    was, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = was


def measured_baseline(captured, model, args, kwargs) -> int | None:
    """The dynamic peak in bytes of the model's own step, measured; None while a profiler runs.

    Restores all tensors and RNG states.
    """
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        args, kwargs = _detached(captured, model, args, kwargs)
        tensors, on_cpu = _tensors(captured, model, args, kwargs)
        with put_back(tensors):
            return _own_peak(captured, model, args, kwargs, tensors, on_cpu)


def _detached(captured, model, args, kwargs) -> tuple[Any, Any]:
    """The arguments without the graph that computed them, which belongs to the caller; their memory is the same."""
    made = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *captured.held)}

    def detached(leaf):
        if not is_tensor(leaf):
            return leaf
        if id(leaf) not in made:  # a tensor that is passed twice is one tensor for the model, too
            copy = leaf.detach().requires_grad_(leaf.requires_grad)
            made[id(leaf)] = copy if leaf.is_leaf else _NoLeaf.apply(copy)
        return made[id(leaf)]

    return tree_map(detached, (args, kwargs))


class _NoLeaf(torch.autograd.Function):
    """The identity. The result shares the input's memory but is not a leaf, so the model may write into it."""

    @staticmethod
    def forward(ctx, value):
        return value.data  # not a view, because the model could not write into a view either

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def _tensors(captured, model, args, kwargs) -> tuple[list[torch.Tensor], bool]:
    """The tensors that a step reads or changes, each once, and whether all are on the CPU."""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs)), *captured.held]
    tensors = list({id(tensor): tensor for tensor in tensors if is_tensor(tensor)}.values())
    return tensors, all(tensor.device.type == "cpu" for tensor in tensors)


def compared(captured, module, model, args, kwargs) -> AsCompiled:
    """How the captured step differs from the model's own; warns of it once, and restores all tensors and RNG states.

    `module`: the captured joint graph, at the sizes of the call. If the tensors have data, this runs the model's own
    step and measures its peak. On the CPU it also runs the captured step and compares the results.

    Raises:
        TraceError: if a result of the captured step is missing or has a different shape or dtype.
    """
    as_compiled = AsCompiled(captured.reason)
    if captured.has_data:
        # The capture's context is still open, so its fake tensor mode has to be disabled.
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
            args, kwargs = _detached(captured, model, args, kwargs)
            tensors, on_cpu = _tensors(captured, model, args, kwargs)
            with put_back(tensors):
                peak_bytes = _own_peak(captured, model, args, kwargs, tensors, on_cpu)
            difference = None
            if on_cpu:
                with put_back(tensors):
                    results = _own_results(captured, model, args, kwargs)
                with put_back(tensors), torch.no_grad():
                    difference = _difference(
                        results, _captured_step(captured, module, model, args, kwargs), captured.reason
                    )
        as_compiled = AsCompiled(captured.reason, peak_bytes, difference)
    if str(as_compiled) not in _WARNED.setdefault(model, set()):  # a model has a capture for every set of sizes
        _WARNED[model].add(str(as_compiled))
        warn(f"The model was captured as torch.compile runs it: {as_compiled}.")
    return as_compiled


@contextlib.contextmanager
def put_back(tensors, generators=()):
    """Run a step inside from the current RNG states, without gradients and hooks; then restore these and the tensors.

    `generators`: streams of generator objects that are restored, too.
    """
    were = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
    leaves = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
    gradients = [(leaf, leaf.grad, leaf._post_accumulate_grad_hooks, leaf._backward_hooks) for leaf in leaves]
    try:
        for leaf, *_, backward_hooks in gradients:
            # These hooks may run an optimizer. None would leave them on.
            leaf.grad, leaf._post_accumulate_grad_hooks = None, OrderedDict()
            if backward_hooks:
                leaf._backward_hooks = None
        with replay(snapshot(generators)):
            yield
    finally:
        for leaf, gradient, hooks, backward_hooks in gradients:
            leaf.grad, leaf._post_accumulate_grad_hooks = gradient, hooks
            if backward_hooks:
                leaf._backward_hooks = backward_hooks
        for tensor, was in were:
            if not torch.equal(tensor.detach().cpu(), was):
                tensor.data.copy_(was)


def _own_forward(captured, model, args, kwargs) -> tuple[list[Any], list[torch.Tensor]]:
    """The outputs of the model's own forward, and those of them that get a gradient."""
    with unchanged(model, lambda was, now: was is now), captured.reads.watched():
        leaves, _ = flatten_outputs(own_call(model)(*args, **kwargs))
    refused = without_gradient(leaves, captured.differentiate)
    return leaves, [
        leaf for at, leaf in enumerate(leaves) if is_tensor(leaf) and leaf.requires_grad and at not in refused
    ]


def _own_peak(captured, model, args, kwargs, tensors, on_cpu: bool) -> int | None:
    """The dynamic peak in bytes of the model's own step; None while the caller profiles or measures this call."""

    def step():
        outputs, roots = _own_forward(captured, model, args, kwargs)
        if not captured.keeps_outputs:
            del outputs
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    warmup = 0 if on_cpu else 1  # CUDA's libraries allocate their workspaces in the first step
    with contextlib.suppress(MeterError):
        return measure(step, resident=[model, *tensors], warmup=warmup, repeats=0).dynamic_peak_bytes
    return None


def _own_results(captured, model, args, kwargs) -> dict[str, torch.Tensor]:
    """``{name: tensor}`` of outputs, gradients and buffers of the model's own step."""
    outputs, roots = _own_forward(captured, model, args, kwargs)
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    results = {f"output {index}": leaf.detach() for index, leaf in enumerate(filter(is_tensor, outputs))}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[f"the gradient of {name!r}"] = parameter.grad.detach()
    return results | _buffers(model)


def _captured_step(captured, module, model, args, kwargs) -> dict[str, torch.Tensor]:
    """The same tensors from the captured step, run without recomputation."""
    values = captured.inputs(every_module(model), tree_leaves((args, kwargs)))
    for node in module.graph.find_nodes(op="placeholder")[len(values) :]:
        values.append(stand_in(node.meta["val"]).fill_(1))
    (output,) = module.graph.find_nodes(op="output")
    results = torch.fx.Interpreter(module).run(*values, enable_io_processing=False)
    by_name: dict[str, torch.Tensor] = {}
    for output_desc, value in zip(output.meta["desc"], results):
        kind = type(output_desc).__name__
        if kind == "PlainAOTOutput":
            by_name[f"output {output_desc.idx}"] = value
        elif kind == "GradAOTOutput" and hasattr(output_desc.grad_of, "target") and value is not None:
            by_name[f"the gradient of {output_desc.grad_of.target!r}"] = value
    return by_name | _buffers(model)


def _buffers(model) -> dict[str, torch.Tensor]:
    return {f"buffer {name!r}": buffer.detach().clone() for name, buffer in model.named_buffers()}


def _difference(results: dict[str, torch.Tensor], captured: dict[str, torch.Tensor], reason: str) -> str:
    """The largest difference, relative to the largest element of its tensor, in words; empty if all are bit-equal."""
    most, where = -1.0, ""
    for name, expected in results.items():
        value: Any = captured.get(name)
        if value is None or value.shape != expected.shape or value.dtype != expected.dtype:
            error = TraceError(
                f"{reason}. Captured as torch.compile runs it, the model gives another result: {name} is "
                f"{_said(value)} instead of {_said(expected)}. Move the code that looks at values out of the model, or "
                "use ackpt.checkpoint on its blocks."
            )
            error.reason, error.can_split = reason, True
            raise error
        if torch.equal(value, expected):
            continue
        wide = torch.complex128 if expected.is_complex() else torch.float64
        apart = (value.to(wide) - expected.to(wide)).abs().nan_to_num(nan=0.0).max().item()
        largest = expected.to(wide).abs().nan_to_num(nan=0.0).max().item()
        share = apart / largest if largest else apart
        same_nans = torch.equal(value.isnan(), expected.isnan())
        if share > most and (share or not same_nans):
            most, where = share, name
    return f"{where} differs by up to {most:.1e} of its largest element" if where else ""


def _said(tensor) -> str:
    return "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
