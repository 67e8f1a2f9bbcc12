"""Llama 3 in its published sizes, one rank of many: the rows of the chapter's tables and the layers of its figures.

Sizes: Grattafiori et al. 2024, arXiv:2407.21783, table 3; a vocabulary of 128,256, as the released configurations have
it. Shards, the optimizer's state and reductions are float32, the step computes in bfloat16.
"""

from __future__ import annotations

import torch

from ackpt.core.errors import BudgetError
from ackpt.planner.sharding.planner import ShardedPlan
from ackpt.planner.sharding.sharded_model import ShardedModel
from ackpt.planner.sharding.sharding import COMMUNICATION, GATHERED, REDUCED, UNREDUCED, Sharding
from ackpt.planner.workloads.planned_shapes import PlanConfig
from ackpt.planner.workloads.step_request import StepRequest

GIB = 2**30
TOKENS = 8192
AS_ON = "h100-80g"  # the GPU whose kernels are captured
LLAMA = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": TOKENS,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": TOKENS,
    },
}


def llama(size: str, batch_size: int = 1) -> ShardedModel:
    """The model of `size`, captured as a GPU runs it, with `batch_size` sequences a rank."""
    request = StepRequest("hf:LlamaConfig", batch_size, TOKENS, None, LLAMA[size], torch.bfloat16)
    return ShardedModel(PlanConfig(request, device=AS_ON))


def mixed(ranks: int) -> Sharding:
    return Sharding(ranks, torch.float32, torch.float32)


def rank_row(model: ShardedModel, ranks: int, budget: str) -> dict:
    """Peaks in GiB: without checkpointing, per block, and within the budget, with that plan's recomputed FLOPs in %."""
    baseline, full = (model.plan(mixed(ranks), policy=policy) for policy in ("none", "full"))
    row = {
        "ranks": ranks,
        "resident": round(baseline.resident_bytes / GIB, 1),
        "baseline": round(baseline.peak_bytes / GIB, 1),
        "full": round(full.peak_bytes / GIB, 1),
    }
    try:
        plan = model.plan(mixed(ranks), budget)
    except BudgetError:
        return row | {"auto": "infeasible", "auto_flops": "–"}
    return row | {"auto": round(plan.peak_bytes / GIB, 1), "auto_flops": again(plan)}


def again(plan: ShardedPlan) -> float:
    """Recomputed FLOPs, in percent of the baseline's."""
    return round(100 * plan.recompute_flops / (plan.flops - plan.recompute_flops), 1)


def layers(plan: ShardedPlan) -> dict[str, int]:
    """Bytes at the peak by category; gathered parameters and the buffers of collectives are one category."""
    sizes = plan.at_peak()
    gathered = sizes.pop(GATHERED, 0) + sizes.pop(COMMUNICATION, 0)
    gradients = sizes.pop(REDUCED, 0) + sizes.pop(UNREDUCED, 0)
    resident = {name: sizes.get(name, 0) for name in ("parameters", "optimizer")}
    dynamic = {name: sizes.get(name, 0) for name in ("activations", "recomputed", "temporaries")}
    return {**resident, "gradients": gradients, "gathered, collectives": gathered, **dynamic}
