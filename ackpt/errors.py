"""The errors of the package: each message names a cause and a way out."""


class CheckpointError(RuntimeError):
    """A checkpointed region cannot give the gradients of the plain model.

    Raised instead of a silently wrong result; nothing has been added to any ``.grad`` by the region that raises.
    """


class OffloadError(RuntimeError):
    """A tensor could not be taken to the store or brought back; nothing was replaced by something else silently."""


class BudgetError(ValueError):
    """No plan keeps the step within the budget; the message names the smallest budget that works.

    ``least_bytes``: that budget of a whole step, resident bytes included; None where a solver knows no graph.
    """

    def __init__(self, message: str = "", least_bytes: int | None = None):
        super().__init__(message)
        self.least_bytes = least_bytes
