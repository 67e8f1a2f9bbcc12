"""Count the live bytes of a step while it runs, and compare them with a bound, on a CPU.

A step in parts can allocate more than the measured step although it saves no more, for example because an expert gets
more tokens and so needs larger temporaries. `LiveBytes` counts the results of all operations while they are allocated.
A dispatch mode counts those of the forward and of recomputations. Backward is counted node by node, because autograd's
engine sums gradients between the nodes, and under a mode it would no longer sum them in place
(``isTensorSubclassLike`` in torch/csrc/autograd/input_buffer.cpp). Workspaces of kernels are not counted.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from ackpt.metering.autograd_engine import is_dense
from ackpt.metering.resident import storages_of

_local = threading.local()
_LIFT = torch.ops.aten.lift_fresh.default
_PLANNED = "CompiledFunctionBackward"
_ACCUMULATES = "AccumulateGrad"  # belongs to a parameter, not to the step
# Their formulas write out of place under a mode (`isTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp and
# aten/src/ATen/native/TensorAdvancedIndexing.cpp), and would allocate more: only their results are counted.
_OUT_OF_PLACE = (
    *("Index", "Gather", "Masked", "Take", "Put", "Scatter", "Max", "Min", "Median", "Nanmedian", "Mode", "Kthvalue"),
    *("Topk", "Sort", "Msort", "Cummax", "Cummin", "Cumprod", "Prod", "Amax", "Amin", "Aminmax", "Trace", "Linalg"),
)


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations allocate, each once while it is allocated.

    Args:
        bound: an upper bound on the live bytes; None for no bound.
        exceeded: called once if the live bytes exceed `bound`, with their number and the name of the running autograd
            node, None in the forward. It may raise an error. In backward it is called at the end, when all gradients
            are complete.
        done: called at the end of a backward that stayed within the bound.

    ``most_bytes``: the largest number of live bytes. ``sizes``: a hash of the sizes of all results of the forward, in
    order.
    """

    def __init__(
        self,
        bound: int | None = None,
        exceeded: Callable[[int, str | None], None] | None = None,
        done: Callable[[], None] | None = None,
    ):
        super().__init__()
        self.bytes = self.most_bytes = 0
        self.sizes = 0
        self.counts_backward = False
        self._bound, self._exceeded, self._done = bound, exceeded, done
        self._followed: dict[int, tuple[weakref.ref, int]] = {}
        self._in_forward = False
        self._start = 0
        self._task = -1  # of autograd: the backward that has begun
        self._most: tuple[int, str] = 0, ""  # in this backward
        self._arrived: dict[Any, weakref.ref] = {}  # the first gradient of an autograd node's output
        self._sums: dict[Any, int] = {}  # bytes of those that were summed into new memory

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, so that Dynamo compiles what it would compile without this mode."""
        return True

    @contextlib.contextmanager
    def counting(self) -> Iterator[LiveBytes]:
        """Count the forward that runs inside."""
        before = getattr(_local, "live", None)
        self._start, self._in_forward = torch.autograd._get_sequence_nr(), True
        _local.live = self
        try:
            with self:
                yield self
        finally:
            _local.live = before
            self._in_forward = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_lift = func is _LIFT
        given = () if is_lift else tree_leaves((args, kwargs))
        existing = {s._cdata for leaf in given if isinstance(leaf, torch.Tensor) for s in storages_of(leaf)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf, existing)
        return result

    def _add(self, tensor: torch.Tensor, existing=()) -> None:
        for storage in storages_of(tensor):
            key, size = storage._cdata, storage.nbytes()
            if key in self._followed:
                before = self._followed[key][1]
                if before == size:
                    continue
                self.bytes -= before  # resized in place
            elif key in existing:
                continue
            self._followed[key] = weakref.ref(storage, lambda _, key=key: self._freed(key)), size
            self.bytes += size
            if self._in_forward:
                self.sizes = hash((self.sizes, size))
            self._reached(self.bytes)

    def _freed(self, key: int) -> None:
        self.bytes -= self._followed.pop(key)[1]

    def _reached(self, size: int) -> None:
        self.most_bytes = max(self.most_bytes, size)
        if self._in_forward:
            if self._bound is not None and size > self._bound and self._exceeded is not None:
                self._bound = None  # once
                self._exceeded(size, None)
        elif size > self._most[0]:
            node = torch._C._current_autograd_node()
            self._most = size, "" if node is None else node.name()

    def count_backward(self, outputs: Any) -> None:
        """Count the backward that follows, too; ``outputs``: those of the forward."""
        self.counts_backward = True
        _references_of_one()
        self._watch(outputs, self._start, is_outer=True)

    def recomputed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The results of `call`, which recomputes a region in backward; counts it and its own backward."""
        start = torch.autograd._get_sequence_nr()
        with self:
            outputs = call(*args, **kwargs)
        if self.counts_backward:
            self._watch(outputs, start, is_outer=False)
        return outputs

    def _watch(self, outputs: Any, start: int, is_outer: bool) -> None:
        """Count what autograd nodes allocate, if they were created since `start` and lead to `outputs`."""
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        left = [tensor.grad_fn for tensor in tensors]
        seen = set(left)
        while left:
            node: Any = left.pop()
            if node.name().endswith(_ACCUMULATES) or node._sequence_nr() < start:
                continue
            self._watch_node(node, is_outer)
            for source, _ in node.next_functions:
                if source is not None and source not in seen:
                    seen.add(source)
                    left.append(source)

    def _watch_node(self, node: Any, is_outer: bool) -> None:
        name, targets, own = node.name(), node.next_functions, node._sequence_nr()
        is_python = isinstance(node, torch.autograd.function.BackwardCFunction)
        in_mode = not is_python and not name.startswith(_OUT_OF_PLACE)
        if is_python:  # a hook for its results would keep its gradients until it ends
            node.apply = partial(_counted_apply, self, weakref.ref(node), targets, name == _PLANNED)

        def before(gradients):
            if is_outer:
                self._begin()
            for number, gradient in enumerate(gradients):
                self.bytes -= self._sums.pop((own, number), 0)
                self._arrived.pop((own, number), None)
                if gradient is not None:
                    self._add(gradient)
            self._reached_in(name)
            if in_mode:
                _push_mode(self)

        def after(results, gradients):
            if in_mode:
                _pop_mode()
            self._arrives(results, targets)

        node.register_prehook(before)
        if not is_python:
            node.register_hook(after)

    def _arrives(self, results, targets) -> None:
        """Count the results of a node, and the new memory of those that autograd's engine cannot sum in place."""
        for result in results:
            if result is not None:
                self._add(result)
        for result, (target, number) in zip(results, targets):
            if result is None or target is None or target.name().endswith(_ACCUMULATES):
                continue
            key = target._sequence_nr(), number
            if key not in self._arrived:
                self._arrived[key] = weakref.ref(result)
            elif key not in self._sums and not _is_summed_in_place(self._arrived[key]()):
                self._sums[key] = result.nbytes
                self.bytes += result.nbytes
        self._reached_in("a sum of gradients")

    def _reached_in(self, name: str) -> None:
        if self.bytes > self._most[0]:
            self.most_bytes, self._most = max(self.most_bytes, self.bytes), (self.bytes, name)

    def _begin(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._most = task, (0, "")
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        size, node = self._most
        if self._bound is not None and size > self._bound:
            if self._exceeded is not None:
                self._exceeded(size, node)
        elif self._done is not None:
            self._done()


def _counted_apply(live: LiveBytes, reference, targets, in_mode: bool, *gradients: torch.Tensor | None) -> Any:
    """Run the backward of a node in Python; that of a planned module under the mode."""
    node = reference()
    with live if in_mode else contextlib.nullcontext():
        results = type(node).apply(node, *gradients)
    live._arrives(results if isinstance(results, tuple) else (results,), targets)
    return results


def _is_summed_in_place(first: torch.Tensor | None) -> bool:
    """Whether the engine adds a further gradient to this one in place: if nothing else refers to it."""
    return first is not None and is_dense(first) and _references(first) == _references_of_one()


def _references(tensor: Any) -> tuple[int, int]:
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@cache
def _references_of_one() -> tuple[int, int]:
    """The use counts of a tensor and its storage, as `_arrives` sees them, if only the engine refers to them."""
    found: list[tuple[int, int]] = []
    x = torch.ones((), requires_grad=True)
    y = x.sin()
    first: list[weakref.ref] = []

    def arrives(results, gradients):
        if first:
            found.append(_references(first[0]()))
        first.append(weakref.ref(results[0]))

    outputs: Any = y.sin(), y.cos()
    for output in outputs:
        output.grad_fn.register_hook(arrives)
    torch.autograd.grad(outputs[0] + outputs[1], x)
    return found[0]


def current() -> LiveBytes | None:
    """The `LiveBytes` that counts the forward in this thread, or None."""
    return getattr(_local, "live", None)
