"""The book's still of a region in autograd's graph: the nodes of a chain of sines and the tensors that they save.

The graphs are torch's own, walked from the loss: without a region, with one after the forward, and inside the region's
backward, when its recomputation has built a graph of its own.
"""

from __future__ import annotations

import torch

import ackpt

from .chain_steps import SCHEMA

OPERATIONS = 4


def autograd_graphs() -> dict:
    """The autograd graphs of a chain of sines and a sum, without and with a region.

    Returns:
        Plain JSON. Each of ``graphs`` has the ``names`` of its nodes from the leaf to the loss, the category of what
        each has ``saved`` (None: nothing), and the number of operations that each node ``covers``.
    """
    x = torch.ones(8, requires_grad=True)
    inner: list[dict] = []

    def chain(a):
        for _ in range(OPERATIONS):
            a = a.sin()
        if ackpt.is_recomputing():
            inner.append(_walked(a.grad_fn, x, "recomputed"))
        return a

    without = _walked(chain(x).sum().grad_fn, x, "activations")
    loss = ackpt.checkpoint(chain, x).sum()
    within = _walked(loss.grad_fn, x, "activations")
    loss.backward()
    labels = "Without a region", "With a region, after the forward", "With a region, in its backward: recomputed"
    graphs = [{"label": label, **graph} for label, graph in zip(labels, (without, within, *inner), strict=True)]
    return {**SCHEMA, "kind": "autograd", "graphs": graphs}


def _walked(node, x: torch.Tensor, category: str) -> dict:
    names, saved, covers = [], [], []
    while node is not None:
        tensors = _saved_tensors(node)
        names.append(node.name().rpartition("::")[2].removeprefix("_"))
        categories = {"inputs" if tensor.data_ptr() == x.data_ptr() else category for tensor in tensors}
        saved.append(categories.pop() if categories else None)
        covers.append(OPERATIONS if "Recompute" in names[-1] else 1)
        assert not categories and len(node.next_functions) <= 1, f"{names[-1]} is no node of a chain"
        node = node.next_functions[0][0] if node.next_functions else None
    return {"names": names[::-1], "saved": saved[::-1], "covers": covers[::-1]}


def _saved_tensors(node) -> list[torch.Tensor]:
    """What a node of an operation, or of a `torch.autograd.Function`, has saved."""
    own = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    return [t for t in (*own, *getattr(node, "saved_tensors", ())) if isinstance(t, torch.Tensor)]
