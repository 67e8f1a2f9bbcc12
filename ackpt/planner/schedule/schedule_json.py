"""Schedules as JSON, for the files of plans and of the cache of searches; a digest shows whether a file was changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from .schedule import COMPUTE, FREE, Schedule, Step


def to_json(schedule: Schedule) -> dict[str, Any]:
    """Plain data, from which `from_json` makes an equal schedule."""
    return {
        "graph": schedule.graph,
        "forward": _packed(schedule.forward),
        "backward": _packed(schedule.backward),
        "saved": list(schedule.saved),
        "replayed": list(schedule.replayed),
    }


def from_json(data: Mapping[str, Any], steps: Steps | None = None) -> Schedule:
    """The schedule that `to_json` wrote.

    Args:
        data: from `to_json`.
        steps: shared by schedules that are read together, to save memory.

    Raises:
        KeyError, TypeError, ValueError: if the data are not complete.
    """
    steps = Steps() if steps is None else steps
    forward, backward = (tuple([steps[_key(entry)] for entry in data[part]]) for part in ("forward", "backward"))
    return Schedule(data["graph"], forward, backward, tuple(data["saved"]), tuple(data["replayed"]))


class Steps(dict[Any, Step]):
    """The steps by their packed form, each one object."""

    def __missing__(self, packed) -> Step:
        if isinstance(packed, tuple):
            kind, storage = packed
            step = Step(kind, storage)
        else:
            step = Step(COMPUTE, packed) if packed >= 0 else Step(FREE, -1 - packed)
        self[packed] = step
        return step


def digest(data: Mapping[str, Any]) -> str:
    """SHA-256 of the data of a file without its own entry ``"digest"``."""
    entries = {key: value for key, value in data.items() if key != "digest"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _packed(steps) -> list:
    """A compute step as its node's id, a free as -1 - the storage's, another as [kind, storage]."""
    numbers = {COMPUTE: lambda step: step.id, FREE: lambda step: -1 - step.id}
    return [numbers.get(step.kind, list)(step) for step in steps]


def _key(entry):
    return tuple(entry) if isinstance(entry, list) else entry
