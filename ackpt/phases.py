"""Which run of a region this thread is in: the first forward, whose graph is dropped, or the recomputation."""

from __future__ import annotations

import threading
from typing import Any


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
