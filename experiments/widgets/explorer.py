"""The frontier explorer of the book: the plan of policy auto for evenly spaced budgets, as data for a page.

The page computes only differences and fractions of these numbers, so everything that it shows comes from the plans.
"""

from __future__ import annotations

import json
from pathlib import Path

from ackpt import plan
from ackpt.core.errors import BudgetError
from ackpt.metering.timeline import CATEGORIES, Timeline
from ackpt.planner.policies import auto
from ackpt.planner.policies.search.frontier import frontier
from ackpt.planner.schedule.plan import PACKED, RECOMPUTED, SAVED, Plan
from experiments.reports.frontier import is_correct
from experiments.reports.frontier_times import label
from experiments.results import write_text_atomic

SCHEMA = {"schema": "ackpt.explorer", "version": 1}
_LETTERS = {SAVED: "s", PACKED: "p", RECOMPUTED: "r", None: "-"}
STEP = 2  # percent of the baseline's dynamic peak between two budgets
BUCKETS = 160  # of events, of which each keeps the one with most live bytes


def explorer(graph, profile, record) -> dict:
    """The data of the page: budgets, plans, activations, and their Pareto frontier.

    Args:
        graph, profile: of the step.
        record: of `frontier.run_frontier` on the same model and sizes.

    Returns:
        Plain JSON. ``budgets``: in percent of the baseline's dynamic peak, with ``plan``, an index into ``plans``,
        None where the budget is refused, and ``lower_bound``, the least cost within that budget. A plan's ``fates`` has
        a letter for each of ``activations``: s for saved, r for recomputed, - if neither this plan's backward nor the
        baseline's needs it. Its ``live`` has bytes by category for each bucket of ``events_in_bucket`` allocations and
        frees, at the bucket's peak; ``boundary`` counts the buckets before backward. ``least_bytes``: the smallest
        dynamic peak that can be planned.
    """
    baseline = plan(graph, policy="none", profile=profile)
    if record.metrics["baseline"]["predicted_peak_bytes"] != baseline.dynamic_peak_bytes:
        raise ValueError("the record is of another step than the graph: trace the model with the record's sizes")
    budgets, plans = _plans(graph, profile)
    events = max(len(one.timeline.live) for one in plans)
    width = -(-events // BUCKETS)
    names = [name for name in CATEGORIES if any(any(one.timeline.categories.get(name, ())) for one in plans)]
    order = {node.name: node.id for node in graph.nodes}
    every = {a.name: a for one in (baseline, *plans) for a in one.activations}
    activations = sorted(every.values(), key=lambda activation: order[activation.name])
    return {
        **SCHEMA,
        "model": record.config["model"],
        "sizes": record.config["sizes"],
        "baseline": {
            "peak_bytes": baseline.dynamic_peak_bytes,
            "resident_bytes": baseline.resident_bytes,
            "flops": baseline.flops,
        },
        "least_bytes": frontier(graph, profile, auto.candidates)[-1].peak_bytes,
        "events_in_bucket": width,
        "categories": names,
        "activations": [{"name": a.name, "module": a.module, "bytes": a.bytes} for a in activations],
        "budgets": budgets,
        "plans": [_shown(one, [a.name for a in activations], names, width) for one in plans],
        "front": record.metrics["front"],
        "peers": [
            {
                "name": " ".join(
                    [label(row["peer"], record), *([] if row["setting"] is None else [str(row["setting"])])]
                ),
                "peak_bytes": row["measured_peak_bytes"],
                "recompute_flops": row["recompute_flops"],
            }
            for row in record.metrics["peers"]
            if is_correct(row, record)
        ],
    }


def _plans(graph, profile) -> tuple[list[dict], list[Plan]]:
    """The budgets, from the smallest feasible one to the baseline's peak, and the distinct plans for them."""
    budgets, plans = [], {}
    for percent in range(100, 0, -STEP):
        row: dict = {"percent": percent, "plan": None, "lower_bound": None}
        try:
            planned = plan(graph, percent / 100, profile=profile)
        except BudgetError:
            pass
        else:
            plans.setdefault(planned.schedule, (len(plans), planned))
            row |= {"plan": plans[planned.schedule][0], "lower_bound": planned.lower_bound}
        budgets.append(row)
    return budgets[::-1], [planned for _, planned in plans.values()]


def _shown(planned: Plan, activations: list[str], names: list[str], width: int) -> dict:
    events, boundary = _highest(planned.timeline, width)
    return {
        "peak_bytes": planned.dynamic_peak_bytes,
        "saved_bytes": planned.saved_bytes,
        "recompute_flops": planned.recompute_flops,
        "cost": planned.cost,
        "fates": "".join(_LETTERS[planned.fates.get(name)] for name in activations),
        "boundary": boundary,
        "live": {name: [planned.timeline.at(event).get(name, 0) for event in events] for name in names},
    }


def _highest(timeline: Timeline, width: int) -> tuple[list[int], int]:
    """In each bucket of `width` events the one with most live bytes, and the number of buckets before backward."""
    starts = range(0, len(timeline.live), width)
    highest = [
        max(range(start, min(start + width, len(timeline.live))), key=timeline.live.__getitem__) for start in starts
    ]
    return highest, sum(event < (timeline.boundary or 0) for event in highest)


def save(data: dict, path) -> Path:
    """Write the data on a few lines: a reader of the page loads them with it."""
    lines = [f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in data.items()]
    return write_text_atomic(path, "{\n" + ",\n".join(lines) + "\n}\n")
