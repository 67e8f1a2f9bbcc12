"""Find the tensors without data that something keeps after a forward of a capture, and remove them or give them data.

A cache that the first call fills (``functools.cache``, a dict, an attribute) would otherwise hold them forever. What
depends on constants and buffers alone gets the values that the first call would have computed; everything else is
removed from what refers to it. Containers that the model's code itself names are put back by `outside_values`, those
of modules by `attributes`; here is the rest, found by the garbage collector.
"""

import contextlib
import functools
import gc
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch import eager_transforms, vmap
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ackpt.checkpointing import reentrant
from ackpt.checkpointing.recorder import is_users
from ackpt.core.errors import CheckpointError, TraceError
from ackpt.metering.without_data import CACHED, holders, removals

from .model_checks import require_plain
from .source_lines import Where, in_model, line, not_repeated

# Operations that use nothing of their first argument but its shape, dtype and device.
OF_SHAPES = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
)


class NotConstant(Exception):
    """A tensor depends on the call's arguments, on parameters, or on random numbers, or cannot get data in place."""


class Kept:
    """Tensors that the code made in the latest forward, and those that outlived it; ``given``: those with data now."""

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref, str]] = []
        self._nodes: dict[int, Node] = {}
        self._operations: dict[Node, tuple] = {}
        self._known: dict[Node, torch.Tensor] = {}
        self._root: Any = None
        self._new: set[int] = set()
        self._removals: list[Callable[[], None]] = []
        self._any = False
        self.given: list[torch.Tensor] = []

    def add(self, result, location: str) -> None:
        """Note what a call of the model's code returned; `location` is in words."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, FunctionalTensor):
                self._made.append((weakref.ref(tensor), location))

    def add_backward(self) -> None:
        """Note the tensors without data that exist after the backward, in which torch calls no `add`."""
        noted = {id(tensor()) for tensor, _ in self._made}
        for each in gc.get_objects(generation=0):
            if type(each) is FunctionalTensor and id(each) not in noted:
                self._made.append((weakref.ref(each), "in a backward or a hook of it"))

    def alive(self) -> list[tuple[torch.Tensor, str]]:
        """The tensors that something still refers to after a forward, each once, and where they were made."""
        if any(tensor() is not None for tensor, _ in self._made):
            self._new.update(map(id, gc.get_objects(generation=0)))
            gc.collect()  # the model may create reference cycles
        pairs = ((tensor(), location) for tensor, location in self._made)
        return list({id(tensor): (tensor, location) for tensor, location in pairs if tensor is not None}.values())

    def start(self, drop: Callable[[], None]) -> None:
        """Begin a forward: call `drop`, which drops references of our own, and remove what the forward before left."""
        self._any |= bool(self.alive())
        drop()
        self._remove_left()
        gc.collect(0)  # from here on, the youngest generation contains just what the forward creates
        self._new.clear()

    def note_operations(self, real: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Note at the end of a forward what computes its tensors; `real`: pairs of a traced and a real tensor."""
        mode = get_proxy_mode()
        if mode is None or not self._any:
            return
        self._root = mode.tracer.root
        for tensor, _ in self._made:
            if (made := tensor()) is not None and (node := _node_of(made, mode.tracer)) is not None:
                self._nodes[id(made)] = node
        for tensor, value in real:
            node = _node_of(tensor, mode.tracer) if isinstance(tensor, FunctionalTensor) else None
            if node is not None and node.op == "placeholder":  # otherwise the forward has written to it
                self._known[node] = value
        nodes = mode.tracer.graph.nodes
        self._operations = {node: (node.op, node.target, node.args, node.kwargs) for node in nodes}

    def give_data(self, tensors, mode) -> None:
        """Make `tensors`, wherever they are, what the model's own call would have computed in the context `mode`.

        Raises NotConstant if one depends on more than constants and buffers, or something has a weak reference to one.
        """
        if any(tensor.requires_grad or id(tensor) not in self._nodes for tensor in tensors):
            raise NotConstant
        with _disable_current_modes(), torch.no_grad(), mode:
            data = self._data([self._nodes[id(tensor)] for tensor in tensors])
        self._removals += removals(tensors, self._new)
        self.given += tensors
        self._made, self._nodes, self._operations, self._known, self._root = [], {}, {}, {}, None
        if any(map(weakref.getweakrefs, tensors)):
            raise NotConstant
        while data:
            torch.utils.swap_tensors(tensors[len(data) - 1], data.pop())

    def _data(self, nodes: list[Node]) -> list[torch.Tensor]:
        values: dict[Node, Any] = dict(self._known)
        left = [*nodes]
        while left:
            op, target, args, kwargs = self._operations.get(node := left[-1], ("placeholder",) * 4)
            if target in OF_SHAPES:
                like = args[0].meta["val"]
                if like._has_symbolic_sizes_strides:
                    raise NotConstant
                like = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
                args = (like, *args[1:])
            needed: list[Node] = []
            map_arg((args, kwargs), needed.append)
            if node in values:
                left.pop()
            elif op == "placeholder" or torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
                raise NotConstant
            elif missing := [each for each in needed if each not in values]:
                left += missing
            elif op == "get_attr":
                values[node] = getattr(self._root, target)
            else:
                given, named = map_arg((args, kwargs), values.__getitem__)
                values[node] = target(*given, **named)
        return [_alias(values[node]) for node in nodes]

    def forget(self) -> None:
        """Remove the tensors that are left from whatever refers to them, and those that `give_data` gave data."""
        noted, self._removals, self.given = self._removals, [], []
        for remove in noted:
            remove()
        self._remove_left()

    def finish(self) -> None:
        """Leave everything as it is after the capture, and reference nothing of it."""
        self._removals.clear()
        self.given.clear()

    def _remove_left(self) -> None:
        tensors = [tensor for tensor, _ in self.alive()]
        self._made.clear()
        self._nodes.clear()
        for remove in removals(tensors, self._new):
            remove()


def _node_of(tensor, tracer) -> Node | None:
    torch._sync(tensor)
    inner = torch._from_functional_tensor(tensor.elem)
    return get_proxy_slot(inner, tracer, None, lambda proxy: proxy.proxy.node)


def _alias(value: torch.Tensor) -> torch.Tensor:
    """A tensor in the memory of `value` that is no view of it, so that nothing else refers to its implementation."""
    value = value.resolve_conj().resolve_neg()
    whole = torch.empty(0, dtype=value.dtype, device=value.device)
    return whole.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())


def places(found: dict[int, tuple[torch.Tensor, str]]) -> list[Callable[[], bool]]:
    """Functions that return whether the tensors in `found` are where the code found them, apart from new objects."""
    new = set(map(id, gc.get_objects(generation=0))) | {id(found), *map(id, found.values())}
    tensors = [tensor for tensor, _ in found.values()]
    checks = []
    for level, items, holder in holders(tensors):
        if id(holder) in new:
            continue
        if isinstance(holder, tuple):
            level.append(holder)
        elif check := _check(holder, items):
            checks.append(check)
    return checks


def _check(holder, items: dict[int, Any]) -> Callable[[], bool] | None:
    """A function that returns whether `holder` still has those of `items` that it has now; a capture keeps them."""
    names: Iterable[Any] = ()
    get: Callable[[Any], Any] = lambda name: getattr(holder, name, None)  # noqa: E731
    if isinstance(holder, dict):
        if "joint" in holder and "held" in holder:  # an earlier capture
            return None
        names, get = [*holder], holder.get
    elif isinstance(holder, (list, deque)):
        names, get = range(len(holder)), lambda at: holder[at] if at < len(holder) else None
    elif isinstance(holder, types.CellType):
        names = ("cell_contents",)
    elif isinstance(holder, types.FunctionType):
        names = ("__defaults__",)
    elif not isinstance(holder, (type, CACHED)):
        slots = (name for kind in type(holder).__mro__ for name in getattr(kind, "__slots__", ()))
        names = {*getattr(holder, "__dict__", ()), *slots}
    were = [(name, id(value)) for name in names if items.get(id(value := get(name))) is value and value is not None]
    return (lambda: all(id(get(name)) == was for name, was in were)) if were else None


_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_OF_AUTOGRAD = torch.Tensor.is_leaf.__get__, torch.Tensor.grad_fn.__get__  # pyright: ignore
_VERSION = torch.Tensor._version.__get__  # pyright: ignore
# What reaches C++ without a call of a function mode: each reads the implementation of the tensors that it gets
# (``THPFunction_apply`` in ``torch/csrc/autograd/python_function.cpp``, ``torch/csrc/jit/python/script_init.cpp``,
# ``Tensor._make_subclass``, ``torch/csrc/functorch/init.cpp``).
_WITHOUT_MODES: tuple[tuple[Any, str], ...] = (
    (torch.autograd.Function, "apply"),
    (torch.jit.ScriptFunction, "__call__"),
    (torch.nn.Parameter, "__new__"),
    (vmap, "_add_batch_dim"),
    (eager_transforms, "_wrap_for_grad"),
)


def _is_called_by_user(frame) -> bool:
    while frame.f_code.co_name == "__torch_function__":  # of the modes inside this one
        frame = frame.f_back
    return is_users(frame.f_code.co_filename)


class HoldsTensors(Exception):
    """The model's code references tensors that must become inputs of the capture: (tensor, line) of each, by its id."""

    def __init__(self, tensors):
        super().__init__()
        self.tensors = tensors


def _refused(*args):
    raise CheckpointError("checkpoint() is called while the step is captured")


class Held(TorchFunctionMode):
    """Inside, the model's code has its own tensors, and torch's functions get the traced ones that represent them.

    ``traced``: ``{id of a tensor: its traced one}``, of `own`, the parameters, buffers and arguments. ``new_inputs``:
    ``{id: (tensor, line)}`` of tensors without one; a second capture takes them as inputs. ``paused``: a context in
    which torch's own code runs. ``where``: the mode around this one.
    """

    def __init__(
        self,
        own: Sequence[torch.Tensor],
        traced: Sequence[torch.Tensor],
        paused: Callable[[], contextlib.AbstractContextManager],
        where: Where,
    ):
        super().__init__()
        self._paused, self._where, self._is_backward = paused, where, False
        self._own = {id(each): tensor for each, tensor in zip(traced, own)}
        self.traced = {id(tensor): each for each, tensor in zip(traced, own)}
        self.new_inputs: dict[int, tuple[torch.Tensor, str]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _OF_AUTOGRAD and id(args[0]) in self.traced:  # torch traces views of the tensors
            return func(*args)
        try:
            args = tuple(map(self._replaced, args))
            kwargs = {name: self._replaced(value) for name, value in (kwargs or {}).items()}
            if func == _VERSION and _is_called_by_user(sys._getframe(1)):
                raise not_repeated(
                    f"the model's code reads the version of a tensor{line()}, and a captured step would get the same "
                    "in every call. Compare a number that your code increments instead"
                )
            if func is torch.Tensor.register_hook:
                args = (args[0], *map(self._in_modes, args[1:]))
        except TraceError as error:
            self._where.note_error(error)
            raise
        with self._paused():
            return self._returned(func(*args, **kwargs))

    @contextlib.contextmanager
    def modes(self):
        """Inside, code of the model's own runs in the backward, which torch runs without the modes of its forward."""
        self._is_backward = True
        with self._where, self:
            yield

    def _in_modes(self, hook):
        @functools.wraps(hook)
        def run(*args):
            with self.modes():
                return hook(*args)

        return run

    def _returned(self, result):
        """`result` with the model's own tensors in place of the traced ones that represent them."""
        if type(result) in (tuple, list):
            return type(result)(map(self._returned, result))
        return self._own.get(id(result), result)

    @contextlib.contextmanager
    def in_functions(self):
        """Inside, the functions of torch that call no function mode get the traced tensors, too."""
        thread = threading.get_ident()

        def with_traced(own, is_deep):
            if isinstance(own, types.ClassMethodDescriptorType):  # ``Function.apply`` from torch 2.14 on
                bind = own.__get__
                own = classmethod(lambda cls, *args, **kwargs: bind(None, cls)(*args, **kwargs))
            function: Any = getattr(own, "__func__", own)

            def replaced(value):
                return self._replaced(value) if is_deep or isinstance(value, torch.Tensor) else value

            def call(*args, **kwargs):
                if threading.get_ident() != thread:
                    return function(*args, **kwargs)
                named = {name: replaced(value) for name, value in kwargs.items()}
                return self._returned(function(*map(replaced, args), **named))

            return call if own is function else type(own)(call)

        with contextlib.ExitStack() as stack:
            for kind, name in _WITHOUT_MODES:
                call = with_traced(vars(kind)[name], kind is torch.jit.ScriptFunction)
                stack.enter_context(mock.patch.object(kind, name, call))
            stack.enter_context(mock.patch.object(reentrant, "_run", _refused))
            start = threading.Thread.start

            def start_elsewhere(new):
                if threading.get_ident() == thread and in_model():
                    said = (
                        f"the forward starts a thread{line()}, which a captured step would not do. Compute without it"
                    )
                    self._where.note_error(not_repeated(said))
                start(new)

            stack.enter_context(mock.patch.object(threading.Thread, "start", start_elsewhere))
            yield

    def _replaced(self, value):
        if isinstance(value, torch.Tensor):
            return self._stand_in(value)
        if isinstance(value, _PLAIN):  # most arguments; a look into them takes longer than the operation's dispatch
            return value
        return tree_map_only(torch.Tensor, self._stand_in, value)

    def _stand_in(self, tensor):
        if id(tensor) in self.traced:
            return self.traced[id(tensor)]
        is_traced = torch._is_functional_tensor(tensor) or is_functorch_wrapped_tensor(tensor)
        if isinstance(tensor, FunctionalTensor) or is_traced or self._is_backward or not in_model():
            return tensor
        require_plain(f"a tensor used{line()}", tensor)
        if tensor.requires_grad:
            raise TraceError(
                f"a tensor of shape {tuple(tensor.shape)} that requires grad is used{line()} but is not a parameter "
                "of the model. Register it: self.name = nn.Parameter(...), or nn.ParameterList for several. If "
                "FullyShardedDataParallel made it, use fully_shard, or ackpt.apply_activation_checkpointing."
            )
        self.new_inputs[id(tensor)] = tensor, line()
        self.traced[id(tensor)] = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return self.traced[id(tensor)]
