"""Train the same model by several methods and compare them: losses, bytes, FLOPs, seconds.

Every method starts from the same weights and sees the same batches. Bytes are those of one further step. Times are
taken last, on one model that is switched from method to method within every round, so that all methods run under the
same conditions; the ratio is the figure to read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

import ackpt
from ackpt.checkpointing.wrapping import apply_activation_checkpointing, remove_activation_checkpointing
from ackpt.metering.meter import compare_seconds, measure
from ackpt.models.transformer import Block
from ackpt.planner.workloads.step_request import autocast
from experiments.results import Record, environment

from .failures import STRICT
from .settings import Prepared, record_config, record_metrics

METHODS = ("baseline", "checkpoint", "chunked-loss", "checkpoint+chunked-loss")
OFFLOADED = "checkpoint+offload"  # the inputs of the checkpointed blocks are offloaded
PLANNED = "auto"  # a plan whose budget is the measured peak of checkpoint


def check_methods(methods, allowed=METHODS) -> tuple[str, ...]:
    """The methods without repetitions; ValueError for one that is not in `allowed`."""
    for method in methods:
        if method not in allowed:
            hint = " (this experiment has no vocabulary head)" if chunks_loss(method) else ""
            raise ValueError(f"unknown method {method!r}{hint}: choose from {', '.join(allowed)}")
    if not methods:
        raise ValueError(f"no method given: choose from {', '.join(allowed)}")
    if PLANNED in methods and "checkpoint" not in methods[: methods.index(PLANNED)]:
        raise ValueError(f"method {PLANNED!r} has the peak of checkpoint as its budget: give checkpoint before it")
    return tuple(dict.fromkeys(methods))


def configure(model, method: str) -> None:
    """Switch checkpointing of the model's blocks, and the offload of their inputs, on or off for `method`."""
    if "checkpoint" in method:
        apply_activation_checkpointing(model, Block, offload="async" if method == OFFLOADED else None)
    else:
        remove_activation_checkpointing(model)


def chunks_loss(method: str) -> bool:
    return "chunked-loss" in method


@dataclass(frozen=True)
class Task:
    """One model with its batches: ``model(**arguments(batch, method))`` is the loss of a step.

    ``batch(i)`` is the batch of step i, ``example()`` one of the same shapes for which no data are needed.
    """

    experiment: str
    build: Callable[[], torch.nn.Module]
    batch: Callable[[int], Any]
    example: Callable[[], Any]
    tensors: Callable[[Any], tuple]
    arguments: Callable[[Any, str], dict]
    learning_rate: float
    device: str
    dtype: str


class LossesDiffer(RuntimeError):
    """Two methods that must compute the same losses did not."""


def adamw(model, learning_rate: float):
    """AdamW with torch's fused kernel, which allocates no temporary memory proportional to the model."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)


def make_states(optimizer) -> None:
    """Make the states of an optimizer of parameters without data, as its first step does; no gradients are left.

    A prediction then needs no training step before. Call it under the parameters' FakeTensorMode.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def scaler_of(device: str, dtype: str):
    """The gradient scaler of a training loop in float16; None for another dtype."""
    return torch.amp.GradScaler(device) if dtype == "float16" else None


def backward_and_update(loss, optimizer, scaler) -> None:
    """Run backward and, with an optimizer, its step, and drop the gradients."""
    (loss if scaler is None else scaler.scale(loss)).backward()
    if optimizer is None:
        return
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=True)


def one_step(task: Task, model, optimizer, batch, method: str, scaler=None):
    """Run forward, backward and the optimizer's step; returns the loss, still on its device."""
    with autocast(task.device, task.dtype):
        loss = model(**task.arguments(batch, method))
    backward_and_update(loss, optimizer, scaler)
    return loss.detach()


def run(
    task: Task, methods, steps: int, config: dict, command: str, *, timed_rounds=5, profiles=None, failures=STRICT
) -> list[Record]:
    """Train, measure and time `task` by each of `methods`; one Record per method.

    `profiles` (see ``profiling.Profiles``) writes a trace and scalars of each; `failures` collects the methods that
    failed, which have no Record.

    Raises:
        LossesDiffer: if a method's losses are not those of the baseline. Methods with the same loss head must be
            bit-equal on the CPU, and on a GPU that runs deterministic algorithms; others must be close.
    """
    model = task.build().to(task.device)
    # On the CPU: on a GPU they would count in every peak.
    start = {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}
    optimizer = adamw(model, task.learning_rate)
    metrics: dict[str, dict] = {}
    called: dict[str, Any] = {}
    for method in methods:
        with failures.of(method):
            model.load_state_dict(start)
            optimizer.state.clear()
            configure(model, method)
            calls = model
            if method == PLANNED:
                calls = _planned(task, model, optimizer, metrics["checkpoint"]["peak_bytes"])
            metrics[method] = _train_and_measure(task, model, calls, optimizer, method, steps, config, profiles)
            called[method] = calls
        model.zero_grad(set_to_none=True)
    exact = task.device == "cpu" or torch.are_deterministic_algorithms_enabled()
    losses = {method: values["losses"] for method, values in metrics.items()}
    for method in losses:
        with failures.of(method):
            metrics[method] |= check_losses(losses, method, exact)
    methods = failures.without(methods)
    for method, times in _time(task, model, optimizer, called, start, methods, timed_rounds).items():
        metrics[method].update(times)
    where = environment(task.device, command)
    return [Record(task.experiment, {**config, "method": method}, metrics[method], where) for method in methods]


def run_lengths(task_of, config, command: str, timed_rounds: int, profiles, failures=STRICT):
    """`run` for every sequence length of a configuration; yields the list of Records of each."""
    more = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
    for seq_len in config.seq_lens:
        settings = record_config(config, seq_len=seq_len, **more)
        options = {"timed_rounds": timed_rounds, "profiles": profiles, "failures": failures}
        yield run(task_of(config, seq_len), config.methods, config.steps, settings, command, **options)


def _planned(task, model, optimizer, budget_bytes: int):
    """The model compiled by policy auto within the budget, a bound on the whole peak."""
    with autocast(task.device, task.dtype):
        arguments = task.arguments(task.batch(0), PLANNED)
        scaler = scaler_of(task.device, task.dtype)
        return ackpt.compile(model, budget=budget_bytes, optimizer=optimizer, scaler=scaler, **arguments)


def _train_and_measure(task, model, called, optimizer, method, steps, config, profiles) -> dict:
    scaler = scaler_of(task.device, task.dtype)
    losses, seconds = _train(task, called, optimizer, method, steps, scaler)
    batch = task.batch(steps)
    step = partial(one_step, task, called, optimizer, batch, method, scaler)
    measured = measure(step, task.device, resident=(model, optimizer, *task.tensors(batch)), warmup=1, repeats=0)
    if profiles is not None:
        name = f"{method}-L{config['seq_len']}"
        profiles.scalars(name, losses, measured.peak_bytes)
        profiles.trace(name, step)
    planned = {} if called is model else {"predicted_peak_bytes": called.plan.peak_bytes, "cost": called.plan.cost}
    return {
        "losses": losses,
        "seconds_training": seconds,
        **record_metrics(measured),
        **planned,
        "timeline": measured.timeline.thinned(400).to_json(),
    }


def _train(task, model, optimizer, method, steps, scaler):
    losses = []
    began = time.perf_counter()
    for step in tqdm(range(steps), desc=method, unit="step", disable=None, leave=False):
        # A copy: the storage of a mean squared error is as large as the input.
        losses.append(one_step(task, model, optimizer, task.batch(step), method, scaler).clone())
    losses = [float(loss) for loss in losses]  # waits for a GPU
    if not all(math.isfinite(loss) for loss in losses):
        raise LossesDiffer(f"{method}: the loss is not finite at step {_first(losses, lambda x: not math.isfinite(x))}")
    return losses, time.perf_counter() - began


def _time(task, model, optimizer, called, start, methods, rounds):
    """Seconds per step of each method, interleaved, on one model that is switched to the method before its step."""
    if not (rounds and methods):
        return {}
    model.load_state_dict(start)
    optimizer.state.clear()
    batch, scaler = task.batch(0), scaler_of(task.device, task.dtype)
    steps = {m: partial(one_step, task, called[m], optimizer, batch, m, scaler) for m in methods}
    comparison = compare_seconds(Prepared(steps, partial(configure, model)), rounds, device=task.device)
    times = comparison.to_json()
    return {
        method: {
            "seconds_step": times["seconds"][method],
            "seconds_ratio": {"reference": comparison.reference, **times["seconds_ratio"][method]},
        }
        for method in methods
    }


# Chunks sum the loss in another order; a GPU's kernels may add in any order.
TOLERANCE = {"chunked": 1e-4, "gpu": 1e-2}
COMPARED = 30  # steps that must be close; training amplifies rounding, so later steps need not be


def check_losses(losses: dict[str, list[float]], method: str, exact: bool) -> dict:
    """Compare the losses of `method` with those of the first method of the same loss head, and of the first of all.

    Losses that need not be bit-equal must be close at the first `COMPARED` steps.

    Returns:
        ``losses_difference``, the largest difference over all steps, relative to the first method's loss; {} if the
        losses must be bit-equal.
    """
    values, reference = losses[method], next(iter(losses))
    twin = next(name for name in losses if chunks_loss(name) == chunks_loss(method))
    if exact and values != losses[twin]:
        step = _first(values, lambda pair: pair[0] != pair[1], losses[twin])
        raise LossesDiffer(
            f"the losses of {method} and {twin} differ at step {step}: {values[step]!r} and {losses[twin][step]!r}; "
            "checkpointing must not change a bit"
        )
    if exact and chunks_loss(method) == chunks_loss(reference):
        return {}
    tolerance = TOLERANCE["chunked"] if exact else TOLERANCE["gpu"]
    differences = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(values, losses[reference], strict=True)]
    for step, difference in enumerate(differences[:COMPARED]):
        if difference > tolerance:
            raise LossesDiffer(
                f"the losses of {method} and {reference} differ by more than {tolerance:g} (relative) at step "
                f"{step}: {values[step]!r} and {losses[reference][step]!r}"
            )
    return {} if exact else {"losses_difference": max(differences)}


def _first(values, wrong, others=None) -> int:
    pairs = values if others is None else zip(values, others)
    return next(index for index, item in enumerate(pairs) if wrong(item))
