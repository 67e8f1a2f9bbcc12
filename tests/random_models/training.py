"""Train a model for a few steps and record what every step leaves behind: tensors, random numbers, plain values."""

import contextlib
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import ackpt

from .model import Model, Spec, batch, build
from .part import restart

STEPS = 3
_PLAIN = (type(None), bool, int, float, str)
_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_checkpoint_options"})
Record = dict[str, Any]  # what was recorded, under a name that says where


@dataclasses.dataclass
class Run:
    """Records of the steps; ``most_uses``: how often the most used tensor of a step is read by operations."""

    records: list[Record]
    most_uses: int = 0


def seed_all(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002


def train(spec: Spec, prepare: Callable, steps: int = STEPS, after_step: Callable | None = None) -> Run:
    """`steps` steps of SGD; ``prepare(model, args, kwargs)`` returns what is called in the model's place."""
    model = _made(spec)
    args, kwargs, _ = batch(spec, 0)
    hooks = _accumulator_hooks(model) if spec.hooks else []
    call = prepare(model, args, kwargs)
    run = Run([])
    for step in range(steps):
        run.records.append(_step(spec, model, call, step, run))
        if after_step is not None:
            after_step(step)
        model.between(step)
        if spec.freezes and step == 0:
            model.blocks[0].requires_grad_(False)
        if spec.evaluates:
            _evaluate(spec, model, call, step)
    if hooks:
        run.records.append({"calls of hooks": [sum(counts) for _, counts in hooks]})
    return run


def _accumulator_hooks(model: nn.Module) -> list[tuple[Any, list[int]]]:
    """The gradient accumulators of the parameters, with a hook that halves gradients and counts its calls."""
    hooks = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            accumulator, counts = parameter.expand_as(parameter).grad_fn.next_functions[0][0], []
            accumulator.register_prehook(lambda gradients, counts=counts: _halved(gradients, counts))
            hooks.append((accumulator, counts))
    return hooks


def _halved(gradients, counts: list[int]):
    counts.append(1)
    return tuple(None if each is None else each * 0.5 for each in gradients)


def _made(spec: Spec) -> Model:
    """The model and the process as a training script has them before the first step."""
    restart()
    model = build(spec)
    seed_all(spec.seed + 1)
    if spec.called:
        args, kwargs, _ = batch(spec, 0)
        with torch.no_grad():
            model(*args, **kwargs)
    return model


def _step(spec: Spec, model: Model, call, step: int, run: Run) -> Record:
    record: Record = {}
    for named in everything(model):
        named[1].grad = None
    outputs, inputs = [], []
    forwards = 1 + (spec.accumulates or spec.delays)
    for micro in range(forwards):
        args, kwargs, tensors = batch(spec, 10 * step + micro, step)
        inputs += [tensor for tensor in tensors if tensor.requires_grad]
        with torch.autocast("cpu", torch.bfloat16) if spec.autocast else contextlib.nullcontext():
            outputs += tensors_in(call(*args, **kwargs))
    for index, output in enumerate(outputs):
        record[f"output {index}"] = output.detach().clone()
    record["outputs that require grad"] = [output.requires_grad for output in outputs]
    record["random numbers after forward"] = random_states(model)
    trained = differentiated(outputs, forwards)
    if spec.penalty:
        trained.append(sum(parameter.float().square().sum() for parameter in model.parameters()))
    run.most_uses = max(run.most_uses, most_uses(trained))
    if spec.delays:
        torch.autograd.backward(trained[0], incoming(trained[:1])[0])
        _fused_step(model)
        torch.autograd.backward(trained[1:], incoming(trained[1:]))
    else:
        torch.autograd.backward(trained, incoming(trained))
    del outputs, trained
    for name, tensor in everything(model):
        record[f"gradient of {name}"] = None if tensor.grad is None else tensor.grad.clone()
    for index, tensor in enumerate(inputs):
        record[f"gradient of input {index}"] = None if tensor.grad is None else tensor.grad.clone()
    record["random numbers after backward"] = random_states(model)
    with torch.no_grad():
        for _, tensor in everything(model):
            if tensor.grad is not None:
                tensor -= 0.1 * tensor.grad
    for name, tensor in everything(model):
        record[f"value of {name}"] = tensor.detach().clone()
    record.update(kept_values(model))
    return record


def _fused_step(model: nn.Module) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    torch.optim.SGD(parameters, lr=0.1, fused=True).step()


def _evaluate(spec: Spec, model: Model, call, step: int) -> None:
    was = {module: module.training for module in model.modules()}
    model.eval()
    args, kwargs, _ = batch(spec, 100 + step)
    with torch.no_grad():
        call(*args, **kwargs)
    for module, training in was.items():
        module.training = training


def differentiated(outputs, forwards: int = 1) -> list[torch.Tensor]:
    """The losses among the outputs, one of each forward; without a loss, all outputs that need a gradient."""
    needed = [output for output in outputs if output.requires_grad]
    losses = [output for output in needed if output.dim() == 0]
    return losses if len(losses) == forwards else needed


def incoming(outputs) -> list[torch.Tensor]:
    """Gradients of outputs, another one for each element."""
    return [torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).view(o.shape) for o in outputs]


def everything(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, those of modules that lie in lists as well, each tensor once."""
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for path, module in model.named_modules():
        hidden = [item for value in vars(module).values() if isinstance(value, list) for item in value]
        for index, owner in enumerate([module, *(item for item in hidden if isinstance(item, nn.Module))]):
            prefix = f"{path}." + (f"hidden{index}." if index else "")
            for name, tensor in (*owner.named_parameters(recurse=index > 0), *owner.named_buffers(recurse=index > 0)):
                named.setdefault(id(tensor), (prefix + name, tensor))
    return list(named.values())


def kept_values(model: nn.Module) -> Record:
    """Numbers and tensors in attributes of modules; what lies in lists and dicts there is marked as "inside".

    The weights that torch's hooks compute before every forward are left out: a planned step does so inside.
    """
    values: Record = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _OF_EVERY_MODULE or name.startswith("_") or name == "call":
                continue
            if isinstance(value, _PLAIN):
                values[f"attribute {path}.{name}"] = value
            elif isinstance(value, torch.Tensor) and not module._forward_pre_hooks:
                values[f"attribute {path}.{name}"] = value.detach().clone()
            elif isinstance(value, (list, dict)):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for key, item in items:
                    if isinstance(item, _PLAIN):
                        values[f"inside {path}.{name}[{key!r}]"] = item
    return values


def random_states(model: nn.Module) -> list:
    """Of the global generators and those that modules hold, comparable by ``==``."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    states: list = [torch.get_rng_state().numpy().tobytes(), random.getstate(), (name, keys.tobytes(), *rest)]
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                states.append(value.get_state().numpy().tobytes())
            elif isinstance(value, random.Random):
                states.append(value.getstate())
            elif isinstance(value, np.random.Generator):
                states.append(str(value.bit_generator.state))
    return states


def tensors_in(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = list(vars(value).values())
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def most_uses(outputs) -> int:
    """How many operations read the most used tensor: with three or more, the order of a sum of gradients matters."""
    uses: dict[Any, int] = {}
    nodes = {output.grad_fn for output in outputs if output.grad_fn is not None}
    left = list(nodes)
    while left:
        for edge in left.pop().next_functions:
            if edge[0] is None:
                continue
            uses[edge] = uses.get(edge, 0) + 1
            if edge[0] not in nodes:
                nodes.add(edge[0])
                left.append(edge[0])
    return max(uses.values(), default=0)


def measured_peak(spec: Spec, prepare: Callable) -> tuple[int, Any]:
    """The dynamic peak of a step in bytes, as measured, and what was prepared."""
    model = _made(spec)
    args, kwargs, tensors = batch(spec, 0)
    call = prepare(model, args, kwargs)
    of_model = [tensor for _, tensor in everything(model)]

    def once():
        for tensor in (*of_model, *tensors):
            tensor.grad = None
        with torch.autocast("cpu", torch.bfloat16) if spec.autocast else contextlib.nullcontext():
            outputs = call(*args, **kwargs)
        trained = differentiated(tensors_in(outputs))
        del outputs  # what gets no gradient counts as dropped
        torch.autograd.backward(trained, [torch.ones_like(output) for output in trained])

    measured = ackpt.measure(once, "cpu", resident=(model, *of_model, *tensors), repeats=0)
    return measured.dynamic_peak_bytes, call
