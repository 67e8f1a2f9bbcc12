"""``StepMemory``: what an explanation knows of a planned step. Its text and its pages are functions of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.schedule.allocations import Allocation, by_kind
from ackpt.planner.schedule.plan import Plan

from .saved import SavedLine, by_block, by_type
from .suggestions import Suggestion


@dataclass(frozen=True, repr=False)
class StepMemory:
    """Where the memory of a planned step goes.

    ``plan``: the plan of the step. ``saved``: a `SavedLine` for every module and source line that saves something for
    backward, whose bytes add up to what the baseline saves. ``allocations``: every block of memory of the step.
    ``suggestions``: the changes that would reduce the peak, the best first. ``not_computed``: changes whose peak was
    not computed, with the reason. ``types``: the classes of the modules, by their names.
    ``views``: the arguments that are smaller than their storage, which counts, in words; "" if there are none.
    """

    graph: JointGraph
    profile: Profile
    plan: Plan
    saved: tuple[SavedLine, ...]
    allocations: tuple[Allocation, ...]
    suggestions: tuple[Suggestion, ...]
    not_computed: tuple[str, ...]
    types: Mapping[str, str]
    views: str = ""

    @cached_property
    def live(self) -> tuple[Allocation, ...]:
        """The allocations that are live at the peak, the largest first."""
        index = self.plan.timeline.peak_index
        return tuple(sorted((a for a in self.allocations if a.is_live(index)), key=lambda a: -a.bytes))

    @cached_property
    def at_peak(self) -> dict[str, int]:
        """Bytes at the peak by kind, such as ``gradients``, ``saved``, ``recomputed`` and ``temporaries``.

        They add up to ``plan.peak_bytes``.
        """
        return by_kind(self.live)

    @cached_property
    def by_block(self) -> dict[str, int]:
        """Bytes that the baseline saves by block, such as ``transformer.h.11``, the largest first."""
        return by_block(self.saved)

    @cached_property
    def by_type(self) -> dict[str, int]:
        """Bytes that the baseline saves by the class of the module, the largest first."""
        return by_type(self.saved, self.types)
