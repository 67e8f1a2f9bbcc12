"""Reading back what a `Plan` or `Profile` has saved."""

from __future__ import annotations

import json
from pathlib import Path


def read_json(path, what: str, error_type: type[Exception]):
    """The data in a file that `save` of a ``"plan"`` or ``"profile"`` wrote; `error_type` if it is no JSON."""
    try:
        return json.loads(Path(path).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise error_type(
            f"{path} is no {what}: {error}. It may be truncated; {what} again and save it with {what.capitalize()}.save"
        ) from error
