"""Policy ``selective``: checkpointing of repeated blocks as transformers and torchtitan do it, without a search.

It shows the effect of their options, for comparison with ``auto``. A checkpointed block saves its inputs and the
results of chosen operations, and recomputes everything else right before its backward, as ``torch.utils.checkpoint``
does. torch also stores results that no recomputation reads, such as that of a block's last product; a plan does not.
Blocks are the members of lists of modules, such as ``layers.0`` and ``layers.1``; in lists inside lists, the inner
members.

Source: ``every_n_layers``, `PreTrainedModel._set_gradient_checkpointing` in transformers 5.23; the saved operations,
torchtitan/distributed/activation_checkpoint.py.
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from ackpt.core.errors import did_you_mean
from ackpt.metering.kernel_memory import MATMULS
from ackpt.planner.capture.joint_graph import BACKWARD, FORWARD, JointGraph, once_per_graph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.schedule.offload_steps import offloadable, offloaded
from ackpt.planner.schedule.schedule import Schedule, everything, lower, scheduled

SAVE = ("inputs", "matmuls", "every-second-matmul")
_NUMBERS = re.compile(r"^(?:.*?\.)??\d+(?:\.\d+)*(?=\.|$)")  # up to the first run of numbers
_FIRST_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.|$)")
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
        >>> from torch import nn
        >>> def block():
        ...     return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh())
        >>> graph = ackpt.trace(nn.Sequential(*(block() for _ in range(4))), torch.ones(4, 8))
        >>> [ackpt.plan(graph, policy="selective", every_n_layers=n).saved_bytes for n in (1, 2, 4)]
        [512, 1024, 1280]
    """
    if isinstance(every_n_layers, bool) or not isinstance(every_n_layers, int) or every_n_layers < 1:
        raise ValueError(f"every_n_layers must be a whole number of at least 1, got {every_n_layers!r}")
    if save not in SAVE:
        raise ValueError(f"save must be one of {', '.join(SAVE)}, got {save!r}{did_you_mean(str(save), SAVE)}")
    chosen = dict.fromkeys(blocks(graph)[::every_n_layers])
    owner = _block_of(graph)
    inputs, outputs = _crossing(graph, chosen)
    inside = {s for s in graph.analysis.savable if owner[graph.storages[s].producer] in chosen}
    results = set().union(*saved_results(graph, owner, chosen, save).values()) | graph.analysis.must_be_saved
    late = lower(graph, ({*everything(graph).saved} - inside) | inputs | outputs | results)
    whole = _recomputed_by_block(graph, late, chosen)
    if not offload:
        return whole
    return offloaded(graph, whole, inputs.intersection(offloadable(graph, whole)), profile, limit_bytes or 0)


@once_per_graph
def blocks(graph: JointGraph) -> tuple[str, ...]:
    """The qualified names of the repeated blocks, in the order of their operations; ValueError if there are none."""
    names = dict.fromkeys(name for name in _block_of(graph)[: graph.boundary] if name)
    lists = Counter(map(_list_of, names))
    repeated = tuple(name for name in names if lists[_list_of(name)] > 1)
    if not repeated:
        raise ValueError(
            "policy 'selective' checkpoints repeated blocks, and this model has none: no nn.ModuleList or "
            "nn.Sequential of modules with submodules. Use policy 'full' or 'auto'"
        )
    return repeated


@once_per_graph
def _block_of(graph: JointGraph) -> tuple[str, ...]:
    """By node, the member of a list of modules that it belongs to; "" for none. A member has submodules."""
    modules = {node.module for node in graph.nodes}
    parents = {prefix for module in modules for prefix in _prefixes(module)[:-1]}
    members = {}
    for module in modules:
        numbers = _NUMBERS.match(module)
        prefixes = [] if numbers is None else reversed(_prefixes(numbers.group()))
        in_lists = (each for each in prefixes if each in parents and each.rpartition(".")[2].isdigit())
        members[module] = next(in_lists, "")
    return tuple(members[node.module] for node in graph.nodes)


def _prefixes(module: str) -> list[str]:
    """The names of the modules around a module, from the outermost one on, and its own."""
    return list(accumulate(module.split("."), "{}.{}".format))


def _list_of(name: str) -> str:
    return _FIRST_NUMBER.split(name)[0]


def _crossing(graph: JointGraph, chosen) -> tuple[set[int], set[int]]:
    """Storages of the forward that chosen blocks read but did not allocate; those they allocate for others' backward.

    Parameters and inputs of the model are not among them.
    """
    savable, owner = graph.analysis.savable, _block_of(graph)
    inputs: set[int] = set()
    outputs: set[int] = set()
    for node in graph.nodes:
        for storage in {s for i in node.inputs for s in graph.nodes[i].storages} & savable:
            source = owner[graph.storages[storage].producer]
            if source == owner[node.id]:
                continue
            if node.phase == FORWARD and owner[node.id] in chosen:
                inputs.add(storage)
            elif node.phase == BACKWARD and source in chosen:
                outputs.add(storage)
    return inputs, outputs


def saved_results(graph: JointGraph, owner, chosen, save: str) -> dict[Any, set[int]]:
    """By block, the storages of the operations whose results the `chosen` ones save; ``owner[node]``: its block."""
    saved: dict[Any, set[int]] = {block: set() for block in chosen}
    products = dict.fromkeys(saved, 0)
    for node in graph.nodes[: graph.boundary]:
        block = owner[node.id]
        if block not in saved or save == "inputs":
            continue
        is_product = node.target in _PRODUCTS
        products[block] += is_product
        if save == "matmuls":
            is_saved = node.target in _MATMULS or "scaled_dot_product" in node.target
        else:
            is_saved = products[block] % 2 == 1 if is_product else "scaled_dot_product" in node.target
        if is_saved:
            saved[block] |= graph.analysis.allocated.get(node.id, frozenset()) & graph.analysis.savable
    return saved


def _recomputed_by_block(graph: JointGraph, late: Schedule, chosen) -> Schedule:
    """`late`, but every chosen block is recomputed as a whole when backward first needs one of its activations."""
    order = late.backward_arrays.computed
    again = dict.fromkeys(sorted(node for node in order if graph.nodes[node].phase == FORWARD))
    owner = _block_of(graph)
    by_block: dict[str, list[int]] = {}
    for node in again:
        by_block.setdefault(owner[node], []).append(node)
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
        together = by_block[owner[node]] if node in again and owner[node] in chosen else ()
        for each in (*together, node):
            result.extend(with_arguments(each))
    return scheduled(graph, None, result)
