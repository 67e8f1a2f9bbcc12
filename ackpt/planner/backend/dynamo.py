"""The backend ``"ackpt"`` of ``torch.compile``: ``torch.compile(model, backend="ackpt", options={"budget": ...})``.

Dynamo compiles a model again for every new fact about its inputs, gives up after a few times, and cannot capture all
that `ackpt.compile` can. So the model is not given to Dynamo: its calls run a `PlannedStep`, which captures it at the
first call that needs gradients. With ``compiler="inductor"``, Inductor compiles the two halves of that step.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule
from torch.utils._pytree import tree_leaves

from ackpt.checkpointing.reachable import LONGEST_CONTAINER, bound, global_names
from ackpt.core.errors import TraceError, check_misspelt
from ackpt.planner.request import Request
from ackpt.planner.step.planned_step import PlannedStep, put_in_place, without_budget

_OPTIONS = (
    *("budget", "slowdown", "policy", "differentiate", "compiler", "on_plan", "device_profile", "chunk_head"),
    *("outputs", "optimizer", "accumulation", "scaler", "cache"),
)


def backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None = None, mode: str | None = None
) -> NoReturn:
    """The backend ``"ackpt"`` of ``torch.compile``: training steps run as planned; evaluation runs the model itself.

    ``torch.compile(model, backend="ackpt", options=...)`` and ``model.compile(...)`` use it by its name. A function
    that contains models, such as one that computes a loss, may take the place of the model.

    Args:
        gm, example_inputs: unused; ``torch.compile`` does not give the model to Dynamo, see `WithoutDynamo`.
        options: ``budget``, ``slowdown``, ``policy`` and its options, as in `ackpt.plan`; ``differentiate``,
            ``device_profile``, ``outputs``, ``optimizer``, ``accumulation``, ``scaler``, ``chunk_head`` and ``cache``,
            as in `ackpt.compile`; ``on_plan``, called with every plan before it runs; ``compiler``: ``"eager"``, the
            default, runs the planned operations one by one, as `ackpt.compile` does. ``"inductor"`` compiles forward
            and backward, for every shape separately. It fuses and reorders operations: the peak is not exactly the
            simulated one. Random results are saved, not replayed. It takes no ``cache`` and no ``chunk_head``.
        mode: of ``torch.compile``, which is Inductor's own: refused.

    Raises:
        BudgetError: by a call whose budget is infeasible. One capture serves all sizes, and a fraction is relative to
            the baseline of the same call.
        TraceError: by a call that cannot be captured as one graph; names the line.
        TypeError, ValueError: for an option that is wrong, and for what cannot be captured, as in `ackpt.compile`.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> plans = []
        >>> options = {"policy": "full", "on_plan": plans.append}
        >>> step = torch.compile(model, backend="ackpt", options=options)
        >>> step(torch.ones(4, 8)).sum().backward()
        >>> plans[0].policy
        'full'
    """
    raise TraceError(
        'this backend was not called through torch.compile(model, backend="ackpt", options=...), which runs the model '
        "without Dynamo: call torch.compile with the name of the backend"
    )


def _install() -> None:
    """Let ``torch.compile`` with this backend, which calls ``torch._dynamo.optimize``, run a `PlannedStep`."""
    dynamo: Any = torch._dynamo
    optimize = dynamo.optimize

    @functools.wraps(optimize)
    def optimize_or_plan(*args, **kwargs):
        wrapper: Any = kwargs.get("backend", args[0] if args else None)
        context: Any = optimize(*args, **kwargs)
        # With torch.compile(disable=True), the context is no OptimizeContext.
        if getattr(wrapper, "compiler_fn", None) is not backend or not isinstance(context, OptimizeContext):
            return context
        request = checked(wrapper.kwargs.get("options"), wrapper.kwargs.get("mode"))
        one_graph = {"dynamic": False, "regions": False}
        fixed: Any = {"dynamic": kwargs.get("dynamic")} if request.compiler == "eager" else one_graph
        return WithoutDynamo(replace(request, **fixed))

    dynamo.optimize = optimize_or_plan


def checked(options: Any, mode: str | None = None) -> Request:
    """The request that the user's `options`, a dict or None, describe; a TypeError or ValueError names a wrong one."""
    if mode is not None:
        raise ValueError(
            f"mode {mode!r} is one of Inductor's: leave it out; options={{'compiler': 'inductor'}} uses it"
        )
    if not isinstance(options, (Mapping, type(None))):
        raise TypeError(f"options must be a dict such as {{'budget': '6GiB'}}, got {type(options).__name__}")
    rest = dict(options or {})
    if foreign := sorted({"plan", "dynamic"} & set(rest)):
        raise TypeError(
            f"{foreign[0]!r} is not an option of this backend: use ackpt.compile(model, ..., {foreign[0]}=...)"
        )
    check_misspelt(rest, _OPTIONS, "this backend")
    given = {name: rest.pop(name) for name in _OPTIONS if name in rest}
    request = Request.from_keywords(**given, options=rest)
    if request.compiler == "inductor" and "cache" in given:
        raise TypeError("'cache' is not an option of compiler 'inductor', whose plans are not cached")
    return request


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


_install()
