"""The names of optimizers that ``ackpt plan`` accepts; `ackpt.planner.capture.optimizer_state` counts their memory."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ackpt.core.errors import did_you_mean

EIGHT_BIT = "adamw-8bit"
OptimizerKind = Callable[[Any], torch.optim.Optimizer]


def _adamw(**settings):
    """AdamW with settings that its constructor refuses for parameters on the meta device."""

    def make(parameters) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters)
        for group in optimizer.param_groups:
            group.update(settings)
        return optimizer

    return make


OPTIMIZERS: dict[str, OptimizerKind | None] = {
    "adamw": torch.optim.AdamW,
    "adamw-fused": _adamw(fused=True),
    "adamw-for-loop": _adamw(foreach=False),
    EIGHT_BIT: torch.optim.AdamW,  # `planned_shapes` counts the bytes of its state by `eight_bit_bytes`
    "adafactor": torch.optim.Adafactor,
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "none": None,
}
UNSHARDED = ("adafactor", EIGHT_BIT)  # FSDP does not shard their state like the parameters


@functools.cache
def optimizer_kind(name: str) -> OptimizerKind | None:
    """The function that makes an optimizer by its name in `OPTIMIZERS` or as ``module:Class``; None for ``"none"``."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        if name not in OPTIMIZERS:
            raise ValueError(
                f"the state of optimizer {name!r} is not known{did_you_mean(name, OPTIMIZERS)}: choose from "
                f"{', '.join(OPTIMIZERS)}, or name a class as module:Class, such as torch.optim:NAdam"
            )
        return OPTIMIZERS[name]
    kind = getattr(_imported(module, name), attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(f"optimizer {name!r}: {module} has no class {attribute} that is a torch.optim.Optimizer")

    def make(parameters) -> torch.optim.Optimizer:
        try:
            return kind(parameters)  # pyright: ignore[reportCallIssue]
        except (TypeError, ValueError) as error:
            raise ValueError(f"optimizer {name!r} cannot be created from parameters alone: {error}") from error

    make.__name__ = attribute
    return make


def _imported(module: str, name: str) -> Any:
    """The module, also one in the current folder."""
    path = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"optimizer {name!r}: the module {module} cannot be imported ({error})") from error
    finally:
        sys.path[:] = path
