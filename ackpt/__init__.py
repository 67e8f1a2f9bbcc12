"""ackpt: activation checkpointing for PyTorch within a memory budget, with gradients equal to the last bit."""

from typing import TYPE_CHECKING

from .autograd_state import is_recomputing
from .checkpointing.chunked_loss import chunked_cross_entropy
from .checkpointing.guards import guarantees
from .checkpointing.reentrant import checkpoint
from .checkpointing.sequential import checkpoint_sequential
from .checkpointing.wrapping import apply_activation_checkpointing, remove_activation_checkpointing
from .errors import BudgetError, CheckpointError, OffloadError, TraceError
from .metering.meter import compare_seconds, count_flops, measure
from .metering.timeline import MeterError
from .offloading.saved_tensors import offload_saved_tensors

if TYPE_CHECKING:
    from .applied import apply_budget, remove_budget
    from .capture.shapes import from_shapes
    from .compiled import compile
    from .costs.calibration import calibrate
    from .explaining.explanation import explain
    from .explaining.print_saved import print_saved
    from .files import RecordError
    from .graph import PlanError, ScheduleError, profile, trace
    from .metering.prediction import predict
    from .offloading.pays import offload_pays
    from .planner import plan
    from .planning.plan import Plan

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
    "apply_budget",
    "calibrate",
    "checkpoint",
    "checkpoint_sequential",
    "chunked_cross_entropy",
    "compare_seconds",
    "compile",
    "count_flops",
    "explain",
    "from_shapes",
    "guarantees",
    "is_recomputing",
    "measure",
    "offload_pays",
    "offload_saved_tensors",
    "plan",
    "predict",
    "print_saved",
    "profile",
    "remove_activation_checkpointing",
    "remove_budget",
    "trace",
]

# Imported on first use: Part II, which needs torch's compiler stack.
_LATER = {
    "Plan": ("ackpt.graph", "Plan"),
    "PlanError": ("ackpt.graph", "PlanError"),
    "RecordError": ("ackpt.files", "RecordError"),
    "ScheduleError": ("ackpt.graph", "ScheduleError"),
    "apply_budget": ("ackpt.applied", "apply_budget"),
    "calibrate": ("ackpt.costs.calibration", "calibrate"),
    "compile": ("ackpt.compiled", "compile"),
    "explain": ("ackpt.explaining.explanation", "explain"),
    "from_shapes": ("ackpt.capture.shapes", "from_shapes"),
    "graph": ("ackpt.graph", None),
    "offload_pays": ("ackpt.offloading.pays", "offload_pays"),
    "plan": ("ackpt.planner", "plan"),
    "policies": ("ackpt.policies", None),
    "predict": ("ackpt.metering.prediction", "predict"),
    "print_saved": ("ackpt.explaining.print_saved", "print_saved"),
    "profile": ("ackpt.graph", "profile"),
    "remove_budget": ("ackpt.applied", "remove_budget"),
    "trace": ("ackpt.graph", "trace"),
}


def __getattr__(name: str):
    if name in _LATER:
        import importlib

        path, attribute = _LATER[name]
        module = importlib.import_module(path)
        return module if attribute is None else getattr(module, attribute)
    if name == "colab":
        raise AttributeError("ackpt.colab is now experiments.colab, in a clone of the repository")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
