"""What runs a call: `Choice`; how long a compiled schedule runs before a cheaper one is: `Stopgap`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ackpt.planner.schedule.plan import Plan
from ackpt.planner.schedule.schedule import Schedule

_COMPILE_SECONDS = 2e-5  # for each step of a schedule; a constant, so that two runs of a script choose the same


@dataclass(eq=False)
class Candidate:
    """A schedule that may run at new sizes, and its ``cost`` as a fraction of the baseline's.

    ``is_compiled``: whether it was chosen before. ``missed_seconds``: the estimated time that it would have saved so
    far, in steps that ran a more expensive schedule because this one is not compiled.
    """

    cost: float
    schedule: Schedule
    is_compiled: bool = False
    missed_seconds: float = 0.0

    @property
    def compile_seconds(self) -> float:
        """The estimated time to compile it."""
        return _COMPILE_SECONDS * (len(self.schedule.forward) + len(self.schedule.backward))


class Stopgap(NamedTuple):
    """Steps of some sizes run a compiled schedule until a cheaper one has missed what compiling it costs.

    Whether the sizes come back is not known, so this rule of the ski-rental problem bounds the time lost: for each
    schedule, the recomputation that it would have saved before it is compiled costs no more than compiling it.

    ``saves``: the cheaper schedules within the budget, and the estimated seconds that each saves per step.
    """

    saves: tuple[tuple[Candidate, float], ...]

    def ran(self) -> None:
        """Count a step."""
        for candidate, seconds in self.saves:
            candidate.missed_seconds += seconds

    def better(self) -> Candidate | None:
        """What the next step should run instead: a schedule that is compiled by now, or that pays for compiling it."""
        for candidate, _ in self.saves:  # from the least cost
            if candidate.is_compiled:
                return candidate
        beyond = [(each.missed_seconds + seconds - each.compile_seconds, each) for each, seconds in self.saves]
        most, candidate = max(beyond, key=lambda pair: pair[0])
        return candidate if most > 0 else None


class Choice(NamedTuple):
    """What runs at some sizes: ``schedule``, whose `Plan` is ``plan()``; for a while, if it is a ``stopgap``."""

    schedule: Schedule
    plan: Callable[[], Plan]
    stopgap: Stopgap | None = None
