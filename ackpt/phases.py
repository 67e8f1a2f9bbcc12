"""In which run of a region this thread is: its first forward, whose graph is dropped, or its recompute."""

from __future__ import annotations

import threading
from typing import Any


class Phase(threading.local):
    """``dropping``: the graph that is built now is dropped when the region ends, so nothing need be saved.

    ``function``: what is being recomputed.
    """

    recomputing = False
    dropping = False
    function: Any = None


phase = Phase()


def is_recomputing() -> bool:
    """Whether the calling code runs inside a recompute: a forward hook that must act once per step can ask.

    Example:
        >>> import ackpt
        >>> ackpt.is_recomputing()
        False
    """
    return phase.recomputing
