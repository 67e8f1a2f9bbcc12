"""Profile one eager step: the modules that it calls, what they save, and their cost.

The costs are those that plans compare: FLOPs and weighted memory traffic.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ackpt.capture.inspection.attributes import every_module
from ackpt.capture.inspection.model_checks import is_opaque
from ackpt.costs.operation_costs import flops, traffic
from ackpt.metering.resident import storages_of
from ackpt.policies.search.recompute_costs import FLOPS_PER_BYTE

from .calls import bytes_of, installed
from .saved_bytes import SavedBytes

Consider = Callable[["Unit", tuple, dict], None]


@dataclass(eq=False)
class Unit:
    """A module that the step called.

    ``parent``: the module that called it; None for the model. ``has_callers``: whether several modules call it.
    ``cost``: of its forward, submodules included. ``saved``: bytes by storage that autograd saved in its forward;
    ``inputs``: those of its arguments. ``argument_bytes``: of all tensors in the arguments of its first call.
    ``windows``: sequence numbers of autograd at the start and the end of its calls.
    """

    path: str
    module: nn.Module
    parent: Unit | None = None
    has_callers: bool = False
    children: list[Unit] = field(default_factory=list)
    cost: float = 0.0
    saved: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    argument_bytes: int = 0
    windows: list[tuple[int, int]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The bytes that it saves as it is."""
        return sum(self.saved.values())

    @property
    def bytes_as_region(self) -> int:
        """The bytes that it saves as a region: those of its arguments, as far as they are not resident."""
        return sum(self.inputs.values())


class StepProfile:
    """Runs a forward with every module watched; ``root`` is the model's unit, ``cost`` that of the step.

    Args:
        model: whose modules are watched; one that is scripted or compiled is part of the module that calls it.
        resident: tensors that are allocated anyway, which do not count as saved.
        consider: called with a unit and its arguments before the first call of its module.
    """

    def __init__(self, model: nn.Module, resident: list[torch.Tensor], consider: Consider):
        self.root = Unit("", model)
        self.cost = 0.0
        self._consider = consider
        self._resident = {storage._cdata for tensor in resident for storage in storages_of(tensor)}
        self._saved = SavedBytes(resident, observe=self._saves)
        self._costs = _Costs(self)
        self._stack = [self.root]
        self._is_considering = False
        watched = {path: module for path, module in every_module(model).items() if path and not is_opaque(model, path)}
        self._calls = {module: _Watch(self, Unit(path, module)) for path, module in watched.items()}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the forward of the model runs."""
        start = torch.autograd._get_sequence_nr()
        with installed(self._calls), self._saved.counting(), self._costs:
            yield
        self.root.windows.append((start, torch.autograd._get_sequence_nr()))

    @contextlib.contextmanager
    def counting_backward(self) -> Iterator[None]:
        """Inside, the backward runs."""
        with self._costs:
            yield

    def call(self, unit: Unit, args, kwargs) -> Any:
        if self._is_considering:  # a capture calls the modules, too
            return unit.module._call_impl(*args, **kwargs)
        parent = self._stack[-1]
        if not unit.windows:
            unit.parent = parent
            parent.children.append(unit)
            unit.argument_bytes = bytes_of((args, kwargs))
            self._is_considering = True
            try:
                self._consider(unit, args, kwargs)
            finally:
                self._is_considering = False
        unit.has_callers |= unit.parent is not parent
        for tensor in filter(torch.is_tensor, tree_leaves((args, kwargs))):
            unit.inputs |= {s._cdata: s.nbytes() for s in storages_of(tensor) if s._cdata not in self._resident}
        start = torch.autograd._get_sequence_nr()
        self._stack.append(unit)
        try:
            return unit.module._call_impl(*args, **kwargs)
        finally:
            self._stack.pop()
            unit.windows.append((start, torch.autograd._get_sequence_nr()))

    def add_cost(self, cost: float) -> None:
        self.cost += cost
        for unit in self._stack:
            unit.cost += cost

    def _saves(self, key: int, size: int) -> None:
        for unit in self._stack:
            unit.saved[key] = size


class _Watch:
    ackpt_own_call = True

    def __init__(self, profile: StepProfile, unit: Unit):
        self.profile, self.unit = profile, unit

    def __call__(self, *args, **kwargs):
        return self.profile.call(self.unit, args, kwargs)


class _Costs(TorchDispatchMode):
    """Adds the cost of every operation to the modules that are running."""

    def __init__(self, profile: StepProfile):
        super().__init__()
        self.profile = profile

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, so that Dynamo compiles what it would compile without this mode."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if all(tensor.layout is torch.strided for tensor in tensors):
            node: Any = SimpleNamespace(op="call_function", target=func, name=str(func))
            moved = sum(traffic(node, args, kwargs, result))
            self.profile.add_cost(float(flops(node, args, kwargs, result) + FLOPS_PER_BYTE * moved))
        return result


def sums_differently(root: Unit, outputs) -> set[Unit]:
    """The units that as one autograd node would sum the gradient of some tensor in another order than eager.

    These use a tensor from outside at least twice, and it is used outside as well: their own uses would be summed
    first.
    """
    uses: dict[tuple[Any, int], list[int]] = defaultdict(list)
    left = [tensor.grad_fn for tensor in tree_leaves(outputs) if torch.is_tensor(tensor) and tensor.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        for source, number in node.next_functions:
            if source is not None:
                uses[source, number].append(node._sequence_nr())
                if source not in seen:
                    seen.add(source)
                    left.append(source)
    shared = [(source._sequence_nr(), numbers) for (source, _), numbers in uses.items() if len(numbers) > 2]
    found = set()
    pending = [root]
    while pending:
        unit = pending.pop()
        pending += unit.children
        for start, end in unit.windows:
            for produced, numbers in shared:
                inside = sum(start <= number < end for number in numbers)
                if 2 <= inside < len(numbers) and not start <= produced < end:
                    found.add(unit)
    return found
