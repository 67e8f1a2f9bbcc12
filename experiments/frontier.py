"""The experiment ``frontier``: measured peak and recomputation of every policy and every peer on one model.

Every schedule runs once, with its bytes and FLOPs measured, from the same parameters, buffers and batch as a step of
policy ``none``; gradients and buffers must be bit-equal to those of that step. A peer runs one step before, in which
``torch.compile`` compiles.

With the compiler ``"inductor"``, every step is compiled by Inductor and compared with the step that Inductor compiles
by itself. Inductor fuses and reorders operations, so peaks are not exactly the predicted ones, FLOPs are not counted,
and results differ by rounding.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from dataclasses import asdict, dataclass, field, replace

from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

import ackpt
from ackpt import plan
from ackpt.core.errors import BudgetError
from ackpt.metering.prediction import predict
from ackpt.planner.choose import default_profile
from ackpt.planner.policies import POLICIES, auto
from ackpt.planner.policies.search.frontier import baseline_cost, frontier
from ackpt.planner.schedule.plan import Plan
from ackpt.planner.schedule.schedule import recomputed
from ackpt.planner.workloads.planned_shapes import kernels_of_a_gpu
from ackpt.planner.workloads.step_request import DTYPES
from experiments.policies import PAPERS
from experiments.results import Record, environment
from experiments.steps.failures import STRICT
from experiments.steps.frontier_models import checked_sizes, workload
from experiments.steps.frontier_runs import Clock, Runs, promised
from experiments.steps.inductor_plans import planned_by_inductor
from experiments.steps.peers import MEMORY_BUDGET, PEERS, peer
from experiments.steps.workload import Workload

EXPERIMENT = "frontier"
OURS = "auto"
PLANNED = tuple(policy for policy in (*POLICIES, *PAPERS) if policy not in ("none", "manual", "selective"))
BUDGETS = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
SETTINGS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
COSTS = {"counted": "FLOPs, and traffic at ten FLOPs a byte", "rates": "seconds at the rates of the device"}
COMPILERS = ("eager", "inductor")
_BOUNDED = 20  # number of equally spaced limits up to the baseline's peak, each with a lower bound
_TOO_LITTLE = 1e-9  # of the baseline's peak: every policy refuses it, naming its smallest feasible budget


@dataclass(frozen=True)
class FrontierConfig:
    """The runs to compare: `sizes` change the model's, `settings` are of the peer ``memory-budget``, `seed` is that
    of weights and batch. `compiler`: ``"eager"``, or ``"inductor"``. `clock`: of `ackpt.compare_seconds`.
    """

    model: str = "transformer"
    sizes: dict[str, int] = field(default_factory=dict)
    policies: tuple[str, ...] = PLANNED
    budgets: tuple[float, ...] = BUDGETS
    peers: tuple[str, ...] = PEERS
    settings: tuple[float, ...] = SETTINGS
    costs: tuple[str, ...] = ("counted",)
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    compiler: str = "eager"
    clock: Clock = "wall"

    def __post_init__(self):
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"unknown device {self.device!r}: choose cpu or cuda")
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}: choose from {', '.join(DTYPES)}")
        if self.compiler not in COMPILERS:
            raise ValueError(f"unknown compiler {self.compiler!r}: choose from {', '.join(COMPILERS)}")
        if self.clock not in ("wall", "processor"):
            raise ValueError(f"unknown clock {self.clock!r}: choose from wall, processor")
        object.__setattr__(self, "sizes", checked_sizes(self.model, self.sizes))
        named = (("policy", self.policies, PLANNED), ("peer", self.peers, PEERS), ("kind of costs", self.costs, COSTS))
        for kind, given, choices in named:
            for name in given:
                if name not in choices:
                    raise ValueError(f"{name!r} is not a {kind} of this experiment: choose from {', '.join(choices)}")
        if not (self.policies and self.budgets and self.costs):
            raise ValueError("give at least one policy, one budget and one kind of costs")
        for budget in self.budgets:
            if not 0 < budget <= 1:
                raise ValueError(f"a budget is a fraction of the baseline's dynamic peak, in (0, 1], got {budget}")
        for setting in self.settings:
            if not 0 <= setting <= 1:
                raise ValueError(f"a setting of {MEMORY_BUDGET} is a number between 0 and 1, got {setting}")


def run_frontier(config: FrontierConfig, command: str = "", timed_rounds: int = 0, failures=STRICT) -> Record:
    """Plan and run everything; returns one Record with all points.

    Its metrics: ``baseline``, the step of policy none; ``eager``, the model's own step; ``rounding``, the differences
    that changed last bits of the parameters make; ``points``, one per policy and budget (None: the smallest feasible
    budget of the policy), for a refused budget with ``least_bytes`` only; ``not_run``, the reasons by policy;
    ``front``, the frontier of policy auto, planned but not run; ``bounds``, lower bounds of the recomputed FLOPs within
    a limit; ``peers``. Peaks are dynamic, in bytes. ``gap_seconds`` of a point is the optimality gap of its plan, if
    the policy minimizes seconds.

    With `timed_rounds` every run has ``seconds_step``, and ``seconds_ratio`` to the model's own step, or to that of
    Inductor. On a CPU the process then keeps freed memory if it can, which ``keeps_freed_memory`` says. A peer also has
    the ratio of auto's plan within the peer's peak, ``auto_seconds_ratio``. For costs other than the first, the
    policy's name includes them, as in ``"auto, rates"``. On a GPU there are no lower bounds, because they are not valid
    for its kernels, and runs have the allocator's counters. `failures` collects the runs that failed, which have no
    point.
    """
    work = workload(config.model, config.sizes, config.seed, config.device, config.dtype)
    runs = Runs(work, config.seed, timed_rounds, config.clock)
    metrics = (_compiled if config.compiler == "inductor" else _run)(config, work, runs, failures)
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()}
    where = environment(config.device, command)
    metrics["keeps_freed_memory"] = runs.keeps_freed_memory
    return Record(EXPERIMENT, {**settings, "threads": where["threads"]}, metrics, where)


def _run(config, work: Workload, runs: Runs, failures) -> dict:
    graph = runs.step.graph
    costs, *others = (_costs(graph, name) for name in config.costs)
    none = plan(graph, policy="none", profile=costs)
    baseline = runs.first(none)
    eager = runs.of(work.model)
    points, not_run = _points(config, graph, costs, runs, failures)
    for name, other in zip(config.costs[1:], others, strict=True):
        more, _ = _points(replace(config, policies=(OURS,)), graph, other, runs, failures)
        points += [{**point, "policy": f"{OURS}, {name}"} for point in more]
    best = others[-1] if others else costs
    peers = [_compared(row, graph, best, none.resident_bytes, runs) for row in _peers(config, work, runs, failures)]
    shares = (*config.budgets, *(step / _BOUNDED for step in range(1, _BOUNDED)))
    limits = [math.floor(share * none.dynamic_peak_bytes) for share in shares]
    limits += [point["predicted_peak_bytes"] for point in points if point["budget"] is None]
    return {
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
        "bounds": _bounds(graph, costs, sorted({*limits}, reverse=True)) if config.device == "cpu" else [],
        "peers": peers,
    }


def _compiled(config, work: Workload, runs: Runs, failures) -> dict:
    """The metrics with Inductor. `auto` has no point at its smallest peak; other policies have only that point."""
    baseline = runs.first_by_inductor()
    peak, resident = baseline["measured_peak_bytes"], baseline["resident_bytes"]
    points = []
    for number, kind in enumerate(config.costs):
        for policy in config.policies if number == 0 else (OURS,):
            name = f"{OURS}, {kind}" if number else policy
            for budget in _progress(config.budgets if policy == OURS else (None,), name):
                limit = None if budget is None else resident + math.floor(budget * peak)
                with failures.of(f"{name} {budget}"):
                    results = planned_by_inductor(work, runs, limit, policy, kind)
                    points.append({"policy": name, "budget": budget, **results})
    peers = []
    for row in _peers(config, work, runs, failures):
        within = resident + row["measured_peak_bytes"]
        ours = planned_by_inductor(work, runs, within, OURS, config.costs[-1])
        row |= {"auto_peak_bytes": ours.get("measured_peak_bytes"), "auto_recompute_flops": None}
        peers.append(row | ({"auto_seconds_ratio": ours["seconds_ratio"]} if "seconds_ratio" in ours else {}))
    return {
        "baseline": {"flops": runs.flops, **baseline},
        "eager": runs.generated(work.model),
        "rounding": runs.rounding(),
        "points": points,
        "not_run": {},
        "front": [],
        "bounds": [],
        "peers": peers,
    }


def predict_frontier(config: FrontierConfig) -> dict[str, int]:
    """The baseline's peak in bytes, resident memory included, on the configuration's device, from shapes alone."""
    with FakeTensorMode():
        work = workload(config.model, config.sizes, config.seed, "cpu", config.dtype)

    def step():
        with kernels_of_a_gpu() if config.device == "cuda" else contextlib.nullcontext():
            work.step(work.model, config.seed)

    prediction = predict(step, resident=(work.model, *work.args), device=config.device, warmup=0)
    return {config.model: prediction.peak_bytes}


def _points(config, graph, costs, runs: Runs, failures) -> tuple[list[dict], dict[str, str]]:
    points, not_run = [], {}
    for policy in _progress(dict.fromkeys(config.policies), "policy"):
        try:
            made = _plans(graph, costs, policy, config.budgets)
        except BudgetError:
            raise
        except (ImportError, ValueError) as error:  # the policy cannot plan this graph at all
            not_run[policy] = str(error)
            continue
        for budget, planned in _progress(made, policy):
            point = {"policy": policy, "budget": budget}
            if isinstance(planned, BudgetError):
                points.append({**point, "least_bytes": planned.least_bytes})
                continue
            name = f"{policy} {'least' if budget is None else budget}"
            gap = {}
            if costs.seconds is not None and planned.lower_bound is not None:
                step = baseline_cost(graph, costs)
                gap = {"gap_seconds": (planned.cost - planned.lower_bound) * step}
            with failures.of(name):
                points.append({**point, **promised(planned), **gap, **runs.planned(planned)})
    return points, not_run


def _plans(graph, costs, policy: str, budgets) -> list[tuple[float | None, Plan | BudgetError]]:
    """A plan or the refusal for every budget, and last, with None as its budget, the plan of the lowest peak."""
    made: list[tuple[float | None, Plan | BudgetError]] = []
    for budget in dict.fromkeys((*budgets, _TOO_LITTLE)):
        try:
            made.append((budget, plan(graph, float(budget), PAPERS.get(policy, policy), profile=costs)))
        except BudgetError as refused:
            made.append((budget, refused))
    _, refused = made.pop()
    assert isinstance(refused, BudgetError)
    return [*made, (None, plan(graph, refused.least_bytes, PAPERS.get(policy, policy), profile=costs))]


def _front(graph, costs) -> list[dict]:
    """From the highest peak to the lowest."""
    return [
        {
            "peak_bytes": point.peak_bytes,
            "recompute_flops": sum(costs.flops[node_id] for node_id in recomputed(graph, point.schedule)),
        }
        for point in frontier(graph, costs, auto.candidates)
    ]


def _bounds(graph, costs, limits: list[int]) -> list[dict]:
    """Lower bounds of the recomputed FLOPs within each limit; [] without scipy."""
    if importlib.util.find_spec("scipy") is None:
        return []
    from ackpt.planner.policies.search.lower_bound import lower_bound

    flops = [float(value) for value in costs.flops]
    bounds = [(limit, lower_bound(graph, flops, costs.workspace_bytes, limit)) for limit in limits]
    return [{"limit_bytes": limit, "recompute_flops": bound} for limit, bound in bounds]


def _peers(config, work: Workload, runs: Runs, failures):
    asked = [
        (name, setting) for name in config.peers for setting in (config.settings if name == MEMORY_BUDGET else (None,))
    ]
    for name, setting in _progress(dict.fromkeys(asked), "peers"):
        results = {}
        with failures.of(f"{name} {setting}"), peer(name, work, setting, config.compiler) as call:
            if config.compiler == "inductor":
                results = runs.generated(call)
            else:
                results = runs.of(call, compiles=name == MEMORY_BUDGET)
        if results:
            yield {"peer": name, "setting": setting, **results}


def _costs(graph, name: str):
    if name == "counted":
        return ackpt.profile(graph, workspace="measured" if graph.on_cpu else "given")
    return default_profile(graph)


def _compared(row: dict, graph, costs, resident_bytes: int, runs: Runs) -> dict:
    """The peer's figures, and those of auto's plan within the peer's measured peak, None if that is infeasible."""
    peak = row["measured_peak_bytes"]
    try:
        ours = plan(graph, resident_bytes + peak, OURS, profile=costs)
    except BudgetError:
        return {**row, "auto_peak_bytes": None, "auto_recompute_flops": None}
    row = {**row, "auto_peak_bytes": ours.dynamic_peak_bytes, "auto_recompute_flops": ours.recompute_flops}
    ratio = runs.planned(ours).get("seconds_ratio") if runs.timed_rounds else None
    return row if ratio is None else {**row, "auto_seconds_ratio": ratio}


def _progress(items, label: str):
    return tqdm(list(items), desc=label, disable=None, leave=False)
