"""ackpt: activation checkpointing for PyTorch within a memory budget, with gradients equal to the last bit."""

from typing import TYPE_CHECKING

from ackpt.checkpointing.chunked_loss import chunked_cross_entropy
from ackpt.checkpointing.guards import guarantees
from ackpt.checkpointing.reentrant import checkpoint
from ackpt.checkpointing.sequential import checkpoint_sequential
from ackpt.checkpointing.wrapping import apply_activation_checkpointing, remove_activation_checkpointing
from ackpt.core import __version__ as __version__
from ackpt.core.autograd_state import is_recomputing
from ackpt.core.errors import BudgetError, CheckpointError, OffloadError, TraceError
from ackpt.metering.meter import compare_seconds, count_flops, measure
from ackpt.metering.timeline import MeterError
from ackpt.offloading.saved_tensors import offload_saved_tensors

if TYPE_CHECKING:
    from ackpt.core.files import RecordError
    from ackpt.graph import PlanError, ScheduleError, profile, trace
    from ackpt.metering.prediction import predict
    from ackpt.offloading.pays import offload_pays
    from ackpt.planner.api import apply_budget, compile, plan, remove_budget
    from ackpt.planner.capture.shapes import from_shapes
    from ackpt.planner.costs.calibration import calibrate
    from ackpt.planner.explain.audit import audit
    from ackpt.planner.explain.explanation import explain
    from ackpt.planner.explain.print_saved import print_saved
    from ackpt.planner.schedule.plan import Plan
    from ackpt.planner.trainer_callback import AckptCallback as AckptCallback
    from ackpt.planner.workloads.batches import batches
    from ackpt.planner.workloads.lengths import fits

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
    "audit",
    "batches",
    "calibrate",
    "checkpoint",
    "checkpoint_sequential",
    "chunked_cross_entropy",
    "compare_seconds",
    "compile",
    "count_flops",
    "explain",
    "fits",
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

# Imported on first use: what plans graphs, which needs torch's compiler stack.
_LATER = {
    "ackpt.core.files": ("RecordError",),
    "ackpt.graph": ("Plan", "PlanError", "ScheduleError", "graph", "profile", "trace"),
    "ackpt.metering.prediction": ("predict",),
    "ackpt.offloading.pays": ("offload_pays",),
    "ackpt.planner.api": ("apply_budget", "compile", "plan", "remove_budget"),
    "ackpt.planner.capture.shapes": ("from_shapes",),
    "ackpt.planner.costs.calibration": ("calibrate",),
    "ackpt.planner.explain.audit": ("audit",),
    "ackpt.planner.explain.explanation": ("explain",),
    "ackpt.planner.explain.print_saved": ("print_saved",),
    "ackpt.planner.trainer_callback": ("AckptCallback",),  # not in `__all__`: it needs transformers
    "ackpt.planner.workloads.batches": ("batches",),
    "ackpt.planner.workloads.lengths": ("fits",),
    "ackpt.policies": ("policies",),
}


def __getattr__(name: str):
    if (path := next((path for path, names in _LATER.items() if name in names), None)) is not None:
        import importlib

        module = importlib.import_module(path)
        return module if path == f"ackpt.{name}" else getattr(module, name)
    if name == "colab":
        raise AttributeError("ackpt.colab is now experiments.colab, in a clone of the repository")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
