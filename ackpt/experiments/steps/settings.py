"""Checks and record entries that the configurations of the experiments share."""

from __future__ import annotations

from dataclasses import asdict


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


def record_config(config, **more) -> dict:
    """The configuration as it stands in a record, with what else tells it from others; the method comes on top."""
    settings = {name: value for name, value in asdict(config).items() if name not in ("methods", "seq_lens")}
    if settings.get("dataset_path"):
        settings["dataset_path"] = "a local copy"  # a path says nothing on another machine
    return {**settings, **more}


def record_metrics(measured) -> dict:
    """A measurement, or a prediction, as it stands in a record: bytes and FLOPs; device and times have other places."""
    return {key: value for key, value in measured.to_json().items() if key not in ("device", "seconds")}
