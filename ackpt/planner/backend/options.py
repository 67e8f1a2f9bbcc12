"""The options of ``torch.compile(model, backend="ackpt", options=...)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ackpt.core.errors import check_misspelt
from ackpt.planner.request import Request

_NOT_OF_INDUCTOR = ("outputs", "optimizer", "accumulation", "scaler", "cache")
_NAMES = (
    "budget",
    "slowdown",
    "policy",
    "differentiate",
    "compiler",
    "on_plan",
    "device_profile",
    "chunk_head",
    *_NOT_OF_INDUCTOR,
)


def checked(options: Any, mode: str | None = None) -> Request:
    """The request that the user's `options` describe, or an error that names the one that is wrong.

    Args:
        options: a dict, or None.
        mode: of ``torch.compile``; it belongs to another backend, so anything but None is refused.

    Raises:
        TypeError, ValueError: naming the option.
    """
    if mode is not None:
        raise ValueError(
            f"mode {mode!r} is one of Inductor's: leave it out; options={{'compiler': 'inductor'}} uses it"
        )
    if not isinstance(options, (Mapping, type(None))):
        raise TypeError(f"options must be a dict such as {{'budget': '6GiB'}}, got {type(options).__name__}")
    rest = dict(options or {})
    if foreign := sorted({"plan", "dynamic"} & set(rest)):
        raise TypeError(
            f"{foreign[0]!r} is not an option of this backend: use ackpt.compile(model, ..., {foreign[0]}=...)"
        )
    check_misspelt(rest, _NAMES, "this backend")
    given = {name: rest.pop(name) for name in _NAMES if name in rest}
    request = Request.from_keywords(**given, options=rest)
    if request.compiler == "inductor" and (refused := next(filter(given.__contains__, _NOT_OF_INDUCTOR), None)):
        raise TypeError(
            f"{refused!r} is not an option of compiler 'inductor', whose plans count all outputs and no optimizer, and "
            "are not cached"
        )
    return request
