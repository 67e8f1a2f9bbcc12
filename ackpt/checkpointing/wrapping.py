"""``apply_activation_checkpointing``: checkpoint chosen modules of a model without changing its code.

A region stands in for the ``forward`` of each chosen module, see `standing_in`. Classes, parameters, buffers, hooks
and names do not change, so ``state_dict``, ``named_parameters`` and optimizers work as before; pickles and copies of
the model are checkpointed too. The first forward with gradients checks that the chosen modules were called.
"""

import collections
import functools
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import nn

from ackpt.core.errors import CheckpointError, warn
from ackpt.offloading.saved_tensors import Offload, resolve

from .reachable import TRAVELING, graph_of
from .reentrant import _modules_run, checkpoint
from .standing_in import StandIn, as_it_is, in_place_of, require_call_of_forward
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
        ValueError: if nothing matches, a name does not exist, or a module is scripted or sharded by
            ``FullyShardedDataParallel``.
        TypeError: if `check_fn` is none of the above, if the model is planned by `ackpt.compile`, or if the class of a
            chosen module has a ``__call__`` that does not call ``forward``.
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
        if "_ackpt_variants" in vars(module) or in_place_of(module) is not None:
            raise TypeError(
                f"{f'module {name!r}' if name else 'the model'} is a step planned by ackpt.compile or "
                "ackpt.apply_budget, whose plan says what is recomputed: use either that or activation checkpointing, "
                "not both (ackpt.remove_budget undoes a budget)"
            )
    resolve(offload)
    chosen = _choose(model, check_fn)
    for name, module in chosen.items():
        require_call_of_forward(module, f"module {name!r}" if name else "the model")
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
    run = functools.partial(_run_as_region, {"preserve_rng_state": preserve_rng_state, "offload": offload})
    for module in chosen.values():
        vars(module)[TRAVELING] = StandIn(type(module), run)
        _modules_run.discard(module)
        _compile_inside(module)
    _compile_inside_regions()
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
        if vars(module).pop(TRAVELING, None) is not None:
            if isinstance(run := module._compiled_call_impl, _CompiledInside):
                module._compiled_call_impl = run.compiled
            names.append(name)
    return names


class _CompiledInside(functools.partial):
    """The call of a region whose module ``Module.compile`` has compiled; ``compiled``: that call without the region."""

    compiled: Any


def _compile_inside(module) -> None:
    """Let the region of a module that ``Module.compile`` has compiled run around the compiled code."""
    compiled = module._compiled_call_impl
    if is_checkpointed(module) and compiled is not None and not isinstance(compiled, _CompiledInside):
        options = vars(module)[TRAVELING].run.args[0]
        module._compiled_call_impl = run = _CompiledInside(checkpoint, as_it_is(module, compiled), **options)
        run.compiled = compiled


@functools.cache
def _compile_inside_regions() -> None:
    """Let ``Module.compile`` of a checkpointed module compile the code inside the region from now on."""
    original = nn.Module.compile

    @functools.wraps(original)
    def compile(self, *args, **kwargs):
        original(self, *args, **kwargs)
        _compile_inside(self)

    nn.Module.compile = compile  # which assigns to `_compiled_call_impl`, so that Dynamo would meet the region


def _run_as_region(options, module, forward, args, kwargs):
    return checkpoint(as_it_is(module, forward), *args, **options, **kwargs)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether `apply_activation_checkpointing` has chosen `module`."""
    return vars(module).get(TRAVELING) is not None


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
            names = ", ".join(map(repr, [*modules][1:4])) or "'' (the model itself)"
            raise ValueError(f"the model has no module named {missing[0]!r}; names look like {names}")
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
    outer = [name.removesuffix("._orig_mod") for name in chosen]  # the region is around what torch.compile returned
    return {name: modules[name] for name in outer}


def _is_collection_of(obj, kind) -> bool:
    return isinstance(obj, (list, tuple, set, frozenset)) and all(isinstance(item, kind) for item in obj)


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
    if _is_scripted(module) or "forward" in vars(module):  # torch.compile sets it
        return False
    return type(module).forward is nn.Module.forward


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
            f"and the first training step fails. Set {switch} = False, or call the model with use_cache=False."
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
    regions: dict[str, Any] = {name: m for name, m in model.named_modules() if is_checkpointed(m)}
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
