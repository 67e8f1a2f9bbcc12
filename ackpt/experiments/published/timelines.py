"""Timelines of reference experiments at the published sizes, predicted from shapes, and the file that stores them.

A timeline takes minutes, so ``results/predictions/timelines.json`` stores it under the key that `Predictions` makes:
it is predicted again if the step, its sizes, the GPU or the code that predicts change.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

from torch._subclasses.fake_tensor import FakeTensorMode

from ackpt.experiments.steps.settings import record_metrics
from ackpt.metering.prediction import predict
from ackpt.results import REFERENCES, Record, environment

from . import predictions
from .steps import STEPS

FILE = REFERENCES.parent / "predictions" / "timelines.json"
POINTS = 300


def predicted_timeline(step: str, sizes: dict[str, Any], gpu_name: str) -> dict[str, Any]:
    """The metrics of a Record: bytes, FLOPs and the timeline of one step, thinned to about `POINTS` events."""
    with mock.patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=""), FakeTensorMode():
        made = STEPS[step](**sizes)
    found = predict(made.run, resident=made.resident, device=gpu_name)
    metrics = record_metrics(found)
    return {**metrics, "allocated": found.peak_bytes, "timeline": found.timeline.thinned(POINTS).to_json()}


def timelines(step: str, file=FILE) -> list[Record]:
    """One Record per published figure of `step`, with its predicted bytes, FLOPs and timeline; stores new ones."""
    stored = predictions.Predictions(file, predicted_timeline)
    chosen = [row for row in predictions.rows() if row["step"] == step]
    records = []
    for row in chosen:
        stored.of(row)
        metrics = stored.stored[stored.key(row)]["bytes"]
        records.append(Record(f"{step}-predicted", row["sizes"], metrics, environment("cpu")))
        if stored.predicted:
            stored.save(predictions.rows())
    return records
