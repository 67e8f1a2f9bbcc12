"""Policy ``selective``: checkpointing of repeated blocks as transformers and torchtitan do it, without a search.

It shows what their switches give, for comparison with ``auto``. A checkpointed block saves its inputs and the results
of chosen operations, and runs all its other operations again right before its backward, as ``torch.utils.checkpoint``
does. torch also stores results that no recomputation reads, such as that of a block's last product; a plan does not.
Blocks are the members of lists of modules, such as ``layers.0`` and ``layers.1``; in lists inside lists, the inner
members.

Source: ``every_n_layers``, `PreTrainedModel._set_gradient_checkpointing` in transformers 5.23; the saved operations,
torchtitan/distributed/activation_checkpoint.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ackpt.capture.analysis import once_per_graph
from ackpt.capture.joint_graph import FORWARD, JointGraph
from ackpt.costs.profiles import Profile
from ackpt.errors import did_you_mean
from ackpt.metering.kernel_memory import MATMULS
from ackpt.planning.offload_steps import offloadable, offloaded
from ackpt.planning.schedule import Schedule, everything, lower, scheduled

SAVE = ("inputs", "matmuls", "every-second-matmul")
_MEMBER = re.compile(r"^(?:.*?\.)??\d+(?:\.\d+)*(?=\.|$)")
_CONVOLUTION = "aten.convolution.default"
_PRODUCTS = {"aten.mm.default", "aten.addmm.default"}  # of linear layers
_MATMULS = {*map(str, MATMULS), _CONVOLUTION}


def schedule(
    graph: JointGraph,
    profile: Profile,
    limit_bytes: int | None,
    *,
    every_n_layers: int = 1,
    save: str = "inputs",
    offload: bool = False,
) -> Schedule:
    """The schedule of a step whose blocks are checkpointed.

    Args:
        every_n_layers: checkpoint the blocks 0, n, 2 n, ...
        save: what a checkpointed block saves besides its inputs: nothing (``"inputs"``), the results of
            ``"matmuls"``, convolutions and attention, or of attention and of the first, third, ... product of its
            linear layers (``"every-second-matmul"``).
        offload: copy the inputs of checkpointed blocks to the host between their uses.

    Raises:
        ValueError: if the model has no repeated blocks, or for a wrong option.

    Example:
        >>> import torch, ackpt
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> graph = ackpt.trace(torch.nn.Sequential(*(block() for _ in range(4))), torch.ones(4, 8))
        >>> [ackpt.plan(graph, policy="selective", every_n_layers=n).saved_bytes for n in (1, 2, 4)]
        [384, 1152, 1536]
    """
    if isinstance(every_n_layers, bool) or not isinstance(every_n_layers, int) or every_n_layers < 1:
        raise ValueError(f"every_n_layers must be a whole number of at least 1, got {every_n_layers!r}")
    if save not in SAVE:
        raise ValueError(f"save must be one of {', '.join(SAVE)}, got {save!r}{did_you_mean(str(save), SAVE)}")
    chosen = dict.fromkeys(blocks(graph)[::every_n_layers])
    savable, inputs = graph.analysis.savable, _crossing(graph, chosen)
    inside = {s for s in savable if _block_of(graph.nodes[graph.storages[s].producer].module) in chosen}
    results = _results(graph, chosen, save) | graph.analysis.must_be_saved
    late = lower(graph, ({*everything(graph).saved} - inside) | inputs | results)
    whole = _recomputed_by_block(graph, late, chosen)
    if not offload:
        return whole
    return offloaded(graph, whole, inputs.intersection(offloadable(graph, whole)), profile, limit_bytes or 0)


@once_per_graph
def blocks(graph: JointGraph) -> tuple[str, ...]:
    """The qualified names of the repeated blocks, in the order of their first operation.

    Raises:
        ValueError: if there is none.
    """
    members: dict[str, bool] = {}  # whether it has submodules
    for node in graph.nodes[: graph.boundary]:
        if name := _block_of(node.module):
            members[name] = members.get(name, False) or node.module != name
    lists: dict[str, list[str]] = {}
    for name, has_submodules in members.items():
        if has_submodules:
            lists.setdefault(re.split(r"\.?\d", name)[0], []).append(name)
    repeated = {name for names in lists.values() if len(names) > 1 for name in names}
    if not repeated:
        raise ValueError(
            "policy 'selective' checkpoints repeated blocks, and this model has none: no nn.ModuleList or "
            "nn.Sequential of modules with submodules. Use policy 'full' or 'auto'"
        )
    return tuple(name for name in members if name in repeated)


def _block_of(module: str) -> str:
    found = _MEMBER.match(module)
    return found.group() if found else ""


def _crossing(graph: JointGraph, chosen) -> set[int]:
    """Storages that a chosen block reads in the forward but did not allocate, or whose backward readers are elsewhere.

    Parameters and inputs of the model are not among them.
    """
    savable = graph.analysis.savable
    owner = [_block_of(node.module) for node in graph.nodes]
    found: set[int] = set()
    for node in graph.nodes:
        for storage in {s for i in node.inputs for s in graph.nodes[i].storages} & savable:
            source = owner[graph.storages[storage].producer]
            if source != owner[node.id] and (owner[node.id] if node.phase == FORWARD else source) in chosen:
                found.add(storage)
    return found


def _results(graph: JointGraph, chosen, save: str) -> set[int]:
    """The storages of the operations whose results the `chosen` blocks save."""
    kept: set[int] = set()
    products = dict.fromkeys(chosen, 0)
    for node in graph.nodes[: graph.boundary]:
        block = _block_of(node.module)
        if block not in products or save == "inputs":
            continue
        is_product = node.target in _PRODUCTS
        products[block] += is_product
        if save == "matmuls":
            is_kept = node.target in _MATMULS or "scaled_dot_product" in node.target
        else:
            is_kept = products[block] % 2 == 1 if is_product else "scaled_dot_product" in node.target
        if is_kept:
            kept |= graph.analysis.allocated.get(node.id, frozenset()) & graph.analysis.savable
    return kept


def _recomputed_by_block(graph: JointGraph, late: Schedule, chosen) -> Schedule:
    """`late`, but every chosen block is recomputed as a whole when backward first needs one of its activations."""
    order = late.backward_arrays.computed
    again = dict.fromkeys(sorted(node for node in order if graph.nodes[node].phase == FORWARD))
    by_block: dict[str, list[int]] = {}
    for node in again:
        by_block.setdefault(_block_of(graph.nodes[node].module), []).append(node)
    done: set[int] = set()

    def with_arguments(node: int) -> Iterator[int]:
        if node not in done:
            for argument in graph.analysis.backward_reads[node]:
                if argument in again:
                    yield from with_arguments(argument)
            done.add(node)
            yield node

    result: list[int] = []
    for node in order:
        block = _block_of(graph.nodes[node].module)
        together = by_block.get(block, ()) if node in again and block in chosen else ()
        for each in (*together, node):
            result.extend(with_arguments(each))
    return scheduled(graph, None, result)
