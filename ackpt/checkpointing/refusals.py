"""The errors for what a region refuses; each message names the cause and what to do instead."""

from __future__ import annotations

from ackpt.autograd_state import phase
from ackpt.errors import CheckpointError


def unreachable(node) -> CheckpointError:
    return CheckpointError(
        f"this region uses a tensor that requires grad and was computed before it (by {node.name()}), but is neither "
        "an argument nor found in the function's closure, defaults or attributes, so its gradient could not be handed "
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


def _describe(signature) -> str:
    shape, dtype, device, requires_grad = signature
    dtype = str(dtype).removeprefix("torch.")
    return f"shape {list(shape)} {dtype} on {device}{'' if requires_grad else ' without grad'}"


def changes_inputs(what: str) -> CheckpointError:
    return CheckpointError(
        f"this checkpointed region changes {what} in place, so the old value is lost for the recompute. Work on a "
        "clone inside the region, use the out-of-place operation (nn.ReLU(inplace=False) as first layer, for "
        "example), or start the region after the change."
    )


def changes_argument(holders) -> CheckpointError:
    names = ", ".join(sorted({type(holder).__name__ for holder in holders}))
    return CheckpointError(
        f"this checkpointed region changes an object that it got as an argument (one of: {names}): it puts tensors "
        "into it or replaces some, and its recompute would do so again, on what the forward has left. Do not pass it "
        "(transformers: use_cache=False), or return the tensors instead."
    )


def other_outputs(count: int, expected: dict, found: list) -> CheckpointError:
    """The error for outputs that differ from the forward's.

    `count`: how many tensors the forward returned; `expected`: signatures, by position, of those that the region
    computed; `found`: signatures of all outputs of the recomputation.
    """
    different = [
        f"output {place}: {_describe(signature)} in forward, {_describe(found[place])} in recompute"
        for place, signature in expected.items()
        if place < len(found) and found[place] != signature
    ]
    if len(found) != count:
        different.insert(0, f"{count} tensors in forward, {len(found)} in recompute")
    return CheckpointError(
        "the recompute of a checkpointed region returned other outputs than its forward ("
        + "; ".join(different)
        + "). The function must do the same both times: look for a condition on a counter, a flag, a cache or a random "
        "number that checkpoint() cannot replay."
    )


def refuse_gradient_of(tensor) -> None:
    """Make backward raise if it reaches `tensor`, which belongs to a first forward's graph that should be gone."""
    tensor.register_hook(_leak)
    if phase.recomputing:
        phase.left.append(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def _leak(grad):
    raise CheckpointError(
        "a tensor computed inside a checkpointed region left it other than through its return value (kept as an "
        "attribute, in a list, or in a returned object that is no list, tuple, dict or dataclass) and takes part in "
        "the loss, so its gradient could not be handed on to the inputs of the region. Return the tensor."
    )
