"""The experiment ``sharded_check``: a step that FSDP2 runs in processes over gloo, measured and predicted.

The prediction is that of `ackpt.planner.sharding.planner`, with the copies that gloo makes. Some threads free their
copies late, so the measured peak is the lowest one of several steps.
"""

from __future__ import annotations

import datetime
import gc
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

import ackpt
from ackpt.planner.sharding.sharded_model import ShardedModel
from ackpt.planner.sharding.sharding import Sharding, groups_of
from ackpt.planner.workloads.planned_shapes import PlanConfig
from ackpt.planner.workloads.step_request import TRANSFORMERS, StepRequest, training_step
from experiments.steps.named_steps import tensors, with_data

LIMIT = datetime.timedelta(seconds=120)
STEPS = 12
METHODS = ("none", "full")


@dataclass(frozen=True)
class Checked:
    """Bytes of one rank's step: measured, in order of the ranks, and predicted.

    ``arguments``: the part of ``predicted_bytes`` for arguments that checkpointed blocks save but do not read.
    """

    method: str
    sharding: Sharding
    measured_bytes: tuple[int, ...]
    resident_bytes: tuple[int, ...]
    predicted_bytes: int
    predicted_resident_bytes: int
    arguments: int


def check(request: StepRequest, sharding: Sharding, methods=METHODS) -> list[Checked]:
    """Run the step of `request` sharded, without checkpointing and with checkpointed blocks, and predict it."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = request, sharding, methods, folder
        multiprocessing.start_processes(_work, arguments, nprocs=sharding.ranks, start_method=_start_method())
        ranks = [torch.load(Path(folder) / str(rank)) for rank in range(sharding.ranks)]
    model = ShardedModel(PlanConfig(request, optimizer="none"))
    checked = []
    for number, method in enumerate(methods):
        plan = model.plan(sharding, policy=method)
        # Checkpointed blocks of transformers are given position_ids, which only rotary embeddings before them read.
        arguments = 8 * request.tokens()[1] if method == "full" and request.model.startswith(TRANSFORMERS) else 0
        checked.append(
            Checked(
                method=method,
                sharding=sharding,
                measured_bytes=tuple(results[number][0] for results in ranks),
                resident_bytes=tuple(results[number][1] for results in ranks),
                predicted_bytes=plan.dynamic_peak_bytes + arguments,
                predicted_resident_bytes=plan.resident_bytes,
                arguments=arguments,
            )
        )
    return checked


def _start_method() -> str:
    """How to start the ranks: where possible, all from one process that has imported what they need."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    return "forkserver"


def _work(rank: int, request: StepRequest, sharding: Sharding, methods, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=sharding.ranks, timeout=LIMIT
    )
    torch.save([_measured(request, sharding, method) for method in methods], f"{folder}/{rank}")
    distributed.destroy_process_group()


def _measured(request: StepRequest, sharding: Sharding, method: str) -> tuple[int, int]:
    """Dynamic peak and resident bytes of this process."""
    model, inputs = _sharded(request, sharding, method)

    def step():
        model.zero_grad(set_to_none=True)
        outputs = model(**inputs)
        loss = getattr(outputs, "loss", outputs)
        del outputs  # as a plan assumes, see `ackpt.trace`
        loss.backward()

    step()  # the first step pads the shards
    model.zero_grad(set_to_none=True)
    shards = [parameter.to_local() for parameter in model.parameters()]
    resident = (*shards, *model.buffers(), *tensors(inputs))
    gc.collect()
    gc.freeze()  # every measurement collects garbage: it need not look at what torch has imported
    measurements = [ackpt.measure(step, "cpu", resident=resident, warmup=0, repeats=0) for _ in range(STEPS)]
    return min(each.dynamic_peak_bytes for each in measurements), measurements[0].resident_bytes


def _sharded(request: StepRequest, sharding: Sharding, method: str) -> tuple[Any, dict]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    computed = request.dtype
    sharded = StepRequest(**{**vars(request), "dtype": sharding.parameters or computed})
    step = training_step(sharded, "cpu")
    torch.manual_seed(0)
    for parameter in step.model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    inputs = with_data(step.model, step.inputs, seed=0)
    mixed = MixedPrecisionPolicy(computed, sharding.reduction or computed)
    for group in groups_of(step.model)[1:]:
        block = step.model.get_submodule(group.name)
        if method == "full":
            parent, _, last = group.name.rpartition(".")
            block = checkpoint_wrapper(block, preserve_rng_state=False)
            setattr(step.model.get_submodule(parent), last, block)
        fully_shard(block, mp_policy=mixed)
    return fully_shard(step.model, mp_policy=mixed), inputs
