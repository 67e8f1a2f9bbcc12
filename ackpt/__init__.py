"""ackpt: activation checkpointing for PyTorch that is correct where it is usually silently wrong."""

from typing import TYPE_CHECKING

from .errors import BudgetError, CheckpointError, OffloadError
from .guards import guarantees
from .loss import chunked_cross_entropy
from .meter import compare_seconds, count_flops, measure
from .offload import offload_saved_tensors
from .offload_pays import offload_pays
from .phases import is_recomputing
from .predict import predict
from .reentrant import checkpoint
from .sequential import checkpoint_sequential
from .timeline import MeterError
from .wrap import apply_activation_checkpointing, remove_activation_checkpointing

if TYPE_CHECKING:
    from .graph import Plan, PlanError, ScheduleError, TraceError, profile, trace
    from .policies import compile, plan
    from .results import RecordError

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CheckpointError",
    "MeterError",
    "OffloadError",
    "Plan",
    "PlanError",
    "RecordError",
    "ScheduleError",
    "TraceError",
    "apply_activation_checkpointing",
    "checkpoint",
    "checkpoint_sequential",
    "chunked_cross_entropy",
    "compare_seconds",
    "compile",
    "count_flops",
    "guarantees",
    "is_recomputing",
    "measure",
    "offload_pays",
    "offload_saved_tensors",
    "plan",
    "predict",
    "profile",
    "remove_activation_checkpointing",
    "trace",
]

# Imported when asked for: Part II, which needs torch's compiler stack, and what experiments hang on.
_LATER = {
    "Plan": ("ackpt.graph", "Plan"),
    "PlanError": ("ackpt.graph", "PlanError"),
    "RecordError": ("ackpt.results", "RecordError"),
    "ScheduleError": ("ackpt.graph", "ScheduleError"),
    "TraceError": ("ackpt.graph", "TraceError"),
    "colab": ("ackpt.colab", None),
    "compile": ("ackpt.policies", "compile"),
    "graph": ("ackpt.graph", None),
    "plan": ("ackpt.policies", "plan"),
    "policies": ("ackpt.policies", None),
    "profile": ("ackpt.graph", "profile"),
    "trace": ("ackpt.graph", "trace"),
}


def __getattr__(name: str):
    if name in _LATER:
        import importlib

        path, attribute = _LATER[name]
        module = importlib.import_module(path)
        return module if attribute is None else getattr(module, attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
