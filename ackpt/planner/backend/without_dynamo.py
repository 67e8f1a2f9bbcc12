"""Run what ``torch.compile(model, backend="ackpt")`` returns as a planned step, without Dynamo (except with Inductor).

Dynamo compiles a model again for every new fact about its inputs, gives up after a few times, and cannot capture all
that `ackpt.compile` can. So the model is not given to Dynamo. Its calls run a `PlannedStep`, which captures it at the
first call that needs gradients.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils._pytree import tree_leaves

from ackpt.checkpointing.reachable import LONGEST_CONTAINER, bound, global_names
from ackpt.planner.request import Request
from ackpt.planner.step.planned_step import PlannedStep, put_in_place, without_budget

_DEPTH = 4  # levels of helper functions, containers and plain objects in which modules are looked for


@dataclass(frozen=True)
class WithoutDynamo:
    """What ``torch.compile`` applies to a model or function, in place of Dynamo.

    ``model``: the one that an ``OptimizedModule`` runs.
    """

    request: Request
    model: nn.Module | None = None

    def __call__(self, function: Any) -> Any:
        if self.model is not None:
            return PlannedStep(self.model, self.request).forward
        if isinstance(function, nn.Module):
            return PlannedModule(function, replace(self, model=function))  # pyright: ignore[reportArgumentType]
        if not callable(function) or inspect.isclass(function):
            raise TypeError(f"give torch.compile a module or a function, got {function!r}")
        owner = getattr(function, "__self__", None)
        if isinstance(owner, nn.Module) and function.__name__ == "_call_impl":  # owner.compile()
            torch._dynamo.reset()  # what was compiled before has the model's own operations in it
            with without_budget(owner):
                step = PlannedStep(owner, self.request)
            put_in_place(step)
            return None  # for `_compiled_call_impl`: what stands in for forward runs the plan
        steps: dict[tuple[nn.Module, ...], PlannedStep] = {}  # by the modules among the arguments
        steps[()] = PlannedStep(_Function(function), self.request)

        @torch._dynamo.disable  # inside another compiled function Dynamo would inline it, without its plan
        @functools.wraps(function)
        def call(*args, **kwargs):
            given = tuple(each for each in tree_leaves((args, kwargs)) if isinstance(each, nn.Module))
            if given not in steps:
                steps[given] = PlannedStep(_Function(function, given), self.request)
            return steps[given].forward(*args, **kwargs)

        return call


class PlannedModule(OptimizedModule):
    """A model of ``torch.compile``; within functions that Dynamo compiles, it still runs as planned.

    Dynamo looks into instances of ``OptimizedModule`` itself, and would compile the model that it wraps.
    """


class _Function(nn.Module):
    """A function as a module, whose submodules are its arguments `given` and the modules that it refers to."""

    def __init__(self, function: Callable[..., Any], given: tuple[nn.Module, ...] = ()):
        super().__init__()
        for name, module in _modules_in([*given, function], "model", _DEPTH, set()):
            if module not in self._modules.values():
                names = (name, *(f"{name}_{number}" for number in range(2, len(self._modules) + 3)))
                self._modules[next(each for each in names if not hasattr(self, each))] = module
        self.forward = function


def _modules_in(value, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the modules that `value` is, contains or, as a function, refers to."""
    if isinstance(value, nn.Module):
        yield name, value
    elif depth > 0 and id(value) not in seen:
        seen.add(id(value))
        for inner, item in _items(value, name):
            yield from _modules_in(item, inner, depth - 1, seen)


def _items(value, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield from ((name, each) for each in (value.func, *value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield from ((name, each) for each in (value.__self__, value.__func__))
    elif isinstance(value, types.FunctionType):
        for key, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            if bound(cell):
                yield key, cell.cell_contents
        yield from ((name, each) for each in (value.__defaults__ or ()))
        yield from (value.__kwdefaults__ or {}).items()
        read, _ = global_names(value.__code__)
        for key in read:
            each = value.__globals__.get(key)
            if not isinstance(each, types.FunctionType) or each.__module__ == value.__module__:
                yield key, each
    elif isinstance(value, (list, tuple)) and len(value) <= LONGEST_CONTAINER:
        yield from ((name, each) for each in value)
    elif isinstance(value, dict) and len(value) <= LONGEST_CONTAINER:
        yield from ((str(key).replace(".", "_"), each) for key, each in value.items())
    elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)):
        yield from vars(value).items()
