"""`PlannedStep`, which runs a model as planned, and the call of a model that has a budget in place."""

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ackpt.checkpointing import standing_in
from ackpt.core.errors import TraceError
from ackpt.core.history import Event
from ackpt.planner.capture.inspection.model_checks import (
    check_call,
    check_model,
    first_opaque,
    is_tensor,
    warn_of_evaluation,
)
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.capture.optimizer_state import check_optimizer
from ackpt.planner.request import Request
from ackpt.planner.schedule.plan import Plan

from .uncovered import Uncovered
from .variants import Variants

_TRAINER = "transformers.trainer"  # a Trainer would drop all columns of a data set: forward names none of them


class PlannedStep(nn.Module):
    """A model that runs as planned; it has the model's parameters, buffers, submodules and state_dict.

    Its other attributes and methods are the model's; a method that calls the model runs the step.

    If shapes, dtypes or settings differ from those of earlier calls, it captures the step again and replans under the
    same budget. Settings are ``train`` and ``eval``, ``requires_grad`` of parameters, autocast, and floats and flags
    among the arguments. They include attributes of modules, such as a dropout's ``p``, also in lists, dicts and a
    ``SimpleNamespace``, and plain values that the model's code reads from globals, closures, environment variables and
    attributes of objects, such as ``SCALE`` or ``cfg.model.scale``. The 64 most recently used plans are stored; pass
    what changes at every step as a tensor. Longer chains of attributes, and what properties and extensions in C return,
    stay as they were captured. Other effects of the model's code, such as printing or calling hooks of submodules,
    happen during the capture, on tensors without data. If nothing requires grad, the model itself runs. Copies and
    pickles have the model and the planner, and replan.

    Args:
        model: an ``nn.Module``; it is shared, not copied.
        planner: a function that makes the plan of a graph, or internally all options of `ackpt.compile`.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> step = ackpt.compile(model, torch.ones(4, 8), budget="100%")
        >>> step(torch.ones(4, 8)).sum().backward()
        >>> model[0].weight.grad.shape, list(step.state_dict()) == list(model.state_dict())
        (torch.Size([8, 8]), True)
        >>> wider = step.prepare(torch.ones(16, 8))
        >>> wider is step.plan, wider.saved_bytes
        (True, 512)
    """

    _ackpt_variants: Variants
    _ackpt_uncovered: Uncovered

    def __init__(self, model: nn.Module, planner: Request | Callable[[JointGraph], Plan]):
        request = planner if isinstance(planner, Request) else Request(planner=planner)
        opaque = first_opaque(model) if request.may_exclude_opaque_submodules else None
        check_model(model, except_opaque=opaque is not None)
        check_optimizer(model, request.loop.optimizer)
        # Module.__setattr__ needs what Module.__init__ makes, and that sets `training`, which is the model's: so the
        # planned calls come first, and past both methods named __setattr__.
        uncovered = Uncovered(model, request)
        object.__setattr__(self, "_ackpt_uncovered", uncovered)
        object.__setattr__(self, "_ackpt_variants", Variants(model, request, uncovered, opaque))
        object.__setattr__(self, "_ackpt_stand_in", standing_in.StandIn(type(model), None))
        training = model.training
        super().__init__()
        self.training = training
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, name, getattr(model, name))

    @property
    def plan(self) -> Plan:
        """The `Plan` of the last call, or of the last `prepare`; a `RegionsPlan` if the model is planned in parts."""
        return self._ackpt_variants.plan

    @property
    def _ackpt_model(self) -> nn.Module:
        return self._ackpt_variants.model

    @property
    def history(self) -> list[Event]:
        """What was captured and planned so far, with causes."""
        return list(self._ackpt_variants.history)

    @property
    def training(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the model is in training mode."""
        return self._ackpt_variants.model.training

    @training.setter
    def training(self, mode: bool) -> None:
        self._ackpt_variants.model.training = mode

    def __setattr__(self, name: str, value: Any) -> None:
        # Private ones are torch's marks, such as that a module was given to torch.compile.
        if name[:1] != "_" and not self._has(name) and hasattr(self._ackpt_variants.model, name):
            raise AttributeError(
                f"{name!r} is an attribute of the model: set it there, where the planned step reads it"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if self._has(name) or name[:2] == "__" or "_ackpt_variants" not in vars(self):
            return super().__getattr__(name)
        if sys._getframe(1).f_globals.get("__name__") == _TRAINER:
            raise TypeError(
                "the Trainer reads the signature of the model's class and saves the model itself, which a planned step "
                "is not: keep the model, and give it a budget by ackpt.apply_budget(model, batch, budget=...)"
            )
        value = getattr(self._ackpt_variants.model, name)
        if isinstance(value, types.MethodType) and value.__self__ is self._ackpt_variants.model:
            return functools.partial(_run_planned, self, value)
        return value

    def _has(self, name: str) -> bool:
        """Whether this step has an attribute, apart from those that it forwards to the model."""
        own = vars(self)
        return (
            name in own
            or hasattr(type(self), name)
            or any(name in own.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))
        )

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Capture and plan for these arguments without running anything; the plan."""
        check_call(self._ackpt_variants.model, args, kwargs)
        warn_of_evaluation(self._ackpt_variants.model)
        self._ackpt_variants.serving(self._ackpt_variants.call(args, kwargs))
        return self.plan

    @torch._dynamo.disable  # inside another compiled function Dynamo would inline the model, without its plan
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _standing_in(self):
            return self._ackpt_variants.model(*args, **kwargs)

    @torch._dynamo.disable
    def _ackpt_run(self, model: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """The outputs of a call of ``model.forward``, in whose place this stands."""
        if _keeps_gradients(model, args, kwargs):
            call = self._ackpt_variants.call(args, kwargs)
            variant = self._ackpt_variants.serving(call)
            return self._ackpt_uncovered.call(lambda: variant.outputs(call), lambda: self.plan)
        outputs = self._ackpt_variants.without_gradients(lambda: forward(*args, **kwargs))
        if torch.is_grad_enabled():
            _require_no_gradients(outputs)
        return outputs

    def __repr__(self) -> str:
        return f"PlannedStep({self.plan!r})" if self.history else "PlannedStep(no plan yet)"

    # Methods that the model may override.

    def train(self, mode: bool = True) -> "PlannedStep":
        self._ackpt_variants.model.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._ackpt_variants.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._ackpt_variants.model.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args, **kwargs):
        return self._ackpt_variants.model._load_from_state_dict(*args, **kwargs)

    def _apply(self, *args, **kwargs):
        self._ackpt_variants.model._apply(*args, **kwargs)
        return self

    def __reduce__(self) -> "tuple[type[PlannedStep], tuple[Any, ...]]":
        return PlannedStep, (self._ackpt_variants.model, self._ackpt_variants.request)


def put_in_place(step: Any) -> None:
    """Let every call of the model's forward run `step`, a `PlannedStep` or a step of a sharded model."""
    standing_in.put_in_place(step._ackpt_model, functools.partial(_run, step))


def in_place_of(model: nn.Module) -> Any:
    """The step that calls of `model` run; None if they run the model itself."""
    run = standing_in.in_place_of(model)
    return None if run is None else run.args[0]


@contextlib.contextmanager
def without_budget(model: nn.Module):
    """Take away the budget of `model` inside."""
    step = in_place_of(model) if isinstance(model, nn.Module) else None
    if step is not None:
        standing_in.remove_from(model)
    try:
        yield
    finally:
        if step is not None:
            put_in_place(step)


def _run_planned(step: PlannedStep, method: Callable[..., Any], *args, **kwargs):
    """Call a method of the model of `step`; where it calls the model, the step runs."""
    with _standing_in(step):
        result = method(*args, **kwargs)
    if inspect.isgenerator(result) or inspect.iscoroutine(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result):
            result.close()  # Python warns of one that nothing awaits
        raise TypeError(
            f"{method.__name__} is a generator or a coroutine, which would call the model without its plan after this "
            "call has ended: call this method of the model itself, or the planned step in a function that returns"
        )
    return result


def _run(step: Any, *call) -> Any:
    return step._ackpt_run(*call)


def _standing_in(step: PlannedStep):
    """Let calls of the model's forward run `step` inside, in this thread."""
    return standing_in.locally({id(step._ackpt_variants.model): functools.partial(_run, step)})


def _keeps_gradients(model: nn.Module, args, kwargs) -> bool:
    """Whether a call records anything for a backward."""
    if not torch.is_grad_enabled():
        return False
    own = (each for module in model.modules() for each in module._parameters.values() if each is not None)
    return any(each.requires_grad for each in own) or any(
        each.requires_grad for each in tree_flatten((args, kwargs))[0] if is_tensor(each)
    )


def _require_no_gradients(outputs) -> None:
    """Refuse gradients of tensors that are neither parameters nor arguments: their step would run without a plan."""
    if any(is_tensor(leaf) and leaf.requires_grad for leaf in tree_flatten(outputs)[0]):
        raise TraceError(
            "the step computes a gradient, but no parameter of the model and no argument requires grad, so it would "
            "run without a plan: register the tensor that requires grad, as in self.name = nn.Parameter(...), or pass "
            "it as an argument. A function must refer to its models by name or take them as arguments."
        )
