"""What every node of a graph costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import flop_registry

from .facts import facts
from .joint import JointGraph
from .workspace import workspace_bytes


@dataclass(frozen=True)
class Profile:
    """Costs by node id.

    ``flops``: floating-point operations; ``bytes_in``, ``bytes_out``: of all arguments and of the results, views
    counting nothing; ``workspace_bytes``: what the operation takes and gives back within itself; ``seconds``: run
    time, None where it is neither measured nor modelled. ``origin``: ``{field: "measured" | "analytic" | "given"}``.
    """

    device: str
    flops: tuple[int, ...]
    bytes_in: tuple[int, ...]
    bytes_out: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    seconds: tuple[float, ...] | None
    origin: dict[str, str]


def node_flops(node) -> int:
    """FLOPs of one fx node, by torch's own formulas; 0 for what they do not count."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def profile(graph: JointGraph, device=None, *, workspace: str = "given") -> Profile:
    """Costs of every node.

    Args:
        graph: from `ackpt.trace`.
        device: reserved for the rates of a named device.
        workspace: ``"measured"`` finds on the CPU what operations take within themselves, see
            `ackpt.graph.workspace.workspace_bytes`; ``"given"`` leaves it at 0.

    Raises:
        ValueError: for another `workspace`.
        MeterError: if the workspace cannot be measured.
    """
    if workspace not in ("measured", "given"):
        raise ValueError(f"workspace must be 'measured' or 'given', got {workspace!r}")
    known = facts(graph)
    fx = [known.fx[node.id] for node in graph.nodes]
    born = [sum(known.bytes[s] for s in known.born.get(node.id, ())) for node in graph.nodes]
    read = [
        sum(known.bytes[s] for s in {s for i in node.inputs for s in graph.nodes[i].storages}) for node in graph.nodes
    ]
    return Profile(
        device="any",
        flops=tuple(node_flops(node) for node in fx),
        bytes_in=tuple(read),
        bytes_out=tuple(born),
        workspace_bytes=workspace_bytes(graph) if workspace == "measured" else (0,) * len(fx),
        seconds=None,
        origin={"flops": "analytic", "bytes_in": "analytic", "bytes_out": "analytic", "workspace_bytes": workspace},
    )
