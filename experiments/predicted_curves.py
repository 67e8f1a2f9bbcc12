"""Curves of the reference experiments, predicted from shapes and stored: memory over a step, peak and time by batch.

Both take minutes. A timeline is predicted again if the step, its sizes, the GPU or the bytes that `Predictions` stores
for them change; a point of `BatchCurves`, if its model, the GPU or the code that plans changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.core.errors import BudgetError
from ackpt.metering.prediction import predict
from ackpt.planner.costs.devices import device
from ackpt.planner.schedule.simulator import simulate
from ackpt.planner.workloads.planned_shapes import PlanConfig, captured
from ackpt.planner.workloads.step_request import StepRequest, training_step
from experiments.results import REFERENCES, Record, environment

from .published import STEPS, Predictions, rows
from .published.predictions import digest, group, version_of
from .steps.settings import record_metrics

FOLDER = REFERENCES.parent / "predictions"
POINTS = 300


def predicted_timeline(step: str, sizes: dict[str, Any], gpu_name: str) -> dict[str, Any]:
    """The metrics of a Record: bytes, FLOPs and the timeline of the first step, thinned to about `POINTS` events."""
    with mock.patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=""), FakeTensorMode():
        made = STEPS[step](**sizes)
    found = predict(made.run, resident=made.resident, device=gpu_name, warmup=0)
    return {**record_metrics(found), "timeline": found.timeline.thinned(POINTS).to_json()}


class Timelines(Predictions):
    """The timelines in `file`, of steps of the published configurations."""

    def __init__(
        self, file: Path = FOLDER / "timelines.json", predicts=predicted_timeline, peaks: Predictions | None = None
    ):
        super().__init__(file, predicts)
        self.peaks = peaks or Predictions()

    def key(self, row: dict[str, Any]) -> str:
        return digest([*group(row), self.peaks.entry(row)])

    def records(self, step: str, methods: Iterable[str]) -> list[Record]:
        """One Record for each method of `step`, with its metrics; new ones are stored."""
        published = {row["sizes"]["method"]: row for row in rows() if row["step"] == step}
        records = []
        for row in (published[method] for method in methods):
            records.append(Record(f"{step}-predicted", row["sizes"], self.entry(row), environment("cpu")))
            if self.predicted:
                self.save([row for row in rows() if row["step"] == step])
        return records


_CODE = ("ackpt/planner/costs", "ackpt/planner/schedule/simulator.py", "ackpt/planner/schedule/schedule.py")
_CODE += tuple(f"ackpt/planner/policies/{name}" for name in ("selective.py", "mu_two.py", "search"))
POLICIES = {"without": "none", "per-block": "selective", "mu-two": "mu-two", "auto": "auto"}
_SIZES = {"dim": 512, "ff_dim": 2048, "layers": 6, "head_dim": 64, "vocab_size": 30_000}
MODELS: dict[str, dict[str, Any]] = {"resnet152": {"image_size": 224}, "lm": {"seq_len": 128, "fields": _SIZES}}
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
    """Peak and time of a step against the batch size, in `file`.

    The models are those of a published mu-TWO pipeline: a ResNet-152, and a Transformer with the sizes of its course.
    """

    def __init__(self, file: Path = FOLDER / "batch-curves.json", predicts=predicted_methods):
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
