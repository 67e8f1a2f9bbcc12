"""Peak and time of a step against the batch size, by method: predicted from shapes and a data sheet, and stored.

The models are those of a published mu-TWO pipeline: a ResNet-152, and a Transformer with the sizes of its course.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ackpt
from ackpt.costs.devices import device
from ackpt.errors import BudgetError
from ackpt.planning.simulator import simulate
from ackpt.results import REFERENCES
from ackpt.workloads.named_models import training_step
from ackpt.workloads.planned_shapes import PlanConfig, captured
from ackpt.workloads.step_request import StepRequest

from .published.predictions import Predictions, digest, version_of

FILE = REFERENCES.parent / "predictions" / "batch-curves.json"
_CODE = ("costs", "planning/simulator.py", "planning/schedule.py")
_CODE += ("policies/chains/selective.py", "policies/mu_two.py", "policies/search")
POLICIES = {"without": "none", "per-block": "selective", "mu-two": "mu-two", "auto": "auto"}
_SIZES = {"dim": 512, "ff_dim": 2048, "layers": 6, "head_dim": 64, "vocab_size": 30_000}
MODELS: dict[str, dict[str, Any]] = {
    "resnet152": {"image_size": 224},
    "lm": {"seq_len": 128, "fields": _SIZES},
}
BATCHES = {"resnet152": (4, 8, 16, 32, 64), "lm": (2, 4, 8, 16, 32, 64, 128, 256)}


def predicted_methods(model: str, sizes: dict[str, int], gpu_name: str) -> dict[str, dict[str, float]]:
    """``peak_bytes`` and ``seconds`` of forward and backward in fp32, by the names in `POLICIES`; nothing is swapped.

    Policies that need a budget get the peak of per-block checkpointing, or the smallest that is feasible for them.
    """
    request = StepRequest(model, sizes["batch"], **MODELS[model])
    graph = captured(training_step(request), PlanConfig(request, optimizer="none", device=gpu_name), device(gpu_name))
    profile = replace(ackpt.profile(graph, device(gpu_name)), swap_seconds=None)
    found: dict[str, dict[str, float]] = {}
    for name, policy in POLICIES.items():
        budget = found["per-block"]["peak_bytes"] if policy in ("mu-two", "auto") else None
        try:
            plan = ackpt.plan(graph, budget, policy, profile=profile)
        except BudgetError as error:
            plan = ackpt.plan(graph, error.least_bytes, policy, profile=profile)
        seconds = simulate(graph, profile, plan.schedule).seconds
        assert seconds is not None
        found[name] = {"peak_bytes": plan.peak_bytes, "seconds": float(f"{seconds:.9g}")}
    return found


class BatchCurves(Predictions):
    """The predictions in `FILE`, under keys that depend on model, batch, GPU and the code that plans."""

    def __init__(self, file=FILE, predicts=predicted_methods):
        super().__init__(file, predicts)
        code = version_of(_CODE)
        self._code = lambda model: digest([code, MODELS[model], POLICIES])

    def curves(self, gpu_name: str) -> dict[str, dict[int, dict[str, dict[str, float]]]]:
        """``{model: {batch: {method: {"peak_bytes": ..., "seconds": ...}}}}``; new ones are stored."""
        rows = [
            {"step": model, "sizes": {"batch": batch}, "gpu": gpu_name}
            for model, batches in BATCHES.items()
            for batch in batches
        ]
        found: dict[str, dict[int, dict[str, dict[str, float]]]] = {model: {} for model in BATCHES}
        for row in rows:
            entry = self.entry(row)
            found[row["step"]][row["sizes"]["batch"]] = {name: entry[name] for name in POLICIES}
            if self.predicted:
                self.save(rows)
        return found
