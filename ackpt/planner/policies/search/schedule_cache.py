"""Cache the results of searches on disk, so that a second run does not search again.

A file has the schedules of one search. Its name is the hash of all that the search depends on: the graph, the profile,
the policy with its options, and the versions of ackpt and torch. Peaks and costs are computed again from the schedules,
so a plan is the same with and without a cache. Files appear in one step, so processes may share a folder.
"""

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ackpt.core import __version__
from ackpt.core.errors import warn
from ackpt.core.files import RecordError, check_folder, write_bytes_atomic
from ackpt.core.progress import stage
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.schedule.schedule import Schedule, digest, from_json, to_json

from .frontier import frontier

Cache = str | os.PathLike[str]
_SCHEMA = {"schema": "ackpt.schedules", "version": 1}
_DAMAGES = (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError)


def cache_folder(cache: Cache | None) -> Path | None:
    """The folder `cache`, which is made if it does not exist; raises RecordError if it cannot be written."""
    if cache is None:
        return None
    if not isinstance(cache, (str, os.PathLike)):
        raise TypeError(f"cache must be a folder, as a string or a path, got {type(cache).__name__}")
    folder = Path(cache)
    try:
        folder = folder.expanduser()
        check_folder(folder)
    except (OSError, RuntimeError) as error:  # without a home folder, the latter
        reason = getattr(error, "strerror", None) or error
        raise RecordError(
            f"cache={str(folder)!r} is not a writable folder: {reason}. Name another folder, or leave cache out, which "
            "searches in every run."
        ) from error
    return folder


@dataclass(frozen=True)
class CachedCandidates:
    """The frontier of ``candidates(graph, profile)``, as candidates: from a file in `folder`, or searched and stored.

    The frontier of these candidates is the same frontier. One file serves all budgets.
    """

    folder: Path
    candidates: Callable

    def __call__(self, graph: JointGraph, profile: Profile) -> list[Schedule]:
        def search():
            return [point.schedule for point in frontier(graph, profile, self.candidates)]

        return cached(self.folder, graph, profile, {"candidates": self.candidates.__module__}, search)


def cached(
    folder: Path, graph: JointGraph, profile: Profile, about: Mapping[str, Any], search: Callable[[], list[Schedule]]
) -> list[Schedule]:
    """``search()``, or what it returned when it was called earlier for an equal graph, profile and `about`."""
    key = _key(graph, profile, about)
    path = folder / f"{key}.json.gz"
    stage("reading the cache")
    schedules = _read(path, key)
    if schedules is None:
        schedules = search()
        try:
            data: dict[str, Any] = {**_SCHEMA, "key": key, "schedules": [to_json(schedule) for schedule in schedules]}
            data["digest"] = digest(data)
            write_bytes_atomic(path, gzip.compress(json.dumps(data).encode(), compresslevel=1, mtime=0))
        except RecordError as error:
            warn(f"The result of a search is not in the cache: {error}.")
    return schedules


_LOOP = ("optimizer_bytes", "optimizer_step_bytes", "accumulated_bytes", "scaled_loss_bytes", "outside_loss_bytes")


def _key(graph: JointGraph, profile: Profile, about: Mapping[str, Any]) -> str:
    """The hash of what a search depends on: names of nodes and modules, too, which the graph's hash leaves out."""
    names, loop = [(node.name, node.module) for node in graph.nodes], [getattr(graph, name) for name in _LOOP]
    parts = [__version__, torch.__version__, graph.hash, names, loop, vars(profile), about]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def _read(path: Path, key: str) -> list[Schedule] | None:
    """The schedules in a file; None if the file is missing or, with a warning, if it is damaged."""
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        expected = {**_SCHEMA, "key": key, "digest": digest(data)}
        if {name: data[name] for name in expected} != expected:
            raise ValueError("it was changed after it was written")
        return [from_json(schedule) for schedule in data["schedules"]]
    except FileNotFoundError:
        return None
    except _DAMAGES as error:
        reason = str(error) or type(error).__name__
        warn(f"{path} is damaged ({reason}), so it is ignored and replaced.")
        return None
