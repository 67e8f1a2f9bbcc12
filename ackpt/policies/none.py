"""Save what backward needs: the step without checkpointing."""

from __future__ import annotations

from ..graph.facts import facts
from ..graph.schedule import Schedule, lower


def schedule(graph, profile, limit_bytes) -> Schedule:
    return lower(graph, facts(graph).savable)
