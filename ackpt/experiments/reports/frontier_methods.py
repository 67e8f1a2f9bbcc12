"""Which method when: what a record of the front says about every method, budget by budget.

Peaks and FLOPs that run again are shares of the plain step's. A peer with wrong gradients or buffers is no choice.
"""

from __future__ import annotations

from ackpt.experiments.frontier import OURS
from ackpt.experiments.steps.peers import MEMORY_BUDGET

from .frontier import is_correct, measured

PLAIN = "the plain step"


def methods(record) -> dict[str, list[tuple[float, float]]]:
    """``{method: [(peak, FLOPs again)]}`` of all that is correct: the plain step, the policies, then torch's own tools.

    Policy auto has all plans of its front, the others what was run.
    """
    base = record.metrics["baseline"]

    def share(peak, flops):
        return peak / base["measured_peak_bytes"], flops / base["flops"]

    found = {PLAIN: [(1.0, 0.0)]}
    for point in measured(record):
        found.setdefault(point["policy"], []).append(share(point["measured_peak_bytes"], point["recompute_flops"]))
    found.setdefault(OURS, []).extend(
        share(row["peak_bytes"], row["recompute_flops"]) for row in record.metrics["front"]
    )
    for row in record.metrics["peers"]:
        if is_correct(row, record):
            point = share(row["measured_peak_bytes"], row["recompute_flops"])
            found.setdefault(_torch(row["peer"]), []).append(point)
    return {name: sorted(set(points)) for name, points in found.items() if points}


def _torch(peer: str) -> str:
    return f"torch: {peer}" if peer != MEMORY_BUDGET else "torch: memory budget"


def least(points, budget: float) -> float | None:
    """The fewest FLOPs of the points that fit into the budget; None if none does."""
    return min((again for peak, again in points if peak <= budget), default=None)


def by_budget(record) -> list[dict]:
    """From the largest budget to the least: ranges within which the choice stays the same.

    Returns:
        Rows with ``low`` and ``high``, the range, ``high`` not included and None for the first; ``best``, the methods
        that run least again, and ``again``, how much at either end; ``torch`` and ``torch_again``, the same for torch's
        own tools, [] and None where none of them fits.
    """
    found = methods(record)
    tools = {name: points for name, points in found.items() if name.startswith("torch: ")}
    rows: list[dict] = []
    for budget in sorted({peak for points in found.values() for peak, _ in points}, reverse=True):
        best, again = _best(found, budget)
        torchs, torch_again = _best(tools, budget)
        if rows and (rows[-1]["best"], rows[-1]["torch"], rows[-1]["torch_again"]) == (best, torchs, torch_again):
            rows[-1]["low"], rows[-1]["again"] = budget, (rows[-1]["again"][0], again)
        else:
            high = rows[-1]["low"] if rows else None
            row = {"low": budget, "high": high, "best": best, "again": (again, again)}
            rows.append({**row, "torch": torchs, "torch_again": torch_again})
    return rows


def _best(found, budget: float) -> tuple[list[str], float | None]:
    fewest = {name: least(points, budget) for name, points in found.items()}
    fitting = {name: again for name, again in fewest.items() if again is not None}
    again = min(fitting.values(), default=None)
    return [name for name, value in fitting.items() if value == again], again


def standings(record) -> list[dict]:
    """What speaks for and against every method but auto.

    Returns:
        Rows with ``method``; ``peak``, its least, ``again`` there, and ``auto`` within that peak; ``points``, how many
        different ones it has, and of them ``ahead``, with fewer FLOPs than auto has within their peak, and ``level``,
        with as many.
    """
    found = methods(record)
    ours = found.pop(OURS)
    rows = []
    for name, points in found.items():
        peak, again = points[0]
        rivals = [least(ours, peak) for peak, _ in points]
        pairs = [(mine, rival) for (_, mine), rival in zip(points, rivals, strict=True)]
        rows.append(
            {
                "method": name,
                "peak": peak,
                "again": again,
                "auto": rivals[0],
                "points": len(points),
                "ahead": sum(rival is None or mine < rival for mine, rival in pairs),
                "level": sum(mine == rival for mine, rival in pairs),
            }
        )
    return rows
