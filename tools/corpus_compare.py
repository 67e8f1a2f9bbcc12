"""What differs between a recorded model of the corpus and the same model now, and whether it is worse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WORSE, CHANGED = "worse", "changed, not worse"
_NO_MORE = ("peak_bytes", "measured_peak_bytes", "cost", "exposed_seconds")


def compare(name: str, then: dict[str, Any], now: dict[str, Any], same_cpu: bool = True) -> list[tuple[str, str]]:
    """Every difference as ``(WORSE or CHANGED, text)``; computed values are compared only on the recorded CPU."""
    found = []
    for key in then.keys() | now.keys():
        if key == "plans" or (key == "unplanned" and not same_cpu):
            continue
        if then.get(key) != now.get(key):
            found.append((WORSE, f"{name}: {key} was {then.get(key)}, is {now.get(key)}"))
    for policy in {**then["plans"], **now["plans"]}:
        old, new = then["plans"].get(policy, {}), now["plans"].get(policy, {})
        for case in {**old, **new}:
            where = f"{name}, {policy}, {case}"
            found += [(verdict, f"{where}: {text}") for verdict, text in _plan(old.get(case), new.get(case))]
    return sorted(found)


def _plan(then: dict[str, Any] | None, now: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if then is None or now is None:
        yield WORSE, f"was {then}, is {now}"
        return
    if "refused" in then or "refused" in now:
        yield from _refusal(then, now)
        return
    if then["schedule"] == now["schedule"]:
        for key in sorted(then.keys() | now.keys()):
            if then.get(key) != now.get(key):
                yield WORSE, f"{key} of the same schedule was {then.get(key)}, is {now.get(key)}"
        return
    changes = [f"{key} {then.get(key)} -> {now.get(key)}" for key in sorted(now) if then.get(key) != now.get(key)]
    yield WORSE if _is_worse(then, now) else CHANGED, ", ".join(changes)


def _is_worse(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether another schedule has a higher peak or cost, a weaker bound, or was not run or not bit-equal."""
    if any(now[key] > then[key] for key in _NO_MORE if key in then and key in now):
        return True
    if then.get("lower_bound", 0.0) > now.get("lower_bound", 0.0):
        return True
    measured = now.get("measured_peak_bytes", now["peak_bytes"])
    return (
        measured > now["peak_bytes"] or not now.get("bit_equal", True) or ("bit_equal" in then) > ("bit_equal" in now)
    )


def _refusal(then: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if then == now:
        return
    if "refused" not in now:
        yield CHANGED, f"was refused, is kept at a peak of {now['peak_bytes']} bytes and a cost of {now['cost']}"
    elif "refused" not in then:
        yield WORSE, f"was kept, is refused; the smallest feasible budget is {now['refused']} bytes"
    else:
        verdict = WORSE if now["refused"] > then["refused"] else CHANGED
        yield verdict, f"smallest feasible budget {then['refused']} -> {now['refused']} bytes"
