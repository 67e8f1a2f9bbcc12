"""The storages of a graph whose real size on the CPU is not that in the graph."""

from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves

from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.costs import workspace


@dataclass(frozen=True)
class Disagreement:
    """A storage whose real size is not that in the graph.

    ``node``: the node that allocates it. ``storage``: its id; None if the difference is in the sum of what the node
    allocates and does not free.
    """

    node: int
    target: str
    storage: int | None
    graph_bytes: int
    real_bytes: int


def disagreements(graph: JointGraph) -> tuple[Disagreement, ...]:
    """The storages whose real size is not that in the graph, in the order of execution.

    Torch's shape functions and its CPU kernels do not always agree: by the shape function, layer norm of bfloat16 with
    float32 weights returns bfloat16 statistics; the result of ``mse_loss`` has a storage as large as its input.
    Raises as `workspace_bytes` does.
    """
    analysis = graph.analysis
    different = []
    with patch.object(workspace, "has_users_kernel", lambda node: False):  # also run the operations of the tests
        allocations, _ = workspace._measured.__wrapped__(graph, torch.get_num_threads())
    for node_id, taken in allocations.items():
        node, born = graph.nodes[node_id], analysis.allocated.get(node_id, frozenset())
        values = tree_leaves(analysis.fx[node_id].meta.get("val"))
        keys = [value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None for value in values]
        ids = dict(zip(dict.fromkeys(key for key in keys if key is not None), node.storages))
        real = {ids[key]: 0 if result is None else result[1] for key, result in zip(keys, taken.results) if key in ids}
        for storage in sorted(born):
            if real[storage] != analysis.bytes[storage]:
                different.append(Disagreement(node_id, node.target, storage, analysis.bytes[storage], real[storage]))
        size = sum(real[storage] for storage in born)
        if size != taken.left:
            different.append(Disagreement(node_id, node.target, None, size, taken.left))
    return tuple(different)
