"""The experiment ``sublinear``: chains of equal blocks by the methods of Chen et al. 2016 and by Revolve; real models.

`run` measures one chain by one method and records the prediction of theory (`predicted`) with it; `within` compares the
policies for chains on any model.
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
from ackpt.policies import chen, revolve, revolve_chain
from ackpt.results import Record, environment
from ackpt.running.planned_step import PlannedStep

EXPERIMENT = "sublinear"
WRAPPED = ("plain", "sqrt", "falling", "halves")  # the model's own step, its blocks in checkpoints
PLANNED = ("chen-sqrt", "chen-log", "revolve")  # policies on the step's graph


class Block(nn.Module):
    """x [rows, width] -> x + linear(tanh(x)); backward reads tanh(x) and the weight."""

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
    """``blocks`` equal blocks on fp32 [rows, width], at least 16: in fewer, tensors outside theory set the peak.

    ``method``: ``"plain"``, the baseline; ``"sqrt"`` and ``"falling"``, checkpoints of sqrt(n) equal segments and of
    those of `ackpt.checkpointing.sequential.segment_lengths`; ``"halves"``, checkpoints of halves within halves; or one
    of the policies in `PLANNED`, of which ``"revolve"`` takes `snapshots`. Square roots need square numbers of blocks,
    halves powers of two.

    Raises:
        ValueError: for sizes that are too small, an unknown method, and numbers that the method cannot take.
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
        """FLOPs of a block's forward, which is one matrix product."""
        return 2 * self.rows * self.width**2


class Predicted(NamedTuple):
    """``live``: saved outputs at the peak, None if theory counts snapshots only; ``runs_again``: matrix products.

    ``beside``: tensors of the same size at the peak that theory does not count: gradients, the result of the running
    operation, in checkpoints also the output of the recomputed segment. Their number was measured, not derived.
    """

    live: int | None
    beside: int | None
    runs_again: int


def predicted(config: ChainConfig) -> Predicted:
    """The prediction of theory for a chain.

    The backward of a block reads tanh(x) and not the product: a planned step does not recompute the last product of a
    segment, checkpoints recompute whole segments. The inputs of the chain belong to the caller.
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
    """Measure one step of a chain on the CPU; the Record keeps about `points` events of its timeline.

    Metrics in addition to the measured ones: ``activation_bytes`` of one tensor between blocks; ``gradient_bytes`` of
    parameters at the peak; ``live``, the number of activations that fit into the rest of the peak, and ``rest_bytes``,
    what is left then; ``runs_again``, the recomputed matrix products; ``predicted``, see `Predicted`.
    """
    torch.manual_seed(config.seed)
    chain = Chain(*(Block(config.width) for _ in range(config.blocks)))
    x = torch.randn(config.rows, config.width)
    measurement = measured(chain, _step(chain, config), (x,))
    peak = measurement.timeline.at(measurement.timeline.peak_index)
    gradients = peak.get("gradients", 0)
    live, rest = divmod(measurement.dynamic_peak_bytes - gradients, config.activation_bytes)
    assert measurement.flops is not None
    again, left = divmod(measurement.flops - (3 * config.blocks - 1) * config.block_flops, config.block_flops)
    assert left == 0, "only matrix products of blocks count"
    metrics = record_metrics(measurement) | {
        "activation_bytes": config.activation_bytes,
        "gradient_bytes": gradients,
        "live": live,
        "rest_bytes": rest,
        "runs_again": again,
        "predicted": predicted(config)._asdict(),
    }
    if points:
        metrics["timeline"] = measurement.timeline.thinned(points).to_json()
    return Record(EXPERIMENT, asdict(config), metrics, environment("cpu", command))


def measured(model: nn.Module, step, args=(), kwargs=None) -> Measurement:
    """Bytes and FLOPs of a step ``step(*args, **kwargs).backward()`` on the CPU that begins without gradients."""
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
    """Peak and cost of the plans of several policies for a graph within each budget.

    Args:
        budgets: fractions of the dynamic peak without checkpointing.

    Returns:
        One row for each policy and budget: ``policy``, ``budget``, ``peak``, the simulated dynamic peak as a fraction
        of the baseline's, and ``cost``, see `Plan`. The last two are None if the budget is infeasible for the policy.
    """
    rows = []
    for policy in policies:
        for budget in budgets:
            row = {"policy": policy, "budget": budget, "peak": None, "cost": None}
            try:
                planned = plan(graph, budget, policy, profile=profile)
            except BudgetError:
                pass
            else:
                row |= {"peak": planned.dynamic_peak_bytes / planned.baseline_dynamic_peak_bytes, "cost": planned.cost}
            rows.append(row)
    return rows


def lowest(graph, profile, policy: str) -> Plan:
    """The plan of `policy` with the lowest peak."""
    try:
        return plan(graph, "1B", policy, profile=profile)
    except BudgetError as error:
        return plan(graph, error.least_bytes, policy, profile=profile)
