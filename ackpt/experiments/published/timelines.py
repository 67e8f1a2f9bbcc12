"""Timelines of reference experiments at the published sizes, predicted from shapes, and the file that stores them.

A timeline can take minutes, so ``results/predictions/timelines.json`` stores it. Its key depends on the step, its
sizes, the GPU and the bytes that `Predictions` stores for them: if these change, the timeline is predicted again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

from torch._subclasses.fake_tensor import FakeTensorMode

from ackpt.experiments.steps.settings import record_metrics
from ackpt.metering.prediction import predict
from ackpt.results import REFERENCES, Record, environment

from .predictions import Predictions, digest, group, rows
from .steps import STEPS

FILE = REFERENCES.parent / "predictions" / "timelines.json"
POINTS = 300


def predicted_timeline(step: str, sizes: dict[str, Any], gpu_name: str) -> dict[str, Any]:
    """The metrics of a Record: bytes, FLOPs and the timeline of the first step, thinned to about `POINTS` events."""
    with mock.patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=""), FakeTensorMode():
        made = STEPS[step](**sizes)
    found = predict(made.run, resident=made.resident, device=gpu_name, warmup=0)
    return {**record_metrics(found), "timeline": found.timeline.thinned(POINTS).to_json()}


class Timelines(Predictions):
    """The timelines in `file`."""

    def __init__(self, file: Path = FILE, predicts=predicted_timeline, peaks: Predictions | None = None):
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
