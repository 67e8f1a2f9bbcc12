"""Run something else wherever the ``forward`` of a module is called: a region, a planned step, or a planned block.

``forward`` of the module's class becomes a data descriptor, which Python asks before the instance's own attributes. So
``model(x)``, ``model.forward(x)``, ``Model.forward(model, x)``, a class's own ``__call__`` and libraries that replace
``forward`` on the instance or the class all reach the replacement, as does ``super().forward`` if the class inherits
it. Other instances, and ``super()`` in a class that overrides it, get the class's own function. The descriptor is
removed with the last `StandIn` of a class. Only the class refers to it, so it is freed when the program assigns another
``forward``, which shows that it did.
"""

import contextlib
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .reachable import IN_PLACE, TRAVELING, leave_uncompiled, names_in

Run = Callable[[nn.Module, Callable[..., Any], tuple, dict], Any]  # called with the module and its own forward
_NAMES = "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_GLOBAL", "LOAD_CONST"
_CALLS = {"forward", "__call__", "_call_impl", "_wrapped_call_impl"}
_LOCK = threading.RLock()  # garbage collection may end a `StandIn` while this thread makes one


class StandIn:
    """Runs ``run(module, forward, args, kwargs)`` in place of the ``forward`` of modules of the class `kind`.

    As the attribute `IN_PLACE`, it is for `module` alone; copies ignore it, and pickles have None. As the attribute
    `TRAVELING`, it is for every module that has it, so that copies and pickles of the module run `run`, too.
    """

    def __init__(self, kind: type[nn.Module], run: Run | None, module: nn.Module | None = None):
        self.kind, self.run = kind, run
        self.of = None if module is None else weakref.ref(module)
        self.end = weakref.finalize(self, _left, _entered(kind))
        self.end.atexit = False

    def __reduce__(self):
        return (StandIn, (self.kind, self.run)) if self.of is None else (type(None), ())


def own_attribute(kind: type, name: str, default: Any = None) -> Any:
    """``vars(kind)[name]`` without a `StandIn`."""
    value = vars(kind).get(name, default)
    if isinstance(value, _Forward):
        value.take_defaults()
        value = value.own
    return default if value is None and name == "forward" else value


def require_call_of_forward(module: nn.Module, label: str) -> None:
    """Refuse a module whose class has a ``__call__`` that does not call ``forward``: it would bypass the `StandIn`.

    Raises:
        TypeError: if its code, and the methods that it names, refer to no way to ``forward``.
    """
    kind, names, seen = type(module), {"__call__"}, set()
    while left := names - seen:
        seen |= left
        for name in left:
            value = inspect.getattr_static(kind, name, None)
            if not callable(value) or (value is vars(nn.Module).get(name) and name != "__call__"):
                continue
            if not isinstance(value, types.FunctionType) or {*value.__code__.co_freevars} - {"__class__"}:
                return  # what it calls is not known
            used = {each for each in names_in(value.__code__, *_NAMES) if isinstance(each, str)}
            if used & _CALLS or any(isinstance(value.__globals__.get(each), types.FunctionType) for each in used):
                return
            names = names | used
    raise TypeError(
        f"{label} ({kind.__name__}) has a __call__ that does not call forward, so its calls would run neither a "
        "region nor a plan: compute in forward and call self.forward from __call__, or pass the modules that it calls"
    )


class _Local(threading.local):
    """``runs``: by the id of a module, what runs in this thread. ``own``: ids of modules that run as they are;
    ``in_place``: whether what was put in place runs."""

    def __init__(self) -> None:
        self.runs: Mapping[int, Run] = {}
        self.own: frozenset[int] = frozenset()
        self.in_place = True


_local = _Local()


@contextlib.contextmanager
def locally(runs: Mapping[int, Run]) -> Iterator[None]:
    """Inside, `runs` stand in for modules, by id, in this thread; the classes of the modules need a `StandIn`."""
    before, _local.runs = _local.runs, {**_local.runs, **runs}
    try:
        yield
    finally:
        _local.runs = before


def put_in_place(module: nn.Module, run: Run) -> None:
    """Let `run` stand in for the forward of `module` from now on, but not for that of its copies."""
    remove_from(module)
    vars(module)[IN_PLACE] = StandIn(type(module), run, module)


def in_place_of(module: nn.Module) -> Any:
    """The function that `put_in_place` gave to `module`, or None."""
    stand_in = vars(module).get(IN_PLACE)
    return stand_in.run if stand_in is not None and stand_in.of() is module else None


def remove_from(module: nn.Module) -> None:
    """Undo `put_in_place`."""
    if in_place_of(module) is not None:
        vars(module).pop(IN_PLACE).end()


def call_own(self: nn.Module, /, *args, **kwargs) -> Any:
    """The result of the module's own ``forward``, inside of which nothing that was put in place runs."""
    return _call_as_it_is(_look_up_and_call, False, self, self, *args, **kwargs)


def _look_up_and_call(module, /, *args, **kwargs):
    return module.forward(*args, **kwargs)


def as_it_is(module: nn.Module, forward: Callable[..., Any]) -> types.MethodType:
    """`forward`, of `module`, as a method inside of which nothing stands in for the module, in whichever thread."""
    return types.MethodType(functools.partial(_call_as_it_is, forward, _local.in_place), module)


def _call_as_it_is(forward, in_place, module, /, *args, **kwargs):
    before = _local.own, _local.in_place
    _local.own, _local.in_place = before[0] | {id(module)}, in_place
    try:
        return forward(*args, **kwargs)
    finally:
        _local.own, _local.in_place = before


def _run_of(module) -> Run | None:
    key, attributes = id(module), module.__dict__
    if key in _local.own:
        return None
    if key in _local.runs:
        return _local.runs[key]
    if IN_PLACE in attributes and _local.in_place and (run := in_place_of(module)) is not None:
        return run
    return attributes[TRAVELING].run if TRAVELING in attributes else None


class _Forward:
    """The attribute ``forward`` of the class `kind`; ``own``: the one before, None if `kind` has inherited it."""

    def __init__(self, kind: type, own: Any):
        self.kind, self.own = kind, own
        self._functions: Any = None, None, None  # the class's own, and what `_method` and `_of_class` make of it
        weakref.finalize(self, _replaced, weakref.ref(kind)).atexit = False

    def __get__(self, module, kind):
        function, stood_in, of_class = self._made()
        if module is None:
            return of_class if kind is not None and _forward_of(kind) is function else _bound(function, None, kind)
        forward = _bound(function, module, kind)
        if not self._is_attribute_of(type(module)):
            return forward
        forward = module.__dict__.get("forward", forward)
        return forward if _run_of(module) is None else self._stood_in(module, forward, function, stood_in)

    def _made(self):
        self.take_defaults()
        function = _forward_of(self.kind, self.own)
        if self._functions[0] is not function:
            of_class = _of_class(function) if isinstance(function, types.FunctionType) else function
            self._functions = function, _method(function), of_class
        return self._functions

    def take_defaults(self) -> None:
        """Give the class's own function the default arguments that the program has set on ``kind.forward``."""
        function, _, of_class = self._functions
        if torch.compiler.is_dynamo_compiling():  # Dynamo has no ``__kwdefaults__`` of functions
            return
        if of_class is not function and (of_class.__defaults__ or of_class.__kwdefaults__):
            function.__defaults__ = of_class.__defaults__ or function.__defaults__
            function.__kwdefaults__ = of_class.__kwdefaults__ or function.__kwdefaults__
            of_class.__defaults__ = of_class.__kwdefaults__ = None

    def _stood_in(self, module: nn.Module, forward: Callable[..., Any], function, stood_in) -> Callable[..., Any]:
        """`forward` with its name and signature, for which something stands in, as long as it does."""
        if getattr(forward, "__code__", None) in _CODES:  # a library kept it, and has put it back
            return forward
        _break_graph()
        if not isinstance(forward, types.MethodType) or forward.__self__ is not module:
            return _function(module, forward)
        return types.MethodType(stood_in if forward.__func__ is function else _method(forward.__func__), module)

    def __set__(self, module, value) -> None:
        module.__dict__["forward"] = value

    def __delete__(self, module) -> None:
        if module.__dict__.pop("forward", None) is None:
            raise AttributeError("forward")

    def _is_attribute_of(self, kind) -> bool:
        """Whether this is ``kind.forward``, or that which it inherits, and not one that a subclass overrides."""
        for each in kind.__mro__:  # no generators here: with fullgraph=True, Dynamo refuses their frames
            forward = each.__dict__.get("forward")
            if forward is self:
                return True
            if forward is not None and (type(forward) is not _Forward or forward.own is not None):
                return False
        return False


def _forward_of(kind: type, own: Any = None) -> Any:
    """``kind.forward`` as in its class's namespace, as if nothing stood in; `own`: that of `kind` itself, if any."""
    for each in kind.__mro__:
        own = own or own_attribute(each, "forward")
    return own


def _bound(function, module, kind) -> Any:
    return function.__get__(module, kind) if hasattr(function, "__get__") else function


_USERS: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()  # the number of each class's `StandIn`s


def _entered(kind: type) -> list[type]:
    """Stand in for the ``forward`` of `kind` and of the class that it inherits it from, if any; returns both."""
    with _LOCK:
        defining = next(each for each in kind.__mro__ if own_attribute(each, "forward") is not None)
        kinds = [kind] if defining in (kind, nn.Module) else [kind, defining]
        for each in kinds:
            _USERS[each] = _USERS.get(each, 0) + 1
            _put_before(each)
    return kinds


def _left(kinds: list[Any]) -> None:
    with _LOCK:
        for kind in kinds:
            _USERS[kind] -= 1
            forward = vars(kind).get("forward")
            if _USERS[kind] == 0 and isinstance(forward, _Forward):
                forward.take_defaults()
                if forward.own is None:
                    del kind.forward
                else:
                    kind.forward = forward.own


def _put_before(kind: Any) -> None:
    own = vars(kind).get("forward")
    if not isinstance(own, _Forward):
        kind.forward = _Forward(kind, own.__wrapped__ if getattr(own, "__code__", None) in _CODES else own)


def _replaced(reference: Callable[[], type | None]) -> None:
    """Stand in for the ``forward`` that the program has assigned to a class; nothing refers to the earlier one."""
    with _LOCK:
        if (kind := reference()) is not None and _USERS.get(kind):
            _put_before(kind)


def _of_class(function) -> Any:
    @functools.wraps(function)
    def forward(self, /, *args, **kwargs):
        is_own = isinstance(self, nn.Module) and "forward" not in vars(self) and _forward_of(type(self)) is function
        return self.forward(*args, **kwargs) if is_own else function(self, *args, **kwargs)

    return forward


def _break_graph() -> None:
    """Say in Dynamo's error of ``fullgraph=True`` what to do; without it, a graph ends here in any case."""
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(  # pyright: ignore[reportAttributeAccessIssue]
            msg="A module with a region or plan of ackpt cannot be part of a graph. With fullgraph=True, compile what "
            "runs inside, as by block.compile(fullgraph=True) for each checkpointed block."
        )


def _method(function) -> Any:
    @functools.wraps(function)
    def forward(self, /, *args, **kwargs):
        _break_graph()
        return _call(self, types.MethodType(function, self), args, kwargs)

    return forward


def _function(module, function) -> Any:
    @functools.wraps(function)
    def forward(*args, **kwargs):
        return _call(module, function, args, kwargs)

    return forward


_CODES = [each.__code__ for each in (_method(len), _function(None, len), _of_class(len))]


def _call(module, forward, args, kwargs):
    run = _run_of(module)
    if run is None:
        return forward(*args, **kwargs)
    return _call_as_it_is(run, _local.in_place, module, module, forward, args, kwargs)


# Torch: Dynamo compiles `_Forward.__get__` as a function, whose code reads ``forward``, which calls `__get__` again.
# Versions: 2.11 to 2.14; test: test_modules_of_a_shared_class_compile_as_one_graph in test_standing_in.py.
_SKIPPED = (_Forward.__get__, _Forward._made, _Forward._stood_in, _bound, _forward_of, _method, _function, _of_class)
for _each in (*_SKIPPED, _Forward.take_defaults, own_attribute, _call_as_it_is):
    leave_uncompiled(_each)
