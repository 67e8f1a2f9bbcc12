"""Guard a region: raise where a parameter or input changed before backward, restore buffers that the region updates.

``Watch`` records the version counter of every tensor that the region reads, and raises an error if one changed.
``MutableState`` handles buffers, attributes, global names, and containers in attributes that the region itself updates.
For the recomputation it restores the values from before the forward, and afterwards the present ones, so that running
statistics and counters change once per step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections import deque
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ackpt.autograd_state import version
from ackpt.errors import CheckpointError

from .reachable import LONGEST_CONTAINER

_SMALL = 1 << 20  # bytes; buffers up to this size are always copied before the region runs
_ABSENT = object()
_UNCHANGED_BUFFERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # larger buffers that a region did not change


@dataclasses.dataclass(frozen=True)
class Guarantees:
    """The guarantees beyond those of torch's checkpoint that are on; see :func:`guarantees`."""

    other_rng: bool = True
    unchanged: bool = True
    exact_graph: bool = True


_local = threading.local()


def current() -> Guarantees:
    return getattr(_local, "guarantees", _ALL)


_ALL = Guarantees()


@contextlib.contextmanager
def guarantees(*, other_rng: bool = True, unchanged: bool = True, exact_graph: bool = True) -> Iterator[None]:
    """Choose the guarantees, beyond those of torch's checkpoint, for the regions entered in this ``with`` block.

    All are on by default. Their cost depends on the number of modules and tensors of a region, not on tensor sizes: a
    few microseconds for a few modules, about a millisecond for fifty. It matters only for regions of tiny tensors.

    Args:
        other_rng: replay Python's ``random``, numpy and generator objects, in addition to torch's streams.
        unchanged: raise an error if a parameter, a buffer or a closed-over tensor changed between forward and
            recomputation, or if the recomputation takes another path. Buffers change once per step.
        exact_graph: outputs require grad exactly where those of the baseline do, and parameters receive their gradients
            through the outer graph: hooks fire once, DDP counts every gradient once, and sums have the baseline's
            order. If off, the forward runs without a graph and gradients accumulate inside the region, as in torch's
            reentrant checkpoint.

    Example:
        >>> import torch, ackpt
        >>> layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
        >>> with ackpt.guarantees(other_rng=False, unchanged=False):
        ...     y = ackpt.checkpoint(layer, x)
        >>> y.sum().backward()
        >>> layer.bias.grad
        tensor([1., 1.])
    """
    previous = current()
    _local.guarantees = Guarantees(other_rng, unchanged, exact_graph)
    try:
        yield
    finally:
        _local.guarantees = previous


class Watch:
    """The version counters and storages of tensors, which `check` compares with the present ones."""

    __slots__ = ("_marks",)

    def __init__(self, named_tensors):
        self._marks = [
            (tensor, name, version(tensor), storage(tensor), tensor.requires_grad) for tensor, name in named_tensors
        ]

    def check(self):
        for tensor, name, mark, memory, requires_grad in self._marks:
            if version(tensor) != mark or storage(tensor) != memory or tensor.requires_grad < requires_grad:
                how = "frozen" if tensor.requires_grad < requires_grad else "changed"
                raise changed_between(f"{_kind(tensor)} {name or 'without a name'!r}, {describe(tensor)},", how)


BACKWARD_FIRST = (
    "Run backward before the change (before optimizer.step(), load_state_dict() or any in-place operation), or change "
    "a clone instead."
)


def changed_between(tensor: str, how: str = "changed") -> CheckpointError:
    return CheckpointError(
        f"{tensor} was {how} between the forward of this checkpointed region and its backward, so the recompute would "
        f"not repeat the forward. {BACKWARD_FIRST}"
    )


def _kind(tensor) -> str:
    if isinstance(tensor, torch.nn.Parameter):
        return "parameter"
    return "closed-over tensor" if tensor.requires_grad else "buffer or closed-over tensor"


def describe(tensor) -> str:
    return f"shape {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def storage(tensor):
    """The identity of a tensor's storage, to detect ``p.data = other``; None for subclasses, which may replace it."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
        return tensor.untyped_storage()._cdata
    return None


def memory(tensor):
    """The identity of a tensor's storage for any class of tensor; None for layouts without a storage."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


class MutableState:
    """The buffers, attributes and globals that a region may change, with their values from before its forward."""

    __slots__ = ("_before", "_bindings", "_changed", "_contents", "_namespaces", "_overwritten", "_parameters")

    def __init__(self, reachable):
        self._bindings = reachable.bindings
        self._namespaces = reachable.namespaces
        self._overwritten = []
        containers = [] if reachable.sharded else reachable.containers  # FSDP's own change between forward and backward
        self._contents = [(each, each.copy()) for each in containers if len(each) <= LONGEST_CONTAINER]
        self._parameters = [
            (tensor, name, version(tensor))
            for tensor, name in reachable.tensors.values()
            if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)
        ]
        self._changed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._before = [
            (tensor, name, version(tensor), _copy(tensor))
            for tensor, name in reachable.tensors.values()
            if not tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter) and not tensor.is_inference()
        ]

    def after_forward(self, leaves, written) -> set[int]:
        """Keep the old values of the buffers that the forward changed; return the ids of these buffers.

        `written`: storages that may have changed although their version counters have not; None if any may.

        Of attributes whose value before the forward has an autograd history, only those with a value among `leaves` are
        kept. Otherwise a module that stores its last output would keep the graphs of all steps alive. Of the other
        attributes only the names are kept, because the recomputation may overwrite the value of a later forward.
        """
        used = {id(leaf) for leaf in leaves}
        bindings, self._bindings = self._bindings, []
        for binding in bindings:
            if not _has_history(binding[2]) or id(binding[2]) in used:
                self._bindings.append(binding)
            else:
                self._record_result(*binding[:2])
        for attributes, names in self._namespaces:
            if len(attributes) > len(names):
                for name, value in attributes.items():
                    if name not in names:
                        if _is_state(value):
                            self._bindings.append((attributes, name, _ABSENT))
                        elif _has_history(value):
                            self._record_result(attributes, name)
        self._namespaces = []
        self._contents = [each for each in self._contents if not _is_filled_with(*each) and not _has_history(each[1])]
        for tensor, name, mark in self._parameters:
            if version(tensor) != mark:
                raise CheckpointError(
                    f"this checkpointed region changes the {_kind(tensor)} {name!r}, {describe(tensor)}, in place (as "
                    "nn.Embedding(max_norm=...) does), and its recompute would do it again. Do it before the region."
                )
        self._parameters = []
        for tensor, name, mark, copy in self._before:
            silently = copy is not None if written is None else memory(tensor) in written
            if version(tensor) == mark and not silently:
                if _bytes(tensor) > _SMALL:
                    _UNCHANGED_BUFFERS[tensor] = True
                continue
            if copy is None:
                _UNCHANGED_BUFFERS.pop(tensor)
                raise CheckpointError(
                    f"buffer {name!r}, {describe(tensor)}, is changed by this checkpointed region for the first time "
                    "after steps that left it alone, and no copy of its old value was kept. Repeat the step (from now "
                    "on a copy is kept), or update the buffer outside the region."
                )
            self._changed.append((tensor, copy))
        self._before = []
        return {id(tensor) for tensor, _ in self._changed}

    def undo(self) -> None:
        """Give everything the value from before the forward that `after_forward` has not seen."""
        _bind([binding for binding in self._bindings if binding[0].get(binding[1]) is not binding[2]])
        for attributes, names in self._namespaces:
            _bind([(attributes, name, _ABSENT) for name in attributes.keys() - names])
        _fill([each for each in self._contents if not _is_filled_with(*each)])
        with torch.no_grad():
            for tensor, _, mark, copy in self._before:
                if copy is not None and (version(tensor) != mark or not torch.equal(tensor, copy)):
                    with torch.autograd._unsafe_preserve_version_counter(tensor):
                        tensor.copy_(copy)

    def _record_result(self, namespace, name) -> None:
        """Record the value that the forward assigned to a name, without keeping it alive."""
        value = namespace.get(name)
        self._overwritten.append((namespace, name, weakref.ref(value) if isinstance(value, torch.Tensor) else None))

    @contextlib.contextmanager
    def _results_kept(self):
        """Let the body assign the results of other names again, and bind the present ones after it if these differ.

        Equal ones stay: their graph has no saved tensors after the backward, that of the forward's results still has.
        """
        present = [(namespace, name, namespace.get(name, _ABSENT)) for namespace, name, _ in self._overwritten]
        try:
            yield
        finally:
            for (namespace, name, value), (*_, reference) in zip(present, self._overwritten):
                is_own = reference is not None and reference() is value
                if not (is_own and _is_equal(namespace.get(name), value)):
                    _bind([(namespace, name, value)])

    @contextlib.contextmanager
    def restored(self):
        """Restore the values from before the forward in the body, and the present ones after it; keep versions.

        The body includes the backward of the recomputed graph, which may read a buffer that the region has updated.
        """
        rebound = [binding for binding in self._bindings if binding[0].get(binding[1]) is not binding[2]]
        contents = [each for each in self._contents if not _is_filled_with(*each)]
        tensors = [tensor for tensor, _ in self._changed]
        if not tensors and not rebound and not contents and not self._overwritten:
            yield
            return
        present = [tensor.detach().clone() for tensor in tensors]
        with contextlib.ExitStack() as stack:
            stack.enter_context(_rebound(rebound))
            stack.enter_context(_refilled(contents))
            stack.enter_context(self._results_kept())
            for tensor in tensors:
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
            try:
                with torch.no_grad():
                    for tensor, old in self._changed:
                        tensor.copy_(old)
                yield
            finally:
                with torch.no_grad():
                    for tensor, value in zip(tensors, present):
                        tensor.copy_(value)


def _has_history(value) -> bool:
    """Whether `value` is, or may contain, a tensor with an autograd history."""
    if isinstance(value, torch.Tensor):
        return value.grad_fn is not None
    if not isinstance(value, (list, tuple, dict, set, deque)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return len(value) > LONGEST_CONTAINER or any(map(_has_history, items))


def _is_equal(value, other) -> bool:
    """Whether two tensors have the same elements; fake and meta tensors are compared by shape and dtype."""
    if value is other:
        return True
    if not isinstance(value, torch.Tensor) or value.shape != other.shape or value.dtype != other.dtype:
        return False
    return isinstance(value, FakeTensor) or value.is_meta or torch.equal(value.detach(), other.detach())


def _is_state(value) -> bool:
    """Whether the value of a new attribute is a number or a tensor without an autograd history."""
    return isinstance(value, (torch.Tensor, int, float)) and not _has_history(value)


@contextlib.contextmanager
def _rebound(bindings):
    """Set ``namespace[name] = value`` for all bindings in the body, and the present values after it."""
    present = [(namespace, name, namespace.get(name, _ABSENT)) for namespace, name, _ in bindings]
    _bind(bindings)
    try:
        yield
    finally:
        _bind(present)


def _bind(bindings) -> None:
    for namespace, name, value in bindings:
        if value is _ABSENT:
            namespace.pop(name, None)
        else:
            namespace[name] = value


@contextlib.contextmanager
def _refilled(contents):
    """Restore the items of containers in the body, and the present ones after it."""
    present = [(container, container.copy()) for container, _ in contents]
    _fill(contents)
    try:
        yield
    finally:
        _fill(present)


def _fill(contents) -> None:
    for container, items in contents:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(items)


def _is_filled_with(container, items) -> bool:
    """Whether a container has the very same items as its copy `items`, in the same order."""
    if len(container) != len(items):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), items.items())
        return all(key is other_key and value is other for (key, value), (other_key, other) in pairs)
    return all(item is other for item, other in zip(container, items))


def _bytes(tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy(tensor):
    if _bytes(tensor) > _SMALL and tensor in _UNCHANGED_BUFFERS:
        return None
    return tensor.detach().clone()
