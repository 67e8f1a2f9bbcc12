"""Part II: who decides. Every policy turns a graph into one schedule; `plan` checks it and keeps the promise."""

from .compiled import compile
from .planner import POLICIES, plan

__all__ = ["POLICIES", "compile", "plan"]
