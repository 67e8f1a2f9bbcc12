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
    "AckptCallback": ("ackpt.planner.trainer_callback", "AckptCallback"),  # not in `__all__`: it needs transformers
    "Plan": ("ackpt.graph", "Plan"),
    "PlanError": ("ackpt.graph", "PlanError"),
    "RecordError": ("ackpt.core.files", "RecordError"),
    "ScheduleError": ("ackpt.graph", "ScheduleError"),
    "apply_budget": ("ackpt.planner.api", "apply_budget"),
    "audit": ("ackpt.planner.explain.audit", "audit"),
    "batches": ("ackpt.planner.workloads.batches", "batches"),
    "calibrate": ("ackpt.planner.costs.calibration", "calibrate"),
    "compile": ("ackpt.planner.api", "compile"),
    "explain": ("ackpt.planner.explain.explanation", "explain"),
    "fits": ("ackpt.planner.workloads.lengths", "fits"),
    "from_shapes": ("ackpt.planner.capture.shapes", "from_shapes"),
    "graph": ("ackpt.graph", None),
    "offload_pays": ("ackpt.offloading.pays", "offload_pays"),
    "plan": ("ackpt.planner.api", "plan"),
    "policies": ("ackpt.policies", None),
    "predict": ("ackpt.metering.prediction", "predict"),
    "print_saved": ("ackpt.planner.explain.print_saved", "print_saved"),
    "profile": ("ackpt.graph", "profile"),
    "remove_budget": ("ackpt.planner.api", "remove_budget"),
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
