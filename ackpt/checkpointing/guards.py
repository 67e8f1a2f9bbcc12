"""Guard a region: raise where a parameter or input changed before backward, restore buffers that the region updates.

``Watch`` records the version counter of every tensor that the region reads, and raises an error if one changed.
``MutableState`` handles buffers, attributes, global names, and containers in attributes that the region itself updates.
For the recomputation it restores the values from before the forward, and afterwards the present ones, so that running
statistics and counters change once per step. The functions at the end make the errors of regions.
"""

import contextlib
import dataclasses
import itertools
import math
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator
from operator import is_

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ackpt.core.autograd_state import phase, version, versions
from ackpt.core.errors import CheckpointError, add_note

from .reachable import LONGEST_CONTAINER, MODULE_FIELDS, PLAIN, is_data

_ABSENT = object()
_GONE = torch.empty(0)
PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))


@dataclasses.dataclass(frozen=True)
class Guarantees:
    """The guarantees beyond those of torch's checkpoint that are on; see :func:`guarantees`."""

    other_rng: bool = True
    unchanged: bool = True
    exact_graph: bool = True


_DEFAULT = Guarantees()
_local = threading.local()


def current() -> Guarantees:
    return getattr(_local, "guarantees", _DEFAULT)


@contextlib.contextmanager
def guarantees(*, other_rng: bool = True, unchanged: bool = True, exact_graph: bool = True) -> Iterator[None]:
    """Choose the guarantees, beyond those of torch's checkpoint, for the regions entered in this ``with`` block.

    All are on by default. Their cost depends on the number of modules, tensors and operations of a region, not on
    tensor sizes. It matters only for regions of tiny tensors.

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
    """The state of tensors after a forward whose backward reads them; ``changes`` compares it with the current state.

    It compares version counters, storages (``p.data = other`` does not change the version), ``requires_grad``, and the
    steps of optimizers since then, because fused optimizers change nothing else.

    Args:
        items: tensors, or weak references to them. Pass strong references to tensors that outlive the step:
            ``torch.utils.swap_tensors`` refuses tensors with weak references.
        names: their descriptions for errors.
    """

    def __init__(self, items, names):
        self._items, self._names = items, names
        self._marks = self._present()[1]
        self._steps = optimizer_steps()

    def _present(self):
        """The tensors, with `_GONE` for one that is gone, and the version, storage and ``requires_grad`` of each."""
        tensors = [item() if type(item) is weakref.ref else item for item in self._items]
        tensors = [_GONE if tensor is None else tensor for tensor in tensors]
        if PLAIN_TENSORS.issuperset(map(type, tensors)):
            with contextlib.suppress(RuntimeError):  # inference tensors have no version, and other layouts no storage
                return tensors, [
                    (each._version, weakref.ref(each.untyped_storage()) if each.numel() else None, each.requires_grad)
                    for each in tensors
                ]
        return tensors, [(version(each), _storage_mark(each), each.requires_grad) for each in tensors]

    def changes(self):
        """Yield ``(tensor, description, how)`` for each that changed; how: "changed", "frozen" or "unfrozen"."""
        stepped = self._steps != optimizer_steps()
        tensors, present = self._present()
        if not stepped and present == self._marks:
            return
        for tensor, name, before, now in zip(tensors, self._names, self._marks, present):
            if tensor is _GONE:
                continue
            (mark, storage, requires_grad), (mark_now, storage_now, requires_grad_now) = before, now
            if requires_grad_now < requires_grad:
                yield tensor, name, "frozen"
            elif (
                mark_now != mark
                or (storage is not None and storage_now != storage)
                or (stepped and _last_step.get(_memory_key(tensor), 0) > self._steps)
            ):
                yield tensor, name, "changed"
            elif requires_grad_now != requires_grad:
                yield tensor, name, "unfrozen"


def _storage_mark(tensor):
    """A weak reference to a tensor's storage, to detect ``p.data = other``; None where that would not show it."""
    if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided and tensor.numel():
        return weakref.ref(tensor.untyped_storage())
    return None


_last_step: dict[int, int] = {}  # by `_memory_key` of a parameter: the number of the last step that updated it
_steps = -1  # of all optimizers; -1 while they are not observed


def optimizer_steps() -> int:
    """The number of optimizer steps so far, counted from the first call."""
    global _steps
    if _steps < 0:
        _steps = 0
        register_optimizer_step_post_hook(_count_step)
    return _steps


def _count_step(optimizer, args, kwargs) -> None:
    global _steps
    if torch.compiler.is_dynamo_compiling():  # a compiled step increments version counters
        return
    _steps += 1
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                _last_step[_memory_key(parameter)] = _steps


def _memory_key(tensor) -> int:
    key = storage(tensor)
    return id(tensor) if key is None else key


BACKWARD_FIRST = (
    "Run backward before the change (before optimizer.step(), load_state_dict() or any in-place operation), or change "
    "a clone instead."
)


def changed_between(tensor, name, how: str) -> CheckpointError:
    """The error for a tensor that a region reads; `name` is the number of an input, or a name in the region's code."""
    label = f"input tensor number {name}" if type(name) is int else f"{_kind(tensor)} {name or 'without a name'!r}"
    return CheckpointError(
        f"{label}, {describe(tensor)}, was {how} between the forward of this checkpointed region and its backward, so "
        f"the recompute would not repeat the forward. {BACKWARD_FIRST}"
    )


def changes_parameter(tensor, name) -> CheckpointError:
    return CheckpointError(
        f"this checkpointed region changes the {_kind(tensor)} {name!r}, {describe(tensor)}, in place (as "
        "nn.Embedding(max_norm=...) does), and its recompute would change it again. Change it before the region."
    )


def _kind(tensor) -> str:
    if isinstance(tensor, torch.nn.Parameter):
        return "parameter"
    return "closed-over tensor" if tensor.requires_grad else "buffer or closed-over tensor"


def describe(tensor) -> str:
    return f"shape {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def storage(tensor):
    """The identity of a tensor's storage; None for subclasses, which may replace it."""
    return memory(tensor) if type(tensor) in PLAIN_TENSORS else None


def memory(tensor):
    """The identity of a tensor's storage for any class of tensor; None for layouts without a storage."""
    while is_functorch_wrapped_tensor(tensor):  # inside torch.func.grad or vmap
        tensor = get_unwrapped(tensor)
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


class MutableState:
    """The buffers, attributes and globals that a region may change, with their values from before its forward.

    `copies`: the largest size in bytes of a buffer to copy in advance. A recorder copies what it sees a call write.
    """

    def __init__(self, reachable, is_recorded: bool = True, copies: float = math.inf):
        self._bindings = reachable.bindings
        self._namespaces = reachable.namespaces
        self._saved = [*map(dict.copy, reachable.namespaces)]
        self._suspects = reachable.suspects
        self._overwritten, self._rewritten, self.is_repeatable = [], [], True
        containers = [] if reachable.sharded else reachable.containers  # FSDP's own change between forward and backward
        self._contents = [(each, each.copy()) for each in containers if len(each) <= LONGEST_CONTAINER]
        self._hooks, self._hook_count = reachable.hooks, sum(map(len, reachable.hooks))
        if self._hook_count:
            self._contents += [(each, each.copy()) for each in self._hooks if each]
        self._changed: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # None: the recomputation ignores the value
        self._present = []
        self.replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._parameters: list[tuple[torch.Tensor, str]] = []
        self._before = []
        for tensor, name in reachable.tensors.values():
            if tensor.requires_grad or (type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter)):
                self._parameters.append((tensor, name))
            elif not tensor.is_inference():
                copy = tensor.detach().clone() if tensor.nbytes <= copies else None
                self._before.append((tensor, name, version(tensor), copy))
        tensors = [tensor for tensor, _ in self._parameters]
        self._versions, self._storages = versions(tensors), [*map(storage, tensors)] if is_recorded else []

    def after_forward(self, leaves, recorder, subject, unread) -> set[int]:
        """Keep the old values of the buffers that the forward changed, and return the ids of these buffers.

        `unread`: the storages of buffers that only norms update, whose old values the recomputation does not need.
        `recorder`: of the forward; without one, any buffer may have changed even if its version counter has not.
        `subject`: learns whether buffers change where no recorder sees it, as in compiled code, and so must be copied
        in advance. Values with a history are kept only if they are among `leaves`: otherwise a module that stores its
        last output would keep the graphs of all steps alive.
        """
        walked = {id(each[0]) for each in (*self._before, *self._parameters)}
        used = {id(leaf) for leaf in leaves}
        values = {id(value): value for _, _, value in self._suspects if id(value) not in used}
        with_history = {key for key, value in values.items() if _has_history(value)}
        results = [each for each in self._suspects if id(each[2]) in with_history]
        self._suspects = []
        if results:
            self._overwritten = [binding[:2] for binding in results]
            dropped = set(map(id, results))
            self._bindings = [each for each in self._bindings if id(each) not in dropped]
            saved = dict(zip(map(id, self._namespaces), self._saved))
            for namespace, name in self._overwritten:
                saved.get(id(namespace), {}).pop(name, None)
        self._contents = [each for each in self._contents if not _has_history(each[1])]
        tensors = [tensor for tensor, _ in self._parameters]
        copied = set() if recorder is None else {memory(tensor) for tensor, _ in recorder.copies}
        changed: set[int] = set()
        for index, (tensor, name) in enumerate(self._parameters if versions(tensors) != self._versions else ()):
            if version(tensor) != self._versions[index]:
                if not tensor.requires_grad and memory(tensor) in copied:
                    changed.add(id(tensor))  # frozen, it is restored like a buffer
                    self.is_repeatable = False  # without a recorder, there would be no copy
                    continue
                is_written = recorder is None or memory(tensor) in recorder.overwritten
                if is_written or storage(tensor) != self._storages[index]:
                    raise changes_parameter(tensor, name)
                self._rewritten.append((tensor, name))  # by `p.set_(p.data)`, which no recorder sees
                self.is_repeatable = False
        self._parameters = []
        if recorder is not None:
            replaced, copies = recorder.replaced, {id(tensor): copy for tensor, copy in recorder.copies}
            self.replaced = [(tensor, copies.get(key, old)) for key, (tensor, old) in replaced.items()]
            # Where views overlap, the oldest value is set last.
            pairs = [pair for pair in recorder.copies[::-1] if id(pair[0]) not in replaced]
            self._changed = [(tensor, None if memory(tensor) in unread else copy) for tensor, copy in pairs]
            recorder.copies, recorder.replaced = [], {}
            self.is_repeatable &= copied.difference(unread).isdisjoint(recorder.written) and not self.replaced
            if recorder.copies_writes:
                reads = [(read.value, read.name, read.version, None) for read in recorder.reads.values()]
                self._before += [each for each in reads if id(each[0]) not in walked]
            self._before = [each for each in self._before if id(each[0]) not in replaced]
            changed.update(replaced)
        unseen = False
        for tensor, name, mark, copy in self._before:
            if copied and memory(tensor) in copied:
                changed.add(id(tensor))
                continue
            if recorder is None:
                silently = copy is not None and not (tensor.is_cpu and is_equal(tensor, copy))
            else:
                silently = copy is not None and memory(tensor) in recorder.written
            if version(tensor) == mark and not silently:
                continue
            if tensor.requires_grad:
                if recorder is not None and memory(tensor) in recorder.overwritten:
                    raise changes_parameter(tensor, name)
                continue
            unseen = True
            changed.add(id(tensor))
            if copy is None:
                if subject is not None:
                    subject.changes_unseen = True
                raise CheckpointError(
                    f"buffer {name!r}, {describe(tensor)}, is changed by this checkpointed region where ackpt cannot "
                    "see it, as in compiled code, and no copy of its old value was kept. Repeat the step (from now on "
                    "a buffer is copied in advance), or update it outside the region."
                )
            self._changed.append((tensor, copy))
        self._before = []
        if subject is not None:
            subject.changes_unseen = subject.changes_unseen or unseen
        return changed

    def forget(self) -> None:
        """Free the copies of old values, after the last recomputation that reads them."""
        self._changed, self.replaced = [], []

    def is_as_before(self) -> bool:
        """Whether there is nothing to restore."""
        return not (self._changed or self._overwritten or self._rewritten or any(self._changes()))

    def restored_bytes(self) -> int:
        """The bytes of the copies of present values that `restored` makes."""
        return sum(tensor.nbytes for tensor, _ in self._changed) + sum(tensor.nbytes for tensor, _ in self._rewritten)

    @contextlib.contextmanager
    def restored(self):
        """Restore the values from before the forward for recomputation and backward, and the present ones afterwards.

        A value that the recomputation assigns stays if it equals the present one and has a history: the graph of the
        forward's value may still have its saved tensors.
        """
        bindings, contents = self._changes()
        bindings = [each for each in bindings if not _is_made(each[0].get(each[1], _ABSENT), each[2])]
        rewritten = [(tensor, name, tensor.detach().clone()) for tensor, name in self._rewritten]
        names = [*(binding[:2] for binding in bindings), *self._overwritten]
        values = [(namespace, name, namespace.get(name, _ABSENT)) for namespace, name in names]
        items = [(container, container.copy()) for container, _ in contents]
        tensors = []
        with contextlib.ExitStack() as stack:
            for tensor, _ in self._changed:
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
            try:
                _bind(bindings)
                _fill(contents)
                with torch.no_grad():
                    self._present = [(tensor, tensor.detach().clone()) for tensor, old in self._changed if old is None]
                    changed = [(tensor, old) for tensor, old in self._changed if old is not None]
                    for tensor, old in changed:
                        is_resized = tensor.shape != old.shape
                        tensors.append((tensor, tensor.data if is_resized else tensor.detach().clone(), is_resized))
                    for tensor, old in changed:
                        _set(tensor, old if tensor.shape == old.shape else old.clone())
                old = changed = None
                yield
                for tensor, name, value in rewritten:
                    if not torch.equal(tensor.detach(), value):
                        raise changes_parameter(tensor, name)
            finally:
                self.restore_unread()
                with torch.no_grad():
                    for tensor, value, is_resized in tensors:
                        if is_resized:
                            tensor.data = value
                        else:
                            _set(tensor, value)
                _fill([each for each in items if not (_has_history(each[1]) and is_equal(*each))])
                _bind(
                    [(of, key, v) for of, key, v in values if not (_has_history(v) and _is_made_again(of.get(key), v))]
                )

    def restore_unread(self) -> None:
        """After a recomputation, undo its updates of buffers that norms update and nothing reads."""
        while self._present:
            tensor, value = self._present.pop()
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
                tensor.copy_(value)

    def _changes(self):
        """The bindings and the containers' items from before the forward, where the present ones are others."""
        bindings = [binding for binding in self._bindings if binding[0].get(binding[1]) is not binding[2]]
        if not _are_same(self._namespaces, self._saved):
            for namespace, saved in zip(self._namespaces, self._saved):
                bindings += self._differences(namespace, saved)
        contents = [each for each in self._contents if not is_filled_with(*each)]
        if contents or sum(map(len, self._hooks)) != self._hook_count:
            existing = {id(container) for container, _ in self._contents}
            contents += [(hooks, {}) for hooks in self._hooks if hooks and id(hooks) not in existing]
        return bindings, contents

    def _differences(self, namespace, saved):
        """Bindings that restore the names of a namespace, and remove those that the forward added."""
        other = {name for owner, name in self._overwritten if owner is namespace}
        if "_modules" in saved:
            other |= MODULE_FIELDS - {"training"}
        for name in [*saved, *(name for name in list(namespace) if name not in saved)]:
            value, present = saved.get(name, _ABSENT), namespace.get(name, _ABSENT)
            if value is present or name in other:
                continue
            if value is not _ABSENT or not _is_made(present, value):
                yield namespace, name, value


def _are_same(dicts, copies) -> bool:
    """Whether dicts have the very items of their copies, in the same order."""
    if [*map(list, dicts)] != [*map(list, copies)]:  # of names, equal ones of which are one object
        return False
    flat = itertools.chain.from_iterable
    return all(map(is_, flat(map(dict.values, dicts)), flat(map(dict.values, copies))))


def _is_made(present, value) -> bool:
    """Whether a forward created a module or parameter where there was none: a new one would get no gradient."""
    return (value is None or value is _ABSENT) and isinstance(present, (torch.nn.Module, torch.nn.Parameter))


def _has_history(value, depth=0) -> bool:
    """Whether `value` is, or may contain, a tensor with an autograd history."""
    if isinstance(value, torch.Tensor):
        return value.grad_fn is not None
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, (list, tuple, set, deque)):
        items = value
    elif not is_data(type(value)):
        return False
    else:
        items = object.__getattribute__(value, "__dict__").values()  # transformers' configurations have a slow one
    if PLAIN.issuperset(map(type, items)):
        return False
    return depth == 4 or len(items) > LONGEST_CONTAINER or any(_has_history(item, depth + 1) for item in items)


def is_equal(value, other) -> bool:
    """Whether two tensors, or containers of tensors, are equal; fake and meta tensors by shape and dtype."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, (list, tuple, deque)):
        return len(value) == len(other) and all(map(is_equal, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(is_equal(item, other[key]) for key, item in value.items())
    if not isinstance(value, torch.Tensor):
        return type(value) in PLAIN and value == other
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    return isinstance(value, FakeTensor) or value.is_meta or torch.equal(value.detach(), other.detach())


def _bind(bindings) -> None:
    for namespace, name, value in bindings:
        if value is _ABSENT:
            namespace.pop(name, None)
        else:
            namespace[name] = value


def _is_made_again(present, value) -> bool:
    """Whether two values are equal; not for an input of a region, which has a graph, but no saved tensors."""
    return "retain_grad" not in getattr(value, "__dict__", ()) and is_equal(present, value)


def _fill(contents) -> None:
    for container, items in contents:
        fill(container, items)


def fill(container, items) -> None:
    """Make the items of a container those of its copy `items`."""
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(items)


def _set(tensor, value) -> None:
    if tensor.shape == value.shape:
        tensor.copy_(value)
    else:
        tensor.data = value


def is_filled_with(container, items) -> bool:
    """Whether a container has the very same items as its copy `items`, in the same order."""
    if len(container) != len(items):
        return False
    if isinstance(container, dict):
        return all(map(is_, container.values(), items.values())) and all(map(is_, container, items))
    return all(map(is_, container, items))


# The errors of regions; each names the cause and what to do instead.


def unreachable(node) -> CheckpointError:
    return CheckpointError(
        f"this region uses a tensor that requires grad and was computed before it (by {node.name()}), or in another "
        "thread, but is neither an argument nor found in the function's closure, defaults or attributes, so its "
        "gradient could not be passed on. Pass it as an argument of checkpoint(), and call checkpoint() in the "
        "thread that computes."
    )


def hidden_use() -> CheckpointError:
    return CheckpointError(
        "this checkpointed region hands a closed-over tensor that was computed before it straight to a "
        "torch.autograd.Function or a compiled function. Pass that tensor as an argument of checkpoint()."
    )


def changes_containers() -> CheckpointError:
    return CheckpointError(
        "this region adds, removes or replaces tensors in a list, dict or dataclass that it got as an argument; a "
        "recompute would do it twice. Return the tensors instead."
    )


def changes_inputs(tensor: str) -> CheckpointError:
    return CheckpointError(
        f"this checkpointed region changes {tensor} in place, so the old value is lost for the recompute. Work on a "
        "clone inside the region, use the out-of-place operation (nn.ReLU(inplace=False) as first layer, for "
        "example), or start the region after the change."
    )


def changes_argument(function, arguments) -> CheckpointError:
    names = ", ".join(sorted({type(argument).__name__ for argument in arguments}))
    module = getattr(function, "__self__", None)
    region = f" of {type(module).__name__}" if isinstance(module, torch.nn.Module) else ""
    return CheckpointError(
        f"this checkpointed region changes an object that it got as an argument (one of: {names}): the forward{region} "
        "puts tensors into it or replaces some, and its recompute would do so again, on what the forward has left. Do "
        "not pass it (transformers: model.config.use_cache=False; if it combines several models, "
        "model.config.text_config.use_cache=False), or return the tensors instead. If a library's model "
        "always passes it, select other modules with check_fn, such as the feed-forward layers, or use "
        "ackpt.apply_budget, which leaves such modules out."
    )


def note_recomputation(error: Exception, function) -> None:
    """Add a note to an error of the user's code, which was raised during recomputation."""
    add_note(
        error,
        f"ackpt: this error was raised while backward recomputed the checkpointed region {name_of(function)}. Its "
        "forward raised no error, so something that its code reads has changed since then, such as a context manager "
        "that has exited, a context variable, or a closed-over list or dict. Keep it unchanged until after backward(), "
        "or pass what the code reads as an argument of checkpoint().",
    )


def name_of(function) -> str:
    if isinstance(function, types.MethodType) and isinstance(function.__self__, torch.nn.Module):
        return type(function.__self__).__name__
    return str(getattr(function, "__qualname__", type(function).__name__))


def other_draws(name: str, function) -> CheckpointError:
    return CheckpointError(
        f"the recompute of a checkpointed region ({name_of(function)}) drew other random numbers from {name} than its "
        "forward: its code seeds it differently each time, as torch.seed(), random.seed() and a seed from a counter "
        "do, or another thread draws from it meanwhile. Seed outside of the region, or with a number that stays the "
        "same, as in torch.manual_seed(5); let other threads draw from generators of their own."
    )


def refuse_gradient_of(tensor) -> None:
    """Make backward raise an error if it reaches `tensor`, which belongs to the dropped graph of a first forward."""
    tensor.register_hook(_raise_leak)
    if phase.recomputing:
        phase.leaked.append(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def _raise_leak(grad):
    raise CheckpointError(
        "a tensor computed inside a checkpointed region left it other than through its return value (kept as an "
        "attribute, in a list, or in a returned object that is no list, tuple, dict or dataclass) and takes part in "
        "the loss, so its gradient could not be passed on to the inputs of the region. Return the tensor."
    )
