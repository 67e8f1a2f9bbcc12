"""Helpers that the experiments share: checks of configurations, entries of records, the host's free memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from ackpt.metering.gpus import BLOCK

LOSS_SCALE = 2.0**16  # of float16, which cannot represent the gradients of a mean over many elements


class Prepared(dict):
    """Functions by name for `ackpt.compare_seconds`; ``prepare(name)`` runs when one is looked up, before its time."""

    def __init__(self, functions: Mapping[str, Callable[[], object]], prepare: Callable[[str], object]):
        super().__init__(functions)
        self.prepare = prepare

    def __getitem__(self, name: str) -> Callable[[], object]:
        self.prepare(name)
        return super().__getitem__(name)

    def values(self):
        return map(self.__getitem__, self)


def require_positive(config, *names: str) -> None:
    """ValueError for the first of the named whole numbers that is below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")


def require_lengths(config) -> None:
    """ValueError if there is no sequence length, or one below 1."""
    if not config.seq_lens:
        raise ValueError("give at least one sequence length")
    for length in config.seq_lens:
        if length < 1:
            raise ValueError(f"seq_len must be at least 1, got {length}")


def on_this_gpu(config, capability: tuple[int, int] | None = None) -> Any:
    """The configuration in float16 instead of bfloat16 if this GPU has no attention in bfloat16, as a T4."""
    if config.dtype == "bfloat16" and config.device == "cuda":
        if capability is None and torch.cuda.is_available():
            capability = torch.cuda.get_device_capability()
        if capability is not None and capability < (8, 0):
            return replace(config, dtype="float16")
    return config


def record_config(config, **more) -> dict:
    """The configuration for a record, without methods and lengths, since each record has one of each; and `more`."""
    settings = {name: value for name, value in asdict(config).items() if name not in ("methods", "seq_lens")}
    if settings.get("dataset_path"):
        settings["dataset_path"] = "a local copy"  # a path says nothing on another machine
    return {**settings, **more}


def record_metrics(measured) -> dict:
    """The bytes and FLOPs of a measurement or a prediction for a record, without its device and its times."""
    return {key: value for key, value in measured.to_json().items() if key not in ("device", "seconds")}


def block_bytes(device: str) -> int | None:
    """The block size to which `predict` rounds for comparison with plans, which do not model an allocator."""
    return BLOCK if device == "cuda" else None


def free_host_bytes() -> int | None:
    """Memory of the host that is free now; None if the system does not say."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
    return None
