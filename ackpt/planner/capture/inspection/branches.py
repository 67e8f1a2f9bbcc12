"""Let a model branch on values that it computes from its integer arguments alone, as in ``if attention_mask.all()``.

A capture records the operations that compute such truth values from masks, ids and labels. It takes the branches that
the values of its call select, and serves a later call only if the same operations give the same truth values there.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OperatorBase
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from .source_lines import line, not_repeated

_READ = torch.ops.aten._local_scalar_dense.default
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(eq=False)
class _Storage:
    """Memory that a known tensor and its views share; ``is_known``: whether the arguments determine its content."""

    is_known: bool = True


@dataclass(eq=False)
class _Value:
    """A tensor whose content follows from the arguments: leaf ``leaf`` of the call, or the result of a step."""

    storage: _Storage
    leaf: int | None = None


@dataclass(eq=False)
class _Step:
    """An operation of torch; ``call``, (args, kwargs), and ``results`` have a `_Value` in place of each tensor."""

    operation: Any
    call: tuple[Any, Any]
    results: list[Any]
    written: list[_Storage]


@dataclass(frozen=True)
class Branch:
    """A truth value that the model's code reads at ``line``, which ``steps`` compute; ``answer``: in the capture."""

    steps: tuple[_Step, ...]
    value: _Value
    answer: bool
    line: str

    def holds(self, leaves: Sequence[Any], symbols) -> bool:
        """Whether the answer is the same in a call with `leaves`; `symbols`: of the capture's sizes, if it has any."""
        return _truth(self.value, self.steps, leaves, symbols) == self.answer


class Branches(TorchDispatchMode):
    """Inside, the model's code can read truth values of tensors that depend on integer arguments alone.

    ``branches``: the branches on these values, in the order in which they are read. `leaves`: of the call, whose values
    select the branches; `traced`: ``{index of a leaf: the tensor that represents it}``; `symbols`: of the capture;
    `own`: ids of the model's own tensors, which no operation may get.
    """

    supports_higher_order_operators = True

    def __init__(self, leaves: Sequence[Any], traced: dict[int, torch.Tensor], symbols, own: Container[int]):
        super().__init__()
        self._own = own
        self.branches: list[Branch] = []
        self._leaves, self._symbols = leaves, symbols
        self._steps: list[_Step] = []
        self._known: dict[int, tuple[ref, _Value]] = {}
        for at, tensor in traced.items():
            if not (tensor.is_floating_point() or tensor.is_complex()):
                self._known[id(tensor)] = ref(tensor), _Value(_Storage(), at)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            if any(callable(each) and not isinstance(each, OperatorBase) for each in args):  # would run in a backward
                raise NotImplementedError(f"{func} is a HigherOrderOperator")
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(id(tensor) in self._own for tensor in tensors):
            raise not_repeated(
                f"code in C++ gets a parameter or an argument{line()} without a call of torch's Python functions, "
                "which a captured step would not follow. Call torch's operations instead"
            )
        values = {id(tensor): value for tensor in tensors if (value := self._value(tensor)) is not None}
        if func is _READ and values and args[0].dtype is torch.bool:
            (value,) = values.values()
            steps = _needed(self._steps, value)
            self.branches.append(Branch(steps, value, _truth(value, steps, self._leaves, self._symbols), line()))
            return self.branches[-1].answer
        written = [values[id(tensor)].storage for tensor in _written(func, args, kwargs) if id(tensor) in values]
        follows = all(id(tensor) in values for tensor in tensors) and func.namespace == "aten"
        if not follows or torch.Tag.nondeterministic_seeded in func.tags:
            for storage in written:
                storage.is_known = False
            return func(*args, **kwargs)
        call = tree_map_only(torch.Tensor, lambda tensor: values[id(tensor)], (args, kwargs))
        result = func(*args, **kwargs)
        aliases = written or [value.storage for value in values.values()]
        is_alias = bool(aliases) and any(each.alias_info is not None for each in func._schema.returns)
        shared = aliases[0] if is_alias else None
        results = [self._noted(each, shared) for each in (result if isinstance(result, (tuple, list)) else (result,))]
        self._steps.append(_Step(func, call, results, written))
        return result

    def _noted(self, result, shared: _Storage | None) -> _Value | None:
        if not isinstance(result, torch.Tensor):
            return None
        value = _Value(shared or _Storage())
        self._known[id(result)] = ref(result), value
        return value

    def _value(self, tensor: torch.Tensor) -> _Value | None:
        is_wrapped = is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor)  # as in tolist()
        if type(tensor) is torch.Tensor and not is_wrapped:
            # A literal of the code, such as the index in x[:, [0, -1]].
            with _disable_current_modes():
                value = _Value(_Storage())
                self._steps.append(_Step(torch.ops.aten.clone.default, ((tensor.clone(),), {}), [value], []))
                return value
        made, value = self._known.get(id(tensor), (None, None))
        return value if made is not None and made() is tensor and value is not None and value.storage.is_known else None


def _written(func, args, kwargs) -> list[Any]:
    """The tensors that an operation writes into."""
    if not func._schema.is_mutable:
        return []
    given = dict(enumerate(args))
    pairs = ((each, given.get(at, kwargs.get(each.name))) for at, each in enumerate(func._schema.arguments))
    return [leaf for each, value in pairs if each.is_write for leaf in tree_leaves(value)]


def _needed(steps: Sequence[_Step], value: _Value) -> tuple[_Step, ...]:
    """The steps on which `value` and the content of its memory depend, in order."""
    values, storages, needed = {value}, {value.storage}, []
    for step in reversed(steps):
        if values.isdisjoint(step.results) and storages.isdisjoint(step.written):
            continue
        needed.append(step)
        given = [leaf for leaf in tree_leaves(step.call) if isinstance(leaf, _Value)]
        values.update(given)
        storages.update(each.storage for each in given)
    return tuple(reversed(needed))


def _truth(value: _Value, steps: Sequence[_Step], leaves: Sequence[Any], symbols) -> bool:
    """The truth value of `value` in a call with `leaves`: the recorded operations compute it from the arguments."""
    made: dict[_Value, Any] = {}
    written = {storage for step in steps for storage in step.written}

    def given(leaf):
        if isinstance(leaf, _SYMBOLIC):
            return symbols.number(leaf, leaves)
        if isinstance(leaf, _Value) and leaf.leaf is not None and leaf not in made:
            made[leaf] = leaves[leaf.leaf].clone() if leaf.storage in written else leaves[leaf.leaf]
        return made[leaf] if isinstance(leaf, _Value) else leaf

    with torch.no_grad(), _disable_current_modes(), torch._C._DisableAutocast():
        for step in steps:
            args, kwargs = tree_map(given, step.call)
            result = step.operation(*args, **kwargs)
            made.update(zip(step.results, result if isinstance(result, (tuple, list)) else (result,)))
        return bool(given(value))
