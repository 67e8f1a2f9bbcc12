"""The bytes of a published step, predicted by ``ackpt.predict``, by metric."""

from __future__ import annotations

import os
import warnings
from typing import Any
from unittest import mock

from torch._subclasses.fake_tensor import FakeTensorMode

from ackpt.metering.gpus import ANY, gpu
from ackpt.metering.prediction import predict

from .step import PublishedStep
from .steps import STEPS

PHASES = ("start", "forward", "optimizer")


def predicted_bytes(step: str, sizes: dict[str, Any], gpu_name: str | None) -> dict[str, int]:
    """Bytes by metric of one step on a GPU (None: one of compute capability 8.0).

    ``NVML`` has the CUDA context of `ackpt.metering.gpus`; the workspaces of cuBLAS have their default size, whatever
    ``CUBLAS_WORKSPACE_CONFIG`` says in this process.
    """
    with mock.patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=""):
        return _predicted_bytes(step, sizes, gpu_name)


def _predicted_bytes(step: str, sizes: dict[str, Any], gpu_name: str | None) -> dict[str, int]:
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, which peft calls by its old names
        made: PublishedStep = STEPS[step](**sizes)
    pending = [made.setup] if made.setup is not None else []

    def run():
        if pending:
            pending.pop()()
        made.run()

    device = gpu(gpu_name or ANY)
    found = predict(run, resident=made.resident, device=device.name)
    phases = {f"allocated, {phase}": found.allocator.get(f"{phase}_peak_bytes") for phase in PHASES}
    reserved = found.allocator["reserved_peak_bytes"]
    allocated = found.dynamic_peak_bytes if made.added else found.peak_bytes
    metrics = {"allocated": allocated, "reserved": reserved, "NVML": reserved + device.context_bytes}
    return {metric: size for metric, size in {**metrics, **phases}.items() if size is not None}
