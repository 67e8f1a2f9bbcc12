"""Policy ``none``: saves everything that backward reads. This is the baseline, a step without checkpointing."""

from __future__ import annotations

from ackpt.planner.schedule.schedule import Schedule, everything


def schedule(graph, profile, limit_bytes) -> Schedule:
    return everything(graph)
