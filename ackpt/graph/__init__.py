"""Part II: the graph of a training step, captured once, and what is computed from it.

``import ackpt`` does not load it; ``ackpt.trace`` and ``ackpt.graph`` do when they are first used.
"""

from .joint import JointGraph, Node, Storage, TraceError
from .trace import trace

__all__ = ["JointGraph", "Node", "Storage", "TraceError", "trace"]
