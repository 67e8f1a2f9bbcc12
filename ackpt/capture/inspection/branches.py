"""Let a model branch on what it computes from its integer arguments alone, such as ``if attention_mask.all()``.

A capture records how the model's code computes such truth values from masks, ids and labels. It takes the branch that
the values of its call decide, and serves a later call only if the same operations of torch decide the same there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from .source_lines import line
from .tensors import is_tensor

Number = Callable[[Any, Sequence[Any]], Any]
_READ = torch.ops.aten._local_scalar_dense.default
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_RANDOM = torch.Tag.nondeterministic_seeded


@dataclass(eq=False)
class _Storage:
    """What a value and its views lie in; ``is_written``: whether the model's code has changed it since."""

    is_written: bool = False


@dataclass(eq=False)
class _Value:
    """How a tensor is computed: output ``at`` of ``function``, whose tensors are replaced by theirs; or leaf ``at``."""

    storage: _Storage
    at: int
    function: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Branch:
    """A truth value that the model's code reads, its ``answer`` in the capture, and the ``line`` that reads it."""

    value: _Value
    answer: bool
    line: str

    def holds(self, leaves: Sequence[Any], number: Number) -> bool:
        """Whether the answer is the same in a call with `leaves`."""
        return _truth(self.value, leaves, number) == self.answer


class Branches(TorchDispatchMode):
    """Inside, truth values of tensors are known that depend on integer arguments alone.

    ``found``: them, in the order in which they are read.

    Args:
        leaves: of the call; their values decide.
        traced: ``{index of a leaf: the tensor that represents it}``.
        number: evaluates a symbolic size in a call with given leaves.
    """

    supports_higher_order_operators = True

    def __init__(self, leaves: Sequence[Any], traced: dict[int, torch.Tensor], number: Number):
        super().__init__()
        self.found: list[Branch] = []
        self._leaves, self._number = leaves, number
        self._known: dict[int, tuple[ref, _Value]] = {}
        for at, tensor in traced.items():
            if not (tensor.is_floating_point() or tensor.is_complex()):
                self._note(tensor, _Value(_Storage(), at))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        known = {key: value for key, tensor in tensors.items() if (value := self._value(tensor)) is not None}
        if func is _READ and known and args[0].dtype is torch.bool:
            (value,) = known.values()
            self.found.append(Branch(value, _truth(value, self._leaves, self._number), line()))
            return self.found[-1].answer
        if func._schema.is_mutable:
            for value in known.values():
                value.storage.is_written = True
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if len(known) == len(tensors) and func.namespace == "aten" and _RANDOM not in func.tags:
            given = tree_map_only(torch.Tensor, lambda tensor: known[id(tensor)], (args, kwargs))
            outputs = result if isinstance(result, (tuple, list)) else (result,)
            is_view = any(each.alias_info is not None for each in func._schema.returns)
            for at, output in enumerate(outputs):
                if isinstance(output, torch.Tensor):
                    storage = next(iter(known.values())).storage if is_view and known else _Storage()
                    self._note(output, _Value(storage, at, func, *given))
        return result

    def _note(self, tensor: torch.Tensor, value: _Value) -> None:
        self._known[id(tensor)] = ref(tensor), value

    def _value(self, tensor: torch.Tensor) -> _Value | None:
        if type(tensor) is torch.Tensor and not is_functorch_wrapped_tensor(tensor):
            # A literal of the code, such as the index in x[:, [0, -1]].
            with _disable_current_modes():
                return _Value(_Storage(), 0, torch.ops.aten.clone.default, (tensor.clone(),))
        if id(tensor) not in self._known:
            return None
        made, value = self._known[id(tensor)]
        return value if made() is tensor and not value.storage.is_written else None


def _truth(value: _Value, leaves: Sequence[Any], number: Number) -> bool:
    """The truth of `value` in a call with `leaves`: torch's own operations compute it from the arguments."""
    with torch.no_grad(), _disable_current_modes(), torch._C._DisableAutocast():
        return bool(_computed(value, leaves, number, {}))


def _computed(leaf, leaves: Sequence[Any], number: Number, made: dict[int, Any]) -> Any:
    """`leaf` of the arguments of an operation in a call with `leaves`; ``made``: results by the ids of their values."""
    if isinstance(leaf, _SYMBOLIC):
        return number(leaf, leaves)
    if not isinstance(leaf, _Value):
        return leaf
    if leaf.function is None:
        return leaves[leaf.at]
    if id(leaf) not in made:
        args, kwargs = tree_map(lambda each: _computed(each, leaves, number, made), (leaf.args, leaf.kwargs))
        result = leaf.function(*args, **kwargs)
        made[id(leaf)] = result if is_tensor(result) else result[leaf.at]
    return made[id(leaf)]
