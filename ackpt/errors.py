"""The errors of the package: each message names a cause and a way out."""

from difflib import get_close_matches

_NEARLY = 0.85  # of difflib's ratio: a letter too many, too few or another one; "captions" are no "options"


class CheckpointError(RuntimeError):
    """A checkpointed region cannot give the gradients of the plain model.

    Raised instead of a silently wrong result; nothing has been added to any ``.grad`` by the region that raises.

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
    """A tensor could not be taken to the store or brought back; nothing was replaced by something else silently.

    Example:
        >>> import torch, ackpt
        >>> try:
        ...     ackpt.offload_saved_tensors(store="disk", folder="/no/such/folder")
        ... except ackpt.OffloadError:
        ...     print("nothing can be written there")
        nothing can be written there
    """


class TraceError(ValueError):
    """A model cannot be captured as one graph; the message names the line or the cause, and the way out.

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

    reason: str = ""  # where a model looks at values, for what is captured in another way instead


class BudgetError(ValueError):
    """No plan keeps the step within the budget; the message names the smallest budget that works.

    ``least_bytes``: that budget of a whole step, resident bytes included; None where a solver knows no graph.
    ``budget``: what was asked for, as it was given; None for a solver's bytes.

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
        super().__init__(message)
        self.least_bytes = least_bytes
        self.budget: float | str | None = budget


def did_you_mean(name, known) -> str:
    """A question to append to a message that lists the `known` names; empty where none of them is like `name`.

    Example:
        >>> did_you_mean("ful", ["none", "full"])
        " (did you mean 'full'?)"
    """
    asked = str(name).lower()
    close = [one for one in known if asked and one.startswith(asked)] or get_close_matches(asked, list(known), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_misspelt(given, known, what: str) -> None:
    """Refuse the first of the `given` names that is nearly one of the `known`, which are those of `what`.

    Raises:
        TypeError: naming both.

    Example:
        >>> check_misspelt(["budgt"], ["budget", "policy"], "ackpt.compile")
        Traceback (most recent call last):
            ...
        TypeError: 'budgt' is no keyword of ackpt.compile: did you mean 'budget'?
    """
    for name in given:
        close = get_close_matches(name.lower(), known, 1, _NEARLY)
        if close and name not in known:
            raise TypeError(f"{name!r} is no keyword of {what}: did you mean {close[0]!r}?")
