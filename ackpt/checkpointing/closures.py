"""Closures of a region's function: fix their cells for the recomputation, and detach the tensors in them."""

from __future__ import annotations

import dis
import functools
import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ackpt.core.autograd_state import phase


class DetachClosedOver(TorchFunctionMode):
    """Replaces closed-over tensors that have an autograd history by detached leaves, in every torch call.

    The graph of a recomputation must end at these tensors. Otherwise the inner backward would run into their history,
    which belongs to the outer backward, and count it twice. ``leaves``: ``{id(tensor): (tensor, leaf)}``.
    """

    def __init__(self, leaves: dict[int, tuple[torch.Tensor, torch.Tensor]]):
        super().__init__()
        self.leaves = leaves

    def __enter__(self):
        self._outer, phase.detached = phase.detached, self
        return super().__enter__()

    def __exit__(self, *exception):
        phase.detached = self._outer
        return super().__exit__(*exception)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*self.replaced(args), **dict(self.replaced(kwargs or {})))

    def replaced(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            pair = self.leaves.get(id(obj))
            return obj if pair is None else pair[1]
        if type(obj) in (list, tuple):
            return type(obj)(self.replaced(item) for item in obj)
        if type(obj) is dict:
            return {key: self.replaced(item) for key, item in obj.items()}
        return obj


def frozen(function):
    """A copy of the function whose closure keeps its present values, such as a loop variable's."""
    if not isinstance(function, (types.FunctionType, functools.partial)):
        return function
    shared: dict = {}
    seen: dict = {}
    _find_rebound(function, shared, seen)
    return _copied(function, shared, {}) if any(each.__closure__ for each in seen.values()) else function


def _find_rebound(function, shared, seen):
    """Add the cells that `function`, or a function in its closure, rebinds to `shared`, ``{id: cell}``."""
    if isinstance(function, functools.partial):
        for item in (function.func, *function.args, *function.keywords.values()):
            _find_rebound(item, shared, seen)
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return
    seen[id(function)] = function
    rebound = rebound_names(function.__code__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        if name in rebound or not bound(cell):
            shared[id(cell)] = cell
        else:
            _find_rebound(cell.cell_contents, shared, seen)


def _copied(function, cells, copies):
    """A copy of `function` with copies of its cells. `cells` maps ids to cells to use instead, and is extended."""
    if type(function) is functools.partial:
        items = [_copied(item, cells, copies) for item in (function.func, *function.args)]
        keywords = {key: _copied(item, cells, copies) for key, item in function.keywords.items()}
        return functools.partial(*items, **keywords)
    if not isinstance(function, types.FunctionType) or not function.__closure__ or id(function) in copies:
        return copies.get(id(function), function)
    copies[id(function)] = function  # a recursive function refers to the original, so that the copy forms no cycle
    for cell in function.__closure__:
        if id(cell) not in cells:
            cells[id(cell)] = types.CellType(_copied(cell.cell_contents, cells, copies))
    closure = tuple(cells[id(cell)] for cell in function.__closure__)
    code, defaults = function.__code__, function.__defaults__
    copy = types.FunctionType(code, function.__globals__, function.__name__, defaults, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__ = function.__dict__
    copies[id(function)] = copy
    return copy


def bound(cell) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def rebound_names(code) -> frozenset[str]:
    """The names of closure cells that the code, or code nested in it, assigns to."""
    return names_in(code, "STORE_DEREF", "DELETE_DEREF")


@functools.lru_cache(maxsize=4096)
def names_in(code, *operations: str) -> frozenset[str]:
    """The names in these `operations` of the bytecode, and of code nested in it."""
    names = {item.argval for item in dis.get_instructions(code) if item.opname in operations}
    nested = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(names.union(*(names_in(each, *operations) for each in nested)))
