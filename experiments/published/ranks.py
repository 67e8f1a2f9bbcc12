"""Published peaks of one rank of FSDP2, and their predictions: torchtitan's Llama 2 7B on 8 H100.

The configuration is that of pytorch/torchtitan, pull request 165 (commit 83c879f18, March 2024): 8 sequences of 2,048
tokens on each rank, parameters gathered in bfloat16, gradients reduced in float32, AdamW with clipping, eager mode. The
loop refers to the logits until the next forward has returned. No constant of the predictor comes from these rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from ackpt.planner.sharding.sharded_model import ShardedModel
from ackpt.planner.sharding.sharding import Sharding
from ackpt.planner.workloads.planned_shapes import PlanConfig
from ackpt.planner.workloads.step_request import StepRequest

GIB = 2**30
GPU = "h100-80g"
# What is saved of a block, and the published bytes in GiB.
PUBLISHED = {
    "full": {"what": "inputs of blocks", "allocated": 22.73, "reserved": 31.02},
    "selective": {"what": "attention, every second product", "allocated": 49.54, "reserved": 59.41},
}
MODERN = Sharding(8, torch.float32, torch.float32)
PUBLISHED_SHARDING = replace(MODERN, version=(2, 4), keeps_last=True)


@cache
def model(name: str, holds_outputs: bool) -> ShardedModel:
    """The step with torchtitan's model or that of transformers, by the name that ``ackpt plan`` has for it."""
    fields = {} if name == "hf:LlamaConfig" else {"returns_logits": holds_outputs}
    options = {"save": "every-second-matmul"}
    request = StepRequest(name, 8, 2048, None, fields, torch.bfloat16)
    return ShardedModel(PlanConfig(request, device=GPU, clipping=True, options=options, hold_outputs=holds_outputs))


def predicted(policy: str, sharding: Sharding, name: str = "torchtitan-llama", holds_outputs: bool = True) -> dict:
    """Predicted bytes of a rank in GiB."""
    of = model(name, holds_outputs)
    memory = of.memory(of.plan(sharding, policy=policy))
    assert memory is not None
    return {"allocated": memory.allocated / GIB, "reserved": memory.reserved / GIB}


def rows() -> list[dict]:
    """Published and predicted peaks, with relative errors."""
    found = []
    for policy, published in PUBLISHED.items():
        bytes_of = predicted(policy, PUBLISHED_SHARDING)
        for metric in ("allocated", "reserved"):
            figures = {"metric": metric, "published": published[metric], "predicted": bytes_of[metric]}
            found.append({"saved": published["what"], **figures, "error": bytes_of[metric] / published[metric] - 1})
    return found


def causes() -> list[dict]:
    """The first row as predicted with less of its configuration, one cause added at a time."""
    steps = {
        "transformers' model, FSDP2 of today": predicted("full", MODERN, "hf:LlamaConfig", False),
        "torchtitan's model": predicted("full", MODERN, holds_outputs=False),
        "the loop keeps the logits": predicted("full", MODERN),
        "the last block stays gathered": predicted("full", replace(MODERN, keeps_last=True)),
        "FSDP2 of spring 2024": predicted("full", PUBLISHED_SHARDING),
    }
    return [{"cause": name, **figures} for name, figures in steps.items()]
