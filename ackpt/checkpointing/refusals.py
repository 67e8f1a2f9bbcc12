"""The error messages of regions; each names the cause and what to do instead."""

from __future__ import annotations

import types

import torch

from ackpt.core.autograd_state import phase
from ackpt.core.errors import CheckpointError


def unreachable(node) -> CheckpointError:
    return CheckpointError(
        f"this region uses a tensor that requires grad and was computed before it (by {node.name()}), but is neither "
        "an argument nor found in the function's closure, defaults or attributes, so its gradient could not be passed "
        "on. Pass that tensor as an argument of checkpoint()."
    )


def hidden_use() -> CheckpointError:
    return CheckpointError(
        "this checkpointed region hands a closed-over tensor that was computed before it straight to a "
        "torch.autograd.Function or a compiled function. Pass that tensor as an argument of checkpoint()."
    )


def changes_containers() -> CheckpointError:
    return CheckpointError(
        "this region adds, removes or replaces tensors in a list, dict or dataclass that it got as an argument; a "
        "recompute would do it twice. Return the tensors instead."
    )


def changes_inputs(tensor: str) -> CheckpointError:
    return CheckpointError(
        f"this checkpointed region changes {tensor} in place, so the old value is lost for the recompute. Work on a "
        "clone inside the region, use the out-of-place operation (nn.ReLU(inplace=False) as first layer, for "
        "example), or start the region after the change."
    )


def changes_argument(function, arguments) -> CheckpointError:
    names = ", ".join(sorted({type(argument).__name__ for argument in arguments}))
    module = getattr(function, "__self__", None)
    region = f" of {type(module).__name__}" if isinstance(module, torch.nn.Module) else ""
    return CheckpointError(
        f"this checkpointed region changes an object that it got as an argument (one of: {names}): the forward{region} "
        "puts tensors into it or replaces some, and its recompute would do so again, on what the forward has left. Do "
        "not pass it (transformers: model.config.use_cache=False), or return the tensors instead. If a library's model "
        "always passes it, select other modules with check_fn, such as the feed-forward layers, or use "
        "ackpt.apply_budget, which leaves such modules out."
    )


def add_note(error: Exception, function) -> None:
    """Add a note to an error of the user's code, which was raised during recomputation."""
    note = (
        f"ackpt: this error was raised while backward recomputed the checkpointed region {name_of(function)}. Its "
        "forward raised no error, so something that its code reads has changed since then, such as a context manager "
        "that has exited, a context variable, or a closed-over list or dict. Keep it unchanged until after backward(), "
        "or pass what the code reads as an argument of checkpoint()."
    )
    if any(each.startswith("ackpt: ") for each in getattr(error, "__notes__", ())):  # of a region inside
        return
    if hasattr(error, "add_note"):
        error.add_note(note)  # pyright: ignore[reportAttributeAccessIssue]
    else:  # Python 3.10
        error.args = (f"{error.args[0] if error.args else ''}\n{note}", *error.args[1:])


def name_of(function) -> str:
    if isinstance(function, types.MethodType) and isinstance(function.__self__, torch.nn.Module):
        return type(function.__self__).__name__
    return str(getattr(function, "__qualname__", type(function).__name__))


def other_outputs(count: int, expected: dict, recomputed: list) -> CheckpointError:
    """The error for a recomputation whose number of outputs, or whose signatures by index, differ."""

    def described(shape, dtype, device, requires_grad):
        dtype = str(dtype).removeprefix("torch.")
        return f"shape {list(shape)} {dtype} on {device}{'' if requires_grad else ' without grad'}"

    different = [
        f"output {index}: {described(*signature)} in forward, {described(*recomputed[index])} in recompute"
        for index, signature in expected.items()
        if index < len(recomputed) and recomputed[index] != signature
    ]
    if len(recomputed) != count:
        different.insert(0, f"{count} tensors in forward, {len(recomputed)} in recompute")
    return CheckpointError(
        "the recompute of a checkpointed region returned other outputs than its forward ("
        + "; ".join(different)
        + "). The function must do the same both times: look for a condition on a counter, a flag, a cache or a random "
        "number that checkpoint() cannot replay."
    )


def other_draws(name: str, function) -> CheckpointError:
    return CheckpointError(
        f"the recompute of a checkpointed region ({name_of(function)}) drew other random numbers from {name} than its "
        "forward: its code seeds it anew each time, as torch.seed(), random.seed() and a seed from a counter do. Seed "
        "outside of the region, or with a number that stays the same, as in torch.manual_seed(5)."
    )


def refuse_gradient_of(tensor) -> None:
    """Make backward raise an error if it reaches `tensor`, which belongs to the dropped graph of a first forward."""
    tensor.register_hook(_raise_leak)
    if phase.recomputing:
        phase.leaked.append(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def _raise_leak(grad):
    raise CheckpointError(
        "a tensor computed inside a checkpointed region left it other than through its return value (kept as an "
        "attribute, in a list, or in a returned object that is no list, tuple, dict or dataclass) and takes part in "
        "the loss, so its gradient could not be passed on to the inputs of the region. Return the tensor."
    )
