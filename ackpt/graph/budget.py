"""A budget is an upper bound on the peak: a fraction of the plain step's dynamic peak, or bytes of everything."""

from __future__ import annotations

import math
import re
from numbers import Integral, Real

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_KNOWN = "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)


def dynamic_limit(budget, baseline_bytes: int, resident_bytes: int) -> int | None:
    """The bound on dynamic bytes that `budget` means.

    Args:
        budget: None for no bound; a float in (0, 1], that fraction of `baseline_bytes`; an int, bytes of the whole
            peak, resident ones included; numpy's and other numbers likewise; or a string that says one of these,
            see `from_text`.
        baseline_bytes: dynamic peak of the step without checkpointing.
        resident_bytes: parameters, buffers, inputs and optimizer state.

    Raises:
        TypeError, ValueError: for what is no budget.

    Example:
        >>> dynamic_limit(0.5, 1000, 300), dynamic_limit("1kB", 1000, 300)
        (500, 700)
    """
    if budget is None:
        return None
    bound = from_text(budget) if isinstance(budget, str) else budget
    if isinstance(bound, bool) or not isinstance(bound, Real):
        raise TypeError(f"a budget is a float, bytes or a string such as '6GiB', got {type(budget).__name__}")
    if not isinstance(bound, Integral):
        share = float(bound)
        if not 0 < share <= 1:
            raise ValueError(
                f"a float budget is a fraction of the plain step's dynamic peak, in (0, 1], got {budget!r}; for bytes "
                "give an int or a string such as '6GiB'"
            )
        return math.floor(share * baseline_bytes)
    if bound <= 0:
        raise ValueError(f"a budget in bytes must be positive, got {budget!r}")
    return int(bound) - resident_bytes


def from_text(text: str) -> float | int:
    """``"6GiB"`` or ``"6442450944"`` are bytes; ``"0.5"`` and ``"50%"`` the same fraction.

    Raises:
        ValueError: for what is none of these.
    """
    bare = text.strip()
    if bare.isdecimal() and int(bare) > 1:
        return int(bare)
    try:
        return float(bare[:-1]) / 100 if bare.endswith("%") else float(bare)
    except ValueError:
        size = _size(text)
    if size is None:
        raise ValueError(
            f"{text!r} is no budget: write bytes with a unit, as in '6GiB' ({_KNOWN}), or a fraction of the plain "
            "step's dynamic peak, as in '0.5' or '50%'"
        )
    return size


def parse_bytes(text: str) -> int:
    """Bytes from a number with a unit, such as ``"6GiB"`` or ``"512 MB"``.

    Raises:
        ValueError: naming the units that are known.
    """
    size = _size(text)
    if size is None:
        raise ValueError(f"{text!r} is no size in bytes: write a number and one of {_KNOWN}, as in '6GiB'")
    return size


def _size(text: str) -> int | None:
    found = _PATTERN.fullmatch(text)
    unit = found[2].lower() if found else ""
    if found is None or unit not in _UNITS:
        return None
    size = math.floor(float(found[1]) * _UNITS[unit])
    if size <= 0:
        raise ValueError(f"a budget in bytes must be positive, got {text!r}")
    return size
