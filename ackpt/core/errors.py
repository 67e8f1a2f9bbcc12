"""The exception classes, warnings, and suggestions for misspelt names. Messages are written where they are raised."""

import sys
import warnings
from difflib import get_close_matches

_INSIDE = ("ackpt", "torch", "contextlib", "functools")  # packages between the user's line and ours
_OUT_OF_MEMORY = " Within the budget, the step would run out of memory."
_SIMILAR = 0.85  # difflib's ratio: one letter added, missing or changed; "captions" is not similar to "options"


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


class TraceError(ValueError):
    """A model cannot be captured as one graph; the message names the line, the cause and what to do instead.

    Example:
        >>> import torch, ackpt
        >>> class Branches(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x) if x.sum() > 0 else x
        >>> try:
        ...     ackpt.trace(Branches(8, 8), torch.ones(4, 8))
        ... except ackpt.TraceError:
        ...     print("it decides by the values of a tensor")
        it decides by the values of a tensor
    """

    def __init__(self, message: str = "", *, reason: str = "", module: str | None = None, can_split: bool = False):
        super().__init__(message)
        self.reason = reason  # the code that reads a tensor's values, if that is the cause
        self.module = module  # the path of the innermost module whose code is the cause; None if unknown
        self.can_split = can_split  # whether the model may run in eager mode, so that its other modules can be planned


class BudgetError(ValueError, RuntimeError):
    """No plan keeps the step within the budget; the message names the smallest feasible budget if it is known.

    Libraries that look for torch's text, such as ``accelerate.utils.find_executable_batch_size``, treat it as
    an out-of-memory error.

    ``least_bytes``: the smallest feasible budget of a whole step in bytes, including resident memory; None if a solver
    without a graph raised the error. ``budget``: the budget as the caller gave it; None for a solver's bytes.

    Example:
        >>> import torch, ackpt
        >>> graph = ackpt.trace(torch.nn.Linear(8, 8), torch.ones(4, 8))
        >>> try:
        ...     ackpt.plan(graph, budget=1)
        ... except ackpt.BudgetError as error:
        ...     least = error.least_bytes
        >>> ackpt.plan(graph, budget=least).peak_bytes <= least
        True
    """

    def __init__(self, message: str = "", least_bytes: int | None = None, budget: float | str | None = None):
        # A RuntimeError whose only argument has this text (`should_reduce_batch_size` in accelerate/utils/memory.py).
        super().__init__(message.removesuffix(_OUT_OF_MEMORY) + _OUT_OF_MEMORY)
        self.least_bytes = least_bytes
        self.budget: float | str | None = budget

    def __str__(self) -> str:
        return str(self.args[0]).replace(_OUT_OF_MEMORY, "", 1)


def warn(message: str) -> None:
    """Give a ``UserWarning`` at the line of the user's code that runs at the moment."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def add_note(error: Exception, note: str) -> None:
    """Add a note, which begins with "ackpt: ", to an error of the user's code, unless it has one already."""
    if any(each.startswith("ackpt: ") for each in getattr(error, "__notes__", ())):
        return
    if hasattr(error, "add_note"):
        error.add_note(note)  # pyright: ignore[reportAttributeAccessIssue]
    else:  # Python 3.10
        error.args = (f"{error.args[0] if error.args else ''}\n{note}", *error.args[1:])


def did_you_mean(name, names) -> str:
    """A question to append to an error that lists the valid `names`; empty if none of them is similar to `name`."""
    text = str(name).lower()
    close = [other for other in names if text and other.startswith(text)] or get_close_matches(text, list(names), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_misspelt(given, names, owner: str) -> None:
    """Raise TypeError if one of the `given` names is a misspelling of one of the `names`, the keywords of `owner`."""
    for name in given:
        close = get_close_matches(name.lower(), names, 1, _SIMILAR)
        if close and name not in names:
            raise TypeError(f"{name!r} is not a keyword of {owner}: did you mean {close[0]!r}?")
