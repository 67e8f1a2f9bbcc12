"""Parse a budget (a fraction of the baseline's dynamic peak, or bytes of the whole peak), and derive the bound."""

import math
import re
from fractions import Fraction
from numbers import Integral, Real

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_KNOWN = "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
_BINARY = ("KiB", "MiB", "GiB", "TiB")
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)


def dynamic_limit(budget, baseline_bytes: int, resident_bytes: int) -> int | None:
    """The bound on dynamic bytes that follows from `budget`.

    Args:
        budget: None for no bound; a float in (0, 1], that fraction of `baseline_bytes`; an int, bytes of the whole
            peak, resident ones included; numpy's and other numbers likewise; or a string that says one of these,
            see `from_text`.
        baseline_bytes: dynamic peak of the step without checkpointing.
        resident_bytes: parameters, buffers, inputs and optimizer state.

    Raises:
        TypeError, ValueError: for anything that is not a budget.
    """
    if budget is None:
        return None
    bound = from_text(budget) if isinstance(budget, str) else budget
    if isinstance(bound, bool) or not isinstance(bound, Real):
        raise TypeError(f"a budget is a float, bytes or a string such as '6GiB', got {type(budget).__name__}")
    if not isinstance(bound, Integral):
        share = float(bound)
        if not 0 < share <= 1 and isinstance(budget, str):
            raise ValueError(
                f"{budget!r} is not a budget: a fraction of the baseline's dynamic peak is more than 0 and at most 1, "
                "as in '0.5' or '50%'; bytes have a unit, as in '6GiB', or are written out, as in '6442450944'"
            )
        if not 0 < share <= 1:
            raise ValueError(
                f"a float budget is a fraction of the baseline's dynamic peak, in (0, 1], got {budget!r}; for bytes "
                "give an int or a string such as '6GiB'"
            )
        return math.floor(share * baseline_bytes)
    if bound <= 0:
        raise ValueError(f"a budget in bytes must be positive, got {budget!r}")
    return int(bound) - resident_bytes


def added_share(slowdown) -> float | None:
    """The fraction of the baseline's time that `slowdown` allows: 0.1 for ``0.1`` and ``"10%"``."""
    if slowdown is None:
        return None
    try:
        share = from_text(slowdown) if isinstance(slowdown, str) else slowdown
    except ValueError:
        share = math.nan
    if isinstance(share, bool) or not isinstance(share, Real):
        raise TypeError(f"a slowdown is a float or a string such as '10%', got {type(slowdown).__name__}")
    if not 0 <= float(share) <= 1:
        raise ValueError(
            f"slowdown={slowdown!r}: give a fraction of the baseline's time from 0 to 1, such as 0.1 or '10%'; 1 is "
            "twice the time"
        )
    return float(share)


def is_share(budget) -> bool:
    """Whether a budget is a fraction of the baseline's dynamic peak, not bytes."""
    bound = from_text(budget) if isinstance(budget, str) else budget
    return isinstance(bound, Real) and not isinstance(bound, Integral)


def split_budget(budget: float | int | str | None) -> tuple[float | int | str | None, bool]:
    """A budget without its word "reserved", and whether it has that word; a fraction with it is a ValueError."""
    if not isinstance(budget, str) or budget.split()[-1:] != ["reserved"]:
        return budget, False
    bound = budget.rpartition("reserved")[0]
    if is_share(bound):
        raise ValueError(
            f"the budget {budget!r} bounds what a GPU's allocator reserves: give bytes, as in '6GiB reserved'"
        )
    return bound, True


def from_text(text: str) -> float | int:
    """``"6GiB"``, ``"6GiB reserved"`` or ``"6442450944"`` are bytes; ``"0.5"`` and ``"50%"`` the same fraction."""
    if text.split()[-1:] == ["reserved"]:
        return from_text(str(split_budget(text)[0]))
    bare = text.strip()
    if bare.isdecimal() and int(bare) > 1:
        return int(bare)
    try:
        return float(bare[:-1]) / 100 if bare.endswith("%") else float(bare)
    except ValueError:
        size = _size(text)
    if size is None:
        raise ValueError(
            f"{text!r} is not a budget{_other_units(text)}: write bytes with a unit, as in '6GiB' ({_KNOWN}), or a "
            "fraction of the baseline's dynamic peak, as in '0.5' or '50%'"
        )
    return size


def readable(size: int) -> str:
    """`size` bytes as text in binary units, rounded up to one decimal, so that as a budget it is at least `size`."""
    power = min(len(_BINARY), max(0, (size.bit_length() - 1) // 10))
    if not power:
        return f"{size} B"
    tenths = -(-10 * size // 2 ** (10 * power))
    return f"{tenths // 10}.{tenths % 10} {_BINARY[power - 1]}"


def least_share(peak_bytes: int, baseline_bytes: int) -> float | None:
    """The smallest budget with four decimals, as a fraction, that allows `peak_bytes`; None if it would exceed 1."""
    if not 0 < peak_bytes <= baseline_bytes:
        return None
    share = -(-(10**4) * peak_bytes // baseline_bytes) / 10**4
    bound = dynamic_limit(share, baseline_bytes, 0)
    # By rounding of floats, the bound of a fraction may be a byte too small.
    return share if bound is not None and bound >= peak_bytes else min(1.0, (round(share * 10**4) + 1) / 10**4)


def unit_hint(budget) -> str:
    """A hint for error messages about a small whole number without a unit, which means bytes; empty for others."""
    if isinstance(budget, str) and budget.strip().isdecimal():
        number = int(budget)
    elif isinstance(budget, Integral) and budget <= 100:
        number = int(budget)
    else:
        return ""
    share = f"{number}%" if 1 < number <= 100 else "50%"
    unit = f"{number}GiB" if number <= 1024 else "6GiB"
    return f"A whole number without a unit is bytes: write '{unit}' for another unit, '{share}' for a fraction. "


def _other_units(text: str) -> str:
    """A question to append to an error about a number whose unit lacks its B, as in ``"22G"``."""
    match = _PATTERN.fullmatch(text)
    prefix = match[2].lower().removesuffix("i") if match else ""
    if match is None or f"{prefix}ib" not in _UNITS or not prefix:
        return ""
    prefix = "k" if prefix == "k" else prefix.upper()
    return f" (did you mean '{match[1]}{prefix.upper()}iB' or '{match[1]}{prefix}B'?)"


def _size(text: str) -> int | None:
    match = _PATTERN.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in _UNITS:
        return None
    size = math.floor(Fraction(match[1]) * _UNITS[unit])  # a float may be smaller than the number as written
    if size <= 0:
        raise ValueError(f"a budget in bytes must be positive, got {text!r}")
    return size
