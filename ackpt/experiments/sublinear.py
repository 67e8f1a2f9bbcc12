"""Sublinear memory, measured: chains of equal blocks by the methods of Chen et al. 2016 and by Revolve, real models.

`run` measures one chain by one method and puts beside it what theory says (`predicted`); `within` asks the policies for
chains what they make of any model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import isqrt, log2
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from ackpt.checkpointing.reentrant import checkpoint
from ackpt.checkpointing.sequential import checkpoint_sequential, segment_lengths
from ackpt.costs.profiles import profile as profiled
from ackpt.errors import BudgetError
from ackpt.experiments.steps.settings import record_metrics, require_positive
from ackpt.metering.meter import Measurement, measure
from ackpt.planner import plan
from ackpt.planning.plan import Plan
from ackpt.planning.planned_step import PlannedStep
from ackpt.policies import chen, revolve, revolve_chain
from ackpt.results import Record, environment

EXPERIMENT = "sublinear"
WRAPPED = ("plain", "sqrt", "falling", "halves")  # the model's own step, its blocks in checkpoints
PLANNED = ("chen-sqrt", "chen-log", "revolve")  # policies on the step's graph


class Block(nn.Module):
    """x [rows, width] -> x + linear(tanh(x)); of all that, backward reads tanh(x) and the weight."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.linear(x.tanh())


class Narrowing(nn.Module):
    """Two neighbouring pairs of rows become one row of twice the width: [rows, width] -> [rows / 4, 2 width]."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x):
        return self.linear(x.view(len(x) // 4, -1).tanh())


class Chain(nn.Module):
    """A sum over a sequence of blocks: a scalar loss."""

    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x):
        return self.blocks(x).sum()


def pyramid(stages: int, blocks: int, width: int) -> Chain:
    """Stages of `blocks` blocks; from one to the next activations halve in bytes and blocks compute the same FLOPs."""
    layers: list[nn.Module] = []
    for stage in range(stages):
        layers += [Narrowing(width * 2 ** (stage - 1))] if stage else []
        layers += [Block(width * 2**stage) for _ in range(blocks)]
    return Chain(*layers)


@dataclass(frozen=True)
class ChainConfig:
    """``blocks`` equal blocks on fp32 [rows, width], at least 16: in less, what theory does not count sets the peak.

    ``method``: ``"plain"``; ``"sqrt"`` and ``"falling"``, sqrt(n) equal segments and those of
    `ackpt.checkpointing.sequential.segment_lengths`, in checkpoints; ``"halves"``, checkpoints of halves within halves;
    or one of the policies in `PLANNED`, of which ``"revolve"`` takes `snapshots`. Square roots need square numbers of
    blocks, halves powers of two.

    Raises:
        ValueError: for sizes too small, an unknown method, and numbers that it cannot take.
    """

    blocks: int
    method: str
    snapshots: int | None = None
    rows: int = 4096
    width: int = 4
    seed: int = 0

    def __post_init__(self):
        require_positive(self, "rows", "width")
        if self.blocks < 16:
            raise ValueError(f"blocks must be at least 16, got {self.blocks}")
        if self.method not in (*WRAPPED, *PLANNED):
            raise ValueError(f"method {self.method!r} is not known; there are {', '.join((*WRAPPED, *PLANNED))}")
        if self.method in ("sqrt", "chen-sqrt") and isqrt(self.blocks) ** 2 != self.blocks:
            raise ValueError(f"{self.method} needs a square number of blocks, got {self.blocks}")
        if self.method in ("halves", "chen-log") and self.blocks & (self.blocks - 1):
            raise ValueError(f"{self.method} needs a power of two, got {self.blocks} blocks")
        if (self.method == "revolve") != (self.snapshots is not None):
            raise ValueError("snapshots are for the method revolve, which needs a number of them")
        if self.snapshots is not None and not 1 <= self.snapshots <= self.blocks:
            raise ValueError(f"snapshots must be from 1 to {self.blocks}, the number of blocks, got {self.snapshots}")

    @property
    def activation_bytes(self) -> int:
        return 4 * self.rows * self.width

    @property
    def block_flops(self) -> int:
        """Of one forward: its matrix product."""
        return 2 * self.rows * self.width**2


class Predicted(NamedTuple):
    """``live``: kept outputs at the peak, None where theory counts snapshots only; ``runs_again``: matrix products.

    ``beside``: tensors of the same size that theory does not count, at the peak. Their number was read off measured
    chains, not derived: gradients, what is being made, or, in checkpoints, what the recomputed segment returns.
    """

    live: int | None
    beside: int | None
    runs_again: int


def predicted(config: ChainConfig) -> Predicted:
    """What theory says of a chain.

    A reversed block reads tanh(x) and not its own product: in a planned step the last product of what is recomputed
    does not run again, checkpoints run whole segments. The inputs of the chain are kept by the caller.
    """
    n = config.blocks
    if config.method == "plain":
        return Predicted(n, 3, 0)
    if config.method == "sqrt":
        counts = chen.sqrt_counts(n)
        return Predicted(counts.peak, 3, counts.extra_forwards + counts.boundaries)
    if config.method == "falling":
        lengths = segment_lengths(n)
        return Predicted(max(before + length for before, length in enumerate(lengths)), 4, n - lengths[-1])
    if config.method == "halves":
        levels = int(log2(n))
        return Predicted(levels, levels + 2, n // 2 * levels)
    if config.method == "chen-sqrt":
        counts = chen.sqrt_counts(n)
        return Predicted(counts.peak, 2, counts.extra_forwards)
    if config.method == "chen-log":
        return Predicted(chen.recursive_peak(n), 2, chen.recursive_extra_forwards(n))
    assert config.snapshots is not None
    return Predicted(None, None, revolve.advances(n, config.snapshots) - (n - 1))


def run(config: ChainConfig, command: str = "", points: int = 0) -> Record:
    """Measure one step of a chain on the CPU; keep about `points` events of its timeline.

    Metrics beside the measured ones: ``activation_bytes`` of one tensor between blocks; ``gradient_bytes`` of
    parameters at the peak; ``live``, how many tensors of that size the rest of the peak is, and ``rest_bytes`` behind
    that; ``runs_again``, matrix products of the forward that run once more; ``predicted``, see `Predicted`.
    """
    torch.manual_seed(config.seed)
    chain = Chain(*(Block(config.width) for _ in range(config.blocks)))
    x = torch.randn(config.rows, config.width)
    found = measured(chain, _step(chain, config), (x,))
    peak = found.timeline.at(found.timeline.peak_index)
    gradients = peak.get("gradients", 0)
    live, rest = divmod(found.dynamic_peak_bytes - gradients, config.activation_bytes)
    assert found.flops is not None
    again, left = divmod(found.flops - (3 * config.blocks - 1) * config.block_flops, config.block_flops)
    assert left == 0, "only matrix products of blocks count"
    metrics = record_metrics(found) | {
        "activation_bytes": config.activation_bytes,
        "gradient_bytes": gradients,
        "live": live,
        "rest_bytes": rest,
        "runs_again": again,
        "predicted": predicted(config)._asdict(),
    }
    if points:
        metrics["timeline"] = found.timeline.thinned(points).to_json()
    return Record(EXPERIMENT, asdict(config), metrics, environment("cpu", command))


def measured(model: nn.Module, step, args=(), kwargs=None) -> Measurement:
    """One training step ``step(*args, **kwargs).backward()`` on the CPU that begins without gradients; not timed."""
    kwargs = kwargs or {}

    def once():
        model.zero_grad()
        step(*args, **kwargs).backward()

    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return measure(once, "cpu", resident=(model, *tensors), repeats=0)


def _step(chain: Chain, config: ChainConfig):
    if config.method in PLANNED:
        return PlannedStep(chain, partial(_planned, config))
    segments = {"plain": 1, "sqrt": isqrt(config.blocks), "falling": None}

    def step(x: torch.Tensor) -> torch.Tensor:
        if config.method == "halves":
            return _halves(list(chain.blocks), x).sum()
        return checkpoint_sequential(chain.blocks, segments[config.method], x).sum()  # pyright: ignore

    return step


def _planned(config: ChainConfig, graph) -> Any:  # whatever has a schedule
    profile = profiled(graph)
    if config.snapshots is None:
        return plan(graph, policy=config.method, profile=profile)
    return SimpleNamespace(schedule=revolve_chain.candidates(graph, profile)[config.snapshots - 1])


def _halves(blocks: list, x):
    if len(blocks) == 1:
        return blocks[0](x)
    half = len(blocks) // 2
    return _halves(blocks[half:], checkpoint(_halves, blocks[:half], x))


def within(graph, profile, budgets: Sequence[float], policies: Sequence[str]) -> list[dict]:
    """What several policies make of a graph within each budget.

    Args:
        budgets: fractions of the dynamic peak without checkpointing.

    Returns:
        One row for each policy and budget: ``policy``, ``budget``, ``peak``, the simulated dynamic peak as a share of
        the plain one, ``cost``, of what runs again, as a share of the plain step's, see `Plan`. The last two are None
        where the policy refuses.
    """
    rows = []
    for policy in policies:
        for budget in budgets:
            row = {"policy": policy, "budget": budget, "peak": None, "cost": None}
            try:
                found = plan(graph, budget, policy, profile=profile)
            except BudgetError:
                pass
            else:
                row |= {"peak": found.dynamic_peak_bytes / found.baseline_dynamic_peak_bytes, "cost": found.cost}
            rows.append(row)
    return rows


def lowest(graph, profile, policy: str) -> Plan:
    """The plan of the lowest peak that `policy` can make of `graph`."""
    try:
        return plan(graph, "1B", policy, profile=profile)
    except BudgetError as error:
        return plan(graph, error.least_bytes, policy, profile=profile)
