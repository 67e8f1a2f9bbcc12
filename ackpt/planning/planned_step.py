"""`PlannedStep`: a model whose step runs as planned; captured at the first call with new shapes, then rewritten."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from ackpt.capture.aot import Capture, capture, given_places
from ackpt.capture.inspection.attributes import attributes, every_module, plain
from ackpt.capture.inspection.calls import another_plan, described, other_bytes
from ackpt.capture.inspection.model_checks import check_model
from ackpt.capture.inspection.tensors import is_tensor
from ackpt.capture.joint_graph import FORWARD, JointGraph, Node
from ackpt.capture.optimizer_state import check_optimizer
from ackpt.capture.outputs import (
    depends_on,
    differentiable_once,
    gradient_strides,
    gradients_as_planned,
    leave_undefined,
    unchanged_until_backward,
)
from ackpt.capture.tracing import captured_graph
from ackpt.errors import BudgetError, TraceError

from .plan import Plan, PlanError
from .rewriting import boxed, rewrite
from .schedule import COMPUTE, Schedule

if TYPE_CHECKING:
    from typing_extensions import Self

_MOST_PLANS = 64


class PlannedStep(nn.Module):
    """A model that runs as planned; it has the model's parameters, buffers, submodules and state_dict.

    Called with other shapes, dtypes or switches than before, it captures and replans under the same budget.
    Switches are ``train`` and ``eval``, ``requires_grad`` of parameters, autocast, numbers and flags among the
    arguments, and what the attributes of the modules hold, such as a dropout's ``p``, also in lists, dicts and a
    ``SimpleNamespace``, and the plain values that the model's code reads from globals, closures, environment variables
    and attributes of objects, such as ``SCALE`` or ``cfg.model.scale``. The 64 plans that were used last are kept; pass
    what changes at every step as a tensor. Longer chains of attributes, objects in containers, and what properties and
    extensions in C return stay as they were captured. Other effects of the model's code, such as printing or calling
    hooks, happen during the capture, on tensors without data. If nothing requires grad, the model itself runs. Copies
    and pickles have the model and the planner, and replan.

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

    _ackpt_planned: _Planned

    def __init__(
        self,
        model: nn.Module,
        planner: Callable[[JointGraph], Plan],
        differentiate: str = "loss",
        optimizer: torch.optim.Optimizer | None = None,
    ):
        check_model(model)
        check_optimizer(model, optimizer)
        # Module.__setattr__ needs what Module.__init__ makes, and that sets `training`, which is the model's: so the
        # planned calls come first, and past both methods named __setattr__.
        object.__setattr__(self, "_ackpt_planned", _Planned(model, planner, differentiate, optimizer))
        training = model.training
        super().__init__()
        self.training = training
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, name, getattr(model, name))

    @property
    def plan(self) -> Plan:
        """The `Plan` of the last call, or of the last `prepare`."""
        return self._ackpt_planned.plan

    @property
    def training(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the model is in training mode."""
        return self._ackpt_planned.model.training

    @training.setter
    def training(self, mode: bool) -> None:
        self._ackpt_planned.model.training = mode

    def __setattr__(self, name: str, value: Any) -> None:
        # Private ones are torch's marks, such as that a module was given to torch.compile.
        if name[:1] != "_" and not hasattr(self, name) and hasattr(self._ackpt_planned.model, name):
            raise AttributeError(
                f"{name!r} is an attribute of the model: set it there, where the planned step reads it"
            )
        super().__setattr__(name, value)

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Capture and plan for these arguments without running anything; the plan."""
        return self._ackpt_planned.prepared(args, kwargs)

    @torch._dynamo.disable  # inside another compiled function Dynamo would inline the model, without its plan
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        planned = self._ackpt_planned
        return planned(args, kwargs) if planned.keeps_gradients(args, kwargs) else planned.model(*args, **kwargs)

    # Methods that the model may override.

    def train(self, mode: bool = True) -> Self:
        self._ackpt_planned.model.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._ackpt_planned.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._ackpt_planned.model.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args, **kwargs):
        return self._ackpt_planned.model._load_from_state_dict(*args, **kwargs)

    def _apply(self, *args, **kwargs):
        self._ackpt_planned.model._apply(*args, **kwargs)
        return self

    def __reduce__(self) -> tuple[type[PlannedStep], tuple[Any, ...]]:
        planned = self._ackpt_planned
        return PlannedStep, (planned.model, planned.planner, planned.differentiate, planned.optimizer)


class _Planned:
    """The captures and plans of a `PlannedStep`, by what its calls have in common."""

    def __init__(self, model: nn.Module, planner, differentiate: str, optimizer):
        self.model, self.planner, self.differentiate, self.optimizer = model, planner, differentiate, optimizer
        # By key, the captures that differ in the values that the model's code read, the latest first.
        self.captures: dict[Any, list[tuple[Any, Capture, Plan]]] = {}
        self.plan: Any = None

    def __call__(self, args, kwargs):
        modules = every_module(self.model)
        leaves, spec = tree_flatten((args, kwargs))
        run, captured = self.captured_for(args, kwargs, self._key(modules.values(), leaves, spec))
        return captured.outputs(run(*captured.inputs(modules, leaves)))

    def keeps_gradients(self, args, kwargs) -> bool:
        """Whether the call records anything for a backward."""
        if not torch.is_grad_enabled():
            return False
        tensors = itertools.chain(self.model.parameters(), filter(is_tensor, tree_flatten((args, kwargs))[0]))
        return any(tensor.requires_grad for tensor in tensors)

    def prepared(self, args, kwargs):
        """The plan for these arguments."""
        self.captured_for(args, kwargs, self._key(every_module(self.model).values(), *tree_flatten((args, kwargs))))
        return self.plan

    def captured_for(self, args, kwargs, key) -> tuple[Any, Capture]:
        entries = self.captures.get(key, [])
        latest = next((each for each in entries if each[1].reads.are_same()), None) or self._planned(args, kwargs)
        self.captures.pop(key, None)
        self.captures[key] = [latest, *(each for each in entries if each is not latest)]
        if sum(map(len, self.captures.values())) > _MOST_PLANS:
            oldest = next(iter(self.captures))
            self.captures[oldest].pop()
            if not self.captures[oldest]:
                self.captures.pop(oldest)
        run, captured, self.plan = latest
        return run, captured

    def _key(self, modules, leaves, spec):
        named = (tensors for module in modules for tensors in (module._parameters, module._buffers))
        own = [tensor for tensors in named for tensor in tensors.values() if tensor is not None]
        return (
            spec,
            tuple(map(_leaf, leaves)),
            given_places(leaves),
            tuple(map(_meta, own)),
            _shared([*own, *filter(is_tensor, leaves)]),
            tuple(module.training for module in modules),
            attributes(modules),
            *_autocast(),
        )

    def _planned(self, args, kwargs):
        try:
            return self._capture(args, kwargs)
        except (BudgetError, PlanError) as error:
            if not self.captures:
                raise
            _, last, _ = list(self.captures.values())[-1][0]
            now = described(self.model, args, kwargs, self.differentiate)
            if isinstance(error, PlanError):
                raise PlanError(f"{error} {another_plan(last.made_for, now)}") from None
            message = f"{error} {other_bytes(last.made_for, now, error.budget)}"
            raise BudgetError(message, error.least_bytes, error.budget) from None

    def _capture(self, args, kwargs):
        # Capturing and planning are not part of the step: a mode that observes the step must not see them.
        with _disable_current_modes(), capture(self.model, args, kwargs, self.differentiate) as captured:
            graph = captured_graph(captured, self.model, args, kwargs, self.differentiate, self.optimizer)
            plan = self.planner(graph)
            captured.joint._aot_state.fw_metadata.bw_donated_idxs = []  # backward may run again (retain_graph)
            compiled = aot_compile_joint_with_descriptors(
                captured.joint,
                partition_fn=partitioner(graph, plan.schedule),
                fw_compiler=run_boxed,
                bw_compiler=run_boxed,
            )
        depends, read, strides = depends_on(graph), _read_later(graph, plan.schedule), gradient_strides(graph)
        own = (*self.model.parameters(), *self.model.buffers())
        given = filter(is_tensor, tree_flatten((args, kwargs))[0])
        lacks_data = any(tensor.is_meta for tensor in own) and not all(tensor.is_meta for tensor in given)

        def run(*inputs):
            if lacks_data:
                raise TraceError(
                    "the model is on the meta device, so that it can be planned, but not run on data: call "
                    "model.to_empty(device=...) and load its state first"
                )
            outputs = compiled(*inputs)
            differentiable_once(outputs)
            gradients_as_planned(outputs, strides)
            unchanged_until_backward(outputs, inputs, read)
            leave_undefined(outputs, depends)
            return outputs

        return run, captured, plan


def partitioner(graph: JointGraph, schedule):
    """AOTAutograd's ``partition_fn`` that splits `graph` as `schedule` says."""

    def partition(joint, inputs, *, num_fwd_outputs, **_):
        rewritten = rewrite(graph, schedule)
        if num_fwd_outputs != rewritten.num_outputs:
            raise TraceError(f"the graph returns {rewritten.num_outputs} values, but torch expects {num_fwd_outputs}")
        return rewritten.forward, rewritten.backward

    return partition


def run_boxed(gm, example_inputs):
    """A compiler for AOTAutograd: the module's operations one by one, arguments freed after their last use."""
    return boxed(gm)


def _leaf(leaf):
    """The part of an argument that a capture depends on."""
    if is_tensor(leaf):
        return _meta(leaf)
    value = plain(leaf)
    if value is None:
        try:
            hash(leaf)
        except TypeError:
            raise TypeError(
                f"an argument of type {type(leaf).__name__} cannot be compared from call to call: pass tensors, "
                "numbers, strings and the like, in lists, tuples and dicts"
            ) from None
        return leaf
    return value


def _meta(tensor):
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _shared(tensors) -> tuple:
    """The tensors that share the storage of an earlier one: (index, index of that one, elements between them)."""
    first: dict[int, int] = {}
    shared = []
    for index, tensor in enumerate(tensors):
        if tensor.layout is torch.strided:
            try:
                storage = tensor.untyped_storage()._cdata
            except NotImplementedError as error:
                raise RuntimeError(
                    f"a planned step takes plain tensors; in torch.func and torch.vmap call the model itself ({error})"
                ) from None
            earlier = first.setdefault(storage, index)
            if earlier != index:
                shared.append((index, earlier, tensor.storage_offset() - tensors[earlier].storage_offset()))
    return tuple(shared)


def _autocast():
    devices = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    return (*devices, torch.is_autocast_cache_enabled())


def _read_later(graph: JointGraph, schedule: Schedule) -> tuple[tuple[int, str], ...]:
    """(index, name for errors) of the step's inputs that its backward reads, so that they must not change before it."""
    runs = (graph.nodes[step.id] for step in schedule.backward if step.kind == COMPUTE)
    read = {storage for node in runs for source in node.inputs for storage in graph.nodes[source].storages}
    inputs = [node for node in map(graph.nodes.__getitem__, graph.analysis.placeholders) if node.phase == FORWARD]
    return tuple((place, _called(graph, node)) for place, node in enumerate(inputs) if read & set(node.storages))


def _called(graph: JointGraph, node: Node) -> str:
    name = getattr(graph.analysis.fx[node.id].meta["desc"], "target", None)
    return "an argument" if name is None else f"{graph.storages[node.storages[0]].category} {name!r}"
