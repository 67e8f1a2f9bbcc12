"""The key by which captures are looked up: everything about a call and its model that a capture depends on.

Reading the properties of a model takes long. `WatchedModel` does so only if something has changed: as the guards of
torch.compile do, it compares the versions of dicts, which count their changes, and the tensors in one call in C++.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch._C._dynamo.guards import TensorGuards, dict_version
from torch.nn.modules import module as global_hooks
from torch.utils._pytree import TreeSpec, tree_flatten

from ackpt.checkpointing.reachable import HOOKS
from ackpt.checkpointing.standing_in import in_place_of
from ackpt.core.errors import warn
from ackpt.metering.resident import inner_tensors

from .aot import given_places
from .dynamic_sizes import Layout, is_sized, layout
from .inspection.attributes import OF_EVERY_MODULE, attributes, changed_attribute, comparable, is_constant, plain
from .inspection.model_checks import is_tensor, public_attributes, require_no_arrays, tensor_facts
from .inspection.value_walk import module_label

Sizes = tuple[Layout, ...]


class Call(NamedTuple):
    """One call of a model.

    ``facts``: everything that a capture depends on except the sizes of the call's tensors, which are in ``sizes``: the
    layout of each, and the integers among the arguments. ``modules``: the model's by their paths;
    ``leaves`` and ``spec``: the call's arguments.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modules: dict[str, nn.Module]
    leaves: list[Any]
    spec: TreeSpec
    facts: "Facts"
    sizes: Sizes


class Facts(NamedTuple):
    """The facts of a call, in a form that compares and hashes.

    ``shared``: see `shared`, of the model's tensors followed by the call's, if one of the latter shares its storage.
    ``settings``: the values of `_SETTINGS`.
    """

    model: "ModelFacts"
    spec: TreeSpec
    leaves: tuple[Any, ...]
    first_places: tuple[int, ...]
    shared: "Shared"
    autocast: tuple[Any, ...]
    settings: tuple[Any, ...]


def call_of(watched: "WatchedModel", args, kwargs) -> Call:
    """The call ``model(*args, **kwargs)`` as it is now."""
    model = watched.facts()
    leaves, spec = tree_flatten((args, kwargs))
    if any(isinstance(leaf, numpy.ndarray) for leaf in leaves):
        require_no_arrays(args, kwargs)
    tensors = list(filter(is_tensor, leaves))
    given = storages(tensors)
    is_shared = len(set(given)) < len(given) or not set(given).isdisjoint(watched.storages)
    facts = Facts(
        model,
        spec,
        tuple(map(_leaf, leaves)),
        given_places(leaves),
        shared([*watched.own_tensors(), *tensors]) if is_shared else (),
        _autocast(),
        tuple([read() for read in _SETTINGS.values()]),
    )
    sizes = tuple(map(layout, filter(is_sized, leaves)))
    return Call(args, kwargs, watched.modules, leaves, spec, facts, sizes)


def _leaf(leaf):
    """The part of an argument that a capture depends on, without the sizes of a tensor and without an integer."""
    if is_tensor(leaf):
        names = public_attributes(leaf) if vars(leaf) else ()
        return type(leaf), leaf.dim(), leaf.dtype, leaf.device, leaf.requires_grad, leaf.is_conj(), leaf.is_neg(), names
    if type(leaf) is int:
        return int
    value = plain(leaf)
    if value is None:
        try:
            hash(leaf)
        except TypeError:
            raise TypeError(
                f"an argument of type {type(leaf).__name__} cannot be compared from call to call: pass tensors, "
                "numbers, strings and the like, in lists, tuples and dicts"
            ) from None
        return leaf
    return value


def _autocast():
    devices = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    return (*devices, torch.is_autocast_cache_enabled())


_HOOKS_OF_ALL = (
    global_hooks._global_forward_pre_hooks,
    global_hooks._global_forward_hooks,
    global_hooks._global_backward_pre_hooks,
    global_hooks._global_backward_hooks,
)


def _precision() -> str:
    """The precision of float32 products; empty where the program sets it by ``fp32_precision`` as well."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return ""


_CPU = torch.device("cpu")


def _default_device() -> torch.device:
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU  # which is a mode of functions


# Settings for the whole process on which the kernels of a step, their workspace or its operations depend.
_SETTINGS: dict[str, Callable[[], Any]] = {
    "torch.get_num_threads()": torch.get_num_threads,
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_default_device()": _default_device,
    "torch.is_anomaly_enabled()": torch.is_anomaly_enabled,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.get_float32_matmul_precision()": _precision,
    "torch.backends.cudnn.benchmark": torch._C._get_cudnn_benchmark,
    "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": torch.backends.cuda.mem_efficient_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.math_sdp_enabled,
    "torch.backends.cuda.cudnn_sdp_enabled()": torch.backends.cuda.cudnn_sdp_enabled,
    "a hook of all modules": lambda: _users_hooks() if any(_HOOKS_OF_ALL) else (),
}


def _users_hooks() -> tuple[int, ...]:
    """The keys of hooks of all modules, without those of torch, by which a ``FlopCounterMode`` follows modules."""
    hooks = chain.from_iterable(each.items() for each in _HOOKS_OF_ALL)
    return tuple(key for key, hook in hooks if not (getattr(hook, "__module__", "") or "").startswith("torch."))


def changed_setting(was: Facts, now: Facts) -> str:
    """The first setting of torch that differs between two calls, in words; empty if none does."""
    pairs = zip(_SETTINGS, was.settings, now.settings)
    return next((f"{name} changed" for name, before, after in pairs if before != after), "")


_DICTS = "_parameters", "_buffers", "_modules", *HOOKS
_PLAIN = torch.Tensor, nn.Parameter
_CONTAINERS = list, tuple, dict, set, deque, SimpleNamespace

Shared = tuple[tuple[int, int, int], ...]
Names = tuple[tuple[str, bool], ...]
Structure = tuple[tuple[str, int, type, Names, Names, Names], ...]


class ModelFacts:
    """The facts of a model, in a form that compares and hashes.

    ``structure``: of every module its path, index in `modules` and type, and the names of its parameters, buffers and
    submodules, each with whether it is None. ``tensors``: type, shape, strides, dtype, device and ``requires_grad`` of
    every parameter and buffer; ``shared``: see `shared`. ``training``: of every module; ``attributes``: from
    `ackpt.planner.capture.inspection.attributes`.
    """

    def __init__(self, modules: Collection[nn.Module]):
        own = _tensors(_named(modules))
        self.structure = _structure(modules)
        self.tensors = _facts(own)
        self.shared = shared(own)
        self.training = [module.training for module in modules]
        self.attributes = attributes(modules)
        self._facts = self.structure, tuple(self.tensors), self.shared, tuple(self.training), self.attributes
        self._hash = hash(self._facts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other) -> bool:
        return self is other or (self._hash == other._hash and self._facts == other._facts)

    def change_since(self, before: "ModelFacts", modules: Mapping[str, nn.Module]) -> tuple[str, str] | None:
        """What differs first from the facts `before`, in words, and its name, or None; `modules`: by their paths."""
        change = _changed_module(before.structure, self.structure)
        return change or changed_attribute(modules, before.attributes, self.attributes)


class WatchedModel:
    """A model and its facts, which are read again when something has changed.

    ``modules``: the model's by their paths. ``storages``: of its parameters and buffers, see `storages`.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._read()

    def facts(self) -> ModelFacts:
        """The facts of the model now; `modules` and `storages` are then current, too."""
        if not self._is_current():
            before = self._facts
            self._read()
            if self._facts == before:  # which callers compare by identity first
                self._facts = before
        return self._facts

    def own_tensors(self) -> list[torch.Tensor]:
        """The model's parameters and buffers, tied ones several times."""
        return _tensors(self._named)

    def _read(self) -> None:
        self.modules = dict(self.model.named_modules())
        modules = self.modules.values()
        for path, module in self.modules.items():
            if path and in_place_of(module) is not None:
                warn(
                    f"{module_label(path)} ({type(module).__name__}) has a budget of its own, which has no effect in "
                    "the calls of the model around it: these run as that model was planned. Call ackpt.remove_budget "
                    "on one of the two."
                )
        self._facts, self._named = ModelFacts(modules), _named(modules)
        own = self.own_tensors()
        self.storages, self._guards = storages(own), _guards(own)
        # Scripted modules have no such dicts.
        is_python = all(isinstance(vars(module).get(name), dict) for module in modules for name in _DICTS)
        self._sources = _Sources(modules, own) if is_python else None

    def _is_current(self) -> bool:
        if self._sources is None or not self._sources.are_same(self.modules.values()):
            return False
        own, facts = self.own_tensors(), self._facts
        if not (self._guards.check(*own) if self._guards else _facts(own) == facts.tensors):
            return False
        return storages(own) == self.storages and (not facts.shared or shared(own) == facts.shared)


def _named(modules: Iterable[nn.Module]) -> list[Mapping[str, torch.Tensor | None]]:
    """The dicts of the modules' parameters and buffers."""
    return [tensors for module in modules for tensors in (module._parameters, module._buffers) if tensors]


def _tensors(named: Iterable[Mapping[str, torch.Tensor | None]]) -> list[torch.Tensor]:
    own = [tensor for tensors in named for tensor in tensors.values() if tensor is not None]
    return [each for tensor in own for each in (tensor, *inner_tensors(tensor).values())]


def _structure(modules: Collection[nn.Module]) -> Structure:
    indices = {id(module): index for index, module in enumerate(modules)}
    model = next(iter(modules))
    return tuple(
        (path, indices[id(each)], type(each), _names(each._parameters), _names(each._buffers), _names(each._modules))
        for path, each in model.named_modules(remove_duplicate=False)
    )


def _names(named: Mapping[str, Any]) -> Names:
    return tuple((name, value is None) for name, value in named.items())


def _changed_module(was: Structure, now: Structure) -> tuple[str, str] | None:
    """What differs first between two structures, in words, and its name."""
    if was == now:
        return None
    before, after = ({path: (kind, *names) for path, _, kind, *names, _ in each} for each in (was, now))
    for path in {**after, **before}:
        label = module_label(path)
        if path not in before or path not in after:
            return f"{label} was {'removed' if path in before else 'added'}", label
        (old, *old_names), (new, *new_names) = before[path], after[path]
        if old is not new:
            if old.__name__ == new.__name__:
                return f"the class of {label} changed", f"the class of {label}"
            return f"{label} changed from {old.__name__} to {new.__name__}", label
        if old_names != new_names:
            return f"the names of the parameters or buffers of {label} changed", f"the names of {label}"
    return "the order or the sharing of submodules changed", "the order or the sharing of submodules"


class _Sources:
    """The dicts from which the facts of modules were read, and the containers in their attributes."""

    def __init__(self, modules: Collection[nn.Module], tensors: Iterable[torch.Tensor]):
        self._types = list(map(type, modules))
        self._namespaces = list(map(vars, modules))
        dicts = [namespace[name] for namespace in self._namespaces for name in _DICTS]
        self._empty = [each for each in dicts if not each]
        self._dicts = [*self._namespaces, *filter(None, dicts), *map(vars, tensors)]
        self._versions = list(map(dict_version, self._dicts))
        items = chain.from_iterable(map(dict.items, self._namespaces))
        values = [value for name, value in items if name not in OF_EVERY_MODULE and isinstance(value, _CONTAINERS)]
        self._containers = [(value, comparable(value)) for value in values if not is_constant(value)]

    def are_same(self, modules: Collection[nn.Module]) -> bool:
        return (
            all(map(is_, map(type, modules), self._types))
            and all(map(is_, map(vars, modules), self._namespaces))
            and not any(self._empty)
            and list(map(dict_version, self._dicts)) == self._versions
            and all(comparable(value) == was for value, was in self._containers)
        )


def _facts(tensors: Iterable[torch.Tensor]) -> list[tuple]:
    return list(map(tensor_facts, tensors))


def _guards(tensors: Sequence[torch.Tensor]) -> Any:
    """Torch's check of plain tensors for at least what `tensor_facts` reads; None for tensors of other kinds."""
    if any(type(each) not in _PLAIN or each.layout is not torch.strided for each in tensors):
        return None
    sizes: Any = [list(each.shape) for each in tensors]  # a dimension with None may have any size
    strides: Any = [list(each.stride()) for each in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def storages(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """An identifier of the storage of every tensor; None if it has none.

    Raises:
        RuntimeError: for tensors of ``torch.func`` and ``torch.vmap``.
    """
    strided = torch.strided
    try:
        return [tensor.untyped_storage()._cdata if tensor.layout is strided else None for tensor in tensors]
    except NotImplementedError as error:
        raise RuntimeError(
            f"a planned step takes plain tensors; in torch.func and torch.vmap call the model itself ({error})"
        ) from None


def shared(tensors: Sequence[torch.Tensor]) -> Shared:
    """The tensors that share the storage of an earlier one: (index, index of that one, elements between them)."""
    first: dict[int, int] = {}
    found = []
    for index, storage in enumerate(storages(tensors)):
        if storage is not None and (earlier := first.setdefault(storage, index)) != index:
            found.append((index, earlier, tensors[index].storage_offset() - tensors[earlier].storage_offset()))
    return tuple(found)
