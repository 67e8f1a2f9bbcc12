"""The book's animated graph: the forward and backward of a chain under several schedules, frame by frame, as data.

The chain is captured from shapes, the schedules are those of the policies, and the live bytes are the simulator's. The
page only draws this data.
"""

from __future__ import annotations

from itertools import groupby

import torch

import ackpt
from ackpt.planner.capture.joint_graph import FORWARD, JointGraph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.schedule.allocations import RESIDENT, Allocation, allocations
from ackpt.planner.schedule.plan import RECOMPUTED, SAVED, Plan
from ackpt.planner.schedule.simulator import CATEGORIES, follow
from experiments.policies import PAPERS

SCHEMA = {"schema": "ackpt.schematic", "version": 1}
_LETTERS = {"saved": "s", "outputs": "s", "recomputed": "r", "temporaries": "t"}
_NAMES = {"aten.mm.default": "linear", "aten.gelu.default": "GELU"}
VARIANTS = {
    "baseline": ["baseline", "Every activation that the backward reads is saved."],
    "per-block": ["per-block", "The output of every layer is saved, and its inside recomputed."],
    "sqrt": ["sqrt(n)", "The ends of sqrt(n) segments are saved, and their insides recomputed."],
    "revolve": ["Revolve", "Within a third of the baseline's peak, from a few snapshots."],
    "plan": ["a plan of ackpt", "Within the peak of sqrt(n), at the least cost."],
}
LAYERS, DIM, ROWS = 12, 32, 512  # the weights are small compared with the activations
REVOLVE_BUDGET = 1 / 3  # relative to the baseline


def chain_steps(variants=tuple(VARIANTS)) -> dict:
    """A chain of linear layers and GELUs under several schedules: the live activations, step by step.

    Returns:
        Plain JSON. ``columns``: the operations of the forward in order; each has a node in the forward and one in the
        backward. ``chain`` and ``reads``: pairs of columns, a forward or a backward node and an activation that it
        reads. Each of ``variants`` has its peak, and per frame the phase (f: forward, r: recomputation, b: backward,
        g: the gradient of the output arrives), the column, the columns of its ``inputs``, the ``states`` of all
        activations (``.`` not computed yet, s saved, t live for a moment, d dropped, r recomputed, ``-`` freed) and the
        live bytes.
    """
    layers = (torch.nn.Sequential(torch.nn.Linear(DIM, DIM, bias=False), torch.nn.GELU()) for _ in range(LAYERS))
    with torch.device("meta"):
        model, x = torch.nn.Sequential(*layers), torch.empty(ROWS, DIM)
    graph = ackpt.trace(model, x)
    profile = ackpt.profile(graph)
    plans = _plans(graph, profile, variants)
    chain = _Chain(graph)
    return {
        **SCHEMA,
        "kind": "graph",
        "columns": [_column(graph, node) for node in chain.columns],
        "chain": chain.chain,
        "reads": chain.reads,
        "categories": list(CATEGORIES),
        "baseline": {"peak_bytes": plans["baseline"].dynamic_peak_bytes, "flops": plans["baseline"].flops},
        "variants": [
            {"name": name, "label": VARIANTS[name][0], "about": VARIANTS[name][1]} | chain.shown(profile, plans[name])
            for name in variants
        ],
    }


def _plans(graph: JointGraph, profile: Profile, variants) -> dict[str, Plan]:
    def planned(**how) -> Plan:
        return ackpt.plan(graph, profile=profile, **how)

    plans = {"baseline": planned(policy="none")}
    # The last operation of a layer, its GELU, computes the layer's output.
    fates = {a.name: SAVED if a.module.endswith(".1") else RECOMPUTED for a in plans["baseline"].activations}
    if "per-block" in variants:
        plans["per-block"] = planned(policy="manual", fates=fates)
    if {"sqrt", "plan"} & {*variants}:
        plans["sqrt"] = planned(policy=PAPERS["chen-sqrt"])
    if "revolve" in variants:
        plans["revolve"] = planned(policy=PAPERS["revolve"], budget=REVOLVE_BUDGET)
    if "plan" in variants:
        plans["plan"] = planned(budget=plans["sqrt"].peak_bytes)
    return plans


def _column(graph: JointGraph, node: int) -> dict:
    layer = int(graph.nodes[node].module.split(".")[0])
    return {"name": _NAMES[graph.nodes[node].target], "layer": layer + 1}


class _Chain:
    """The nodes of the picture: an operation of the forward that allocates a tensor, and its backward, per column."""

    def __init__(self, graph: JointGraph):
        analysis = graph.analysis
        self.graph = graph
        self.columns = [
            node.id
            for node in graph.nodes
            if node.phase == FORWARD and node.id not in analysis.sources and analysis.allocated.get(node.id)
        ]
        # Autograd numbers the operations of the forward; those of the backward have the number of their forward.
        numbers = {analysis.fx[node].meta["seq_nr"]: column for column, node in enumerate(self.columns)}
        self.column_of = {node: column for column, node in enumerate(self.columns)}
        self.inputs_of: dict[int, set[int]] = {}  # columns of the activations that a node reads
        chain, reads = set(), set()
        bases = dict(self.column_of)
        for node in graph.nodes:
            if node.id in analysis.sources or not analysis.allocated.get(node.id):
                continue
            inputs = {bases[base] for i in node.inputs for base in self._bases(i) if base in bases}
            self.inputs_of[node.id] = inputs
            if node.phase != FORWARD:
                self.column_of[node.id] = numbers[analysis.fx[node.id].meta["seq_nr"]]
            pairs = chain if node.phase == FORWARD else reads
            pairs |= {(self.column_of[node.id], column) for column in inputs}
        self.chain, self.reads = ([list(pair) for pair in sorted(pairs)] for pairs in (chain, reads))

    def _bases(self, node: int) -> set[int]:
        return {self.graph.analysis.base_of[storage] for storage in self.graph.nodes[node].storages}

    def shown(self, profile: Profile, plan: Plan) -> dict:
        graph, schedule = self.graph, plan.schedule
        live = follow(graph, schedule, profile.workspace_bytes)
        total, series, nothing = plan.timeline.live, plan.timeline.categories, (0,) * len(plan.timeline.live)
        blocks = [b for b in allocations(graph, schedule, profile.workspace_bytes) if b.kind not in RESIDENT]
        # A frame is one operation, or several of one column in a row, at the moment when most is live.
        events = [(*self._frame(owner, i > live.boundary), i) for i, owner in enumerate(live.owner, 1)]
        runs = [(key, [event for *_, event in run]) for key, run in groupby(events, key=lambda event: event[:2])]
        owners = [{node for event in run if (node := live.owner[event - 1]) is not None} for _, run in runs]
        moments = [max(run, key=total.__getitem__) for _, run in runs]
        return {
            "peak_bytes": plan.dynamic_peak_bytes,
            "saved_bytes": plan.saved_bytes,
            "recompute_flops": plan.recompute_flops,
            "phases": "".join(phase for (phase, _), _ in runs),
            "at": [column for (_, column), _ in runs],
            "inputs": [sorted({c for node in nodes for c in self.inputs_of.get(node, ())}) for nodes in owners],
            "states": [self._states(blocks, moment) for moment in moments],
            "live": {name: [series.get(name, nothing)[i] for i in moments] for name in CATEGORIES},
        }

    def _frame(self, owner: int | None, in_backward: bool) -> tuple[str, int]:
        if owner is None or owner in self.graph.analysis.tangents:
            return "g", len(self.columns)
        is_forward = self.graph.nodes[owner].phase == FORWARD
        return "f" if not in_backward else "r" if is_forward else "b", self.column_of[owner]

    def _states(self, blocks: list[Allocation], moment: int) -> str:
        letters = []
        for node in self.columns:
            own = [block for block in blocks if block.node == node and block.storage is not None]
            if live := [block for block in own if block.is_live(moment)]:
                letters.append(_LETTERS[live[0].kind])
            elif not any(block.begin <= moment for block in own):
                letters.append(".")
            else:
                letters.append("d" if any(block.begin > moment for block in own) else "-")
        return "".join(letters)
