"""Train the same model by several methods and say what each one cost: losses, bytes, FLOPs, seconds.

Per method the run starts from the same weights and sees the same batches. Bytes are those of one further step. Times
are taken last, on one model that is switched from method to method within every round, so that all methods meet the
same weather; the column to read is the ratio.
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

from ackpt.meter import compare_seconds, measure
from ackpt.results import Record, environment

from .methods import autocast, configure
from .settings import record_config, record_metrics


@dataclass(frozen=True)
class Task:
    """One model with its batches: ``loss(model, batch, method)`` is the forward of a step.

    ``batch(i)`` is the batch of step i, ``example()`` one of the same shapes for which no data are needed.
    """

    experiment: str
    build: Callable[[], torch.nn.Module]
    batch: Callable[[int], Any]
    example: Callable[[], Any]
    tensors: Callable[[Any], tuple]
    loss: Callable
    learning_rate: float
    device: str
    dtype: str


class LossesDiffer(RuntimeError):
    """Two methods that must compute the same losses did not."""


def adamw(model, learning_rate: float):
    """AdamW without temporaries the size of the model: torch's fused kernel, on CPU and CUDA."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)


def one_step(task: Task, model, optimizer, batch, method: str, scaler=None):
    """Forward, backward, optimizer step; returns the loss, still on its device."""
    with autocast(task.device, task.dtype):
        loss = task.loss(model, batch, method)
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def run(task: Task, methods, steps: int, config: dict, command: str, *, timed_rounds=5, profiles=None) -> list[Record]:
    """Train, measure and time `task` by each of `methods`; one Record per method.

    `profiles` (see ``profiling.Profiles``) takes a trace and scalars of each.

    Raises `LossesDiffer` if a method's losses are not the baseline's to the last bit where they must be (methods that
    differ in checkpointing only, on the CPU) or not close (chunked loss; any method on a GPU).
    """
    model = task.build().to(task.device)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    metrics: dict[str, dict] = {}
    for method in methods:
        model.load_state_dict(start)
        configure(model, method)
        metrics[method] = _train_and_measure(task, model, method, steps, config, profiles)
        model.zero_grad(set_to_none=True)
    check_losses({method: values["losses"] for method, values in metrics.items()}, exact=task.device == "cpu")
    for method, times in _time(task, model, start, methods, timed_rounds).items():
        metrics[method].update(times)
    where = environment(task.device, command)
    return [Record(task.experiment, {**config, "method": method}, metrics[method], where) for method in methods]


def run_lengths(task_of, config, command: str, timed_rounds: int, profiles):
    """`run` for every sequence length of a configuration; yields the list of Records of each."""
    for seq_len in config.seq_lens:
        settings = record_config(config, seq_len=seq_len)
        task = task_of(config, seq_len)
        yield run(task, config.methods, config.steps, settings, command, timed_rounds=timed_rounds, profiles=profiles)


def _train_and_measure(task, model, method, steps, config, profiles) -> dict:
    optimizer = adamw(model, task.learning_rate)
    scaler = torch.amp.GradScaler(task.device) if task.dtype == "float16" else None
    losses, seconds = _train(task, model, optimizer, method, steps, scaler)
    batch = task.batch(steps)
    step = partial(one_step, task, model, optimizer, batch, method, scaler)
    measured = measure(step, task.device, resident=(model, optimizer, *task.tensors(batch)), warmup=1, repeats=0)
    if profiles is not None:
        name = f"{method}-L{config['seq_len']}"
        profiles.scalars(name, losses, measured.peak_bytes)
        profiles.trace(name, step)
    return {
        "losses": losses,
        "seconds_training": seconds,
        **record_metrics(measured),
        "timeline": measured.timeline.thinned(400).to_json(),
    }


def _train(task, model, optimizer, method, steps, scaler):
    losses = []
    began = time.perf_counter()
    for step in tqdm(range(steps), desc=method, unit="step", disable=None, leave=False):
        losses.append(one_step(task, model, optimizer, task.batch(step), method, scaler))
    losses = [float(loss) for loss in losses]  # waits for a GPU
    if not all(math.isfinite(loss) for loss in losses):
        raise LossesDiffer(f"{method}: the loss is not finite at step {_first(losses, lambda x: not math.isfinite(x))}")
    return losses, time.perf_counter() - began


def _time(task, model, start, methods, rounds):
    """Interleaved seconds per step: one model, switched to the method just before its step."""
    if not rounds:
        return {}
    model.load_state_dict(start)
    optimizer = adamw(model, task.learning_rate)
    batch = task.batch(0)

    def step_of(method):
        def step():
            configure(model, method)
            one_step(task, model, optimizer, batch, method)

        return step

    comparison = compare_seconds({method: step_of(method) for method in methods}, rounds, device=task.device)
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


def check_losses(losses: dict[str, list[float]], exact: bool) -> None:
    """Compare every method's losses with those of the first method of the same loss, and the two losses."""
    reference = next(iter(losses))
    for method, values in losses.items():
        same_head = ("chunked" in method) == ("chunked" in reference)
        twin = method.removeprefix("checkpoint+").replace("checkpoint", "baseline")
        if exact and twin in losses and values != losses[twin]:
            step = _first(values, lambda pair: pair[0] != pair[1], losses[twin])
            raise LossesDiffer(
                f"the losses of {method} and {twin} differ at step {step}: {values[step]!r} and "
                f"{losses[twin][step]!r}; checkpointing must not change a bit"
            )
        tolerance = TOLERANCE["chunked"] if exact else TOLERANCE["gpu"]
        if not (exact and same_head):
            for step, (a, b) in enumerate(zip(values, losses[reference])):
                if abs(a - b) > tolerance * max(1.0, abs(b)):
                    raise LossesDiffer(
                        f"the losses of {method} and {reference} differ by more than {tolerance:g} (relative) at step "
                        f"{step}: {a!r} and {b!r}"
                    )


def _first(values, wrong, others=None) -> int:
    pairs = values if others is None else zip(values, others)
    return next(index for index, item in enumerate(pairs) if wrong(item))
