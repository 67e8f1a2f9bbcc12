"""Choose which dimensions become dynamic: declared ones, and those whose size changed between calls."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from ackpt.planner.capture.call_facts import Call, Sizes
from ackpt.planner.capture.dynamic_sizes import SMALLEST, Dimension, is_sized
from ackpt.planner.capture.inspection.calls import named_leaves
from ackpt.planner.capture.inspection.model_checks import is_tensor
from ackpt.planner.request import Bounds, DynamicArgument


def declared(dynamic: DynamicArgument, model: nn.Module, call: Call) -> set[Dimension]:
    """The dimensions that `dynamic` or ``torch._dynamo.mark_dynamic`` names in this call."""
    if dynamic is False:
        return set()
    chosen = set(declared_bounds(dynamic, model, call))
    for at, leaf in enumerate(call.leaves):
        if is_tensor(leaf):
            marked = range(leaf.dim()) if dynamic is True else getattr(leaf, "_dynamo_dynamic_indices", ())
            chosen |= {Dimension(at, dim) for dim in marked}
    return chosen


def named_dimensions(dynamic: DynamicArgument, model: nn.Module, call: Call) -> set[Dimension]:
    """The dimensions that the user names one by one, so that it is an error if one cannot be dynamic."""
    return set() if dynamic is True else declared(dynamic, model, call)


def declared_bounds(dynamic: DynamicArgument, model: nn.Module, call: Call) -> dict[Dimension, Bounds | None]:
    """The bounds of every dimension that `dynamic` names.

    Raises:
        TypeError, ValueError: for names, dimensions and bounds that do not fit the call; names the argument.
    """
    if dynamic is None or isinstance(dynamic, bool):
        return {}
    if not isinstance(dynamic, Mapping):
        raise TypeError(
            f"dynamic must be None, True, False or a dict such as {{'input_ids': {{1: (16, 512)}}}}, got {dynamic!r}"
        )
    leaves = dict(_leaves(model, call))
    found: dict[Dimension, Bounds | None] = {}
    for name, dims in dynamic.items():
        if name not in leaves:
            raise ValueError(f"dynamic names {name!r}, but the tensors of this call are {', '.join(leaves)}")
        at = leaves[name]
        tensor: Any = call.leaves[at]
        if not isinstance(dims, Mapping):
            raise TypeError(f"dynamic[{name!r}] must be a dict such as {{1: (16, 512)}}, got {type(dims).__name__}")
        for dim, bounds in dims.items():
            if not isinstance(dim, int) or not 0 <= dim < tensor.dim():
                raise ValueError(f"dynamic[{name!r}] names dimension {dim!r}; the tensor has {tensor.dim()} dimensions")
            found[Dimension(at, dim)] = _checked(bounds, name, dim, tensor.shape[dim])
    return found


def differing(sizes: Sizes, call: Call) -> set[Dimension]:
    """The dimensions in which `call` has other sizes than `sizes`, unless one of them is less than 2."""
    places = [at for at, leaf in enumerate(call.leaves) if is_sized(leaf)]
    found = set()
    for at, (was, *_), (now, *_) in zip(places, sizes, call.sizes):
        pairs = enumerate(zip(was, now))
        found |= {Dimension(at, dim) for dim, (one, other) in pairs if one != other and min(one, other) >= SMALLEST}
    return found


def _leaves(model: nn.Module, call: Call):
    """(name, index) of every tensor of a call; a positional argument has the name of the forward's parameter."""
    parameters = list(inspect.signature(model.forward).parameters)
    for at, (name, leaf) in enumerate(named_leaves(call.args, call.kwargs)):
        if is_tensor(leaf):
            number, _, rest = name.partition("[")
            is_position = number.isdecimal() and int(number) < len(parameters)
            yield (parameters[int(number)] + name[len(number) :] if is_position else name), at


def _checked(bounds, name: str, dim: int, size: int) -> Bounds | None:
    where = f"dynamic[{name!r}][{dim}]"
    if bounds is None:
        return None
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2 or not all(isinstance(each, int) for each in bounds):
        raise TypeError(f"{where} must be (smallest, largest) or None, got {bounds!r}")
    low, high = bounds
    if not SMALLEST <= low <= high:
        raise ValueError(f"{where} must be {SMALLEST} <= smallest <= largest, got {bounds!r}")
    if not low <= size <= high:
        raise ValueError(
            f"{where} is {bounds!r}, but the size of dimension {dim} of {name!r} in this call is {size}: declare "
            "bounds that include it, or None for any size"
        )
    return low, high
