"""`step.history`: every capture, search and plan of a `PlannedStep`, with its cause and duration."""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ackpt.core.errors import warn

_LOG = logging.getLogger("ackpt")
_MOST = 4  # captures for one cause, after which a warning says how to avoid them


@dataclass(frozen=True)
class Event:
    """One capture or choice of a plan.

    ``kind``: ``"capture"`` (of one shape), ``"dynamic capture"`` (of all sizes of some dimensions), ``"plan"`` (a
    choice for new sizes), ``"regions"`` (a plan in parts), or ``"refused"`` (a dynamic capture that was not possible).
    ``cause``: what made it necessary. ``seconds``: how long it took.

    Example:
        >>> import torch, ackpt
        >>> step = ackpt.compile(torch.nn.Linear(8, 8), torch.ones(4, 8))
        >>> step.history[0].kind, step.history[0].cause
        ('capture', 'first call')
    """

    kind: str
    cause: str
    seconds: float


class History:
    """The events of one step, each logged once by ``logging.getLogger("ackpt")``."""

    def __init__(self):
        self._events: list[Event] = []
        self._captures: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def add(self, kind: str, cause: str, seconds: float, *, group: str = "", advice: str = "") -> None:
        """Record an event; `advice` says how to avoid the many captures of one `group`, such as an attribute's."""
        self._events.append(Event(kind, cause, seconds))
        _LOG.info("%s in %.1f s: %s", kind, seconds, cause)
        if not group:
            return
        self._captures[group] += 1
        if self._captures[group] == _MOST:
            warn(
                f"This step was captured and planned {_MOST} times because {group} changed (most recently: {cause}). "
                f"{advice}"
            )
