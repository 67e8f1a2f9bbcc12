"""The callables that replace a module's forward: as a region, as a guarded region, or as a planned step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ackpt.autograd_state import is_recomputing
from ackpt.checkpointing.reentrant import checkpoint
from ackpt.errors import BudgetError, TraceError
from ackpt.running.planned_step import PlannedStep

from .live_bytes import current
from .saved_bytes import counting_a_region, has_room, not_counting

_MOST_SIZES = 8  # of the arguments of one planned module; with other sizes it runs as a region


@contextlib.contextmanager
def installed(calls: Mapping[nn.Module, Callable]) -> Iterator[None]:
    """Inside, a call of one of these modules calls its replacement."""
    for module, call in calls.items():
        module._compiled_call_impl = call
    try:
        yield
    finally:
        for module in calls:
            vars(module).pop("_compiled_call_impl", None)


class RegionCall:
    """Runs a module as one region."""

    ackpt_own_call = True

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, live = self.module._call_impl, current()

        def function(*args, **kwargs):
            if live is not None and is_recomputing():
                return live.recomputed(call, *args, **kwargs)
            with counting_a_region():
                return call(*args, **kwargs)

        return checkpoint(function, *args, **kwargs)


class GuardedCall:
    """Runs a module as it is, or as a region if the step has less than `needed` bytes left to save.

    `needed` is for arguments of `argument_bytes`, and is scaled with them.
    """

    ackpt_own_call = True

    def __init__(self, module: nn.Module, needed: int, argument_bytes: int):
        self.module, self.needed, self.argument_bytes = module, needed, argument_bytes
        self.as_region = RegionCall(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        needed = self.needed * bytes_of((args, kwargs)) // (self.argument_bytes or 1)
        call = self.module._call_impl if has_room(needed) else self.as_region
        return call(*args, **kwargs)


def bytes_of(arguments: Any) -> int:
    """The bytes of the tensors in arguments, each tensor once."""
    tensors = {id(leaf): leaf for leaf in tree_leaves(arguments) if torch.is_tensor(leaf)}
    return sum(tensor.nbytes for tensor in tensors.values() if tensor.layout is torch.strided)


class PlannedCall:
    """Runs a module as a planned step of its own; as a region if the plan cannot serve the arguments.

    `refused`: called with the reason when a plan for new arguments is not possible.
    """

    ackpt_own_call = True

    def __init__(self, step: PlannedStep, module: nn.Module, refused: Callable[[str], None]):
        self.step, self.module, self.refused = step, module, refused
        self.as_region = RegionCall(module)
        self._sizes: dict[Any, bool] = {}  # by facts and sizes of a call, whether a plan serves it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module._call_impl(*args, **kwargs)
        call = self.step._ackpt_planned.call(args, kwargs)
        key = call.facts, call.sizes
        if not self._sizes.get(key, len(self._sizes) < _MOST_SIZES):
            return self.as_region(*args, **kwargs)
        try:
            with not_counting():
                variant = self.step._ackpt_planned.of(call)
        except (BudgetError, TraceError) as error:
            self._sizes[key] = False
            self.refused(str(error))
            return self.as_region(*args, **kwargs)
        self._sizes[key] = True
        return self.module._call_impl(*args, **kwargs) if variant.run is None else variant.outputs(call)
