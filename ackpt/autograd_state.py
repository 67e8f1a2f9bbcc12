"""The state of autograd that regions and offload ask for: which run of a region a thread is in, versions of tensors."""

from __future__ import annotations

import threading
from typing import Any

import torch


class Phase(threading.local):
    """The state of one thread.

    ``recomputing``: a region is being recomputed. ``dropping``: the graph being built will be dropped when the region
    ends, so nothing needs to be saved. ``function``: what is being recomputed. ``left``: tensors of the dropped graphs
    of nested regions that are still alive although they should not be. ``recorder``: that of the innermost region that
    is running.
    """

    recomputing = False
    dropping = False
    function: Any = None
    left: list | tuple = ()
    recorder: Any = None


phase = Phase()


def is_recomputing() -> bool:
    """Whether the calling code runs inside a recomputation. A forward hook can check this to act once per step.

    Example:
        >>> import ackpt
        >>> ackpt.is_recomputing()
        False
    """
    return phase.recomputing


def version(tensor: torch.Tensor) -> int:
    """The version counter, which every operation in place raises; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version
