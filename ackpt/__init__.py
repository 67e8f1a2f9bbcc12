"""ackpt: activation checkpointing for PyTorch that is correct where it is usually silently wrong."""

from .errors import CheckpointError, OffloadError
from .guards import guarantees
from .loss import chunked_cross_entropy
from .meter import compare_seconds, count_flops, measure
from .offload import offload_saved_tensors
from .offload_pays import offload_pays
from .phases import is_recomputing
from .predict import predict
from .reentrant import checkpoint
from .wrap import apply_activation_checkpointing, checkpoint_sequential, remove_activation_checkpointing

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "OffloadError",
    "apply_activation_checkpointing",
    "checkpoint",
    "checkpoint_sequential",
    "chunked_cross_entropy",
    "compare_seconds",
    "count_flops",
    "guarantees",
    "is_recomputing",
    "measure",
    "offload_pays",
    "offload_saved_tensors",
    "predict",
    "remove_activation_checkpointing",
]


def __getattr__(name: str):
    if name == "colab":  # imported when asked for: it is the only part that experiments hang on
        import importlib

        return importlib.import_module("ackpt.colab")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
