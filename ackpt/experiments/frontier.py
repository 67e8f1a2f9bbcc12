"""The front: every policy and every peer on one model, measured peak against what runs again.

Every schedule is run once, under `ackpt.measure` and with its FLOPs counted as they run, from the same parameters,
buffers and batch as a step of policy ``none``, whose gradients and buffers it must leave to the last bit. A peer has
one step more before, in which ``torch.compile`` compiles.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import asdict, dataclass, field

from tqdm import tqdm

import ackpt
from ackpt.errors import BudgetError
from ackpt.graph import Plan
from ackpt.graph.schedule import recomputed
from ackpt.policies import auto
from ackpt.policies.front import front
from ackpt.policies.planner import POLICIES, plan
from ackpt.results import Record, environment

from .frontier_models import Workload, checked_sizes, workload
from .frontier_runs import Runs
from .peers import MEMORY_BUDGET, PEERS, peer

EXPERIMENT = "frontier"
OURS = "auto"
PLANNED = tuple(policy for policy in POLICIES if policy not in ("none", "manual"))
BUDGETS = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
SETTINGS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
_BOUNDED = 20  # limits between nothing and the plain step's peak for which there is a bound
_TOO_LITTLE = 1e-9  # of the plain step's peak: what every policy refuses, naming the smallest that it keeps


@dataclass(frozen=True)
class FrontierConfig:
    """What is compared: `sizes` change those of the model, `settings` are of the peer ``memory-budget``, the seed
    draws weights and batch.
    """

    model: str = "transformer"
    sizes: dict[str, int] = field(default_factory=dict)
    policies: tuple[str, ...] = PLANNED
    budgets: tuple[float, ...] = BUDGETS
    peers: tuple[str, ...] = PEERS
    settings: tuple[float, ...] = SETTINGS
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "sizes", checked_sizes(self.model, self.sizes))
        for what, given, known in (("policy", self.policies, PLANNED), ("peer", self.peers, PEERS)):
            for name in given:
                if name not in known:
                    raise ValueError(f"{name!r} is no {what} of the front: choose from {', '.join(known)}")
        if not (self.policies and self.budgets):
            raise ValueError("give at least one policy and one budget")
        for budget in self.budgets:
            if not 0 < budget <= 1:
                raise ValueError(f"a budget is a fraction of the plain step's dynamic peak, in (0, 1], got {budget}")
        for setting in self.settings:
            if not 0 <= setting <= 1:
                raise ValueError(f"a setting of {MEMORY_BUDGET} is a number between 0 and 1, got {setting}")


def run_frontier(config: FrontierConfig, command: str = "", timed_rounds: int = 0) -> Record:
    """Plan and run everything; one Record with all points.

    Its metrics: ``baseline``, the step of policy none; ``eager``, that of the plain model; ``rounding``, the
    differences that last bits of the parameters make; ``points``, one per policy and budget
    (None: the smallest that the policy keeps), where a refused budget has ``least_bytes`` and nothing measured;
    ``not_run``, the reason per policy; ``front``, all plans that policy auto chooses from, not run, if it takes part;
    ``bounds``, the least FLOPs that must run again within a limit; ``peers``.
    Peaks are dynamic, in bytes. With `timed_rounds` every run has ``seconds_ratio`` to the plain model's step.
    """
    work = workload(config.model, config.sizes, config.seed)
    graph = ackpt.trace(work.model, *work.args)
    costs = ackpt.profile(graph, workspace="measured")
    none = plan(graph, policy="none", profile=costs)
    runs = Runs(work, config.seed, timed_rounds)
    baseline = runs.first(none)
    eager = runs.of(work.model)
    points, not_run = _points(config, graph, costs, runs)
    peers = [_beside(row, graph, costs, none.resident_bytes) for row in _peers(config, work, runs)]
    shares = (*config.budgets, *(step / _BOUNDED for step in range(1, _BOUNDED)))
    limits = [math.floor(share * none.dynamic_peak_bytes) for share in shares]
    limits += [point["predicted_peak_bytes"] for point in points if point["budget"] is None]
    metrics = {
        "baseline": {
            "flops": runs.flops,
            "resident_bytes": none.resident_bytes,
            "predicted_peak_bytes": none.dynamic_peak_bytes,
            **baseline,
        },
        "eager": eager,
        "rounding": runs.rounding(),
        "points": points,
        "not_run": not_run,
        "front": _front(graph, costs) if OURS in config.policies else [],
        "bounds": _bounds(graph, costs, sorted({*limits}, reverse=True)),
        "peers": peers,
    }
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()}
    where = environment("cpu", command)
    return Record(EXPERIMENT, {**settings, "threads": where["threads"]}, metrics, where)


def _points(config, graph, costs, runs: Runs) -> tuple[list[dict], dict[str, str]]:
    points, not_run = [], {}
    for policy in _progress(dict.fromkeys(config.policies), "policy"):
        try:
            made = _plans(graph, costs, policy, config.budgets)
        except BudgetError:
            raise
        except (ImportError, ValueError) as error:  # what the policy cannot plan at all
            not_run[policy] = str(error)
            continue
        for budget, planned in _progress(made, policy):
            point = {"policy": policy, "budget": budget}
            if isinstance(planned, BudgetError):
                points.append({**point, "least_bytes": planned.least_bytes})
                continue
            promised = {
                "limit_bytes": planned.limit_bytes,
                "predicted_peak_bytes": planned.dynamic_peak_bytes,
                "predicted_recompute_flops": planned.recompute_flops,
                "cost": planned.cost,
                "lower_bound": planned.lower_bound,
            }
            points.append({**point, **promised, **runs.planned(planned)})
    return points, not_run


def _plans(graph, costs, policy: str, budgets) -> list[tuple[float | None, Plan | BudgetError]]:
    """A plan or the refusal for every budget, and at the end, without a budget, the least that the policy needs."""
    made: list[tuple[float | None, Plan | BudgetError]] = []
    for budget in dict.fromkeys((*budgets, _TOO_LITTLE)):
        try:
            made.append((budget, plan(graph, float(budget), policy, profile=costs)))
        except BudgetError as refused:
            made.append((budget, refused))
    _, refused = made.pop()
    assert isinstance(refused, BudgetError)
    return [*made, (None, plan(graph, refused.least_bytes, policy, profile=costs))]


def _front(graph, costs) -> list[dict]:
    """From the highest peak to the lowest."""
    return [
        {
            "peak_bytes": point.peak_bytes,
            "recompute_flops": sum(costs.flops[place] for place in recomputed(graph, point.schedule)),
        }
        for point in front(graph, costs, auto.candidates)
    ]


def _bounds(graph, costs, limits: list[int]) -> list[dict]:
    """The FLOPs that no schedule within a limit can spare; none without scipy."""
    if importlib.util.find_spec("scipy") is None:
        return []
    from ackpt.policies.bound import lower_bound

    flops = [float(value) for value in costs.flops]
    found = [(limit, lower_bound(graph, flops, costs.workspace_bytes, limit)) for limit in limits]
    return [{"limit_bytes": limit, "recompute_flops": bound} for limit, bound in found]


def _peers(config, work: Workload, runs: Runs):
    asked = [
        (name, setting) for name in config.peers for setting in (config.settings if name == MEMORY_BUDGET else (None,))
    ]
    for name, setting in _progress(dict.fromkeys(asked), "peers"):
        with peer(name, work, setting) as call:
            yield {"peer": name, "setting": setting, **runs.of(call, compiles=name == MEMORY_BUDGET)}


def _beside(row: dict, graph, costs, resident_bytes: int) -> dict:
    """The peer's figures, and what policy auto plans within the peak that was measured; None where it refuses that."""
    peak = row["measured_peak_bytes"]
    try:
        ours = plan(graph, resident_bytes + peak, OURS, profile=costs)
    except BudgetError:
        return {**row, "auto_peak_bytes": None, "auto_recompute_flops": None}
    return {**row, "auto_peak_bytes": ours.dynamic_peak_bytes, "auto_recompute_flops": ours.recompute_flops}


def _progress(items, what: str):
    return tqdm(list(items), desc=what, disable=None, leave=False)
