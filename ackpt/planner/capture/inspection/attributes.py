"""Record the attributes of modules that a capture depends on, and refuse a forward that changes them.

A forward that changes attributes is refused when it is captured, and its changes are undone. In what a call compares,
plain values and containers count by content; tensors, functions and other callables by identity.
"""

import contextlib
import enum
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.attention import SDPBackend

from ackpt.checkpointing.guards import fill, is_filled_with
from ackpt.checkpointing.reachable import HOOKS, LONGEST_CONTAINER, MODULE_FIELDS

from .source_lines import not_repeated, set_at

# Marks that only fully_shard and accelerate read; the former also leaves them on modules that it does not run itself.
_MARKS = "_is_fsdp_managed_module", "_fsdp_use_orig_params", "_is_accelerate_prepared"
OF_EVERY_MODULE = MODULE_FIELDS | {"_compiled_call_impl", *_MARKS}
_TENSORS = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}

# What to do about an attribute that changes. Torch's dropout takes no tensor.
_OF_CHECKPOINTING = "gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hooks"
_CHECKPOINTED = "gradient_checkpointing=True changed the model: remove it, because the plan decides what is recomputed"
_HOOK = "to avoid replanning, register hooks once, before the first step"
_BUFFER = "hold it in a buffer that changes in place to avoid replanning"
_DROPOUT = (
    "to avoid replanning, change it once per epoch, or hold it in a buffer p that changes in place and write "
    "x * (torch.rand_like(x) >= p) / (1 - p) for the dropout"
)


ABSENT: Any = object()
_WITHOUT_DATA = FakeTensor, FunctionalTensor


def attributes(modules) -> tuple[tuple, ...]:
    """The attributes of each of these modules, except parameters, buffers and modules, in a form that a call compares.

    Hooks are represented by the ids of their handles, which are unique.
    """
    facts = []
    for module in modules:
        values = vars(module)
        entries = [(name, comparable(values[name])) for name in values if name not in OF_EVERY_MODULE]
        entries += [(name, *values[name]) for name in HOOKS if values[name]]
        for name, tensor in (*values["_parameters"].items(), *values["_buffers"].items()):
            entries += [(f"{name}.{key}", fact) for key, fact in tensor_attributes(tensor)]
        facts.append(tuple(entries))
    return tuple(facts)


def tensor_attributes(tensor) -> list[tuple[str, Any]]:
    """The names of a tensor's Python attributes, and their values in a form that a call can compare.

    Of tensors among them only that they are tensors: those that the model's code reads are inputs of the capture.
    """
    if tensor is None or not (own := vars(tensor)) or isinstance(tensor, _WITHOUT_DATA):
        return []
    return [(name, torch.Tensor if isinstance(own[name], torch.Tensor) else comparable(own[name])) for name in own]


def changed_attribute(modules: Mapping[str, nn.Module], was: tuple, now: tuple) -> tuple[str, str] | None:
    """What differs first between two results of `attributes` and how to avoid it, and the name of the attribute."""
    for (path, module), *both in zip(modules.items(), was, now):
        before, after = ({fact[0]: fact[1:] for fact in facts} for facts in both)
        for name in {**before, **after}:
            if before.get(name) != after.get(name):
                label = f"{name} of {path or 'the model'}"
                values = [_value_in(each.get(name)) for each in (before, after)]
                words = "changed" if None in values else f"changed from {values[0]} to {values[1]}"
                is_dropout = name == "p" and isinstance(module, nn.modules.dropout._DropoutNd)
                advice = _DROPOUT if is_dropout else _HOOK if name in HOOKS else _BUFFER
                if name in _OF_CHECKPOINTING:
                    advice = _CHECKPOINTED
                return f"{label} {words}; {advice}", label
    return None


def _value_in(fact) -> str | None:
    """The plain value of a fact, as text; None if it has none."""
    if fact is None or len(fact) != 1 or not isinstance(fact[0], tuple) or len(fact[0]) != 2:
        return None
    kind, value = fact[0]
    return str(value) if isinstance(kind, type) and issubclass(kind, _PLAIN) else None


class Change(NamedTuple):
    """A change that a forward made to ``now``: ``key`` identifies what changed, the functions repeat and revert it."""

    key: tuple[int, Any]
    now: Any
    refusal: str
    repeat: Callable[[], Any]
    revert: Callable[[], Any]


class Snapshot:
    """A container, and a copy of it from before a forward.

    `refusal`: of a change (key, value before, value now), in words. `counts`: whether a change of value
    is one; others stay. `derived`: keys of items whose changes are restored, but not refused.
    """

    def __init__(
        self, container, refusal: Callable[..., str], counts=lambda was, now: True, derived: Collection[Any] = ()
    ):
        self._container, self._copy = container, _copied(container)
        self._refusal, self._counts, self._derived = refusal, counts, derived

    def restored(self) -> list[Change]:
        """Restore the items that a forward has changed, and return the changes."""
        items = [item for item in _changed_items(self._container, self._copy) if self._counts(*item[1:])]
        if not items:
            return []
        now, of = _copied(self._container), id(self._container)
        changes = [
            Change((of, key), after, self._refusal(key, before, after), self._put(now, key), self._put(self._copy, key))
            for key, before, after in items
            if key not in self._derived
        ]
        fill(self._container, self._copy)
        return changes

    def _put(self, values, key) -> Callable[[], Any]:
        """A function that sets an item as in `values`; in anything but a dict, all items."""
        if not isinstance(self._container, dict):
            return functools.partial(fill, self._container, list(values))
        if key in values:
            return functools.partial(self._container.__setitem__, key, values[key])
        return functools.partial(self._container.pop, key, None)


def module_snapshots(model: nn.Module) -> Iterator[Snapshot]:
    """Of all attributes of the modules in `model`, and of lists and dicts in them, also of unregistered modules."""
    for path, module in _with_unregistered(dict(model.named_modules())).items():
        computed = derived(module)
        for attribute, container in _containers(module):
            refusal = functools.partial(_refusal, module, path, attribute)
            yield Snapshot(container, refusal, derived=computed if container is vars(module) else ())


def _with_unregistered(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """`modules` and those in lists, tuples and dicts in their attributes, which torch does not know as submodules."""
    result = dict(modules)
    seen = {id(module) for module in modules.values()}
    left = list(modules.items())
    while left:
        path, module = left.pop()
        for name, value in vars(module).items():
            if name in OF_EVERY_MODULE or not isinstance(value, (list, tuple, dict)) or len(value) > LONGEST_CONTAINER:
                continue
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(item, nn.Module) and id(item) not in seen:
                    added = dict(item.named_modules(prefix=f"{path}.{name}[{key!r}]".lstrip(".")))
                    seen.update(map(id, added.values()))
                    result |= added
                    left += added.items()
    return result


@contextlib.contextmanager
def arguments_unchanged(arguments):
    """Inside, a forward runs that must not change lists and dicts among its `arguments`, copies of the caller's."""
    before = [(*each, _copied(each[1])) for each in _nested("", arguments)]
    yield
    for name, container, copy in before:
        if any(_changed_items(container, copy)):
            fill(container, copy)
            what = f"a {type(container).__name__}" if not name else "an attribute of a tensor"
            raise not_repeated(
                f"the forward changes {what} that it received as an argument, which a captured step would not do. "
                "Return the collected values as an output of the model"
            )


def _containers(module: nn.Module):
    """The module's own dict, those of its parameters, buffers, submodules and hooks, and what attributes contain."""
    for name, value in vars(module).items():
        if name not in OF_EVERY_MODULE:
            yield from _nested(name, value)
        elif isinstance(value, dict):
            yield name, value
            if name in ("_parameters", "_buffers"):
                for key, tensor in value.items():
                    yield from _nested(key, tensor)
    yield "", vars(module)


def _nested(name: str, value):
    if isinstance(value, (list, dict, deque, set)):
        yield name, value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _nested(name, item)
    elif isinstance(value, tuple):
        for item in value:
            yield from _nested(name, item)
    elif isinstance(value, torch.Tensor) and not isinstance(value, _WITHOUT_DATA):
        yield f"{name}.", vars(value)


def _copied(container):
    return next((kind for kind in (dict, set) if isinstance(container, kind)), list)(container)


def _changed_items(container, copy) -> Iterator[tuple[Any, Any, Any]]:
    """(key, value before, value now) of every changed item, or `ABSENT`; an item of a set is its key."""
    if is_filled_with(container, copy):
        return
    if isinstance(container, dict):
        pairs = [(key, copy.get(key, ABSENT), container.get(key, ABSENT)) for key in {**copy, **container}]
    elif isinstance(container, set):
        pairs = [(x, x if x in copy else ABSENT, x if x in container else ABSENT) for x in copy ^ container]
    else:
        now = list(container)
        size = max(len(copy), len(now))
        before, after = (values + [ABSENT] * (size - len(values)) for values in (copy, now))
        pairs = list(zip(range(size), before, after))
    yield from (item for item in pairs if not _same(*item[1:]))


def _same(was, now) -> bool:
    if was is now or (plain(was) is not None and plain(was) == plain(now)):
        return True
    if isinstance(now, weakref.ref):  # by which torch's recurrent modules remember the weights that they flattened
        return True
    if isinstance(was, (list, tuple)) and type(was) is type(now) and len(was) == len(now):
        return all(map(_same, was, now))
    return False


def derived(module: nn.Module) -> set[str]:
    """Attributes that hooks of torch compute before every forward: by spectral_norm, weight_norm and pruning."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook).__module__.startswith("torch.nn.utils")]
    return {getattr(hook, name) for hook in hooks for name in ("name", "_tensor_name") if hasattr(hook, name)}


def _refusal(module: nn.Module, name: str, attribute: str, key, was, now) -> str:
    owner = f"of module {name!r}" if name else "of the model"
    is_of_tensor = attribute.endswith(".")
    owner += set_at(module, key if is_of_tensor or attribute in _TENSORS else attribute or key)
    if attribute in _TENSORS:
        return (
            f"the forward replaces {_TENSORS[attribute]} {key!r} {owner}, which a captured step cannot do. Change "
            "buffers in place, as in self.buffer.copy_(value), and create modules and parameters before the forward"
        )
    if attribute in OF_EVERY_MODULE:
        return (
            f"the forward adds or removes a hook {owner}, which a captured step would not repeat. Register hooks "
            "before the forward"
        )
    label = f"attribute {f'{attribute}{key}' if is_of_tensor else attribute or key!r} {owner}"
    return (
        stores_a_tensor(label) if isinstance(now, torch.Tensor) else changes_value(label, in_words(was), in_words(now))
    )


def stores_a_tensor(label: str) -> str:
    return f"the forward stores a tensor in {label}, which a captured step would not do. Return it from the forward"


def changes_value(label: str, was: str, now: str) -> str:
    return (
        f"the forward changes {label} from {was} to {now}, which a captured step would not repeat. Count in a buffer, "
        "in place, or outside of the model"
    )


def in_words(value) -> str:
    """`value` in an error: the text of a plain value, the type of others, whose ``__repr__`` may fail or take long."""
    if value is ABSENT:
        return "no value"
    return f"{type(value).__name__}(…)" if plain(value) is None else repr(value)


_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, Fraction, Decimal, enum.Enum, SDPBackend),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_CONSTANT = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial),
    *(type, range, slice),
)


class Identity:
    """Equals every other `Identity` of the same object.

    It keeps the object alive only if the object does not support weak references. An id alone is not enough: after the
    object is freed, another one may have the same id.
    """

    __slots__ = "_id", "_reference"

    def __init__(self, value):
        self._id, self._reference = id(value), reference(value)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other) -> bool:
        if self is other or not isinstance(other, Identity) or self._id != other._id:
            return self is other
        value = self._reference()
        return value is not None and value is other._reference()


def reference(value):
    """A function that returns `value`, by a weak reference if `value` supports it."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def plain(value):
    """`value` in a form that compares exactly: 0.0 is not -0.0, 1 is not True, nan is nan; None if it is not plain."""
    if not isinstance(value, _PLAIN):
        return None
    return type(value), repr(value) if isinstance(value, (float, complex, Decimal)) else value


def is_constant(value) -> bool:
    """Whether `comparable` always returns the same for this object, whatever the code that owns it does."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_constant, value))
    return isinstance(value, _PLAIN + _CONSTANT)


def comparable(value):
    """An attribute's value in a form that a call can compare; None if it is an object that no call compares."""
    if type(value) in (int, bool, str):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return Identity(value)
    if isinstance(value, (list, tuple, deque)) and len(value) <= LONGEST_CONTAINER:
        return type(value), tuple(map(comparable, value))
    if type(value) is SimpleNamespace:
        value = vars(value)
    if isinstance(value, dict) and len(value) <= LONGEST_CONTAINER:
        return type(value), tuple((comparable(key), comparable(item)) for key, item in value.items())
    if isinstance(value, (set, frozenset)) and len(value) <= LONGEST_CONTAINER:
        return type(value), frozenset(map(comparable, value))
    if isinstance(value, (range, slice)):
        return type(value), tuple(map(comparable, (value.start, value.stop, value.step)))
    if isinstance(value, types.MethodType):  # every access to a method gives another object
        return types.MethodType, Identity(value.__self__), Identity(value.__func__)
    if (fact := plain(value)) is None and callable(value) and not isinstance(value, weakref.ref):
        return Identity(value)
    return fact
