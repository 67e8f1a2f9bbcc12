"""`RegionsPlan`: which blocks of a model are saved and which are checkpointed, and the peak of its steps."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from ackpt.metering.meter import memory_format
from ackpt.planning.plan import PlanError

SAVED, CHECKPOINTED = "saved", "checkpointed"


@dataclass(frozen=True)
class RegionsPlan:
    """The plan of a step that cannot be one graph.

    Until the first step with gradients has ended, all byte counts except ``resident_bytes`` are None: the plan is made
    from what that step allocates, in which all blocks are checkpointed.

    ``fates``: by the paths of blocks, ``"saved"`` (runs as it is) or ``"checkpointed"`` (saves its inputs, recomputes
    everything). ``reasons``: why blocks that cannot be checkpointed are saved. ``resident_bytes``: parameters, buffers,
    inputs and optimizer state. ``peak_bytes``: an upper bound on the peak, resident bytes included, of steps that need
    no more memory than the first one; on a CPU, what it leaves allocated is added when the next step begins.
    ``least_peak_bytes``: that with all blocks checkpointed, the smallest feasible budget; ``baseline_peak_bytes``: that
    with all blocks saved. ``limit_bytes``: the bound on dynamic bytes that follows from the budget, None without one. A
    fraction is relative to the baseline's dynamic peak. No step exceeds the limit without an error. ``saved_bytes``:
    what the saved blocks hold for backward. ``cost``: of recomputation, as a fraction of the baseline step, in FLOPs
    and traffic weighed against each other; backward counts as twice the forward. ``note``: why the model is not one
    graph. ``made_for``: the call, in words.

    Example:
        >>> import torch, ackpt
        >>> class Positive(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x if x.sum() > 0 else -x
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        >>> model = torch.nn.Sequential(block(), Positive(), block(), block())
        >>> step = ackpt.compile(model, torch.ones(64, 8), budget=0.8)
        >>> set(step.plan.fates.values()), step.plan.peak_bytes
        ({'checkpointed'}, None)
        >>> step(torch.ones(64, 8)).sum().backward()
        >>> step.plan.fates["0"], step.plan.fates["3"], step.plan.dynamic_peak_bytes <= step.plan.limit_bytes
        ('checkpointed', 'saved', True)
    """

    policy = "regions"

    fates: Mapping[str, str]
    reasons: Mapping[str, str]
    resident_bytes: int
    note: str
    made_for: Mapping[str, str] = field(compare=False)
    limit_bytes: int | None = None
    peak_bytes: int | None = None
    least_peak_bytes: int | None = None
    baseline_peak_bytes: int | None = None
    saved_bytes: int | None = None
    cost: float | None = None

    def __repr__(self) -> str:
        if self.peak_bytes is None:
            return f"<RegionsPlan: {self._fates()}; the plan is made from the first training step>"
        return f"<RegionsPlan: peak {memory_format(self.peak_bytes)}, {self._fates()}; table() says more>"

    @property
    def dynamic_peak_bytes(self) -> int | None:
        """The peak without resident bytes; None before the first step."""
        return None if self.peak_bytes is None else self.peak_bytes - self.resident_bytes

    @property
    def baseline_dynamic_peak_bytes(self) -> int | None:
        """The dynamic peak of the step with all blocks saved; None before the first step."""
        return None if self.baseline_peak_bytes is None else self.baseline_peak_bytes - self.resident_bytes

    def save(self, path: str | os.PathLike[str]) -> NoReturn:
        """Not possible.

        Raises:
            PlanError: always, before anything is written.
        """
        raise PlanError(
            f"a plan in parts cannot be saved to {os.fspath(path)!r}: it is made in every run from what the first step "
            "allocates. Give the budget in every run instead."
        )

    def table(self) -> str:
        """Peak, cost, and how each block runs, as aligned text."""
        lines = ["policy            regions: made from the first training step, checked in every step"]
        if self.peak_bytes is None:
            lines.append("peak              not known before the first step, which checkpoints all blocks")
        else:
            baseline, peak = self.baseline_dynamic_peak_bytes, self.dynamic_peak_bytes or 0
            relative = "" if not baseline else f" = {peak / baseline:.3f} of the baseline's"
            resident = memory_format(self.resident_bytes)
            lines.append(f"peak              {memory_format(self.peak_bytes)}, of it {resident} resident")
            lines.append(f"dynamic peak      {memory_format(peak)}{relative} (all blocks saved, from the first step)")
            lines.append(f"saved             {memory_format(self.saved_bytes or 0)} by the saved blocks")
            lines.append(f"cost              {self.cost or 0.0:.1%} of the step")
        if self.limit_bytes is not None:
            lines.append(
                f"limit             {memory_format(self.limit_bytes)} of dynamic memory; a step above it raises"
            )
        lines += [f"not one graph     {self.note}", f"blocks            {self._fates()}"]
        reasons = {path: f": {reason}" for path, reason in self.reasons.items()}
        return "\n".join([*lines, *(f"  {fate:<15} {at}{reasons.get(at, '')}" for at, fate in self.fates.items())])

    def _fates(self) -> str:
        counts = Counter(self.fates.values())
        return f"{counts[SAVED]} blocks saved and {counts[CHECKPOINTED]} checkpointed"
