"""Describe a call in words, and how it differs from an earlier one, for error messages.

A graph's hash shows that two steps differ, but not how. A graph and its plan carry these words only for error
messages; no decision depends on them.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from ackpt.core.budget import is_share
from ackpt.metering.meter import memory_format

_MODE, _TRAINING, _EVALUATION = "mode", "training", "evaluation"
MACHINE = "machine"  # given only where it is not the one that plans
CHECKPOINTS = "torch.utils.checkpoint"  # given only where the model calls it
_LONGEST = 60  # characters of an argument that is not a tensor
_EVALUATE = (
    "The model was in training mode then and is in evaluation mode now, but gradients are on: run evaluation under "
    "torch.no_grad(), which calls the model without a plan"
)


def described(model: nn.Module, args, kwargs, differentiate: str = "loss") -> dict[str, str]:
    """``{what: how it is}`` for a call of `model`: torch, the model, its parameters and mode, autocast, arguments."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}.values()
    kinds = ", ".join(dict.fromkeys(f"{_dtype(parameter)}{_device(parameter)}" for parameter in parameters))
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    number = sum(parameter.numel() for parameter in parameters)
    return {
        "torch": torch.__version__,
        "model": type(model).__name__,
        "parameters": f"{number:,} in {len(parameters)} tensors of {kinds}, {trained:,} trained",
        _MODE: _mode(model),
        "autocast": _autocast(),
        "differentiate": differentiate,
        **{f"argument {name}": said for name, said in _arguments(args, kwargs)},
    }


def differences(was: Mapping[str, str] | None, now: Mapping[str, str] | None) -> list[str]:
    """A clause for every known difference between the calls; empty if one of them is unknown."""
    if was is None or now is None:
        return []
    clauses = []
    for name in {**was, **now}:
        without = "this one" if name == MACHINE else "not given"
        before, after = was.get(name, without), now.get(name, without)
        if before != after:
            clauses.append(f"{name} changed from {before} to {after}")
    return clauses


def another_plan(was, now, cause: str) -> str:
    """What to do if the given plan does not fit a later call, with its `cause` in words."""
    if _left_training(was, now):
        return f"It matched the previous call. {_EVALUATE}."
    if not differences(was, now):
        return f"It matched the previous call. Since then, {cause}: change it back, or give a budget, which replans."
    return (
        "It matched the previous call. Make a second step with a plan for this call, leave out a last batch that "
        "differs, as a DataLoader with drop_last=True does, or give a budget instead, which replans."
    )


def other_bytes(was, now, budget, cause: str) -> str:
    """What to do if the budget is infeasible for a later call but was feasible for an earlier one."""
    said = f"The budget was feasible for the earlier call: {'; '.join(differences(was, now)) or cause}."
    if was["autocast"] != now["autocast"]:
        said += (
            " Plan under the autocast that training uses, also that of Trainer(bf16=True), as in "
            "with torch.autocast('cuda', torch.bfloat16): ackpt.apply_budget(...)."
        )
    if not is_share(budget):
        evaluate = f" {_EVALUATE}." if _left_training(was, now) else ""
        return f"{said}{evaluate} Give the budget that the largest call needs."
    if _left_training(was, now):
        return (
            f"{said} {_EVALUATE}. In evaluation mode the baseline's peak is lower, and a fraction is relative to it; a "
            "budget in bytes, such as '6GiB', does not change."
        )
    return (
        f"{said} A fraction is relative to the baseline's dynamic peak with the current arguments, so a smaller batch "
        "has a smaller budget: give bytes, such as '6GiB', or a larger fraction, or leave the batch out, as a "
        "DataLoader with drop_last=True does."
    )


def _left_training(was: Mapping[str, str] | None, now: Mapping[str, str]) -> bool:
    """Whether some module was in training mode then, and none is now."""
    return was is not None and was[_MODE] != now[_MODE] == _EVALUATION


def _mode(model: nn.Module) -> str:
    modes = [module.training for module in model.modules()]
    if all(modes) or not any(modes):
        return _TRAINING if all(modes) else _EVALUATION
    return f"training of {sum(modes)} in {len(modes)} modules"


def _autocast() -> str:
    dtypes = {at: torch.get_autocast_dtype(at) for at in ("cpu", "cuda") if torch.is_autocast_enabled(at)}
    return ", ".join(f"{str(dtype).removeprefix('torch.')} on {device}" for device, dtype in dtypes.items()) or "off"


def _arguments(args, kwargs) -> Iterator[tuple[str, str]]:
    first: dict[int, str] = {}
    for where, leaf in named_leaves(args, kwargs):
        if not isinstance(leaf, torch.Tensor):
            yield where, _value(leaf)
        elif id(leaf) in first:
            yield where, f"the tensor that is {first[id(leaf)]}, too"
        else:
            first[id(leaf)] = where
            needs_grad = ", requires grad" if leaf.requires_grad else ""
            yield where, f"{_dtype(leaf)} {list(leaf.shape)}{_device(leaf)}{needs_grad}"


def call_arguments(batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a model from a batch: a mapping, a tuple or list, or one argument."""
    if isinstance(batch, (DataLoader, Iterator)):
        raise TypeError(f"batch is a {type(batch).__name__}: give one batch, such as next(iter(loader))")
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}


def sliced(args, kwargs) -> str:
    """A sentence that names the arguments whose storage is larger than they are; otherwise empty."""
    views = [
        f"argument {name} of shape {list(leaf.shape)} is a view of {memory_format(leaf.untyped_storage().nbytes())}"
        for name, leaf in named_leaves(args, kwargs)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        if leaf.untyped_storage().nbytes() > leaf.nbytes
    ]
    if not views:
        return ""
    return f"The inputs count with their whole storage: {'; '.join(views)}. To count a view alone, pass its clone()."


def named_leaves(args, kwargs) -> Iterator[tuple[str, object]]:
    """(name, leaf) of every leaf of a call's arguments: ``"0"``, or ``"batch[2]"`` in a container."""
    for name, value in (*enumerate(args), *kwargs.items()):
        for index, leaf in enumerate(tree_leaves(value)):
            yield str(name) if leaf is value else f"{name}[{index}]", leaf


def _value(leaf) -> str:
    if isinstance(leaf, (type(None), bool, int, float, str)):
        said = repr(leaf)
        return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."
    return f"a {type(leaf).__name__}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _device(tensor: torch.Tensor) -> str:
    """Tensors without a device are planned as tensors on the CPU."""
    return "" if tensor.device.type in ("cpu", "meta") else f" on {tensor.device}"


_ITEMS = "num_items_in_batch"


def as_trainer_calls(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """`batch` as the Trainer passes it to `model`, if the program has imported the Trainer; else as it is.

    The Trainer adds ``num_items_in_batch`` (``_get_num_items_in_batch`` in transformers/trainer.py, 5.24) for a model
    of transformers whose forward has ``**kwargs``, or that sets ``accepts_loss_kwargs``; its value does not matter.
    """
    modules = sys.modules
    if "transformers.trainer" not in modules or not isinstance(batch.get("labels"), torch.Tensor) or _ITEMS in batch:
        return dict(batch)
    unwrapped: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
    if not isinstance(unwrapped, modules["transformers.modeling_utils"].PreTrainedModel):
        return dict(batch)
    accepts = getattr(unwrapped, "accepts_loss_kwargs", None)
    if accepts is None:
        parameters = inspect.signature(unwrapped.forward).parameters.values()
        accepts = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return {**batch, _ITEMS: torch.ones((), device=batch["labels"].device)} if accepts else dict(batch)
