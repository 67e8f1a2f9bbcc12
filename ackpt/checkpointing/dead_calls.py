"""Find the calls of a region that compute nothing that its backward reads, and leave out their kernels.

`Liveness` watches a first forward. A call is *dead* if nothing that it makes or writes is saved by autograd, outlives
the region, or is read by another call that is not dead. torch's non-reentrant checkpoint stops after the last saved
tensor; dead calls before it are left out, too. `Skipping` runs a recomputation without their kernels: autograd still
makes their nodes, whose results are `Dead` tensors, without memory. Reading one raises `DeadRead`, so no error of the
analysis is silent: the region is then recomputed as a whole, and so are all later regions of its function.
"""

import contextlib
import functools
import operator
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from ackpt.core.autograd_state import version
from ackpt.core.errors import CheckpointError

RANDOM = torch.Tag.nondeterministic_seeded
_WITH_STORAGE = frozenset((torch.Tensor, torch.nn.Parameter, FakeTensor))
# Calls of several kernels, the last of which may be dead although autograd saves results of the others; under
# autocast, casts are such others.
_COMPOSED = frozenset(
    "dropout alpha_dropout feature_dropout linear bilinear matmul __matmul__ __rmatmul__ einsum tensordot conv1d "
    "conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d multi_head_attention_forward mm bmm mv addmm "
    "addmm_ addmv addbmm baddbmm chain_matmul".split()
)
#: Methods that read no element, if they return no tensor.
DESCRIBING = frozenset(
    "__get__ __set__ __len__ dim size numel stride element_size storage_offset get_device is_contiguous is_complex "
    "is_floating_point register_hook retain_grad __hash__".split()
)
top_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
_make: Any = torch.Tensor._make_wrapper_subclass


class DeadRead(CheckpointError):
    """A recomputation or its backward reads a tensor that was left out."""


class Dead(torch.Tensor):
    """The result of a dead call: shape, strides, dtype and device, but no memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.is_view or func is torch.ops.aten.detach.default:  # autograd saves tensors as views
            return _without_kernel(func, args, kwargs or {})
        raise DeadRead(
            f"{func} reads a tensor that a region's recomputation left out, because its first forward did not read it. "
            "Code that stores tensors of a region must do so in the forward only: check ackpt.is_recomputing(). If "
            "backward raised this, repeat the step: the region's function is recomputed as a whole from now on."
        )


class DeadCalls(dict[Any, dict[int, int]]):
    """``{function: {number of a call: how many tensors it must save before the rest of it is dead}}``; ``is_proven``:
    whether a backward has succeeded without them; ``unread``: the indices of inputs that no other call reads."""

    is_proven = False
    unread: Sequence[int] = ()

    def instead_of(self, inputs) -> dict[int, Dead]:
        """Tensors without memory in the place of `unread` inputs, by index, which then need not be saved."""
        return {i: dead_like(inputs[i]) for i in self.unread if self.is_proven and _has_storage(inputs[i])}


class _Dropped(functools.partial):
    """A hook for tensors that autograd saves in a graph that is dropped at once."""


def dropping_hooks() -> saved_tensors_hooks:
    """Hooks that replace outer ones, such as those of offload, for a graph that is dropped at once."""
    return saved_tensors_hooks(_Dropped(torch.Tensor.detach), lambda tensor: tensor)


class Saved:
    """A tensor that autograd saves in a graph that is dropped at once."""

    def __init__(self, tensor):
        self.tensor = tensor


class Liveness:
    """Watches the calls of a first forward; `dead` gives those that its recomputation can leave out.

    A tensor's memory is known by a weak reference to its storage; equal references mean the same storage.
    """

    def __init__(self) -> None:
        self.is_doubtful = False
        self.saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._calls: list[_Watched] = []
        self._counts: Counter[Any] = Counter()
        self._live: set[weakref.ref | None] = set()
        self._running: _Watched | None = None
        self._numbers: set[int] = set()
        self._top = None

    def begin(self) -> None:
        """Note the hooks with which the run begins; others are those of a nested region, or of the user's code."""
        self._top = top_hooks(False)

    def has_made(self, node) -> bool:
        """Whether a watched call has made a node of autograd, and not, for example, a scripted function."""
        return node._sequence_nr() in self._numbers

    def run(self, func, args, kwargs) -> Any:
        """Call a torch function and note what it reads, makes and writes."""
        with torch._C.DisableTorchFunction():  # otherwise, outer regions would record every attribute access here
            tensors = [*_tensors((args, kwargs))]
            call = self._running = _Watched(func, self._counts[func], set(map(self._memory, tensors)))
            versions = [*map(version, tensors)]
        self._counts[func] += 1
        started = torch.autograd._get_sequence_nr()
        try:
            with self._hooks():
                result = func(*args, **kwargs)
        finally:
            self._running = None
        with torch._C.DisableTorchFunction():
            call.makes = set(map(self._memory, _tensors((result,))))
            call.makes.update(self._memory(t) for t, before in zip(tensors, versions) if version(t) != before)
        call.end = torch.autograd._get_sequence_nr()
        self._numbers.update(range(started, call.end))
        if call.makes or func.__name__ not in DESCRIBING:
            self._calls.append(call)
        return result

    def _hooks(self):
        """Hooks for what autograd saves in one call: torch.func transforms raise where hooks are active around them."""
        top = top_hooks(False)
        if top != self._top and (top is None or not isinstance(top[0], _Dropped)):
            self.is_doubtful = True
        if torch._C._are_functorch_transforms_active():
            self.is_doubtful = True
        elif top == self._top:
            return saved_tensors_hooks(_Dropped(self.pack), operator.attrgetter("tensor"))
        return contextlib.nullcontext()

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Note a tensor that autograd saves."""
        with torch._C.DisableTorchFunction():
            memory = self._memory(tensor)
            self._live.add(memory)
            if (call := self._running) is not None:
                call.saves += 1
                if memory not in call.reads:
                    call.needed = call.saves
            self.saved.add(saved := Saved(tensor.detach()))
            return saved

    def dead(self, inputs: Iterable[torch.Tensor], outputs: Sequence[torch.Tensor], left, nodes) -> DeadCalls:
        """The dead calls of the run. Call this when its graph is gone.

        `inputs`, `outputs`: of the region; `left`: tensors that it has stored elsewhere; `nodes`: sequence numbers of
        the graph's nodes that no watched call has made, such as those of functions in Python or C++, which may read any
        tensor that exists.
        """
        live, calls = self._live, self._calls
        holders = Counter(map(self._memory, outputs))
        returned = {self._memory(each) for each in outputs if holders[self._memory(each)] == _holders(each)}
        returned -= {*map(self._memory, left)}
        made = {memory for call in calls for memory in call.makes} - returned
        live |= {memory for memory in made if memory is not None and memory() is not None}
        last = max(nodes, default=-1)
        for call in calls:
            is_opaque = call.end <= last + 1 or not call.makes
            call.is_live = is_opaque or (call.needed > 0 and call.func.__name__ not in _COMPOSED)
            if call.is_live or call.needed:
                live |= call.reads
        count = -1
        while count < len(live):  # an earlier call may write to what a later one makes
            count = len(live)
            for call in reversed(calls):
                if call.is_live or not live.isdisjoint(call.makes):
                    live |= call.reads | call.makes
        dead = DeadCalls()
        for call in () if self.is_doubtful else calls:
            if not call.is_live and live.isdisjoint(call.makes):
                dead.setdefault(call.func, {})[call.number] = call.needed
        if dead and not nodes:
            dead.unread = [i for i, each in enumerate(inputs) if self._memory(each) not in live | {None}]
        return dead

    def _memory(self, tensor) -> weakref.ref | None:
        if _has_storage(tensor):
            with contextlib.suppress(RuntimeError):  # inside torch.func transforms
                return weakref.ref(tensor.untyped_storage())
        self.is_doubtful = True
        return None


def _has_storage(tensor: torch.Tensor) -> bool:
    return type(tensor) in _WITH_STORAGE and tensor.layout is torch.strided


def _holders(tensor: torch.Tensor) -> int:
    """How many tensors share a tensor's memory; 0 if that is unknown."""
    if not _has_storage(tensor):
        return 0
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # without the storage's own Python object


class _Watched:
    """One call: its `number` among those of its function, the memory that it ``reads`` and ``makes``.

    ``saves``: how many tensors autograd saved in it; ``needed``: the number of the last of them that the call made;
    ``end``: autograd's next sequence number.
    """

    __slots__ = ("func", "number", "reads", "makes", "saves", "needed", "end", "is_live")

    def __init__(self, func, number, reads):
        self.func, self.number, self.reads = func, number, reads
        self.makes: set = set()
        self.saves = self.needed = 0
        self.end, self.is_live = 0, False


class Skipping:
    """Runs the calls of a recomputation, the dead ones without their kernels."""

    def __init__(self, dead: DeadCalls):
        self._dead = dead
        self._counts = dict.fromkeys(dead, -1)

    def run(self, func, args, kwargs) -> Any:
        needed = None
        if (numbers := self._dead.get(func)) is not None:
            self._counts[func] = number = self._counts[func] + 1
            needed = numbers.get(number)
        try:
            if needed is None:
                return func(*args, **kwargs)
            hooks = top_hooks(False)
            _push_mode(skip := _Skip(needed))  # a fifth of the time of `with`, which sets flags for Dynamo
            try:
                if not needed and hooks is None:
                    return func(*args, **kwargs)
                pack, unpack = (skip.pack, _unpack) if needed else (_outside(hooks[0]), hooks[1])
                with saved_tensors_hooks(pack, unpack):
                    return func(*args, **kwargs)
            finally:
                _pop_mode()
        except Exception as error:
            if needed is None and all(type(tensor) is not Dead for tensor in _tensors((args, kwargs))):
                raise
            raise DeadRead(f"{func} cannot run without its result") from error


class _Skip(TorchDispatchMode):
    """Replaces kernels by `Dead` results, after autograd has saved `needed` tensors."""

    def __init__(self, needed: int):
        super().__init__()
        self._needed = needed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # else ``TorchDispatchMode.__init_subclass__`` makes calls import Dynamo
        return False

    def pack(self, tensor):
        self._needed -= 1
        return tensor.detach(), tensor._version

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._needed > 0 or (func.is_view and type(args[0]) is not Dead) or func.namespace == "prim":
            return func(*args, **kwargs)  # the device of a fake tensor is an operation in the namespace prim
        return _without_kernel(func, args, kwargs)


def _outside(pack):
    """The hook `pack` of the user's code, run outside of the mode that replaces kernels."""

    def packed(tensor):
        mode: Any = _pop_mode()
        try:
            return pack(tensor)
        finally:
            _push_mode(mode)

    return packed


def _unpack(saved):
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation"
        )
    return tensor


def _without_kernel(func, args, kwargs):
    """The results of an operation of torch as `Dead` tensors; one that draws random numbers runs, and is dropped."""
    schema = func._schema
    if RANDOM in func.tags:
        func(*map(_zeros, args), **{name: _zeros(value) for name, value in kwargs.items()})
    if schema.is_mutable:
        given = {**dict(zip((argument.name for argument in schema.arguments), args)), **kwargs}
        written = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if len(written) == 1 and type(written[0]) is Dead and torch.Tag.inplace_view not in func.tags:
            return written[0]
        raise DeadRead(f"{func} writes a tensor that was not recomputed")
    device = kwargs.get("device") or next(_tensors(args)).device
    key: Any = None
    with contextlib.suppress(TypeError):  # an argument has no hash
        key = None if kwargs else (func, *map(_facts, args))
        if (known := _known.get(key)) is not None:
            return _dead(*known, device)  # pyright: ignore[reportCallIssue]
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    with torch._C._DisableTorchDispatch():  # otherwise, meters would count these
        result = func(*map(_meta, args), **{name: _meta(value) for name, value in kwargs.items()})
    if isinstance(result, torch.Tensor):
        if result.is_conj() or result.is_neg():  # torch's other operations ask for these bits
            raise DeadRead(f"{func} of a tensor that was not recomputed has a flag of its own")
        facts = result.shape, result.stride(), result.storage_offset(), result.dtype
        if key is not None and len(_known) < _MOST_KNOWN:
            _known[key] = facts
        return _dead(*facts, device)
    if not all(isinstance(each, torch.Tensor) for each in result):
        raise DeadRead(f"{func} returns other values than tensors")
    return type(result)(_dead(t.shape, t.stride(), t.storage_offset(), t.dtype, device) for t in result)


_known: dict[Any, Any] = {}  # shape, strides, offset and dtype of the results of operations
_MOST_KNOWN = 4096


def _dead(shape, strides, offset, dtype, device) -> Dead:
    tensor = _make(Dead, shape, strides=strides, storage_offset=offset, dtype=dtype, device=device, storage_size=0)
    torch._C._set_throw_on_mutable_data_ptr(tensor)  # a kernel that bypasses the dispatcher would read address 0
    return tensor


def dead_like(tensor: torch.Tensor) -> Dead:
    return _dead(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)


def _facts(value):
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_facts, value)) if type(value) in (list, tuple) else (type(value), value)


def _meta(value):
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if type(value) in (list, tuple):
        return type(value)(map(_meta, value))
    return value


def _zeros(value):
    if type(value) is Dead:
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return value


def _tensors(values) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif type(value) is dict:
            yield from _tensors(value.values())
