"""``apply_activation_checkpointing``: checkpoint chosen modules of a model without changing its code.

Each chosen module gets a subclass of its class that differs only in ``forward``. Parameters, buffers, hooks, attributes
and names do not change, so ``state_dict``, ``named_parameters`` and optimizers work as before. The class keeps its
name, and pickles and copies of the model are checkpointed too. The first forward with gradients checks that the chosen
modules were called.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import nn

from ackpt.core.errors import CheckpointError, warn
from ackpt.offloading.saved_tensors import Offload, resolve

from .reachable import graph_of
from .reentrant import _modules_run, checkpoint, uncompiled
from .tree import strip_result


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
    """Checkpoint submodules of `model` in place; each of them becomes one region.

    Args:
        model: the model to change.
        check_fn: the modules to checkpoint: a predicate ``module -> bool``, one or several module classes, or one or
            several qualified names such as ``"blocks.0"``. ``None`` chooses the repeated blocks: members of an
            ``nn.ModuleList`` or ``nn.Sequential`` that have the class of a sibling, have submodules and parameters, and
            are not inside another such block. Members of a list inside a list count as members of the outer list.
        preserve_rng_state: as in :func:`checkpoint`.
        offload: as in :func:`checkpoint`, for the inputs of the chosen modules.

    Returns:
        The qualified names of the chosen modules, in the order of ``named_modules``.

    Raises:
        ValueError: if nothing matches, a name does not exist, or a module is scripted, sharded by
            ``FullyShardedDataParallel``, or has its ``forward`` replaced on the instance.
        TypeError: if `check_fn` is none of the above, or if the model is planned by `ackpt.compile`.
        CheckpointError: in the first forward with gradients, if parameters of a chosen module were used but the module
            itself was not called and is therefore not checkpointed.

    Warns:
        UserWarning: if ``config.use_cache`` is on in a model of transformers; a region cannot recompute a cache.

    Forward hooks of a chosen module fire once per step; those of its submodules fire again in the recomputation (see
    :func:`is_recomputing`). Call this before ``fully_shard`` and DDP; ``Module.compile`` and ``torch.compile`` may come
    before or after it.

    Source: Chen et al. 2016 (arXiv:1604.06174), with every block as one segment.

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
        if "_ackpt_variants" in vars(module):
            raise TypeError(
                f"{f'module {name!r}' if name else 'the model'} is a step planned by ackpt.compile, whose plan says "
                "what is recomputed: use either that or activation checkpointing, not both"
            )
    resolve(offload)
    chosen = _choose(model, check_fn)
    for name, module in chosen.items():
        if _is_scripted(module):
            raise ValueError(
                f"module {name!r} is scripted, so its forward cannot be replaced. Apply activation checkpointing to "
                "the module around it, or let that module's forward call ackpt.checkpoint(module, ...)."
            )
        if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__):
            raise ValueError(
                f"module {name!r} is a FullyShardedDataParallel, which gathers its parameters outside the region. Call "
                "apply_activation_checkpointing before it, or pass the class of the blocks inside."
            )
        if "forward" in vars(module):
            raise ValueError(
                f"module {name!r} has its forward replaced on the instance (by a hook library, perhaps), which would "
                "bypass the checkpoint. Apply activation checkpointing first, then whatever replaces forward."
            )
    for module in chosen.values():
        if not isinstance(module, _Checkpointed):
            module.__class__ = _checkpointed_class(type(module))
        vars(module)["_checkpoint_options"] = {"preserve_rng_state": preserve_rng_state, "offload": offload}
        _modules_run.discard(module)
        _compile_inside(module)
    _stop_checking(model)
    model.register_forward_hook(_check_regions_ran)
    _warn_of_cache(model)
    return list(chosen)


def remove_activation_checkpointing(model: nn.Module) -> list[str]:
    """Undo :func:`apply_activation_checkpointing` on `model` and all its submodules; return the names of these modules.

    Example:
        >>> import torch, ackpt
        >>> ackpt.remove_activation_checkpointing(torch.nn.Linear(2, 2))
        []
    """
    _require_module(model)
    names = []
    for name, module in model.named_modules():
        _stop_checking(module)
        if isinstance(module, _Checkpointed):
            module.__class__ = _original_class(type(module))
            if (run := vars(module).get("_compiled_call_impl")) is not None:
                vars(module)["_compiled_call_impl"] = run.compiled
            del module._checkpoint_options
            names.append(name)
    return names


class _Checkpointed:
    """Mixin that precedes a module's class; the combined class runs the original ``forward`` as one region."""

    _checkpoint_options: dict

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        _compile_inside(self)

    def __reduce_ex__(self, protocol):
        # Pickle cannot find a class made at run time by its name: pickle the original class, replace it when loading.
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _rebuild, (_original_class(type(self)),), state


def _compile_inside(module) -> None:
    """Let the region of a module that ``Module.compile`` has compiled run around the compiled code."""
    compiled = module._compiled_call_impl
    if compiled is None or isinstance(compiled, functools.partial):
        return

    def forward(self, *args, **kwargs):
        return compiled(*args, **kwargs)

    run: Any = functools.partial(checkpoint, types.MethodType(forward, module), **module._checkpoint_options)
    run.compiled, module._compiled_call_impl = compiled, run


@functools.cache
def _checkpointed_class(cls):
    @functools.wraps(cls.forward)
    def forward(self, *args, **kwargs):
        return checkpoint(cls.forward.__get__(self), *args, **self._checkpoint_options, **kwargs)

    uncompiled(forward)  # in compiled code, `cls.forward` of the module would be this function again
    names = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_Checkpointed, cls), names)


def _original_class(cls):
    """The class before checkpointing; raises TypeError if another library, such as FSDP, has changed it since."""
    bases = cls.__bases__
    if bases[0] is not _Checkpointed:
        raise TypeError(
            f"{cls.__name__} was changed by another library after activation checkpointing was applied; undo that first"
        )
    return bases[1]


def _rebuild(cls):
    checkpointed = _checkpointed_class(cls)
    return checkpointed.__new__(checkpointed)


def _require_module(model):
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _choose(model, check_fn) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    if check_fn is None:
        chosen = repeated_blocks(model)
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


def repeated_blocks(model) -> dict[str, nn.Module]:
    chosen: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or _is_scripted(module):
            continue
        if any(name == block or name.startswith(block + ".") for block in chosen):
            continue
        members = {path: child for path, child in callable_members(module, name) if not _is_scripted(child)}
        siblings = collections.Counter(map(type, members.values()))
        for path, child in members.items():
            # A module without children is one operation, whose region would save the same tensors as the operation.
            if siblings[type(child)] > 1 and _is_not_empty(child.children()) and _is_not_empty(child.parameters()):
                chosen.setdefault(path, child)
    return chosen


def callable_members(module, name):
    """The callable members of a module, ``(path, module)``; members of a container without a forward replace it."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if _is_container(child):
            yield from callable_members(child, path)
        else:
            yield path, child


def _is_container(module) -> bool:
    return not _is_scripted(module) and type(module).forward is nn.Module.forward


def _is_scripted(module) -> bool:
    return isinstance(module, (torch.jit.ScriptModule, torch.jit.ScriptFunction))


def _is_not_empty(items) -> bool:
    return any(True for _ in items)


def _warn_of_cache(model) -> None:
    modules = {f"model.{name}".rstrip("."): module for name, module in model.named_modules()}
    configs = {path: getattr(module, "config", None) for path, module in modules.items()}
    # Parts of a model, such as the decoder of a vision-language model, may have a configuration of their own.
    paths = {id(config): path for path, config in reversed(configs.items()) if getattr(config, "use_cache", False)}
    generates = (getattr(module, "can_generate", None) for module in modules.values())
    if paths and any(callable(each) and each() for each in generates):
        switch = " = ".join(f"{path}.config.use_cache" for path in reversed(paths.values()))
        warn(
            f"{switch} is on: every block then puts its keys and values into a cache, which a region cannot recompute, "
            f"and the first training step raises. Set {switch} = False, or call the model with use_cache=False.",
        )


def _stop_checking(model) -> None:
    for key in [key for key, hook in model._forward_hooks.items() if hook is _check_regions_ran]:
        del model._forward_hooks[key]


def _check_regions_ran(model, args, result) -> None:
    """Check once, by a forward hook, that all chosen modules with parameters in the graph ran as regions."""
    if torch.compiler.is_dynamo_compiling():
        return
    outputs = [tensor for tensor in strip_result(result)[0] if tensor.grad_fn is not None]
    if {type(output) for output in outputs} != {torch.Tensor}:  # others, for example, while the model is captured
        return
    _stop_checking(model)
    regions: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, _Checkpointed)}
    not_run = {name: module for name, module in regions.items() if module not in _modules_run}
    covered = {id(p) for module in regions.values() if module in _modules_run for p in module.parameters()}
    reached = {id(leaf) for leaf in graph_of(outputs).ends} - covered
    unused = [name for name, module in not_run.items() if not reached.isdisjoint(map(id, module.parameters()))]
    if unused:
        raise CheckpointError(_not_run(unused, regions))


def _not_run(names, regions) -> str:
    first = regions[names[0]]
    children = [child for _, child in callable_members(first, "") if _is_not_empty(child.parameters())]
    inside = sorted({type(child).__name__ for child in children})
    better = f"check_fn=lambda module: type(module).__name__ in {inside}" if inside else "check_fn= with other modules"
    return (
        f"{len(names)} of {len(regions)} chosen modules were not called in this forward although their parameters took "
        f"part in it, so they are not checkpointed: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''} "
        f"({type(first).__name__}). The model calls what is inside of them. Choose modules that are called: "
        f"ackpt.apply_activation_checkpointing(model, {better}), after ackpt.remove_activation_checkpointing(model)."
    )
