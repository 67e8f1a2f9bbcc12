"""The experiment ``sharded_check``: a step that FSDP2 runs in processes over gloo, measured and predicted.

The prediction is that of `ackpt.planner.sharding.planner`, with the copies that gloo makes. Some threads free their
copies late, so the measured peak is the lowest one of several steps.
"""

from __future__ import annotations

import datetime
import gc
import tempfile
import warnings
from collections import Counter
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
SELECTIVE = "every-second-matmul"


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
    """Run the step of `request` sharded and predict it, for each of the `methods`.

    These are those of `METHODS`, `SELECTIVE`, or a share of the baseline's dynamic peak as a budget of `apply_budget`.
    The loop keeps the model's outputs until the next forward has returned, if `sharding` says so.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = request, sharding, methods, folder
        multiprocessing.start_processes(_work, arguments, nprocs=sharding.ranks, start_method=_start_method())
        ranks = [torch.load(Path(folder) / str(rank)) for rank in range(sharding.ranks)]
    config = PlanConfig(request, optimizer="none", hold_outputs=sharding.holds_outputs, options={"save": SELECTIVE})
    model = ShardedModel(config)
    checked = []
    for number, method in enumerate(methods):
        is_budget = not isinstance(method, str)
        plan = None if is_budget else model.plan(sharding, policy="selective" if method == SELECTIVE else method)
        predicted, resident = ranks[0][number][2:] if plan is None else (plan.dynamic_peak_bytes, plan.resident_bytes)
        # Checkpointed blocks of transformers are given position_ids, which only rotary embeddings before them read.
        arguments = 8 * request.tokens()[1] if method == "full" and request.model.startswith(TRANSFORMERS) else 0
        checked.append(
            Checked(
                method=f"plan within {method:.0%}" if is_budget else method,
                sharding=sharding,
                measured_bytes=tuple(results[number][0] for results in ranks),
                resident_bytes=tuple(results[number][1] for results in ranks),
                predicted_bytes=predicted + arguments,
                predicted_resident_bytes=resident,
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


def _measured(request: StepRequest, sharding: Sharding, method: str | float) -> tuple[int, ...]:
    """Dynamic peak and resident bytes of this process, and those of its plan if `method` is a budget."""
    model, inputs = _sharded(request, sharding, method if isinstance(method, str) else "none")
    plan = None if isinstance(method, str) else ackpt.apply_budget(model, inputs, method).plan

    def step():
        outputs = None
        for _ in range(1 + sharding.holds_outputs):
            model.zero_grad(set_to_none=True)
            outputs = model(**inputs)
            loss = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "loss", outputs)
            if not sharding.holds_outputs:
                del outputs  # as a plan assumes, see `ackpt.trace`
            loss.backward()

    step()  # the first step pads the shards
    model.zero_grad(set_to_none=True)
    shards = [parameter.to_local() for parameter in model.parameters()]
    resident = (*shards, *model.buffers(), *tensors(inputs))
    gc.collect()
    gc.freeze()  # every measurement collects garbage: it need not look at what torch has imported
    measurements = [ackpt.measure(step, "cpu", resident=resident, warmup=0, repeats=0) for _ in range(STEPS)]
    planned = () if plan is None else (plan.dynamic_peak_bytes, plan.resident_bytes)
    return min(each.dynamic_peak_bytes for each in measurements), measurements[0].resident_bytes, *planned


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
    *others, end = groups_of(step.model)[1:]
    for group in (*others, end):
        block = step.model.get_submodule(group.name)
        if method != "none":
            parent, _, last = group.name.rpartition(".")
            context: dict[str, Any] = {"context_fn": _every_second_product} if method == SELECTIVE else {}
            block = checkpoint_wrapper(block, preserve_rng_state=False, **context)
            setattr(step.model.get_submodule(parent), last, block)
        fully_shard(block, mp_policy=mixed, reshard_after_forward=not (sharding.keeps_last and group is end))
    return fully_shard(step.model, mp_policy=mixed), inputs


def _every_second_product():
    """torchtitan's selective checkpointing: attention and the products 1, 3, ... of a block are saved."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    products = Counter()

    def policy(context, operation, *args, **kwargs):
        is_product = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        products[context.is_recompute] += is_product
        is_saved = products[context.is_recompute] % 2 if is_product else "scaled_dot_product" in str(operation)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
