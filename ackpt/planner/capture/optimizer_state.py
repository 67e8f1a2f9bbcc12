"""Compute the memory of the training loop around a step: optimizer, accumulated gradients, and a loss of the loop.

The state of an optimizer is resident; its step allocates and frees. Both follow from one step of a copy of the
optimizer on fake tensors, so neither the optimizer nor the model changes, and most new optimizers need no code here.
`ackpt.planner.workloads.step_request` has the names that ``ackpt plan --optimizer`` takes. A loss runs without data,
too.
"""

import contextlib
import copy
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ackpt.core.errors import TraceError, did_you_mean
from ackpt.metering.prediction import LATE, predict
from ackpt.metering.resident import rounded

from .inspection.calls import call_arguments
from .inspection.model_checks import forward_names
from .joint_graph import JointGraph

CUDA_BLOCK = 512  # bytes: a GPU allocates multiples of them
_LEAST_8BIT, _BLOCK_8BIT = 4096, 256  # elements


class Loop(NamedTuple):
    """The parts of the training loop around a step that need memory.

    ``optimizer``: of the model's parameters, or the name of one in ``torch.optim``; None to leave it out.
    ``accumulation``: whether gradients of earlier steps exist. ``clipping``: ``torch.nn.utils.clip_grad_norm_`` runs
    before the optimizer's step. ``scaling``: a ``torch.amp.GradScaler`` unscales the gradients; ``scales_loss``: and
    the loop scales the loss that the model returns. ``loss``: an `OutsideLoss` that the loop computes.
    """

    optimizer: torch.optim.Optimizer | str | None = None
    accumulation: bool = False
    clipping: bool = False
    scaling: bool = False
    scales_loss: bool = False
    loss: Any = None


NO_LOOP = Loop()


def check_optimizer(model: torch.nn.Module, optimizer) -> None:
    """Raise an error unless `optimizer` is None, the name of an optimizer, or an optimizer of parameters of `model`."""
    if optimizer is None:
        return
    if isinstance(optimizer, str):
        _named(optimizer)
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        got = f"got {type(optimizer).__name__}"
        if isinstance(optimizer, type):
            got = f"got the class {optimizer.__name__}: create it, as in {optimizer.__name__}(model.parameters())"
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or a name such as 'adamw', {got}")
    parameters = set(map(id, model.parameters()))
    if not any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            f"this {type(optimizer).__name__} has none of the model's parameters: give an optimizer created from this "
            "model's parameters(), after any call that replaces them"
        )


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer in a wrapper such as accelerate's, a copy of which would set the attributes of the original."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def optimizer_bytes(
    optimizer: torch.optim.Optimizer, on_cpu: bool = True, clipping: bool = False, scaling: bool = False
) -> tuple[int, int]:
    """Bytes of the optimizer's state after its first step, and the peak of its step beyond gradients and state.

    On a GPU (not `on_cpu`) blocks are multiples of 512 bytes, counts of steps are in host memory, and torch updates all
    parameters at once (``foreach``) unless the optimizer says otherwise. `clipping`, `scaling`: as in `Loop`; what they
    allocate counts as part of the step. A step that needs values, as that of LBFGS, is a TraceError.
    """
    stand_in, trained, prediction = _after_a_step(optimizer, on_cpu, clipping, scaling)
    block = 1 if on_cpu else CUDA_BLOCK
    gradients = sum(rounded(p.grad.numel() * p.grad.element_size(), block) for p in trained)
    state = _state_bytes(optimizer, stand_in, prediction, on_cpu)
    stand_in.state.clear()  # a cycle of references keeps the copy, and its step counts have data
    return state, prediction.dynamic_peak_bytes - gradients


def _state_bytes(optimizer: torch.optim.Optimizer, stand_in, prediction, on_cpu: bool) -> int:
    """Bytes of the optimizer's state, from what `_after_a_step` returns."""
    block = 1 if on_cpu else CUDA_BLOCK
    # Some optimizers create their state before the first step, also for parameters that are not trained.
    untrained = [values for parameter, values in optimizer.state.items() if not parameter.requires_grad]
    counted = [value for value in tree_leaves(untrained) if _counts(value, on_cpu)]
    untrained_bytes = sum(rounded(tensor.untyped_storage().nbytes(), block) for tensor in counted)
    state = prediction.categories.get("optimizer", 0) - (0 if on_cpu else CUDA_BLOCK * _host_counts(stand_in))
    return state + untrained_bytes


def _after_a_step(optimizer: torch.optim.Optimizer, on_cpu: bool, clipping: bool = False, scaling: bool = False):
    """A copy of the optimizer without data after one step, its trained parameters, and the prediction of that step."""
    own = unwrapped(optimizer)
    stand_in = type(own).__new__(type(own))
    stand_in.__setstate__({**own.__getstate__(), "defaults": dict(own.defaults)})  # __setstate__ changes them; no hooks
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), no_autocast():
            if any(kind.__module__.startswith("bitsandbytes.") for kind in type(own).__mro__):
                for name, value in vars(own).items():  # `__setstate__` sets none of its own attributes
                    vars(stand_in).setdefault(name, tree_map(lambda leaf: _stands_for(leaf, None), value))
            stand_in.param_groups = [_group_without_data(group, on_cpu) for group in optimizer.param_groups]
            stand_in.state = defaultdict(dict, _states_without_data(optimizer, stand_in))
            trained = [p for group in stand_in.param_groups for p in group["params"] if p.grad is not None]
            device, block = ("cpu", 1) if on_cpu else ("cuda", CUDA_BLOCK)
            step = _with_gradients_prepared(stand_in, trained, clipping, scaling)
            prediction = predict(step, resident=(stand_in, *trained), device=device, round_to=block)
    except (RuntimeError, TypeError, AttributeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(
            f"the step of {type(optimizer).__name__} cannot be simulated without data: {reason}. Leave it out, and "
            "give a budget that leaves room for its state."
        ) from error
    states = tree_leaves([[*state.values()] for state in stand_in.state.values() if isinstance(state, dict)])
    reason = ""
    if on_cpu and any(getattr(each, "dtype", None) is torch.uint8 for each in states):
        reason = "updates 8-bit state by kernels whose memory on a CPU is not known"
    elif not on_cpu and getattr(own, "is_paged", False):
        reason = "keeps its state in memory that CUDA moves between host and GPU, so its bytes on the GPU are not known"
    if reason:
        raise TraceError(
            f"{type(own).__name__} {reason}. Leave optimizer= out, and give a budget that leaves room for its state."
        )
    return stand_in, trained, prediction


def _with_gradients_prepared(optimizer, trained, clipping: bool, scaling: bool) -> Callable[[], object]:
    """The step of `optimizer` after its gradients were unscaled and clipped, in the order that torch documents.

    torch's own scaler runs, so what it allocates is counted: ``inv_scale`` with its two float64 intermediates, and
    ``found_inf``, which lives until ``update`` (torch/amp/grad_scaler.py:351 and 356).
    """
    scaler = torch.amp.GradScaler("cpu", enabled=scaling)
    if scaling:
        scaler.scale(torch.empty(()))  # allocates the scale

    def step():
        _count_as_late(optimizer)
        if clipping:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def _count_as_late(optimizer) -> None:
    """Set the step counts to `LATE`, because some optimizers allocate more memory after their first steps."""
    values = tree_leaves([list(state.values()) for state in optimizer.state.values()])
    with _disable_current_modes():
        for value in values:
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and not value.is_meta:
                value.fill_(LATE)


def eight_bit_bytes(optimizer: torch.optim.Optimizer, on_cpu: bool = True) -> int:
    """Bytes of the optimizer's state if tensors as large as their parameter have 8 bits per element.

    As in bitsandbytes (Dettmers et al. 2022, arXiv:2110.02861): one float32 scale per 256 elements, and tensors of
    fewer than 4096 elements as they are.
    """
    stand_in, _, prediction = _after_a_step(optimizer, on_cpu)
    size = _state_bytes(optimizer, stand_in, prediction, on_cpu)
    block = 1 if on_cpu else CUDA_BLOCK
    for parameter, state in stand_in.state.items():
        for value in state.values() if isinstance(state, dict) else ():
            elements = parameter.numel()
            if isinstance(value, torch.Tensor) and value.numel() == elements >= _LEAST_8BIT:
                scales = torch.float32.itemsize * -(-elements // _BLOCK_8BIT)
                size -= rounded(elements * value.element_size(), block)
                size += rounded(elements, block) + rounded(scales, block)
    return size


def with_loop(graph: JointGraph, model: torch.nn.Module, loop: Loop) -> JointGraph:
    """`graph`, of a step of `model`, with the bytes of the loop around it; raises as `optimizer_bytes` does."""
    if loop == NO_LOOP:
        return graph
    gradient_bytes = graph.gradient_bytes if loop.accumulation else 0
    return dataclasses.replace(graph, **loop_bytes(model, loop, gradient_bytes, graph.on_cpu))


def loop_with(optimizer, accumulation: bool, scaler) -> Loop:
    """The loop that the arguments of `ackpt.compile` describe."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be the torch.amp.GradScaler that scales the loss, got {type(scaler).__name__}")
    scales = scaler is not None and scaler.is_enabled()
    return Loop(optimizer, accumulation, scaling=scales, scales_loss=scales)


def loop_bytes(model: torch.nn.Module, loop: Loop, gradient_bytes: int, on_cpu: bool) -> dict[str, int]:
    """The fields of a `JointGraph` for the loop around a step of `model`, whose gradients have `gradient_bytes`."""
    optimizer = optimizer_of(model, loop.optimizer)
    state, step = (0, 0) if optimizer is None else optimizer_bytes(optimizer, on_cpu, loop.clipping, loop.scaling)
    scalar = loop.scales_loss * (torch.float32.itemsize if on_cpu else CUDA_BLOCK)
    # When the optimizer's step runs, the step's own gradients have been added to accumulated ones, and are free.
    accumulated = gradient_bytes if loop.accumulation else 0
    return {
        "optimizer_bytes": state + 2 * scalar,  # with the scale and the growth tracker
        "optimizer_step_bytes": max(0, step - accumulated) if accumulated else step,
        "accumulated_bytes": accumulated,
        "scaled_loss_bytes": scalar,
    }


def optimizer_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | str | None) -> torch.optim.Optimizer | None:
    """The optimizer; of a name, that of `torch.optim` with its default options and the parameters that are trained."""
    if not isinstance(optimizer, str):
        return optimizer
    return _named(optimizer)([parameter for parameter in model.parameters() if parameter.requires_grad])


def _named(name: str) -> Callable[..., torch.optim.Optimizer]:
    kinds = {
        kind.lower(): value
        for kind, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() not in kinds:
        raise ValueError(
            f"torch.optim has no optimizer {name!r}{did_you_mean(name, kinds)}: give the optimizer itself, or one of "
            f"{', '.join(sorted(kinds))}"
        )
    return kinds[name.lower()]


@contextlib.contextmanager
def no_autocast():
    """Inside, autocast is off: a step planned under autocast has an optimizer that runs outside of it."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _counts(value, on_cpu: bool) -> bool:
    return isinstance(value, torch.Tensor) and (on_cpu or value.dim() > 0)


def _host_counts(stand_in) -> int:
    """How many counts of steps were counted as if they were on the GPU, although they are in host memory."""
    groups = [g for g in stand_in.param_groups if not any(g.get(key) for key in ("fused", "capturable"))]
    counts = [stand_in.state[p].get("step") for group in groups for p in group["params"] if p in stand_in.state]
    return sum(isinstance(count, FakeTensor) for count in counts)


def _group_without_data(group, on_cpu: bool):
    copied = {**group, "params": [_without_data(parameter) for parameter in group["params"]]}
    if not on_cpu and "foreach" in group and not any(group.get(key) for key in ("fused", "differentiable")):
        copied["foreach"] = True if group["foreach"] is None else group["foreach"]
    return copied


def _states_without_data(optimizer, stand_in):
    """The states that are there: before torch 2.13 Adagrad's step needs those that its constructor makes."""
    states = {}
    for group, stand_ins in zip(optimizer.param_groups, stand_in.param_groups):
        on_device = any(group.get(key) for key in ("fused", "capturable"))
        for parameter, fake_parameter in zip(group["params"], stand_ins["params"]):
            if fake_parameter.grad is not None and parameter in optimizer.state:
                state = optimizer.state[parameter]
                states[fake_parameter] = {name: _stands_for(value, on_device) for name, value in state.items()}
    return states


def _stands_for(value, on_device: bool | None):
    """A tensor without data for a part of a state; a copy of a count of steps, unless it is read `on_device` only."""
    if not isinstance(value, torch.Tensor):
        return value if on_device is None else copy.deepcopy(value)
    if value.dim() or on_device or isinstance(value, FakeTensor) or value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    with unset_fake_temporarily():
        return value.clone()


def _without_data(parameter):
    value = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
    value = torch.nn.Parameter(value, parameter.requires_grad)
    value.grad = torch.empty_like(value) if parameter.requires_grad else None
    return value


class OutsideLoss:
    """``function(outputs, batch)``, the loss of a training loop, and what it adds to the step of a model.

    It runs once at each size; a batch of other sizes than `batch` has those by which the outputs differ.
    """

    def __init__(self, function: Callable[[Any, Any], torch.Tensor], batch: Any, inputs: Any):
        """`inputs`: the part of `batch` that the model gets; the other tensors count as resident."""
        if not callable(function):
            raise TypeError(f"loss must be a function of outputs and batch, got {type(function).__name__}")
        self.function = function
        self.batch: Any = tree_map(lambda leaf: _empty(leaf, "meta"), batch)  # without the user's tensors
        given, tensors = {id(leaf) for leaf in tree_leaves(inputs)}, tree_leaves(batch)
        targets = [each for each in tensors if isinstance(each, torch.Tensor) and id(each) not in given]
        storages = {each._cdata: each.nbytes() for each in map(torch.Tensor.untyped_storage, targets)}
        self.target_bytes: int = sum(storages.values())
        self._shapes: list[tuple[int, ...]] = []  # of the outputs that go with `batch`

    def counted(self, graph: JointGraph, outputs: Callable[[Sequence[Any]], Any]) -> JointGraph:
        """`graph` with the bytes of this loss; `outputs` makes what the model returns from a list of tensors."""
        fx = graph.analysis.fx
        values = [None if node is None else fx[node].meta["val"] for node in graph.analysis.outputs]
        shapes = [tuple(each.shape) for each in values if isinstance(each, torch.Tensor)]
        self._shapes = self._shapes or shapes
        sizes = dict(zip(chain(*self._shapes), chain(*shapes)))
        batch = tree_map(lambda leaf: _resized(leaf, sizes), self.batch)
        ratio = sum(map(math.prod, shapes)) / max(1, sum(map(math.prod, self._shapes)))
        step, held = _bytes_of(self.function, outputs, values, batch, graph.on_cpu)
        return dataclasses.replace(
            graph,
            outside_loss_bytes=step,
            target_bytes=math.ceil(ratio * self.target_bytes),
            scaled_loss_bytes=graph.scaled_loss_bytes + held,
        )


def _resized(leaf, sizes: dict[int, int]):
    """`leaf`, a part of the batch, for outputs whose sizes have changed as `sizes` says."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty([sizes.get(size, size) for size in leaf.shape], dtype=leaf.dtype, device="meta")


def inputs_of(model, batch):
    """The part of `batch` that the model's forward takes: the other keys, or positions, are for the loss."""
    args, kwargs = call_arguments(batch)
    names = forward_names(model)
    return args[: max(1, len(names))] if not kwargs else {name: kwargs[name] for name in kwargs if name in names}


def cross_entropy_bytes(outputs: Sequence[torch.Tensor]) -> int | None:
    """What a cross-entropy on the largest of `outputs` allocates; None if none can be the logits of one."""
    logits = [each for each in outputs if each.dim() > 1 and all(isinstance(size, int) for size in each.shape)]
    logits = [each for each in logits if each.is_floating_point()]
    if not logits:
        return None
    largest = max(logits, key=torch.Tensor.numel)
    targets = torch.empty(largest.shape[:-1], dtype=torch.int64, device="meta")

    def loss(outputs, targets):
        return torch.nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    on_cpu = largest.device.type in ("cpu", "meta")
    return _bytes_of(loss, lambda tensors: tensors[0], [largest], targets, on_cpu)[0]


def _bytes_of(function, outputs, values, batch, on_cpu: bool) -> tuple[int, int]:
    """The dynamic peak of `function`, forward and backward, and the bytes of the loss that it returns."""
    held = []
    active = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
    autocast = contextlib.nullcontext() if active is None else torch.autocast("cpu", torch.get_autocast_dtype(active))
    with _disable_current_modes(), torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [_empty(value, "cpu") for value in values]
        for each in tensors:
            if isinstance(each, torch.Tensor):
                each.requires_grad_(each.is_floating_point())
        returned, batch = outputs(tensors), tree_map(lambda leaf: _empty(leaf, "cpu"), batch)

        def step():
            with autocast:  # for the loss alone: `predict` refuses it around its own tensors
                loss = function(returned, batch)
            if not isinstance(loss, torch.Tensor):
                raise TypeError(f"it returned {loss!r:.40} instead of a tensor")
            held[:] = [loss.untyped_storage().nbytes()]
            loss.backward()

        resident = [each for each in tree_leaves((tensors, batch)) if isinstance(each, torch.Tensor)]
        device, block = ("cpu", 1) if on_cpu else ("cuda", CUDA_BLOCK)
        try:
            with no_autocast():
                found = predict(step, resident=resident, warmup=0, device=device, round_to=block)
        except Exception as error:  # of the user's function
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TraceError(
                f"loss= cannot run without data: {reason}. It gets the outputs and the batch, whose sizes change as "
                "those of the outputs do, and must return a scalar without reading values; leave it out to plan the "
                "model alone."
            ) from error
    return found.dynamic_peak_bytes, rounded(held[0], block)


def _empty(leaf, device: str):
    """A tensor like `leaf` without data on `device`; what is no tensor stays as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
