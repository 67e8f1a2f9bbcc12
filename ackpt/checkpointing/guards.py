"""What may not change between the forward of a region and its recompute, and what must change only once.

``Watch`` remembers the version counter of every tensor the region reads and reports the first one that moved.
``State`` gives buffers that the region itself updates their old values for the recompute and their new ones back
after it, so that running statistics and counters change once per step; so it does with attributes and global names
that mean another object by then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ackpt.autograd_state import version
from ackpt.errors import CheckpointError

LONGEST_CONTAINER = 100  # items; longer ones are not searched, since that would take time at every call
_SMALL = 1 << 20  # bytes up to which a buffer is always copied before the region runs
_ABSENT = object()
_STEADY: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # larger buffers that a region left alone


@dataclasses.dataclass(frozen=True)
class Guarantees:
    """Which guarantees beyond torch's own are on; see :func:`guarantees`."""

    other_rng: bool = True
    unchanged: bool = True
    exact_graph: bool = True


_local = threading.local()


def current() -> Guarantees:
    return getattr(_local, "guarantees", _ALL)


_ALL = Guarantees()


@contextlib.contextmanager
def guarantees(*, other_rng: bool = True, unchanged: bool = True, exact_graph: bool = True) -> Iterator[None]:
    """Choose, for the regions entered in this block, which guarantees beyond torch's own are given.

    All are on by default. What they cost depends on the number of a region's modules and tensors, not on their sizes
    (microseconds for a few, about a millisecond for fifty modules), so only regions of very small tensors notice.

    Args:
        other_rng: replay Python's ``random``, numpy and generator objects as well as torch's own streams.
        unchanged: raise if a parameter, a buffer or a closed-over tensor changed between forward and recompute, or if
            the recompute takes another path; let buffers change once per step.
        exact_graph: outputs require grad exactly where the plain function's do, and parameters get their gradients
            through the outer graph (hooks fire once, DDP's bookkeeping holds, sums have the plain model's order). Off,
            the forward runs without a graph and gradients accumulate inside, as in torch's reentrant checkpoint.

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
    """Version counters and storages of tensors, to be found unchanged later."""

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


def changed_between(what: str, how: str = "changed") -> CheckpointError:
    return CheckpointError(
        f"{what} was {how} between the forward of this checkpointed region and its backward, so the recompute would "
        f"not repeat the forward. {BACKWARD_FIRST}"
    )


def _kind(tensor) -> str:
    if isinstance(tensor, torch.nn.Parameter):
        return "parameter"
    return "closed-over tensor" if tensor.requires_grad else "buffer or closed-over tensor"


def describe(tensor) -> str:
    return f"shape {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def storage(tensor):
    """The identity of the storage, which tells ``p.data = other``; subclasses (DTensor) may swap theirs freely."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
        return tensor.untyped_storage()._cdata
    return None


def memory(tensor):
    """The identity of the storage whatever the tensor's class; None where a layout has none."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


class State:
    """Buffers of a region: copied before it runs, so that the recompute starts from the values the forward saw."""

    __slots__ = ("_before", "_bindings", "_changed", "_namespaces", "_overwritten", "_parameters")

    def __init__(self, reach):
        self._bindings = reach.bindings
        self._namespaces = reach.namespaces
        self._overwritten = []
        self._parameters = [
            (tensor, name, version(tensor))
            for tensor, name in reach.tensors.values()
            if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)
        ]
        self._changed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._before = [
            (tensor, name, version(tensor), _copy(tensor))
            for tensor, name in reach.tensors.values()
            if not tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter) and not tensor.is_inference()
        ]

    def after_forward(self, leaves, written) -> set[int]:
        """Keep the old values of what the forward changed; return the ids of those buffers.

        `written`: storages that may have changed although their version counters have not, None if any may.

        Of the values before the forward that have a history, only those among `leaves` are kept: a module that
        remembers its last output would else keep the graphs of all its steps alive. Of the others, the recompute may
        overwrite what a later forward has left, so their names are.
        """
        used = {id(leaf) for leaf in leaves}
        bindings, self._bindings = self._bindings, []
        for binding in bindings:
            if not _has_history(binding[2]) or id(binding[2]) in used:
                self._bindings.append(binding)
            else:
                self._remember(*binding[:2])
        for attributes, names in self._namespaces:
            if len(attributes) > len(names):
                for name, value in attributes.items():
                    if name not in names:
                        if _is_state(value):
                            self._bindings.append((attributes, name, _ABSENT))
                        elif _has_history(value):
                            self._remember(attributes, name)
        self._namespaces = []
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
                    _STEADY[tensor] = True
                continue
            if copy is None:
                _STEADY.pop(tensor)
                raise CheckpointError(
                    f"buffer {name!r}, {describe(tensor)}, is changed by this checkpointed region for the first time "
                    "after steps that left it alone, and no copy of its old value was kept. Repeat the step (from now "
                    "on a copy is kept), or update the buffer outside the region."
                )
            self._changed.append((tensor, copy))
        self._before = []
        return {id(tensor) for tensor, _ in self._changed}

    def _remember(self, namespace, name) -> None:
        """Note what the forward has left under a name, without keeping it alive."""
        left = namespace.get(name)
        self._overwritten.append((namespace, name, weakref.ref(left) if isinstance(left, torch.Tensor) else None))

    def _left_by_others(self):
        """Bindings, with the values of now, that another forward than this region's has made since."""
        for namespace, name, left in self._overwritten:
            now = namespace.get(name, _ABSENT)
            if left is None or left() is not now:
                yield namespace, name, now

    @contextlib.contextmanager
    def as_before(self):
        """Old values inside, and after the body the values of now again; version counters stay.

        The backward of the recomputed graph belongs inside as well: it may read a buffer that the region has updated.
        """
        rebound = [binding for binding in self._bindings if binding[0].get(binding[1]) is not binding[2]]
        rebound += self._left_by_others()
        tensors = [tensor for tensor, _ in self._changed]
        if not tensors and not rebound:
            yield
            return
        now = [tensor.detach().clone() for tensor in tensors]
        with contextlib.ExitStack() as stack:
            stack.enter_context(_bound_again(rebound))
            for tensor in tensors:
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
            try:
                with torch.no_grad():
                    for tensor, old in self._changed:
                        tensor.copy_(old)
                yield
            finally:
                with torch.no_grad():
                    for tensor, value in zip(tensors, now):
                        tensor.copy_(value)


def _has_history(value) -> bool:
    """Whether `value` is or may hold a tensor that a graph has computed."""
    if isinstance(value, torch.Tensor):
        return value.grad_fn is not None
    if not isinstance(value, (list, tuple, dict, set)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return len(value) > LONGEST_CONTAINER or any(map(_has_history, items))


def _is_state(value) -> bool:
    """Whether an attribute that a forward has made is a tensor or number of its own."""
    return isinstance(value, (torch.Tensor, int, float)) and not _has_history(value)


@contextlib.contextmanager
def _bound_again(bindings):
    """Names as they were: ``namespace[name] = value`` inside, what they are now afterwards."""
    now = [(namespace, name, namespace.get(name, _ABSENT)) for namespace, name, _ in bindings]
    _bind(bindings)
    try:
        yield
    finally:
        _bind(now)


def _bind(bindings) -> None:
    for namespace, name, value in bindings:
        if value is _ABSENT:
            namespace.pop(name, None)
        else:
            namespace[name] = value


def _bytes(tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy(tensor):
    if _bytes(tensor) > _SMALL and tensor in _STEADY:
        return None
    return tensor.detach().clone()
