"""What the compared methods switch on: activation checkpointing of the blocks, the loss head in chunks."""

from __future__ import annotations

from ackpt.checkpointing.wrapping import apply_activation_checkpointing, remove_activation_checkpointing
from ackpt.models.transformer import Block

METHODS = ("baseline", "checkpoint", "chunked-loss", "checkpoint+chunked-loss")
OFFLOADED = "checkpoint+offload"  # the inputs of the checkpointed blocks wait in host memory
PLANNED = "auto"  # a plan that needs no more than the measured peak of checkpoint


def check_methods(methods, known=METHODS) -> tuple[str, ...]:
    """The methods without repetitions; ValueError for one that is not among `known`."""
    for method in methods:
        if method not in known:
            hint = " (this experiment has no vocabulary head)" if chunks_loss(method) else ""
            raise ValueError(f"unknown method {method!r}{hint}: choose from {', '.join(known)}")
    if not methods:
        raise ValueError(f"no method given: choose from {', '.join(known)}")
    if PLANNED in methods and "checkpoint" not in methods[: methods.index(PLANNED)]:
        raise ValueError(f"method {PLANNED!r} has the peak of checkpoint as its budget: give checkpoint before it")
    return tuple(dict.fromkeys(methods))


def configure(model, method: str) -> None:
    """Switch checkpointing of the model's blocks, and offload of their inputs, on or off, as `method` says."""
    if "checkpoint" in method:
        apply_activation_checkpointing(model, Block, offload="async" if method == OFFLOADED else None)
    else:
        remove_activation_checkpointing(model)


def chunks_loss(method: str) -> bool:
    return "chunked-loss" in method
