"""State that regions, plans, offload and the meters share: whether this thread recomputes; versions of tensors."""

import threading
from collections.abc import Callable
from typing import Any

import torch


class Phase(threading.local):
    """The run of a region that this thread is in.

    ``recomputing``: whether a region is being recomputed. ``dropping``: whether the graph being built is dropped when
    the region ends, so that nothing needs to be saved. ``function``: the function being recomputed. ``leaked``: tensors
    of the dropped graphs of nested regions that are still alive. ``recorder``: the recorder of the innermost region.
    ``detached``: the mode that replaces closed-over tensors, also in regions nested in the one that is recomputed.
    ``used_once``: torch's number of a backward, and the ids of the leaves that it uses once.
    ``leaves_behind``: whether a first forward left tensors of its dropped graph alive; None if this is not checked.
    """

    recomputing = False
    dropping = False
    function: Any = None
    leaked: list | tuple = ()
    recorder: Any = None
    detached: Any = None
    leaves_behind: bool | None = None
    used_once: tuple[int, set[int]] = -1, set()


phase = Phase()


def is_recomputing() -> bool:
    """Return whether the calling code runs in a recomputation; a forward hook can check this to act once per step.

    Example:
        >>> import ackpt
        >>> ackpt.is_recomputing()
        False
    """
    return phase.recomputing


# Each observer is called with ("recompute",) when a recomputation begins, and with ("recomputed",) when one ends: after
# a region's, and after each operation that a plan recomputes.
observers: list[Callable[[tuple[str]], object]] = []


def recomputation_begins() -> None:
    """Tell the observers; generated code calls this before operations that are recomputed."""
    for observer in observers:
        observer(("recompute",))


def recomputation_ends() -> None:
    """Tell the observers: what was allocated since the last call of either function, and is live, is recomputed."""
    for observer in observers:
        observer(("recomputed",))


def generator_state(generator: torch.Generator) -> torch.Tensor:
    """The state of a generator; `ackpt.predict` replaces this function to count the states that regions save."""
    return generator.get_state()


def version(tensor: torch.Tensor) -> int:
    """The version counter of a tensor, which every in-place operation increments; 0 for inference tensors."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def versions(tensors: list[torch.Tensor]) -> list[int]:
    """The `version` of each of `tensors`."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [*map(version, tensors)]
