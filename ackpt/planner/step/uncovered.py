"""Report memory around a planned step that its plan does not count.

`Uncovered` counts what earlier forwards of the step still hold, gradients and outputs, where a forward and its backward
begin. It warns of a loss outside the model, and of the state of an optimizer that is not planned, which a global hook
of torch reports. On a GPU the allocator's peak shows whether the step stayed within its budget; on a CPU torch counts
none.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from ackpt.core.budget import is_share
from ackpt.core.errors import warn
from ackpt.metering.gpus import MIB
from ackpt.metering.meter import memory_format
from ackpt.metering.resident import storages_of
from ackpt.planner.capture.inspection.model_checks import is_tensor
from ackpt.planner.capture.optimizer_state import cross_entropy_bytes
from ackpt.planner.capture.outputs import flatten_outputs
from ackpt.planner.parts.live_bytes import _SCALAR, allocated, with_peak
from ackpt.planner.request import Request
from ackpt.planner.schedule.plan import Plan

from .compiled_schedule import DROPPED, KEPT, SAVED, Check

_WORKSPACES = 2 * 32 * MIB  # of cuBLAS, one for the forward's thread and one for backward's
_GRADIENTS = (
    "If you accumulate gradients, give accumulation=True, which counts both; otherwise call optimizer.zero_grad(), "
    "which sets them to None, before the step."
)
_OUTPUTS = (
    "Keep the loss only, as in loss = model(**batch).loss, delete the other outputs before backward, or plan with "
    "outputs='keep'."
)
_RETAINED = "Add the losses and call backward() once, or give a larger budget in bytes."
_EARLIER = (
    "Call backward() and drop the outputs before the next forward, or plan a module whose forward calls this one for "
    "all inputs and returns the loss."
)
_WITHOUT_GRADIENTS = "Run it before the forward that has gradients, or after the backward."


class Room(NamedTuple):
    """The bytes that a plan leaves for other memory.

    ``forward``, ``backward``, ``between``: its limit minus the peak of the forward, the peak of the backward, and the
    bytes that are live between the two; ``live``: these live bytes. ``whole``: the limit plus the resident bytes.
    """

    forward: int
    backward: int
    between: int
    live: int
    whole: int

    @classmethod
    def of(cls, plan: Plan) -> "Room | None":
        """The room of `plan`; None if it has no limit."""
        if (limit := plan.limit_bytes) is None:
            return None
        live, boundary = plan.timeline.live, plan.timeline.boundary or 0
        most, later = max(live[: boundary + 1]), max(live[boundary:])
        between = live[boundary]
        return cls(limit - most, limit - later, limit - between, between, limit + plan.resident_bytes)


class Forward:
    """A planned forward, and what of it is still allocated.

    ``leaves``: the inputs that get a gradient, by id. ``node``: returns its autograd node until backward has freed what
    the node saves. ``arguments``, ``outputs``: weak references to storages, with their bytes, fates and indices.
    """

    def __init__(self, leaves: set[int], arguments: Sequence[torch.Tensor], room: Callable[[], Room | None]):
        self.leaves, self.room = leaves, room
        self.node: Callable[[], Any] = lambda: None
        storages = (storage for tensor in arguments for storage in storages_of(tensor))
        self.arguments = {each._cdata: (StorageWeakRef(each), each.nbytes()) for each in storages}
        self.outputs: dict[int, tuple[StorageWeakRef, int, str, str]] = {}
        self._scalars: list[tuple[StorageWeakRef, int]] = []
        self.is_reported = False

    def returns(self, node: Any, outputs: Mapping[int, tuple[Any, str]]) -> None:
        """Note its autograd node and its `outputs` that are no inputs: by index, each with its fate in backward."""
        self.node = weakref.ref(node)
        for at, (tensor, fate) in outputs.items():
            for each in storages_of(tensor) if isinstance(tensor, torch.Tensor) else ():
                if each.nbytes() > _SCALAR:
                    words, reference = f"output {at} of shape {list(tensor.shape)}", StorageWeakRef(each)
                    if tensor.numel() == 1 and tensor.storage_offset() == 0 and each._cdata not in self.outputs:
                        self._scalars.append((reference, tensor.element_size()))
                    self.outputs[each._cdata] = reference, each.nbytes(), fate, words

    def shrink_scalars(self) -> None:
        """After its backward, reduce the storages of outputs of one element to it, if no other tensor shares them.

        Losses such as that of ``mse_loss`` have a storage of the size of their input, and loops keep them for a step.
        """
        for reference, size in self._scalars if self.node() is None else ():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            # One use is `storage`. Torch makes storages that NumPy reads not resizable.
            if storage is not None and storage.resizable() and torch._C._storage_Use_Count(storage._cdata) == 2:
                storage.resize_(size)
                self.outputs.pop(storage._cdata, None)

    def referenced(self, *fates: str) -> dict[int, tuple[int, str]]:
        """The outputs, with these fates if any, that are still referenced: their bytes, and what they are."""
        alive = {key: each for key, each in self.outputs.items() if not each[0].expired()}
        return {key: (size, words) for key, (_, size, fate, words) in alive.items() if not fates or fate in fates}

    def held_bytes(self, counted: set[int]) -> int:
        """What is still allocated, except storages that are `counted` already; adds its own to these."""
        total = 0
        storages = {key: size for key, (size, _) in self.referenced().items()}
        if self.node() is not None and (room := self.room()) is not None:
            total = room.live  # with these outputs
            for key, (ref, size, fate, _) in self.outputs.items():
                if fate != DROPPED and (key in counted or (fate == KEPT and ref.expired())):
                    total -= size
            counted.update(self.referenced(SAVED, KEPT))
            storages |= {key: size for key, (ref, size) in self.arguments.items() if not ref.expired()}
        total += sum(size for key, size in storages.items() if key not in counted)
        counted.update(storages)
        return total


class _Arrived(threading.local):
    """The leaves whose gradients the present backward, a task of autograd's engine, has computed."""

    task = -1
    leaves: frozenset[int] = frozenset()


_arrived = _Arrived()


class Uncovered:
    """The memory that the budget of a step of `model` does not cover, and the errors and warnings about it."""

    def __init__(self, model: nn.Module, request: Request):
        self.model, self.request, self.budget = model, request, request.budget
        self._is_bounded = any(each is not None for each in (request.budget, request.plan, request.planner))
        self._is_in_bytes = self.budget is not None and not is_share(self.budget)
        self._forwards: list[Forward] = []  # those whose memory may still be allocated
        self._has_loss: bool | None = None  # None before the first call
        self._has_exceeded = False  # on a GPU
        self._unplanned: tuple[str, int] | None = None  # an optimizer and the bytes of its state
        _ALL.add(self)
        if self._is_in_bytes and request.loop.optimizer is None:
            _WATCHING.add(self)
            _observe_optimizers()

    def begin(self, inputs, arguments, room: Callable[[], Room | None]) -> Callable[[Any, Mapping], Check] | None:
        """Check what is allocated before a planned forward with these `inputs`, among them `arguments`.

        Returns a function of the autograd node and the outputs, which returns the check before backward; None without
        a budget.
        """
        if not self._is_bounded:
            return None
        for each in self._forwards:
            each.shrink_scalars()
        self._forwards = [each for each in self._forwards if each.node() is not None or each.referenced()]
        leaves = [tensor for tensor in inputs if tensor.is_leaf and tensor.requires_grad]
        forward = Forward(set(map(id, leaves)), arguments, room)
        self._check(forward, leaves, "forward", False)

        def returned(node, outputs) -> Check:
            forward.returns(node, outputs)
            self._forwards.append(forward)
            return check

        def check(gradients) -> None:
            retains = torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
            task = torch._C._current_graph_task_id()
            if task != _arrived.task:
                _arrived.task, _arrived.leaves = task, frozenset()
            self._check(forward, leaves, "backward", retains)
            _arrived.leaves |= forward.leaves
            if not retains:
                forward.node = lambda: None

        return returned

    def without_gradients(self, run: Callable[[], Any]) -> Any:
        """The outputs of `run`, a call without gradients; it counts if the backward of an earlier call is to come."""
        pending = [each for each in self._forwards if each.node() is not None]
        if not pending:
            return run()
        parameters = [*self.model.parameters()]
        outputs, size = with_peak(run, parameters[0].device)
        self._check(
            pending[-1], [each for each in parameters if id(each) in pending[-1].leaves], "between", False, size
        )
        return outputs

    def _check(self, forward: Forward, leaves: Sequence[torch.Tensor], phase: str, retains: bool, size=0) -> None:
        """Report if `phase` of `forward` begins while more is allocated than its budget allows.

        `size`: the bytes that a forward without gradients has allocated between forward and backward.
        """
        gradients = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
        if self.request.loop.accumulation:
            gradients -= sum(leaf.nbytes for leaf in leaves if isinstance(leaf, nn.Parameter))
        outputs = {} if size else forward.referenced(DROPPED)  # none before the forward
        others = (each for one in _ALL for each in one._forwards if one is self or each.leaves & forward.leaves)
        counted = {*forward.arguments, *forward.outputs}
        earlier = sum(each.held_bytes(counted) for each in others if each is not forward)
        if phase == "backward":  # autograd sums the gradients of several forwards before it adds them to `.grad`
            earlier += sum(leaf.nbytes for leaf in leaves if id(leaf) in _arrived.leaves)
        if (gradients <= 0 and not (outputs or retains or earlier or size)) or (room := forward.room()) is None:
            return
        _, largest = max(outputs.values(), default=(0, ""))
        causes = [
            (gradients, "of gradients exist", _GRADIENTS),
            (sum(size for size, _ in outputs.values()), f"of outputs are still referenced ({largest})", _OUTPUTS),
            (room.live * retains, "of activations stay allocated because of retain_graph=True", _RETAINED),
            (earlier, "of other forwards and their gradients are allocated", _EARLIER),
            (size, "were allocated by a forward without gradients", _WITHOUT_GRADIENTS),
        ]
        more, allowed = sum(each for each, *_ in causes), getattr(room, phase)
        if more <= allowed or forward.is_reported:
            return
        peak, whole = room.whole - allowed + more, room.whole
        causes = [cause for cause in causes if cause[0] > 0]
        said = " and ".join(f"{memory_format(size)} {words}" for size, words, _ in causes)
        fixes = " ".join(fix for *_, fix in causes)
        budget = "" if self.budget is None else f" {self.budget!r}"
        begins = "backward has not begun and" if size else f"{phase} begins while"
        message = (
            f"{begins} {said}, which would exceed the budget{budget}: the peak would be {memory_format(peak)} "
            f"({peak} bytes), and {memory_format(whole)} ({whole} bytes) are allowed. {fixes}"
        )
        if more - earlier - size <= allowed and not self._is_in_bytes:  # a fraction refers to a step of one forward
            warn(message)
        else:
            self.request.report(f"{message} on_exceed='warn' lets such steps run.", peak)
        forward.is_reported = True

    def note_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        """Warn if no output that gets a gradient is a scalar, and those of the step before included one."""
        shapes = [tuple(output.shape) for output in outputs]
        had, self._has_loss = self._has_loss, any(all(isinstance(n, int) and n == 1 for n in shape) for shape in shapes)
        if self.budget is None or self._has_loss or had is False:
            return
        said = ", ".join(str(list(shape)) for shape in shapes)
        size = sum(output.numel() * output.element_size() for output in outputs)  # a symbol if the sizes are
        said += f", {memory_format(size)} ({size} bytes)" if isinstance(size, int) else ""
        entropy = cross_entropy_bytes(outputs)
        of_loss = "" if entropy is None else f" (a cross-entropy on them: {memory_format(entropy)}, {entropy} bytes)"
        warn(
            f"no output of {type(self.model).__name__} is a scalar loss, so the budget {self.budget!r} covers the "
            f"model alone, not what a loss outside of it allocates for the outputs of shape {said}{of_loss}. "
            "Give it as loss=fn, a function of outputs and batch, or compute it in forward, and check the whole step "
            "with ackpt.measure."
        )

    def call(self, run: Callable[[], Any], plan: Callable[[], Plan]) -> Any:
        """The outputs of `run`, a call of the model as planned; `plan` returns its plan."""
        if self._unplanned is not None:
            (name, size), self._unplanned = self._unplanned, None
            peak = plan().peak_bytes
            warn(
                f"the budget {self.budget!r} does not count the state of {name}, {memory_format(size)} ({size} bytes): "
                f"with it, the planned peak is {memory_format(peak + size)}, not {memory_format(peak)}. Give "
                "optimizer= where you give the budget, which then counts the state and the optimizer's step."
            )
        is_outside = self._has_loss is False or self.request.loop.loss is not None
        is_outside = self.budget is not None and is_outside and not self._has_exceeded
        device = next((each.device for each in self.model.parameters()), None) if is_outside else None
        counters = allocated(device) if device is not None and device.type == "cuda" else None
        outputs = run()
        if counters is not None:
            tensors = [leaf for leaf in flatten_outputs(outputs)[0] if is_tensor(leaf) and leaf.grad_fn is not None]
            at_end = torch.autograd.Variable._execution_engine.queue_callback  # pyright: ignore[reportAttributeAccessIssue]
            check = partial(self._check_peak, device, *counters, plan)
            for node in {tensor.grad_fn for tensor in tensors}:
                node.register_prehook(lambda gradients: at_end(check))
        return outputs

    def _check_peak(self, device: torch.device, begin: int, before: int, plan: Callable[[], Plan]) -> None:
        """Warn if the peak of `device` has grown since it was `before`, and exceeds the budget."""
        (_, peak), limit = allocated(device), plan().limit_bytes
        if self._has_exceeded or limit is None or peak <= max(before, begin + limit + _WORKSPACES):
            return
        self._has_exceeded = True
        excess, planned = peak - begin - limit, self.request.loop.loss
        fix = "Give it as loss=fn, or compute it in forward."
        if planned is not None:
            least = planned.step_bytes + excess
            fix = (
                f"loss= allocates {memory_format(planned.step_bytes)} ({planned.step_bytes} bytes), and this one at "
                f"least {memory_format(least)} ({least} bytes): give the loss that runs."
            )
        warn(
            f"this step exceeded the budget {self.budget!r} by {memory_format(excess)}, with a peak of "
            f"{memory_format(peak)} on {device}: its loss is computed outside of {type(self.model).__name__}. {fix}"
        )

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the state of `optimizer`, whose step has just ended, if it has parameters of the model."""
        own = set(map(id, self.model.parameters()))
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            return
        _WATCHING.discard(self)
        states = (state for parameter, state in optimizer.state.items() if id(parameter) in own)
        tensors = [leaf for state in states for leaf in tree_leaves(state) if is_tensor(leaf)]
        size = sum({each._cdata: each.nbytes() for tensor in tensors for each in storages_of(tensor)}.values())
        if size:
            self._unplanned = type(optimizer).__name__, size


_ALL: weakref.WeakSet[Uncovered] = weakref.WeakSet()
_WATCHING: weakref.WeakSet[Uncovered] = weakref.WeakSet()


@cache
def _observe_optimizers() -> None:
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    for each in list(_WATCHING):
        each.stepped(optimizer)
