"""The gradients of a region's inputs, one for each use, so that they are summed in the baseline's order.

If several regions, or a region and other code, use a tensor, autograd's engine adds the gradients of all uses one by
one, latest use first. A region that returned their sum would change the order of this summation, and with it the last
bits. So a region is connected to a tensor once per use, and returns the gradient of every use separately.
"""

from __future__ import annotations

from typing import Any

import torch

from .reachable import ACCUMULATE_GRAD


class Summands:
    """Collects the gradients of tensors that a graph uses several times, while the engine runs through that graph.

    Args:
        outputs: of the graph.
        tensors: where the graph starts.
        uses: how often the graph used each of them in the first run. Those with one use are not collected.
    """

    def __init__(self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], uses: list[int]):
        self._uses = uses
        self._collected: dict[int, list[torch.Tensor]] = {}
        several = {_source(tensor): index for index, tensor in enumerate(tensors) if uses[index] > 1}
        if several:
            self._collected = {index: [] for index in several.values()}
            self._watch(outputs, several)

    def of(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients with those of tensors with several uses replaced by one for each use; None where missing."""
        separate: list[torch.Tensor | None] = []
        for index, count in enumerate(self._uses):
            each = self._collected.pop(index, None)
            if each is None:
                separate.append(gradients[index])
                continue
            while len(each) > count:  # only scripted code has another graph in its second run
                last = each.pop()
                each[-1] = each[-1] + last
            separate += [*each, *[None] * (count - len(each))]
            each.clear()  # the graph's hooks refer to the list, and the model's code may keep the graph
        return separate

    def _watch(self, outputs: list[torch.Tensor], several: dict[Any, int]) -> None:
        seen: set[Any] = {output.grad_fn for output in outputs}
        left = list(seen)
        while left:
            node = left.pop()
            edges = node.next_functions
            wanted = {}
            for slot, edge in enumerate(edges):
                if (index := several.get(_key(*edge))) is not None:
                    wanted[slot] = self._collected[index]
                elif edge[0] is not None and edge[0] not in seen:
                    seen.add(edge[0])
                    left.append(edge[0])
            if wanted:
                node.register_hook(_collector(wanted))


def _collector(wanted: dict[int, list[torch.Tensor]]):
    """A hook of a node: appends its gradients in these slots to lists, and passes on only the first of a list.

    The engine would sum what is passed on; with nothing, hooks of the tensor would not run.
    """

    def collect(gradients, _):
        passed = list(gradients)
        for slot, collected in wanted.items():
            if gradients[slot] is not None:
                if collected:
                    passed[slot] = None
                collected.append(gradients[slot])
        return tuple(passed)

    return collect


def _source(tensor: torch.Tensor):
    return (id(tensor), 0) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def _key(node, number: int):
    """What `_source` returns for the tensor at the end of an edge."""
    return (id(node.variable), 0) if type(node) is ACCUMULATE_GRAD else (node, number)
