"""The book's animated stack: the tensors that one Transformer block saves, in order, as data for a page.

The block is captured from shapes; the order and the bytes are those of the baseline's schedule.
"""

from __future__ import annotations

from typing import Any

import torch

import ackpt
from ackpt.models import Block, TransformerConfig
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.schedule.allocations import Allocation, allocations
from ackpt.planner.schedule.schedule import everything

from .chain_steps import SCHEMA

CONFIG = TransformerConfig(dim=256, ff_dim=1024, layers=6, head_dim=64)  # that of chapter 1
TOKENS = 1024


def block_stack(config: TransformerConfig = CONFIG, tokens: int = TOKENS) -> dict:
    """The tensors that one Transformer block saves, from its input on, in the order in which the forward saves them.

    Returns:
        Plain JSON. ``layers``: each with what it is, its bytes, its elements per token, and these as a ``symbol``.
        ``frames``: a list of [``"save"`` or ``"free"``, index of a layer], in order.
    """
    with torch.device("meta"):
        block, x = Block(config), torch.empty(tokens, config.dim)
    graph = ackpt.trace(block, x, torch.tensor([0, tokens], dtype=torch.int32), tokens)
    profile = ackpt.profile(graph)
    listed = allocations(graph, everything(graph), profile.workspace_bytes)
    events = max(b.end or b.begin for b in listed)
    inputs = [b for b in listed if b.kind == "inputs" and b.bytes == x.nbytes]
    saved = [*inputs, *(b for b in listed if b.kind == "saved")]
    moves = [(b.begin, "save", i) for i, b in enumerate(saved)]
    moves += [(b.end or events + 1, "free", i) for i, b in enumerate(saved)]  # the caller holds the block's input
    return {
        **SCHEMA,
        "kind": "stack",
        "tokens": tokens,
        "layers": [_layer(graph, config, tokens, one) for one in saved],
        "frames": [[kind, i] for _, kind, i in sorted(moves)],
    }


def _layer(graph: JointGraph, config: TransformerConfig, tokens: int, block: Allocation) -> dict:
    assert block.node is not None
    elements = block.bytes // (4 * tokens)
    names = {1: "1", config.heads: "h", config.dim: "d", 3 * config.dim: "3 d", config.ff_dim: "f"}
    category = "inputs" if block.kind == "inputs" else "activations"
    what = {"label": _saved_tensor(graph, block), "category": category}
    return {**what, "bytes": block.bytes, "elements": elements, "symbol": names[elements]}


def _saved_tensor(graph: JointGraph, block: Allocation) -> str:
    """What a saved tensor is, in words; raises KeyError for an operation that a Transformer block does not have."""
    assert block.node is not None
    if block.kind == "inputs":
        return "input of the block"
    node = graph.nodes[block.node]
    if node.target == "getitem":
        place: Any = graph.analysis.fx[node.id].args[1]
        return {0: "output of attention", 1: "attention: one sum per head"}[place]
    words = {
        "aten.rsqrt.default": f"{node.module}: its scales",
        "aten.mul.Tensor": f"output of {node.module}",
        "aten.mm.default": f"output of {node.module}",
        "aten.add.Tensor": "input + attention",
        "aten.gelu.default": "output of GELU",
    }
    return words[node.target]
