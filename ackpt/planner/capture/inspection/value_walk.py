"""Find plain values by the names in code: globals, closed-over variables, and attributes of objects."""

import contextvars
import dis
import functools
import gc
import importlib.util
import io
import os
import random
import sys
import sysconfig
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ackpt.checkpointing.reachable import (
    HOOKS,
    LONGEST_CONTAINER,
    Namespace,
    attribute_of,
    bound,
    content_of,
    global_names,
    rebound_names,
    slots_of,
)
from ackpt.checkpointing.recorder import code_location, is_users
from ackpt.checkpointing.rng import TorchStream, stream_of
from ackpt.checkpointing.standing_in import own_attribute
from ackpt.metering.resident import state_name
from ackpt.metering.without_data import CACHED

from .attributes import (
    ABSENT,
    OF_EVERY_MODULE,
    Change,
    Snapshot,
    changes_value,
    in_words,
    module_snapshots,
    plain,
    reference,
    stores_a_tensor,
)
from .source_lines import not_repeated

_DEPTH, _DEEPEST = 2, 5  # containers in containers, and attributes of attributes
_METHODS = types.FunctionType, staticmethod, classmethod, property, CACHED, torch.Tensor
_SEED = 1_795_364_021  # of generators while a forward runs that must not seed them
_BOUND = types.MethodType, types.MethodWrapperType, types.BuiltinMethodType
_WRAPPING = types.MethodType, staticmethod, classmethod
_READS_ENVIRONMENT = frozenset(("environ", "getenv"))
# Only in these containers is it certain that reading an item runs no user code.
_CONTAINERS = frozenset((list, tuple, deque, set, frozenset, dict, OrderedDict, defaultdict, Counter))
_STANDARD = tuple(os.path.abspath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))
# torch computes with symbolic sizes by these, so they run during a forward that is captured with dynamic dimensions.
_SYMBOLIC = tuple(
    os.path.dirname(spec.origin) + os.sep
    for spec in map(importlib.util.find_spec, ("sympy", "mpmath", "torchgen"))
    if spec is not None and spec.origin is not None
)
_INSTALLED = os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep


class Value:
    """A name in a namespace and what it referred to: a plain value, a container of plain values, or an object.

    ``owner``: the object or cell whose namespace it is, which the forward may have created itself; None for others.
    """

    __slots__ = ("namespace", "name", "label", "was", "content", "copies", "original", "owner")

    def __init__(self, namespace, name: str, label: str, value, owner=None, may_grow=False):
        self.namespace, self.name, self.label, self.owner = namespace, name, label, owner
        self.content = _content(value)
        self.was = value if self.content is not None or value is ABSENT else reference(value)
        self.original = value  # until the capture ends
        is_set = _is_replaced if may_grow else _is_set
        self.copies = [Snapshot(each, functools.partial(_refusal, label), is_set) for each in _containers(value)]

    def is_changed(self) -> bool:
        now = self.namespace.get(self.name, ABSENT)
        if now is self.was:
            return bool(self.copies) and _content(now) != self.content
        if self.content is None:
            return self.was is ABSENT or now is not self.was()
        return _content(now) != self.content

    def restored(self) -> Iterator[Change]:
        """Restore it where a forward has set plain values, or tensors without data."""
        now = self.namespace.get(self.name, ABSENT)
        if _is_set(self.original, now):
            key = id(self.namespace if self.owner is None else self.owner), self.name
            repeat, revert = functools.partial(self._put, now), functools.partial(self._put, self.original)
            revert()
            yield Change(key, now, _refusal(self.label, ABSENT, self.original, now), repeat, revert)
        for copy in self.copies:
            yield from copy.restored()

    def _put(self, value) -> None:
        if value is ABSENT:
            self.namespace.pop(self.name)
        else:
            self.namespace[self.name] = value


class Walk:
    """The values that code reads by name, starting from globals, a model's modules and the arguments of a call.

    `runs`: whether the code runs; iterators, queues and random number generators are then guarded, torch's generators
    seeded until `drawn_from`, which finds those that it seeded, and `restored` includes the attributes of modules.
    ``refused``: why a captured step would not do what the code does, in words, as far as it shows while it runs.
    """

    def __init__(self, model: nn.Module, leaves, runs: bool = False):
        self._runs = runs
        self.values: dict[tuple[int, str], Value] = {}
        self.refused: list[str] = []
        self._generators: dict[int, tuple[TorchStream, str, Any, Any]] = {}
        self._wires: list[tuple[Any, Any, Any, Any]] = []
        self._ids: dict[int, int] = {}  # of items, by those of the wires in their places
        self._armed: list[_Tripwire] = []
        if runs:
            self._guard_module(random, "Python's module random")
            if numpy := sys.modules.get("numpy"):
                for module in (numpy.random, numpy.random.mtrand):
                    self._guard_module(module, "numpy.random")
        self._snapshots = [*module_snapshots(model)] if runs else []
        self._functions: set[types.FunctionType] = set()
        self._names = {"forward"}  # torch's own code calls it
        self._objects: dict[int, tuple[Any, str, int]] = {}
        self._classes: dict[type, Namespace] = {}
        # Facts of every call compare modules and the states of quantized weights, which their layers also hold.
        states = (vars(each).get(state_name(each) or "") for each in model.parameters())
        self._compared = {*map(id, model.modules()), *(id(state) for state in states if state is not None)}
        for path, module in model.named_modules():
            label = module_label(path)
            self.add(type(module), f"the class of {label}")
            for name, value in list(vars(module).items()):
                if name not in OF_EVERY_MODULE and self._has_attributes(value):
                    self.note(vars(module), name, f"attribute {name!r} of {label}", 0)
                elif name not in OF_EVERY_MODULE:
                    self.add(value, f"attribute {name!r} of {label}")
                    self._add_items(value, f"attribute {name!r} of {label}", 0)
                    self._guard(vars(module), name, f"attribute {name!r} of {label}")
            for hook in (hook for hooks in HOOKS for hook in getattr(module, hooks).values()):
                self.add(_owner(hook), f"a hook of {label}")
        for leaf in leaves:
            self.add(leaf, "an argument")

    def enter(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        """Record the values that `code` reads, and globals that it sets; its globals are `namespace`."""
        if self._runs and (line := _compares_types(code)):
            place = code_location(code.co_filename, line)
            self.refused.append(
                f"the model's code compares a type with torch.Tensor at {place}, and a captured step would "
                "get another answer, because the tensors of a capture are of a subclass. Use isinstance"
            )
        read, written = global_names(code)
        texts = [text for text in code.co_consts if isinstance(text, str)]  # for getattr and globals()
        for name in sorted({*read, *written, *(texts if "globals" in code.co_names else ())}):
            label = f"global {name!r} of {namespace.get('__name__')}"
            self.note(namespace, name, label, 0, is_optional=name in written)
        if rebound_names(code) and closes_over(code):
            self.close_over(functions_of([code]))
        if not _READS_ENVIRONMENT.isdisjoint(code.co_names):
            self.note(_ENVIRONMENT, "variables", "the environment", 0)
        new = {name for name in (*code.co_names, *texts) if name not in self._names and not name.startswith("__")}
        self._names |= new
        for value, label, depth in list(self._objects.values()):
            self._attributes(value, label, depth, new)

    def enter_closure(self, frame: types.FrameType) -> None:
        """Record what code that starts to run in `frame` closes over, and guard iterators and queues."""
        closed_over = {name: frame.f_locals.get(name) for name in frame.f_code.co_freevars}
        for name, value in closed_over.items():
            self.add(value, f"{name!r} of {said(frame.f_code)}")
        if any(_advances(value) or next(_containers(value), None) is not None for value in closed_over.values()):
            self.close_over(functions_of([frame.f_code]), may_grow=True)  # a list may be a log
            _ = frame.f_locals  # before Python 3.13, what was read last is written back after a trace function

    def closure_of(self, frame: types.FrameType) -> tuple[int, ...]:
        """The ids of the code that starts to run in `frame` and of what it closes over."""
        values, names = frame.f_locals, frame.f_code.co_freevars
        ids = (id(values.get(name)) for name in names)
        return id(frame.f_code), *(self._ids.get(each, each) for each in ids)

    def close_over(self, functions: list[types.FunctionType], may_grow=False) -> None:
        """Record what these functions close over."""
        for function in functions:
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                if name != "__class__" and bound(cell):
                    label = f"{name!r} of {said(function.__code__)}"
                    self.note(content_of(cell), name, label, 0, owner=cell, may_grow=may_grow)

    def note(self, namespace, name: str, label: str, depth: int, is_optional=False, owner=None, may_grow=False) -> None:
        value = namespace.get(name, ABSENT)
        is_new = (id(namespace), name) not in self.values and type(value) is not _Tripwire
        if is_new and (value is not ABSENT or is_optional):  # otherwise a builtin
            self.values[id(namespace), name] = Value(namespace, name, label, value, owner, may_grow)
            self._guard(namespace, name, label)
            self.add(value, label, depth)
            self._add_items(value, label, depth)
            if isinstance(value, contextvars.ContextVar):
                self.note(Namespace(lambda name, default: value.get(default), None, None), "value", label, depth)
            if value is os.environ:  # by another name
                self.note(_ENVIRONMENT, "variables", "the environment", 0)
            if isinstance(value, CACHED) and isinstance(wrapped := value.__wrapped__, types.FunctionType):
                self.enter(wrapped.__code__, wrapped.__globals__)  # its results depend on what it reads

    def _defaults(self, function: types.FunctionType, label: str) -> None:
        """Record the default arguments of a function that can change in place."""
        code, defaults = function.__code__, function.__defaults__ or ()
        named = dict(zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults))
        named |= function.__kwdefaults__ or {}
        for name, value in named.items() if is_of_model(code.co_filename) else ():
            if self._has_attributes(value) or any(True for _ in _containers(value)):
                self.note(named, name, f"default argument {name!r} of {label}", 0)

    def add(self, value, label: str, depth: int = 0) -> None:
        """Record the attributes of an object that are named in entered code; `enter` adds those of later code."""
        wrapped = {functools.partial: "func", **dict.fromkeys(_WRAPPING, "__func__")}.get(type(value))
        function = value if wrapped is None else getattr(value, wrapped)
        if type(function) is types.FunctionType and function not in self._functions:
            self._functions.add(function)
            self._defaults(function, label)
        if depth < _DEEPEST and id(value) not in self._objects and self._has_attributes(value):
            self._objects[id(value)] = value, label, depth
            self._attributes(value, label, depth, self._names)

    def _add_items(self, value, label: str, depth: int) -> None:
        for item in (item for container in _containers(value) for item in _items(container)):
            if not isinstance(item, torch.nn.Module):  # a module that is not registered has its own walk
                self.add(item, label, depth + 1)

    def _guard(self, namespace, name: str, label: str) -> None:
        """Guard iterators, queues and random number generators: a value, or those in its lists and dicts."""
        if not self._runs:
            return
        value = namespace.get(name, None)
        items = [(namespace, name, value)]
        for each in (each for each in _containers(value) if not isinstance(each, set)):  # whose items have no keys
            items += [(each, key, item) for key, item in (each.items() if isinstance(each, dict) else enumerate(each))]
        for container, key, item in items:
            if isinstance(item, torch.Generator) and id(item) not in self._generators:
                stream, state = TorchStream(item), item.get_state()
                item.manual_seed(_SEED)
                self._generators[id(item)] = stream, label, state, stream.get()
            elif _advances(item) or (type(item) is tuple and any(map(_advances, item))):
                self._wire(container, key, item, label)

    def _guard_module(self, module: types.ModuleType, label: str) -> None:
        """Guard the functions of `module` that draw from its global random numbers."""
        for name, value in list(vars(module).items()):
            if _advances(value) or type(value).__name__ == "cython_function_or_method":
                self._wire(vars(module), name, value, label)

    def _wire(self, container, key, item, label: str) -> None:
        def wired(value):
            self._armed.append(_Tripwire(value, self.refused, label))
            return self._armed[-1]

        is_tuple = type(item) is tuple
        wire = tuple(wired(each) if _advances(each) else each for each in item) if is_tuple else wired(item)
        self._wires.append((container, key, item, wire))
        self._ids[id(wire)] = id(item)
        container[key] = wire

    def drawn_from(self) -> list[str]:
        """The labels of torch's generators that were seeded; this restores their states."""
        moved = [label for stream, label, _, seeded in self._generators.values() if stream.moved(seeded)]
        for stream, _, state, _ in self._generators.values():
            stream.set(state)
        return moved

    def generators(self) -> list[torch.Generator]:
        """The generators of torch that the code can read."""
        return [stream.generator for stream, *_ in self._generators.values()]

    def restored(self) -> list[Change]:
        """Restore what changed, and return the changes."""
        for container, key, item, wire in self._wires:
            is_list = isinstance(container, (list, deque))
            if (dict(enumerate(container)) if is_list else container).get(key, None) is wire:
                container[key] = item
        for wire in self._armed:
            wire._thread = 0
        new = set(map(id, gc.get_objects(generation=0)))  # see `kept_tensors.Kept.start`
        values = [value for value in self.values.values() if value.owner is None or id(value.owner) not in new]
        return [change for each in (*values, *self._snapshots) for change in each.restored()]

    def _has_attributes(self, value) -> bool:
        if isinstance(value, types.ModuleType):
            return is_of_model(getattr(value, "__file__", None) or "")
        if isinstance(value, torch.Tensor) or id(value) in self._compared:
            return False
        if isinstance(value, types.FunctionType):
            return bool(vars(value)) and is_of_model(value.__code__.co_filename)
        if isinstance(value, threading.local):
            return True
        return _is_class_of_model(value if isinstance(value, type) else type(value))

    def _attributes(self, value, label: str, depth: int, names: set[str]) -> None:
        shared: set[str] = set()
        kinds = list(filter(_is_class_of_model, (value if isinstance(value, type) else type(value)).__mro__))
        absent = names & {name for kind in kinds for name in vars(kind)}  # from `kind` and the classes derived from it
        for kind in kinds:
            own = {name: own_attribute(kind, name, ABSENT) for name in absent | (names & vars(kind).keys())}
            absent = {name for name in absent if own[name] is ABSENT}
            for name, shares in own.items():
                if isinstance(shares, _METHODS) or _content(shares) is not None or _advances(shares) or name in absent:
                    put, pop = functools.partial(setattr, kind), functools.partial(delattr, kind)
                    of_class = Namespace(functools.partial(own_attribute, kind), put, pop)
                    namespace = self._classes.setdefault(kind, of_class)
                    self.note(namespace, name, f"attribute {name!r} of {label}", depth + 1, name in absent)
                    shared.add(name)
                elif isinstance(shares, types.MemberDescriptorType) and not isinstance(value, type):
                    self.note(slots_of(value), name, f"attribute {name!r} of {label}", depth + 1, owner=value)
        instance = None if isinstance(value, type) else getattr(value, "__dict__", None)
        if isinstance(value, threading.local):  # each thread has another dict
            instance = Namespace(*(functools.partial(each, value) for each in (attribute_of, setattr, delattr)))
            for name in names:
                self.note(instance, name, f"attribute {name!r} of {label}", depth + 1, True, value)
        elif isinstance(instance, dict):
            for name in names & (instance.keys() | shared):
                self.note(instance, name, f"attribute {name!r} of {label}", depth + 1, name in shared, value)


class _Tripwire:
    """In the place of an iterator, a queue or random numbers during a capture, whose thread must not use them."""

    def __init__(self, of, refused: list[str], label: str):
        self.of, self._refused, self._label, self._thread = of, refused, label, threading.get_ident()

    def _used(self) -> Any:
        # For each frame that Dynamo sees, as in torch.cond, its ``eval_frame_cpp.cpp`` gets and sets Python's state.
        name = self.of.__name__ if type(self.of) is types.MethodType else ""
        is_dynamos = name in ("getstate", "setstate") and name not in sys._getframe(2).f_code.co_names
        if threading.get_ident() != self._thread or is_dynamos:
            return self.of
        self._refused.append(
            f"the forward takes items from {self._label}, which a captured step would not repeat. Take them outside of "
            "the model and pass them as arguments"
            if not _is_random(self.of)
            else drawn(self._label)
        )
        raise not_repeated(self._refused[-1])

    def __iter__(self) -> Any:
        return iter(self._used())

    def __next__(self) -> Any:
        return next(self._used())

    def __call__(self, *args, **kwargs):
        return self._used()(*args, **kwargs)

    def __getattr__(self, name: str):
        return getattr(self._used(), name)

    __class__ = property(lambda self: type(self.of))  # pyright: ignore


def drawn(label: str) -> str:
    return (
        f"the forward draws random numbers from {label} or seeds it, which a captured step would not repeat. Draw them "
        "with torch, as in torch.rand(()), or outside of the model and pass them as tensors"
    )


def _is_random(value) -> bool:
    """Whether `value` is a random number generator of Python or NumPy, or a function that draws from one."""
    return type(value).__name__ == "cython_function_or_method" or stream_of(_owner(value)) is not None


def _owner(value) -> Any:
    """The object of a bound method, such as ``count().__next__``; other objects as they are."""
    return value.__self__ if isinstance(value, _BOUND) else value


def _advances(value: Any) -> bool:
    """Whether using `value`, or what it is bound to, changes what it gives next; not if its class is the model's."""
    value = _owner(value)
    if isinstance(value, functools.partial):
        return any(map(_advances, (value.func, *value.args)))
    kind = type(value)
    take = getattr(kind, "__next__", getattr(kind, "get", None) if hasattr(kind, "put") else None)
    is_models = isinstance(take, types.FunctionType) and is_of_model(take.__code__.co_filename)
    is_written = isinstance(value, io.IOBase) and not isinstance(value, (io.BytesIO, io.StringIO))
    is_written = is_written and (value.closed or value.writable())
    is_advancing = take is not None and not is_models and not is_written
    return is_advancing or (stream_of(value) is not None and not isinstance(value, torch.Generator))


# The environment variables of the process, as one hash; they are not restored.
_ENVIRONMENT = Namespace(
    lambda name, default: hash(frozenset(os.environ.items())), lambda name, value: None, lambda name: None
)


def _content(value, depth: int = 0):
    """The part of `value` that can be compared: plain values, and ids of tensors in containers; None for an object."""
    if type(value) is types.SimpleNamespace:
        value = vars(value)
    if type(value) not in _CONTAINERS:
        return (torch.Tensor, id(value)) if depth and isinstance(value, torch.Tensor) else plain(value)
    if len(value) > LONGEST_CONTAINER or depth > _DEPTH:
        return ()
    if isinstance(value, (set, frozenset)):
        return frozenset(_content(item, depth + 1) for item in value)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    compared = ((plain(key), _content(item, depth + 1)) for key, item in items)
    return tuple(pair for pair in compared if None not in pair)


def _is_set(was, now) -> bool:
    """Whether a forward has set or deleted a value, or stored a tensor; a new object may be a cache, and is not."""
    can_compare = [each is ABSENT or _content(each) is not None for each in (was, now)]
    if all(can_compare):
        return _content(was) != _content(now)
    return was is not now and (_has_tensor(now) or not any(can_compare))


def _is_replaced(was, now) -> bool:
    return was is not ABSENT and _is_set(was, now)


def _has_tensor(value, depth: int = 0) -> bool:
    is_container = isinstance(value, (list, tuple, deque, set, frozenset, dict))
    if is_container and len(value) <= LONGEST_CONTAINER and depth <= _DEPTH:
        return any(_has_tensor(item, depth + 1) for item in _items(value))
    return isinstance(value, torch.Tensor)


def _refusal(label: str, key, was, now) -> str:
    if _has_tensor(now):
        return stores_a_tensor(label)
    label += "" if key is ABSENT else f", at {in_words(key)},"
    return changes_value(label, in_words(was), in_words(now))


def _containers(value, depth: int = 0):
    """Yield the mutable containers in `value`, which may be one itself."""
    if type(value) is types.SimpleNamespace:
        value = vars(value)
    if type(value) in _CONTAINERS and len(value) <= LONGEST_CONTAINER and depth <= _DEPTH:
        if not isinstance(value, (tuple, frozenset)):
            yield value
        for item in _items(value):
            yield from _containers(item, depth + 1)


def _items(container):
    return container.values() if isinstance(container, dict) else container


def closes_over(code: types.CodeType) -> bool:
    """Whether functions with this code close over variables of other functions."""
    return bool(set(code.co_freevars) - {"__class__"})


def module_label(path: str) -> str:
    """The module at `path` in words."""
    return f"module {path!r}" if path else "the model"


def is_of_model(path: str) -> bool:
    """Whether the file `path` may be the model's code: it is not torch's, sympy's, ackpt's or Python's own."""
    is_standard = path.startswith(_STANDARD) and not is_installed(path)
    return bool(path) and is_users(path) and not is_standard and not path.startswith((*_SYMBOLIC, "<frozen"))


def is_installed(path: str) -> bool:
    """Whether the file `path` belongs to an installed library."""
    return any(part in path for part in _INSTALLED)


def _is_class_of_model(kind: type) -> bool:
    root = kind.__module__.partition(".")[0]
    is_standard = root in sys.stdlib_module_names and root != "types"  # that of classes that make_dataclass makes
    return not is_standard and root != "torch" or kind.__name__ == "Namespace"


def _compares_types(code: types.CodeType) -> int | None:
    """The line in which `code` compares a type, as of ``type(x)``, with ``torch.Tensor``; None if it does not."""
    if "Tensor" not in (*code.co_names, *code.co_consts) or {"type", "__class__"}.isdisjoint(code.co_names):
        return None
    types_of, expression, line = {"type", "__class__"}, set(), code.co_firstlineno
    for each in dis.get_instructions(code):
        line = getattr(each, "line_number", each.starts_line) or line  # starts_line is a bool from Python 3.13 on
        if isinstance(each.argval, str) and not each.opname.startswith("STORE_"):
            expression.add(each.argval)
        elif each.opname.startswith(("STORE_", "POP_", "RETURN_", "JUMP_")):  # an expression ends
            if not types_of.isdisjoint(expression):
                if "Tensor" in expression and "issubclass" not in expression:
                    return line
                if each.opname.startswith("STORE_"):
                    types_of.add(each.argval)
            expression.clear()
    return None


def said(code: types.CodeType) -> str:
    return f"{code.co_name}() at {code_location(code.co_filename, code.co_firstlineno)}"


def functions_of(codes: list[types.CodeType]) -> list[types.FunctionType]:
    """The functions with these codes, also those that ``gc.freeze`` hides from ``gc.get_referrers``."""
    functions = _referrers_of(codes)
    if {id(function.__code__) for function in functions} != set(map(id, codes)) and gc.get_freeze_count():
        gc.collect()  # what is garbage now must not be frozen
        gc.unfreeze()
        functions = _referrers_of(codes)
        gc.freeze()
    return functions


def _referrers_of(codes: list[types.CodeType]) -> list[types.FunctionType]:
    referrers = gc.get_referrers(*codes) if codes else ()
    return [function for function in referrers if isinstance(function, types.FunctionType)]
