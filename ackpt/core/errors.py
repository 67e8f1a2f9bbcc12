"""The exception classes of a running step, and warnings. The messages are written where they are raised."""

import sys
import warnings

_INSIDE = ("ackpt", "torch", "contextlib", "functools")  # packages between the user's line and ours


class CheckpointError(RuntimeError):
    """A checkpointed region cannot compute the gradients of the baseline.

    Raised instead of a silently wrong result. The region that raises has not added anything to any ``.grad``.

    Example:
        >>> import torch, ackpt
        >>> layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
        >>> loss = ackpt.checkpoint(layer, x).sum()
        >>> with torch.no_grad():  # an optimizer's step before backward
        ...     _ = layer.weight.add_(1)
        >>> try:
        ...     loss.backward()
        ... except ackpt.CheckpointError as error:
        ...     print(str(error).split(",")[0])
        parameter 'weight'
    """


class OffloadError(RuntimeError):
    """A tensor could not be copied to the offload store or back. Raised instead of any silent fallback.

    Example:
        >>> import torch, ackpt
        >>> try:
        ...     ackpt.offload_saved_tensors(store="disk", folder="/no/such/folder")
        ... except ackpt.OffloadError:
        ...     print("nothing can be written there")
        nothing can be written there
    """


def warn(message: str) -> None:
    """Give a ``UserWarning`` at the line of the user's code that runs at the moment."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
