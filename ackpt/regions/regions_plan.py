"""`RegionsPlan`: how the modules of a step run, its measured peak, and the bound that every step is checked against."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from ackpt.metering.meter import memory_format
from ackpt.metering.timeline import Timeline
from ackpt.planning.plan import PlanError


@dataclass(frozen=True)
class RegionsPlan:
    """The plan of a step that cannot be one graph.

    ``peak_bytes``: measured with the example batch, resident and dynamic bytes together; ``resident_bytes``:
    parameters, buffers, inputs and optimizer state; ``baseline_peak_bytes``: the same of the model's own step, None if
    it runs out of memory. ``limit_bytes``: the bound on dynamic bytes that follows from the budget, None without one.
    ``fates``: by the paths of modules, ``"region"`` (saves its inputs, recomputes everything) or ``"planned"`` (a
    plan of its own); all other modules run as they are. ``saved_bytes``: the most that autograd saved at one time
    in the example, the recomputation of one region included; ``bound_bytes``: a later step that saves more raises a
    `BudgetError`. ``kernel_bytes``: the part of the measured peak that kernels allocate internally, which
    later steps are assumed not to exceed; None where later steps are not counted: on a GPU, and without a budget.
    ``cost``: of recomputation, as a fraction of the baseline's, in FLOPs and traffic weighed against each other.
    ``note``: why the model is not one graph. ``made_for``: the example call, in words.

    Example:
        >>> import torch, ackpt
        >>> class Positive(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x if x.sum() > 0 else -x
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        >>> model = torch.nn.Sequential(block(), Positive(), block(), block())
        >>> plan = ackpt.compile(model, torch.ones(64, 8), budget=0.8).plan
        >>> set(plan.fates) <= {"0", "2", "3"}, plan.dynamic_peak_bytes <= plan.limit_bytes
        (True, True)
    """

    policy = "regions"

    limit_bytes: int | None
    peak_bytes: int
    resident_bytes: int
    baseline_peak_bytes: int | None
    fates: Mapping[str, str]
    saved_bytes: int
    bound_bytes: int | None
    kernel_bytes: int | None
    cost: float
    timeline: Timeline
    note: str
    made_for: Mapping[str, str] = field(compare=False)

    def __repr__(self) -> str:
        return f"<RegionsPlan: measured peak {memory_format(self.peak_bytes)}, {self._fates()}; table() says more>"

    @property
    def dynamic_peak_bytes(self) -> int:
        """The peak without resident bytes."""
        return self.peak_bytes - self.resident_bytes

    @property
    def baseline_dynamic_peak_bytes(self) -> int | None:
        """The dynamic peak of the model's own step; None if it is unknown."""
        return None if self.baseline_peak_bytes is None else self.baseline_peak_bytes - self.resident_bytes

    def save(self, path: str | os.PathLike[str]) -> NoReturn:
        """Not possible.

        Raises:
            PlanError: always, before anything is written.
        """
        raise PlanError(
            f"a plan in parts cannot be saved to {os.fspath(path)!r}: it holds for what this machine measured with one "
            "batch. Give the budget in every run instead."
        )

    def table(self) -> str:
        """Peak, cost, bound, and how each module runs, as aligned text."""
        baseline = self.baseline_dynamic_peak_bytes
        relative = "" if not baseline else f" = {self.dynamic_peak_bytes / baseline:.3f} of the baseline's"
        unbounded = self.bound_bytes is None
        lines = [
            "policy            regions: measured for the example batch, checked in every step",
            f"peak              {memory_format(self.peak_bytes)}, of it {memory_format(self.resident_bytes)} resident",
            f"dynamic peak      {memory_format(self.dynamic_peak_bytes)}{relative}",
            f"saved             {memory_format(self.saved_bytes)}; "
            + (
                "no bound"
                if unbounded
                else f"a step that saves more than {memory_format(self.bound_bytes or 0)} raises"
            ),
            f"later steps       {self._later()}",
            f"cost              {self.cost:.1%} of the step",
            f"not one graph     {self.note}",
            f"modules           {self._fates()}",
        ]
        return "\n".join([*lines, *(f"  {fate:<15} {path}" for path, fate in self.fates.items())])

    def _later(self) -> str:
        if self.limit_bytes is None:
            return "not checked: there is no budget"
        if self.kernel_bytes is None:
            return "checked by what they save; their temporaries are assumed not to exceed those of the example"
        return (
            "counted where sizes are new; inside of kernels, they are assumed not to exceed "
            f"{memory_format(self.kernel_bytes)}"
        )

    def _fates(self) -> str:
        counts = Counter(self.fates.values())
        said = [f"{counts['region']} regions", f"{counts['planned']} planned modules"]
        return " and ".join(said)
