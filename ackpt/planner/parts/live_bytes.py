"""Count the live bytes of steps while they run: `LiveBytes` on a CPU, `AllocatedBytes` on a GPU.

On a CPU, a dispatch mode follows the results of all operations of the forward and of recomputations, and adds the
workspace of each operation. Backward is counted node by node, because autograd's engine sums gradients between the
nodes, and under a mode it would no longer sum them in place (``isTensorSubclassLike`` in
torch/csrc/autograd/input_buffer.cpp). On a GPU, torch's allocator counts.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch._C._autograd import _profiler_enabled
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_flatten, tree_leaves

from ackpt.core.autograd_state import phase
from ackpt.metering.autograd_engine import PRODUCTS, SAVE_NUMBERS, number_bytes
from ackpt.metering.resident import storages_of
from ackpt.metering.run_alone import begin_counting, end_counting, in_new_thread, run_counted
from ackpt.metering.timeline import MeterError
from ackpt.planner.capture.in_place import as_in_eager
from ackpt.planner.costs.operation_costs import flops, traffic
from ackpt.planner.costs.workspace import allocation_of
from ackpt.planner.policies.search.frontier import FLOPS_PER_BYTE

_LIFT = torch.ops.aten.lift_fresh.default
_ACCUMULATES = "AccumulateGrad"  # belongs to a parameter, not to the step
RNG_STATE_BYTES = torch.get_rng_state().nbytes
_MOST_WORKSPACES = 10_000
_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
_SCALAR = 16  # bytes; a loop usually refers to the loss of the last step
# Their formulas write out of place under a mode (`isTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp and
# aten/src/ATen/native/TensorAdvancedIndexing.cpp), and would allocate more: they are counted by a profiler.
_OUT_OF_PLACE = (
    *("Index", "Gather", "Masked", "Take", "Put", "Scatter", "Max", "Min", "Median", "Nanmedian", "Mode", "Kthvalue"),
    *("Topk", "Sort", "Msort", "Cummax", "Cummin", "Cumprod", "Prod", "Amax", "Amin", "Aminmax", "Trace", "Linalg"),
)


def allocated(device: torch.device) -> tuple[int, int]:
    """Bytes that the allocator of a GPU has allocated now, and at its peak."""
    counted = torch.cuda.memory.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return counted["current"], counted["peak"]


def with_peak(run: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """The result of `run`, and the peak of the bytes that it allocated; 0 inside a profiler and below a GPU's peak."""
    if device.type != "cuda" and not _profiler_enabled():
        result, _, peak = run_counted(run)
        return result, peak
    begin, before = allocated(device) if device.type == "cuda" else (0, 0)
    result = run()
    peak = allocated(device)[1] if device.type == "cuda" else 0
    return result, (peak - begin) * (peak > before)


class Backward:
    """One backward: the ``forwards`` that it has reached, the ``most`` live bytes, and at which autograd node."""

    def __init__(self, live_bytes: int):
        self.forwards: list[Any] = []
        self.most: tuple[int, str] = live_bytes, ""
        self.arrived: dict[Any, weakref.ref] = {}  # the first gradient of an autograd node's output
        self.sums: dict[Any, int] = {}  # bytes of those that were summed into new memory


class Counter(TorchDispatchMode):
    """Counts the bytes that are live in steps, beyond those that are allocated before and after them.

    `ended` is called at the end of every backward that `begin` was called in; it may raise an error. ``bytes``: live
    now. ``bound``: an upper bound; a forward that exceeds it calls ``exceeded`` once, with its live bytes. ``cost``: of
    all operations so far, as plans compare it, while ``counts_cost``. ``watches``: whether recomputations count their
    backward.
    """

    bytes: int

    def __init__(self, ended: Callable[[Backward], None]):
        super().__init__()
        self.bound: int | None = None
        self.exceeded: Callable[[int], None] | None = None
        self.counts_cost = self.watches = False
        self.cost = 0.0
        self.in_forward = False
        self._ended = ended
        self._backwards: dict[int, Backward] = {}  # by autograd's id
        self._thread = threading.local()  # `backward`: that of the thread

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, so that Dynamo compiles what it would compile without this mode."""
        return True

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Count the forward that runs inside."""
        self.in_forward = True
        try:
            with self:
                yield
        finally:
            self.in_forward = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = as_in_eager(func)(*args, **kwargs)
        self._add_cost(func, args, kwargs, result)
        return result

    def _add_cost(self, func, args, kwargs, result) -> None:
        if self.counts_cost and (self.in_forward or phase.recomputing):
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            if all(tensor.layout is torch.strided for tensor in tensors):
                node: Any = SimpleNamespace(op="call_function", target=func, name=str(func))
                moved = sum(traffic(node, args, kwargs, result))
                self.cost += float(flops(node, args, kwargs, result) + FLOPS_PER_BYTE * moved)

    def begin(self, forward: Any) -> bool:
        """Note that backward has reached `forward`; whether it is the first that this backward reaches."""
        task = torch._C._current_graph_task_id()
        backward = self._backwards.get(task)
        if is_first := backward is None:
            self._backwards = {key: each for key, each in self._backwards.items() if each is not self._of_thread()}
            backward = self._thread.backward = self._backwards[task] = Backward(self.bytes)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))
        if forward not in backward.forwards:
            backward.forwards.append(forward)
        return is_first

    def _of_thread(self) -> Backward | None:
        return getattr(self._thread, "backward", None)

    def _end(self, task: int) -> None:
        backward = self._backwards.pop(task)
        self._thread.backward = None
        self._ended(backward)


class LiveBytes(Counter):
    """The live bytes of all steps of one model on a CPU: those that their operations have allocated and not freed.

    ``sizes``: a hash of the sizes of all results of the present forward, in order.
    """

    def __init__(self, ended: Callable[[Backward], None]):
        super().__init__(ended)
        self.bytes = 0
        self.sizes = 0
        self._segment = 0
        self._followed: dict[int, tuple[weakref.ref, int]] = {}
        self._lock = threading.RLock()  # several threads may run steps
        self._start = 0
        self._numbers = 0  # bytes of the factors that the present forward or recomputation saves
        self._gradients: list[int] = []  # keys of storages
        self._workspaces: dict[Any, int] = {}

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        self.sizes, self._start = 0, torch.autograd._get_sequence_nr()
        for key in [key for key, (_, size) in [*self._followed.items()] if size <= _SCALAR]:  # other threads add
            self.freed(key)
        with self.without_numbers(), super().forward():
            yield

    @contextlib.contextmanager
    def without_numbers(self) -> Iterator[None]:
        """Count the numbers that products save inside only until the end, when they are dropped or followed."""
        before = self._numbers
        try:
            yield
        finally:
            with self._lock:
                self.bytes -= self._numbers - before
                self._numbers = before

    def segment_peak(self) -> int:
        """The most bytes that were live since the last call of this method."""
        peak, self._segment = self._segment, self.bytes
        return peak

    def gradients(self, existing: Iterable[torch.Tensor], counts: bool = True) -> None:
        """Stop counting the gradients of the last call; count the `existing` ones of parameters if `counts`."""
        for key in self._gradients:
            self.freed(key)
        tensors = list(existing)
        self._gradients = [storage._cdata for tensor in tensors for storage in storages_of(tensor)]
        for tensor in tensors if counts else ():
            self.follow(tensor)

    def accumulated(self, parameters: Iterable[torch.Tensor]) -> None:
        """Count the gradients of `parameters` in place of the sums from which the engine made them."""
        sums = {} if (backward := self._of_thread()) is None else backward.sums
        for each in parameters:
            if each.is_leaf and each.grad is not None:
                with self._lock:
                    self.bytes -= sums.pop((id(each), 0), 0)
                self.follow(each.grad)

    @contextlib.contextmanager
    def more(self, size: int) -> Iterator[None]:
        """Inside, `size` more bytes are live, which no operation has allocated."""
        with self._lock:
            self.bytes += size
        self._reached(self.bytes)
        try:
            yield
        finally:
            with self._lock:
                self.bytes -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._count_states()
        arguments = () if func is _LIFT else tree_leaves((args, kwargs))
        existing = {s._cdata for leaf in arguments if isinstance(leaf, torch.Tensor) for s in storages_of(leaf)}
        result, workspace = self._run(func, args, kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.follow(leaf, existing)
        if func in SAVE_NUMBERS and torch.is_grad_enabled() and args[0].requires_grad:
            with self._lock:
                self._numbers += number_bytes(args[1])
                self.bytes += number_bytes(args[1])
        self._reached(self.bytes + workspace)
        self._add_cost(func, args, kwargs, result)
        return result

    def _run(self, func, args, kwargs) -> tuple[Any, int]:
        """The result of an operation, and its workspace: its peak beyond its results."""
        key = _signature(func, args, kwargs)
        call = as_in_eager(func)
        if key in self._workspaces:
            return call(*args, **kwargs), self._workspaces[key]
        if _profiler_enabled():  # by the user, and a thread can have only one
            left, peak = 0, in_new_thread(lambda: _workspace(func, args, kwargs))
            result = call(*args, **kwargs)
        else:
            result, left, peak = run_counted(lambda: call(*args, **kwargs))
        if len(self._workspaces) >= _MOST_WORKSPACES:
            self._workspaces.clear()
        # Under a dispatch mode, torch converts a number to a tensor twice.
        takes = zip(args, func._schema.arguments) if isinstance(func, torch._ops.OpOverload) else ()
        numbers = [value for value, each in takes if isinstance(each.type, torch.TensorType)]
        workspace = peak - left + sum(number_bytes(each) for each in numbers if isinstance(each, (int, float, complex)))
        self._workspaces[key] = workspace
        return result, workspace

    def follow(self, tensor: torch.Tensor, existing: Collection[int] = ()) -> None:
        """Count a tensor as long as it is allocated, without the `existing` storages."""
        for storage in storages_of(tensor):
            key, size = storage._cdata, storage.nbytes()
            with self._lock:
                if key in self._followed:
                    before = self._followed[key][1]
                    if before == size:
                        continue
                    self.bytes -= before  # resized in place
                elif key in existing:
                    continue
                self._followed[key] = weakref.ref(storage, lambda _, key=key: self.freed(key)), size
                self.bytes += size
            if self.in_forward:
                self.sizes = hash((self.sizes, size))

    def _count_states(self) -> None:
        """Count the states of random numbers that torch's checkpoint keeps: as long as its hooks exist."""
        pack = (_top_hooks(True) or (None,))[0]
        if pack is not None and pack.__module__ == torch.utils.checkpoint.__name__ and id(pack) not in self._followed:
            with self._lock:
                key = id(pack)
                self._followed[key] = weakref.ref(pack, lambda _: self.freed(key)), RNG_STATE_BYTES
                self.bytes += RNG_STATE_BYTES

    def freed(self, key: int) -> None:
        """Stop counting a storage."""
        with self._lock:
            if key in self._followed:
                self.bytes -= self._followed.pop(key)[1]

    def _reached(self, size: int, name: str | None = None) -> None:
        self._segment = max(self._segment, size)
        if self.in_forward:
            if self.bound is not None and size > self.bound and self.exceeded is not None:
                self.bound = None  # once
                self.exceeded(size)
        elif (backward := self._of_thread()) is not None and size > backward.most[0]:
            if name is None:
                node = torch._C._current_autograd_node()
                name = "" if node is None else node.name()
            backward.most = size, name

    def count_backward(self, outputs: Any) -> None:
        """Count the backward that follows, too; ``outputs``: those of the forward."""
        self._watch(outputs, self._start)

    def recomputed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The results of `call`, which recomputes a region in backward; counts it and its own backward."""
        start = torch.autograd._get_sequence_nr()
        with self.without_numbers(), self:
            outputs = call(*args, **kwargs)
        if self.watches:
            self._watch(outputs, start)
        return outputs

    def _watch(self, outputs: Any, start: int) -> None:
        """Count what autograd nodes allocate, if they were created since `start` and lead to `outputs`."""
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        left = [tensor.grad_fn for tensor in tensors]
        seen = set(left)
        while left:
            node: Any = left.pop()
            if node.name().endswith(_ACCUMULATES) or node._sequence_nr() < start:
                continue
            self._watch_node(node)
            for source, _ in node.next_functions:
                if source is not None and source not in seen:
                    seen.add(source)
                    left.append(source)

    def _watch_node(self, node: Any) -> None:
        name, targets, number = node.name(), node.next_functions, node._sequence_nr()
        # `_saved_other` would run hooks on saved tensors, and with them the recomputation of torch's own checkpoint.
        other = node._raw_saved_other.data if name in PRODUCTS else None
        if isinstance(other, torch.Tensor) and other.dim() == 0:
            self.follow(other)
        is_python = isinstance(node, torch.autograd.function.BackwardCFunction)
        if is_python:  # a hook for its results would keep its gradients until it ends
            forward = getattr(type(node), "_forward_cls", None)
            apply = "apply_boxed" if getattr(forward, "boxed_grads_call", False) else "apply"  # of compiled modules
            replaced = vars(node).get(apply), getattr(type(node), apply)
            setattr(node, apply, partial(_counted_apply, self, weakref.ref(node), replaced, targets))
        is_composed = not name.startswith(_OUT_OF_PLACE)
        start = 0
        ends: Callable[[], Any] | None = None

        def before(gradients):
            nonlocal start, ends
            backward = self._of_thread() or Backward(0)
            for output, gradient in enumerate(gradients):
                with self._lock:
                    self.bytes -= backward.sums.pop((number, output), 0)
                backward.arrived.pop((number, output), None)
                if gradient is not None:
                    self.follow(gradient)
            self._reached(self.bytes, name)
            if is_python:
                return
            start = self.bytes
            if is_composed or _profiler_enabled():
                _push_mode(self)
                ends = _pop_mode
            else:
                begin_counting()
                ends = end_counting

        def after(results, gradients):
            assert ends is not None
            if isinstance(counted := ends(), tuple):
                self._reached(start + counted[1], name)
            self._arrives(results, targets)

        node.register_prehook(before)
        if not is_python:
            node.register_hook(after)

    def _arrives(self, results, targets) -> None:
        """Count the results of a node, and the sums of gradients that autograd's engine makes of them.

        The engine never adds in place to a followed storage: it allocates the first sum, then frees both gradients.
        """
        for result in results:
            if result is not None:
                self.follow(result)
        backward = self._of_thread() or Backward(0)
        for result, (target, number) in zip(results, targets):
            if result is None or target is None:
                continue
            key = id(target.variable) if target.name().endswith(_ACCUMULATES) else target._sequence_nr(), number
            if key in backward.sums:
                continue
            if key in backward.arrived and backward.arrived[key]() is not None:
                with self._lock:
                    backward.sums[key] = result.nbytes
                    self.bytes += result.nbytes
            else:
                backward.arrived[key] = weakref.ref(result)
        self._reached(self.bytes, "a sum of gradients")

    def sums_of_thread(self) -> set[Any]:
        """The keys of the sums of gradients that exist in the backward of this thread."""
        backward = self._of_thread()
        return set() if backward is None else set(backward.sums)

    def end_sums(self, earlier: Collection[Any] = ()) -> None:
        """Stop counting the sums of the backward of this thread, except the `earlier` ones."""
        if (backward := self._of_thread()) is not None:
            with self._lock:
                for key in backward.sums.keys() - earlier:
                    self.bytes -= backward.sums.pop(key)

    def _end(self, task: int) -> None:
        self.end_sums()
        super()._end(task)


class AllocatedBytes(Counter):
    """The live bytes of a step on a GPU, from torch's caching allocator, relative to the start of the forward.

    The allocator has one peak counter. While a step is recorded (``counts_cost``), it is reset at the end of each
    segment, which changes ``torch.cuda.max_memory_allocated()``. Other steps do not reset it, and are checked only if
    it rises.
    """

    sizes = 0

    def __init__(self, ended: Callable[[Backward], None]):
        super().__init__(ended)
        self._base = self._earlier = 0

    @property
    def bytes(self) -> int:
        """Live now."""
        return torch.cuda.memory_allocated() - self._base

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        self._base = torch.cuda.memory_allocated()
        self._earlier = torch.cuda.max_memory_allocated()
        if self.counts_cost:
            torch.cuda.reset_peak_memory_stats()
            with super().forward():
                yield
        else:
            yield
        if self.bound is not None and self.exceeded is not None and (size := self._risen()) > self.bound:
            self.exceeded(size)

    def _risen(self) -> int:
        """The most live bytes of this step, as far as the allocator's peak shows them."""
        most = torch.cuda.max_memory_allocated()
        return (most if self.counts_cost or most > self._earlier else torch.cuda.memory_allocated()) - self._base

    def segment_peak(self) -> int:
        if not self.counts_cost:
            return 0
        peak = torch.cuda.max_memory_allocated() - self._base
        torch.cuda.reset_peak_memory_stats()
        return peak

    def gradients(self, existing: Iterable[torch.Tensor], counts: bool = True) -> None:
        """Count the gradients that existed before the step."""
        self._base -= sum(tensor.untyped_storage().nbytes() for tensor in existing) if counts else 0

    def _nothing(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        """Do nothing: the allocator counts."""
        return contextlib.nullcontext()

    follow = freed = accumulated = count_backward = more = without_numbers = _nothing

    def recomputed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self:
            return call(*args, **kwargs)

    def _end(self, task: int) -> None:
        self._backwards[task].most = self._risen(), ""
        super()._end(task)


def _workspace(func, args, kwargs) -> int:
    """The workspace of an operation of torch at these sizes, from another run in a thread of its own.

    An operation that only reads gets its own arguments, because sparse tensors cannot be made up. One that writes, as
    norms do to running statistics without saying so, gets made-up values.
    """
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return 0
    try:
        with torch.no_grad():
            if not func._schema.is_mutable and "running_mean" not in {each.name for each in func._schema.arguments}:
                _, left, peak = run_counted(lambda: func(*args, **kwargs))
                return peak - left
            return allocation_of(SimpleNamespace(name="", target=func, module=""), func, (args, kwargs)).workspace
    except (MeterError, RuntimeError, TypeError):
        return 0


def _signature(func, args, kwargs) -> Any:
    """The properties that two calls of an operation must share to allocate the same bytes."""
    leaves, spec = tree_flatten((args, kwargs))
    described = [
        (leaf.dtype, leaf.layout, leaf.shape, leaf.stride() if leaf.layout is torch.strided else None)
        if isinstance(leaf, torch.Tensor)
        else leaf
        if isinstance(leaf, (int, str))
        else type(leaf)
        for leaf in leaves
    ]
    return func, spec, tuple(described)


def _counted_apply(live: LiveBytes, reference, replaced, targets, *gradients) -> Any:
    """Run and count the backward of a Python node; ``replaced``: that of a block or None, and of the node's class."""
    node, (of_block, of_class) = reference(), replaced
    if of_block is not None:  # which counts itself; the sums of its own backward end with it
        earlier = live.sums_of_thread()
        results = of_block(*gradients)
        live.end_sums(earlier)
    elif _profiler_enabled():
        with live:
            results = of_class(node, *gradients)
    else:
        start = live.bytes
        results, _, peak = run_counted(lambda: of_class(node, *gradients))
        live._reached(start + peak, node.name())
    # Results are for all arguments, targets for tensors only; `accumulated` counts gradients of a region's parameters.
    needed = zip(results if isinstance(results, tuple) else (results,), node.needs_input_grad)
    given = [(None, 0) if of_block and t[0].name().endswith(_ACCUMULATES) else t for t in targets if t[0] is not None]
    live._arrives([each for each, is_needed in needed if is_needed], given)
    return results
