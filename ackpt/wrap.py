"""Checkpointing switched on from outside: for the blocks of a model, or for a chain of functions.

``apply_activation_checkpointing`` gives each chosen module a class that differs in ``forward`` only. Parameters,
buffers, hooks, attributes and names stay where they are, so ``state_dict``, ``named_parameters`` and optimizers see
no difference; the class keeps its name, and pickles and copies of the model stay checkpointed.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import torch
from torch import nn

from .offload import Offload, resolve
from .reentrant import checkpoint


def apply_activation_checkpointing(
    model: nn.Module,
    check_fn: Callable[[nn.Module], bool]
    | type[nn.Module]
    | Collection[type[nn.Module]]
    | Collection[str]
    | None = None,
    *,
    preserve_rng_state: bool = True,
    offload: Offload | Literal["sync", "async"] | None = None,
) -> list[str]:
    """Checkpoint chosen submodules of `model`, in place; each becomes one region.

    Args:
        check_fn: which modules: a predicate ``module -> bool``, a module class or several, or qualified names
            (``"blocks.0"``, or several). ``None`` takes the repeated blocks: members of an ``nn.ModuleList`` or
            ``nn.Sequential`` that share their class with a sibling, have submodules and parameters, and lie in no other
            such block.
        offload: as in :func:`checkpoint`: where the inputs of the chosen modules wait for backward.

    Returns:
        The qualified names of the modules that are checkpointed now, in the order of ``named_modules``.

    Raises:
        ValueError: if nothing matches, a name does not exist, or a module has its ``forward`` replaced on the instance.
        TypeError: if `check_fn` is none of the above, or the model is planned by `ackpt.compile`.

    Forward hooks of a chosen module fire once per step; those of modules inside it fire again in the recompute (see
    :func:`is_recomputing`). Use it before ``fully_shard``, DDP and ``torch.compile``.
    Source: the per-module switch of static-graph frameworks; Chen et al. 2016 (arXiv:1604.06174) per block.

    Example:
        >>> import torch, ackpt
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> ackpt.apply_activation_checkpointing(model)
        ['0', '1', '2']
        >>> ackpt.remove_activation_checkpointing(model)
        ['0', '1', '2']
    """
    _require_module(model)
    for name, module in model.named_modules():
        if "_ackpt" in vars(module):
            raise TypeError(
                f"{f'module {name!r}' if name else 'the model'} is a step planned by ackpt.compile, whose plan says "
                "what is recomputed: use either that or activation checkpointing, not both"
            )
    resolve(offload)
    chosen = _choose(model, check_fn)
    for name, module in chosen.items():
        if "forward" in vars(module):
            raise ValueError(
                f"module {name!r} has its forward replaced on the instance (by a hook library, perhaps), which would "
                "bypass the checkpoint. Apply activation checkpointing first, then whatever replaces forward."
            )
    for module in chosen.values():
        if not isinstance(module, _Checkpointed):
            module.__class__ = _checkpointed_class(type(module))
        vars(module)["_checkpoint_options"] = {"preserve_rng_state": preserve_rng_state, "offload": offload}
    return list(chosen)


def remove_activation_checkpointing(model: nn.Module) -> list[str]:
    """Undo :func:`apply_activation_checkpointing` on `model` and all its submodules; return their names.

    Example:
        >>> import torch, ackpt
        >>> ackpt.remove_activation_checkpointing(torch.nn.Linear(2, 2))
        []
    """
    _require_module(model)
    names = []
    for name, module in model.named_modules():
        if isinstance(module, _Checkpointed):
            _replace_class(module)
            del module._checkpoint_options
            names.append(name)
    return names


class _Checkpointed:
    """Mixed in before a module's own class: runs the original ``forward`` as one region."""

    _checkpoint_options: dict

    def __reduce_ex__(self, protocol):
        # The class is made at run time and cannot be found by name: pickle the original and switch it on again.
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _rebuild, (_original_class(type(self)),), state


@functools.cache
def _checkpointed_class(cls):
    @functools.wraps(cls.forward)
    def forward(self, *args, **kwargs):
        return checkpoint(types.MethodType(cls.forward, self), *args, **self._checkpoint_options, **kwargs)

    names = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_Checkpointed, cls), names)


def _original_class(cls):
    """The class without the checkpoint; what others (FSDP) put in front of it stays out of reach and is refused."""
    bases = cls.__bases__
    if bases[0] is not _Checkpointed:
        raise TypeError(
            f"{cls.__name__} was changed by another library after activation checkpointing was applied; undo that first"
        )
    return bases[1]


def _replace_class(module):
    module.__class__ = _original_class(type(module))


def _rebuild(cls):
    checkpointed = _checkpointed_class(cls)
    return checkpointed.__new__(checkpointed)


def _require_module(model):
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _choose(model, check_fn) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    if check_fn is None:
        chosen = _repeated_blocks(model)
        hint = "no block is repeated in an nn.ModuleList or nn.Sequential; pass check_fn: a predicate, classes or names"
    elif isinstance(check_fn, type) or _is_collection_of(check_fn, type):
        classes = (check_fn,) if isinstance(check_fn, type) else tuple(check_fn)
        chosen = {name: module for name, module in modules.items() if isinstance(module, classes)}
        present = sorted({type(module).__name__ for module in modules.values()})
        hint = f"no module is a {' or '.join(cls.__name__ for cls in classes)}; the model has {', '.join(present)}"
    elif isinstance(check_fn, str) or _is_collection_of(check_fn, str):
        names = [check_fn] if isinstance(check_fn, str) else list(check_fn)
        missing = [name for name in names if name not in modules]
        if missing:
            raise ValueError(f"the model has no module named {missing[0]!r}; names look like {_examples(modules)}")
        chosen = {name: module for name, module in modules.items() if name in names}
        hint = "the list of names is empty"
    elif callable(check_fn):
        chosen = {name: module for name, module in modules.items() if check_fn(module)}
        hint = "the predicate is true for no module"
    else:
        raise TypeError(
            f"check_fn must be a predicate, a module class, a qualified name, or several of these; got {check_fn!r}"
        )
    if not chosen:
        raise ValueError(f"nothing to checkpoint: {hint}")
    return chosen


def _is_collection_of(obj, kind) -> bool:
    return isinstance(obj, (list, tuple, set, frozenset)) and all(isinstance(item, kind) for item in obj)


def _examples(modules) -> str:
    return ", ".join(repr(name) for name in list(modules)[1:4]) or "'' (the model itself)"


def _repeated_blocks(model) -> dict[str, nn.Module]:
    chosen: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        if any(name == block or name.startswith(block + ".") for block in chosen):
            continue
        siblings = collections.Counter(type(child) for child in module.children())
        for key, child in module.named_children():
            # A module without children is one operation: its region would save what the operation saves anyway.
            if siblings[type(child)] > 1 and _has(child.children()) and _has(child.parameters()):
                chosen[f"{name}.{key}" if name else key] = child
    return chosen


def _has(items) -> bool:
    return any(True for _ in items)


_MISSING = object()


def checkpoint_sequential(
    functions: Iterable[Callable[[Any], Any]],
    segments: int | None = None,
    input: Any = _MISSING,
    *,
    preserve_rng_state: bool = True,
    offload: Offload | Literal["sync", "async"] | None = None,
) -> Any:
    """Run a chain of functions on `input`, checkpointed in segments; the last segment is not recomputed.

    Args:
        functions: an ``nn.Sequential`` or a sequence of callables, each called with the output of the one before.
        segments: how many segments of equal length (within one), or ``None`` for the lengths of least peak where each
            function keeps as much as its input: see :func:`segment_lengths`. Functions that keep much more, such as
            whole Transformer layers, need less as a segment each: ``segments=len(functions)``.
        input: what the first function is called with.
        offload: as in :func:`checkpoint`: where the inputs of the segments wait for backward.

    Raises:
        ValueError: if `segments` is not between 1 and the number of functions, or there is no function.
        TypeError: if `input` is missing, or given in place of `functions`.

    Source: Chen et al. 2016 (arXiv:1604.06174), section 3.

    Example:
        >>> import torch, ackpt
        >>> chain = torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(16)))
        >>> ackpt.checkpoint_sequential(chain, 4, torch.zeros(2)).shape
        torch.Size([2])
    """
    if input is _MISSING:
        raise TypeError("checkpoint_sequential needs an input: checkpoint_sequential(functions, segments, input)")
    resolve(offload)
    if isinstance(functions, torch.Tensor):
        raise TypeError("the functions come first, not the input: checkpoint_sequential(functions, segments, input)")
    functions = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if not functions:
        raise ValueError("checkpoint_sequential got no functions")
    lengths = segment_lengths(len(functions), segments)
    start = 0
    for length in lengths[:-1]:
        part = _Chain(functions[start : start + length])
        input = checkpoint(part, input, preserve_rng_state=preserve_rng_state, offload=offload)
        start += length
    return _Chain(functions[start:])(input)


class _Chain:
    """Functions called one after the other."""

    def __init__(self, functions):
        self.functions = functions

    def __call__(self, value):
        for function in self.functions:
            value = function(value)
        return value


def segment_lengths(layers: int, segments: int | None = None) -> list[int]:
    """Lengths of the segments of a chain of `layers` equal layers, first to last.

    While segment i is recomputed, the i - 1 boundaries before it are alive besides its own activations, so with equal
    lengths the last segment alone sets the peak: ``(segments - 1) + length`` activations. ``segments=None`` lets
    earlier segments use the room that the missing boundaries leave: lengths fall by one per segment, which needs
    ``p`` live activations for up to ``p (p + 1) / 2`` layers, about ``sqrt(2 n)`` instead of ``2 sqrt(n)``. Among
    plans of that peak it takes the one that recomputes least (the longest last segment, which is not recomputed).

    Example:
        >>> segment_lengths(16, 4)
        [4, 4, 4, 4]
        >>> segment_lengths(16)
        [4, 5, 4, 3]
    """
    if segments is not None:
        if isinstance(segments, bool) or not isinstance(segments, int) or not 1 <= segments <= layers:
            raise ValueError(
                f"segments must be a whole number from 1 to {layers} (the number of functions), got {segments!r}"
            )
        short, extra = divmod(layers, segments)
        return [short + 1] * extra + [short] * (segments - extra)
    peak = 1
    while peak * (peak + 1) // 2 < layers:
        peak += 1
    count = 1
    while sum(peak - i for i in range(count)) < layers:
        count += 1
    lengths: list[int] = []
    left = layers
    for i in reversed(range(count)):
        lengths.insert(0, min(peak - i, left - i))
        left -= lengths[0]
    return lengths
