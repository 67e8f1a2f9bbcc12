"""The record of one model of the corpus: its graph, its plans under every policy, and the steps that run as planned."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from corpus_models import Case, build
from torch import Tensor

import ackpt
from experiments.policies import PAPERS

#: Policy -> whether it depends on the budget.
POLICIES = {
    "none": False,
    "full": False,
    "manual": False,
    "auto": True,
    "chen-sqrt": True,
    "chen-log": True,
    "revolve": True,
    "rotor": True,
    "min-cut": True,
    "ilp": True,
    "mu-two": True,
}
OFFLOADING = ("auto", "mu-two")  # also planned for a GPU, to whose host they may offload
SMALL = 160  # nodes; of larger graphs, where a run takes seconds, only these plans are run:
EXTREMES = {("none", "none"), ("full", "none"), *((policy, "smallest") for policy in ("auto", "rotor", "mu-two"))}
_DIGITS = 6  # of costs and bounds: the last bits of a linear program's solution are not the plan's


def record(name: str, then: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, float]]:
    """The record of a model, and the CPU time of its capture and planning in units of a fixed loop.

    Budgets in bytes are those of the record `then` if it is given, so that both are planned for the same budgets.
    """
    with warnings.catch_warnings():
        # one model of the corpus is captured that way on purpose
        warnings.filterwarnings("ignore", "The model was captured as torch.compile", UserWarning)
        # time_limit=None leaves a gap where the program's own bound cannot be reached
        warnings.filterwarnings("ignore", "policy 'ilp' ran out of time", UserWarning)
        return _record(name, then)


def _record(name: str, then: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, float]]:
    ackpt.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))  # imports what a first capture needs
    case, loop = build(name), _loop_seconds()
    with case.around():
        options = {"outputs": "keep", **case.options}
        capture, graph = _timed(lambda: ackpt.trace(case.model, *case.args, **options, **case.kwargs))
    runs = _Runs(case) if graph.has_data else None
    start = time.process_time()
    plans: dict[str, dict[str, Any]] = {}
    made: list[tuple[dict[str, Any], Any]] = []
    # FLOPs and traffic are counted, as rates of a CPU would have to be recorded too.
    counted = ackpt.profile(graph, workspace="measured" if graph.on_cpu and graph.has_data else "given")
    for policy, profile in _columns(case, graph, counted):
        label = policy if profile is counted else f"{policy} on {profile.device}"
        budgets = None if then is None else then["plans"].get(label)
        plans[label] = {}
        for budget, entry, plan in _plans(graph, policy, profile, budgets):
            plans[label][budget] = entry
            is_chosen = len(graph.nodes) <= SMALL or (policy, budget) in EXTREMES
            if plan is not None and profile is counted and is_chosen:
                made.append((entry, plan))
    planning = time.process_time() - start
    if runs is not None:
        for entry, plan in made:
            entry.update(runs.of(plan, entry["schedule"]))
    data = {
        "graph": graph.hash[:16],
        "structure": _structure(graph),
        "nodes": len(graph.nodes),
        "bytes": graph.bytes(),
        "unplanned": None if runs is None else runs.unplanned,
        "plans": plans,
    }
    return data, {"capture": round(capture / loop, 3), "planning": round(planning / loop, 3)}


def _columns(case: Case, graph, counted) -> Iterator[tuple[str, Any]]:
    for policy in POLICIES:
        if policy != "ilp" or case.has_ilp:
            yield policy, counted
    for policy in OFFLOADING:
        yield policy, ackpt.profile(graph, "h200")


def _plans(graph, policy: str, profile, recorded) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """``(name of the budget, entry, plan or None)`` for every budget of a policy."""
    options: dict[str, Any] = {"profile": profile}
    if policy == "manual":
        options["fates"] = ackpt.plan(graph, policy=PAPERS["chen-sqrt"], profile=profile).fates
    if policy == "ilp":
        options["time_limit"] = None  # what it finds must not depend on the machine's speed

    def planned(name, budget):
        try:
            plan = ackpt.plan(graph, budget, PAPERS.get(policy, policy), **options)
        except ackpt.BudgetError as error:
            return name, {"budget": budget, "refused": error.least_bytes}, None
        return name, {"budget": budget, **_entry(plan)}, plan

    yield planned("none", None)
    if not POLICIES[policy] or (policy == "min-cut" and len(graph.nodes) > SMALL):
        return  # torch's partitioner takes seconds for the budgets of a large graph
    refusal = planned("1 byte", 1)
    yield refusal
    yield planned("75%", 0.75)
    if recorded is None:
        smallest = refusal[1]["refused"]
        middle = (smallest + ackpt.plan(graph, policy="none", profile=profile).peak_bytes) // 2
    else:
        smallest, middle = (recorded[name]["budget"] for name in ("smallest", "middle"))
    yield planned("middle", middle)
    yield planned("smallest", smallest)


def _entry(plan) -> dict[str, Any]:
    schedule = plan.schedule
    order = [[list(step) for step in schedule.forward], [list(step) for step in schedule.backward]]
    found = {
        "schedule": _hash([*order, list(schedule.saved), list(schedule.replayed)]),
        "peak_bytes": plan.peak_bytes,
        "saved_bytes": plan.saved_bytes,
        "host_bytes": plan.host_bytes,
        "recompute_flops": plan.recompute_flops,
        "cost": _rounded(plan.cost),
        "exposed_seconds": _rounded(plan.exposed_seconds),
        "lower_bound": _rounded(plan.lower_bound),
    }
    return {key: value for key, value in found.items() if value is not None}


class _Runs:
    """Runs planned steps on the CPU; equal schedules once."""

    def __init__(self, case: Case):
        self.case = case
        self.state = [value.detach().clone() for value in self._values()]
        self.unplanned: dict[str, str] = self._results(case.model)
        self.known: dict[str, dict[str, Any]] = {}

    def of(self, plan, schedule: str) -> dict[str, Any]:
        if schedule not in self.known:
            self.known[schedule] = self._run(plan)
        return self.known[schedule]

    def _run(self, plan) -> dict[str, Any]:
        case = self.case
        self._restore()
        with case.around():
            options = {"outputs": "keep", **case.options}  # as traced
            step = ackpt.compile(case.model, *case.args, plan=plan, **options, **case.kwargs)
        results = self._results(step)

        def once():
            case.model.zero_grad()
            with case.around():
                outputs = step(*case.args, **case.kwargs)
            _backward(case, outputs)
            del outputs
            if case.optimizer is not None:
                case.optimizer.step()

        self._restore()
        if case.optimizer is not None:
            once()  # makes the optimizer's state
        resident = [case.model, *case.inputs, *([] if case.optimizer is None else [case.optimizer])]
        measured = ackpt.measure(once, "cpu", resident=resident, warmup=0, repeats=0)
        return {"measured_peak_bytes": measured.peak_bytes, "bit_equal": results == self.unplanned}

    def _results(self, call: Callable) -> dict[str, str]:
        """Hashes of what one step of `call` returns and leaves behind, from the first state."""
        case = self.case
        self._restore()
        torch.manual_seed(1)
        with case.around():
            outputs = call(*case.args, **case.kwargs)
        found = {"outputs": _tensors_hash(_tensors(outputs))}
        _backward(case, outputs)
        found["gradients"] = _tensors_hash(p.grad for p in case.model.parameters())
        found["buffers"] = _tensors_hash(case.model.buffers())
        found["random"] = _tensors_hash([torch.get_rng_state()])
        return found

    def _values(self) -> list[Tensor]:
        return [*self.case.model.parameters(), *self.case.model.buffers()]

    def _restore(self) -> None:
        with torch.no_grad():
            for value, first in zip(self._values(), self.state):
                value.copy_(first)
        self.case.model.zero_grad()


def _backward(case: Case, outputs) -> None:
    """Backward of the loss, or of all outputs with gradients that differ from element to element."""
    if case.differentiate == "loss":
        (outputs["loss"] if isinstance(outputs, dict) else outputs).backward()
        return
    tensors = _tensors(outputs)
    torch.autograd.backward(tensors, [torch.linspace(0.5, 1.5, t.numel()).reshape(t.shape) for t in tensors])


def _tensors(value) -> list[Tensor]:
    """The tensors in containers and in the attributes of objects, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return _tensors(vars(value)) if hasattr(value, "__dict__") and not callable(value) else []


def _tensors_hash(tensors) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none")
            continue
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _structure(graph) -> str:
    """A hash of what reads what and of storages with their accesses, without the namespace of ackpt's operations."""
    nodes = [
        [re.sub(r"ackpt\w*[.:]+", "", node.target), node.phase, node.inputs, node.storages, node.is_random]
        for node in graph.nodes
    ]
    storages = [
        [s.bytes, s.category, s.producer, s.nodes, s.last_fw_access, s.first_bw_access, s.last_bw_access]
        for s in graph.storages
    ]
    return _hash([nodes, storages, graph.outputs, sorted(graph.gradients.items())])


def _hash(data) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def environment() -> dict[str, Any]:
    """What the record depends on: versions, and for computed values the CPU."""
    packages = ("torch", "transformers", "numpy", "scipy")
    return {
        "versions": {name: importlib.metadata.version(name).partition("+")[0] for name in packages},
        "cpu": f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return " ".join(facts.get(key, "?") for key in ("vendor_id", "cpu family", "model"))


def import_time() -> float:
    """CPU time of ``import ackpt`` after torch, the least of five, in units of a fixed loop."""
    code = "import time, torch; t = time.process_time(); import ackpt; print(time.process_time() - t)"
    root = Path(__file__).resolve().parent.parent
    runs = [subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=True) for _ in range(5)]
    return round(min(float(run.stdout) for run in runs) / _loop_seconds(), 3)


def _timed(function: Callable) -> tuple[float, Any]:
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def _loop_seconds() -> float:
    """CPU time of a loop in plain Python, the least of five."""
    return min(_timed(lambda: sum(number % 7 for number in range(1_000_000)))[0] for _ in range(5))
