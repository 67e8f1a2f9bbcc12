"""Run a model's code on tensors without data: remove what it leaves in caches, and answer what it asks of values.

A cache that the model's code fills on fake tensors (``functools.cache``, a dict, a class attribute) would otherwise
hold them forever, and the model would find them in its next step on data. The garbage collector finds such places.
"""

import contextlib
import functools
import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

CACHED = type(functools.lru_cache(len))
_CONTAINERS = dict, list, deque, set, types.CellType, CACHED
_OWNERS = type, types.FunctionType  # whose attributes may be caches
_MOST_HOLDERS = 100  # in a prediction; the objects that Dynamo makes refer to each other in millions of ways
_PASSED_BY = types.FrameType, types.TracebackType, types.GeneratorType, types.CoroutineType
_OWN_CACHES = {*sys.stdlib_module_names, "torch", "numpy", "sympy"}  # store no tensors of models


class Made:
    """The tensors that code on tensors without data makes, to remove those that it leaves in caches.

    Args:
        modules: whose classes may hold some. The garbage collector must not run while the code does.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]):
        gc.collect(1)  # from here on, the younger generations contain just what the code creates
        self._made: list[weakref.ref[torch.Tensor]] = []
        self._new: set[int] = set()
        imported = [(name, module) for name, module in list(sys.modules.items()) if _is(module, types.ModuleType)]
        spaces = [vars(module) for name, module in imported if name.partition(".")[0] not in _OWN_CACHES]
        variables = {id(each): each for space in spaces for each in list(space.values())}.values()
        classes = {each for each in variables if _is(each, type)}
        spaces += [attributes for each in variables if type(attributes := _attributes_of(each)) is dict]
        classes |= {each for module in modules for each in type(module).__mro__}
        self._before = [
            (space, dict(vars(space) if isinstance(space, type) else space)) for space in (*spaces, *classes)
        ]
        self._old = {key for _, before in self._before for value in before.values() for key in _dicts(value, 0)}

    def add(self, result: Any, args: Iterable[Any]) -> None:
        """Note what a call with `args` returned, which may be one of them."""
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor) and not any(each is argument for argument in args):
                self._made.append(weakref.ref(each))

    def note_objects(self) -> None:
        """Call this before the garbage collector runs, and at the end."""
        self._new.update({*map(id, gc.get_objects(generation=0))} - self._old)

    def remove(self, kept: Collection[int]) -> None:
        """Remove the tensors that are left, other than those with the ids `kept`, from caches.

        Variables of modules and classes become what they were, and so do attributes of objects to which these refer.
        Those of other objects stay, as they belong to the step.
        """
        alive = {id(tensor): tensor for each in self._made if (tensor := each()) is not None and id(tensor) not in kept}
        self._made.clear()
        if not alive:
            return
        for space, before in self._before:
            for name, value in [*_names(space).items()]:
                if id(value) in alive:
                    _put(space, name, before)
        tensors = [*alive.values()]
        alive.clear()
        for remove in removals(tensors, self._new, objects=False):
            remove()


def _is(value: Any, kind: type) -> bool:
    return issubclass(type(value), kind)  # some objects import a library to tell their class


def _names(space: Any) -> Mapping[str, Any]:
    return vars(space) if isinstance(space, type) else space


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of a class that may cache tensors."""
    kind = type(value)
    if str(kind.__module__).partition(".")[0] in _OWN_CACHES or issubclass(kind, (type, types.ModuleType)):
        return None
    with contextlib.suppress(Exception):  # of a proxy without an object
        return object.__getattribute__(value, "__dict__")


def _dicts(value: Any, depth: int) -> Iterator[int]:
    """The ids of dicts in a variable; the garbage collector takes a dict that was empty for a new one."""
    if type(value) is dict and depth < 3:
        yield id(value)
        for each in [*value.values()]:
            yield from _dicts(each, depth + 1)


def _put(space: Any, name: str, before: dict[str, Any]) -> None:
    if isinstance(space, type):
        setattr(space, name, before[name]) if name in before else delattr(space, name)
    elif name in before:
        space[name] = before[name]
    else:
        del space[name]


def removals(tensors: list[torch.Tensor], new: set[int], objects: bool = True) -> list[Callable[[], None]]:
    """Functions that remove `tensors` from the containers and objects that were there before the forward.

    `new`: ids of the objects that the forward created, which go with the tensors in them. `objects`: also from the
    attributes of objects.
    """
    found: list[Callable[[], None]] = []
    number = 0
    for level, items, holder in holders(tensors):  # enumerate would refer to them
        number += 1
        if not objects and number > _MOST_HOLDERS:
            break
        owner = _owner(holder)
        if isinstance(holder, tuple) or _is_new(holder if owner is None else owner, new):
            level.append(holder if owner is None else owner)
            continue
        is_cache = isinstance(owner, _OWNERS) if owner is not None else isinstance(holder, _CONTAINERS)
        if (objects or is_cache) and (remove := _removal(holder, owner, items)):
            found.append(remove)
    return found


def holders(tensors: list[torch.Tensor]) -> Iterator[tuple[list[Any], dict[int, Any], Any]]:
    """Yield ``(next items, items by their ids, what refers to some of these)``; the caller fills the first list."""
    if not tensors:
        return
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:  # frozen objects are no referrers; no garbage must be frozen
        gc.collect()
        gc.unfreeze()
    try:
        level: list[Any] = [*tensors]
        seen: set[int] = set()
        while level:
            items = {id(item): item for item in level}
            seen |= {*items, id(level), id(items), id(tensors)}
            level = []
            for holder in gc.get_referrers(*items.values()):
                if not isinstance(holder, _PASSED_BY) and id(holder) not in seen and holder is not level:
                    yield level, items, holder
    finally:
        if is_frozen:
            gc.freeze()


def _owner(holder):
    """The object or class whose attributes are the dict `holder`; otherwise None."""
    if type(holder) is not dict:
        return None
    for each in gc.get_referrers(holder):
        if isinstance(each, type):
            return each
        if not isinstance(each, _PASSED_BY) and getattr(each, "__dict__", None) is holder:
            return each
    return None


def _is_new(holder, new: set[int]) -> bool:
    """Whether `holder` is among the objects with the ids `new`, and was not only unknown to the collector before.

    It tracks a dict from its first item on that it tracks. A dict to which a variable or an attribute refers was there:
    otherwise `outside_values` or `attributes` would have put back what was.
    """
    if id(holder) not in new or type(holder) is not dict:
        return id(holder) in new
    return not any(
        isinstance(each, types.CellType)
        or type(each).__name__.startswith("hamt_")  # the values of context variables
        or (isinstance(each, tuple) and id(each) not in new)
        or _owner(each)
        for each in gc.get_referrers(holder)
    )


def _removal(holder, owner, items: dict[int, Any]) -> Callable[[], None] | None:
    """A function that removes `items`, by their ids, from `holder`; None for what cannot be changed.

    `owner`: the object or class whose attributes `holder` contains, if it does.
    """

    def is_item(value) -> bool:
        return items.get(id(value)) is value and value is not None

    if isinstance(holder, dict):
        return lambda: _remove_keys(holder, owner, is_item)
    if isinstance(holder, (list, deque, set)):
        return lambda: _keep(holder, [value for value in holder if not is_item(value)])
    if isinstance(holder, types.CellType):
        return lambda: setattr(holder, "cell_contents", None) if is_item(holder.cell_contents) else None
    if isinstance(holder, CACHED):
        return lambda: _remove_cached(holder, is_item)
    if isinstance(holder, type) or not hasattr(holder, "__dict__") and not hasattr(holder, "__slots__"):
        return None
    return lambda: _remove_attributes(holder, is_item)


def _remove_keys(container: dict, owner, is_item) -> None:
    for key in [key for key, value in container.items() if is_item(value)]:
        if isinstance(owner, type):
            delattr(owner, key)  # a class has a cache of its attributes
        else:
            del container[key]


def _keep(container, values) -> None:
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(values)


def _remove_attributes(holder, is_item) -> None:
    slots = (name for kind in type(holder).__mro__ for name in getattr(kind, "__slots__", ()))
    for name in {*getattr(holder, "__dict__", ()), *slots}:
        if is_item(getattr(holder, name, None)):
            object.__delattr__(holder, name)


def _remove_cached(cache, is_item) -> None:
    """Remove single results of ``functools.lru_cache``, which shows them to the garbage collector after their keys.

    Its C code takes a missing key for one that another thread has removed, and drops the result later.
    """
    content = gc.get_referents(cache)
    keys = [content[at - 1] for at, value in enumerate(content) if is_item(value)]
    entries = next(
        (each for each in content if isinstance(each, dict) and keys and all(key in each for key in keys)), None
    )
    if entries is None:
        cache.cache_clear()
        return
    for key in keys:
        del entries[key]
    results: list[Any] = [value for value in content if is_item(value)]
    while results:  # until the cache drops them, they are tensors of no elements
        result = results.pop()
        if isinstance(result, tuple):
            results += result
        elif isinstance(result, torch.Tensor):
            with contextlib.suppress(RuntimeError), _disable_current_modes():
                torch.utils.swap_tensors(result, torch.empty(0))


_COUNTED = ("arange",)
_DERIVED = ("add", "unsqueeze", "expand", "repeat", "view", "reshape", "long")  # what models do to positions


class _Counted(TorchFunctionMode):
    """Records the values of traced tensors that come from ``torch.arange`` alone and were not changed since."""

    def __init__(self):
        super().__init__()
        self._known: dict[int, tuple[weakref.ref, torch.Tensor, int]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _COUNTED or name in _DERIVED:
            self._note(result, func, args, kwargs or {}, counted=name in _COUNTED)
        return result

    def is_one_sequence(self, positions) -> bool:
        value = self._value(positions)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return value is not None and bool((value.diff(dim=-1) == 1).all())

    def _value(self, tensor) -> torch.Tensor | None:
        ref, value, version = self._known.get(id(tensor), (None, None, None))
        return value if ref is not None and ref() is tensor and version == tensor._version else None

    def _note(self, result, func, args, kwargs, counted):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if result.dtype != torch.int64 or bool(tensors) == counted or "out" in kwargs:
            return
        if any(self._value(tensor) is None for tensor in tensors):
            return
        args, kwargs = tree_map_only(torch.Tensor, self._value, (args, kwargs))
        args, kwargs = tree_map_only(torch.SymInt, _of_example, (args, kwargs))
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            value = func(*args, **({**kwargs, "device": "cpu"} if counted else kwargs))
        self._known[id(result)] = weakref.ref(result), value, result._version


def _of_example(size: torch.SymInt) -> int:
    """The size in the example. Positions that count on are one sequence at every length, so this needs no guard."""
    return size.node.hint


@contextlib.contextmanager
def found_packed():
    """Inside, positions that a decoder of transformers counted itself are one sequence, if its version asks.

    It reads the values of position ids, which fake tensors do not have, and would then use a mask tensor instead of its
    attention's causal mask. Positions that the model counts itself have known values, as they depend on no input.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(masking, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return
    counted = _Counted()

    def found(position_ids):
        return None if counted.is_one_sequence(position_ids) else find(position_ids)

    masking.find_packed_sequence_indices = found
    try:
        with counted:
            yield
    finally:
        masking.find_packed_sequence_indices = find
