"""Which method to use when: a comparison of all methods for each budget, from a record of the experiment ``frontier``.

Peaks and FLOPs of recomputation are fractions of the baseline's. A peer with wrong gradients or buffers is left out.
"""

from __future__ import annotations

from experiments.frontier import OURS
from experiments.steps.peers import MEMORY_BUDGET

from .frontier import is_correct, measured

BASELINE = "the baseline"


def methods(record) -> dict[str, list[tuple[float, float]]]:
    """``{method: [(peak, FLOPs of recomputation)]}`` of the baseline, the policies and torch's tools, in this order.

    The points of auto are all plans of its frontier, those of the other policies are the runs.
    """
    base = record.metrics["baseline"]

    def share(peak, flops):
        return peak / base["measured_peak_bytes"], flops / base["flops"]

    points_of = {BASELINE: [(1.0, 0.0)]}
    for point in measured(record):
        points_of.setdefault(point["policy"], []).append(share(point["measured_peak_bytes"], point["recompute_flops"]))
    points_of.setdefault(OURS, []).extend(
        share(row["peak_bytes"], row["recompute_flops"]) for row in record.metrics["front"]
    )
    for row in record.metrics["peers"]:
        if is_correct(row, record):
            point = share(row["measured_peak_bytes"], row["recompute_flops"])
            points_of.setdefault(_torch(row["peer"]), []).append(point)
    return {name: sorted(set(points)) for name, points in points_of.items() if points}


def _torch(peer: str) -> str:
    return f"torch: {peer}" if peer != MEMORY_BUDGET else "torch: memory budget"


def least(points, budget: float) -> float | None:
    """The fewest FLOPs among the points within the budget; None if no point is."""
    return min((again for peak, again in points if peak <= budget), default=None)


def by_budget(record) -> list[dict]:
    """Ranges of budgets with the same choice, from the largest budget to the smallest.

    Returns:
        Rows with ``low`` and ``high``, the range, ``high`` not included and None for the first; ``best``, the methods
        that recompute least, and ``again``, their recomputation at both ends; ``torch`` and ``torch_again``, the
        same for torch's own tools, [] and None if none of them fits.
    """
    points_of = methods(record)
    tools = {name: points for name, points in points_of.items() if name.startswith("torch: ")}
    rows: list[dict] = []
    for budget in sorted({peak for points in points_of.values() for peak, _ in points}, reverse=True):
        best, again = _best(points_of, budget)
        torchs, torch_again = _best(tools, budget)
        if rows and (rows[-1]["best"], rows[-1]["torch"], rows[-1]["torch_again"]) == (best, torchs, torch_again):
            rows[-1]["low"], rows[-1]["again"] = budget, (rows[-1]["again"][0], again)
        else:
            high = rows[-1]["low"] if rows else None
            row = {"low": budget, "high": high, "best": best, "again": (again, again)}
            rows.append({**row, "torch": torchs, "torch_again": torch_again})
    return rows


def _best(points_of, budget: float) -> tuple[list[str], float | None]:
    fewest = {name: least(points, budget) for name, points in points_of.items()}
    fitting = {name: again for name, again in fewest.items() if again is not None}
    again = min(fitting.values(), default=None)
    return [name for name, value in fitting.items() if value == again], again


def standings(record) -> list[dict]:
    """How every other method compares with auto.

    Returns:
        Rows with ``method``; ``peak``, its smallest, ``again``, its recomputation there, and ``auto``, that of
        auto within that peak; ``points``, the number of its different points, and of these ``ahead``, the number
        with fewer FLOPs than auto has within their peak, and ``level``, the number with as many.
    """
    points_of = methods(record)
    ours = points_of.pop(OURS)
    rows = []
    for name, points in points_of.items():
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
