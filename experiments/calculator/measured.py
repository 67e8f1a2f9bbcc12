"""Capture the steps of a model at several sizes, and derive formulas from their windows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ackpt.planner.capture.joint_graph import FORWARD
from ackpt.planner.schedule.schedule import recomputed
from ackpt.planner.schedule.simulator import CATEGORIES
from ackpt.planner.sharding.planner import CAPTURED, deep
from ackpt.planner.sharding.sharding import CATEGORIES_OF_A_RANK, ROOT, Sharding, ShardingError, Window, groups_of

from .choices import FIRST_BLOCKS, HALF, KINDS, NONE, PER_BLOCK, SINGLE, plan_config, shardings, whole_step
from .polynomials import (
    RANKS,
    TERMS,
    UNIT,
    Events,
    NotExact,
    Point,
    Points,
    Run,
    features,
    instants,
    terms,
    terms_like,
    upper,
)
from .presets import Preset
from .windows import CapturedStep

# With these, all tensors of batch size times length elements fill multiples of the 512 bytes of an allocator's block.
TOKENS = Points(Point(4, 1), Point(12, 4), Point(2, 2))
IMAGES = Points(Point(256), Point(512), Point(1024))
SHORT = Points(Point(128, 1), Point(384, 2), Point(64, 3))  # for models of few tokens, whose audio has a fixed size
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)
LENGTHS = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)


def points_of(preset: Preset) -> Points:
    """The sizes at which a step is captured."""
    if not preset.has_tokens:
        return IMAGES
    return TOKENS if preset.longest >= UNIT * TOKENS.second.length else SHORT


class At:
    """The windows of a step at one size, for each variant of the step."""

    def __init__(self, captured: CapturedStep, point: Point, mode: str, ranks: Sequence[int], has_windows: bool):
        self.point = point
        per_block = captured.per_block()
        schedules = {NONE: captured.none(), PER_BLOCK: per_block}
        if has_windows:
            schedules[FIRST_BLOCKS] = captured.per_block(CAPTURED // 2)
        self.rows = {name: captured.windows(schedule) for name, schedule in schedules.items()}
        self.flops, self.owners = captured.profile.flops, captured.owners
        self.recomputed, self.recomputed_by_ranks = recomputed(captured.graph, per_block), []
        self.inputs = [storage.bytes for storage in captured.graph.storages if storage.category == "input"]
        self.sharded: dict[str, dict[int, list[list[Window]]]] = {}  # by mode and ranks: without and with recomputation
        for name, sharding in shardings(mode).items():
            try:
                self.sharded[name] = {
                    n: captured.sharded(Sharding(n, sharding.parameters, sharding.reduction)) for n in ranks
                }
            except ShardingError:
                continue
            self.recomputed_by_ranks = captured.recomputed_by_ranks()

    def shape(self) -> list:
        """Phases, groups and categories of all windows, which models with equal events share."""
        rows = [*self.rows.values(), *(row for by_ranks in self.sharded.values() for row in by_ranks[RANKS[0]])]
        windows = [(w.phase, w.group, [category for _, category in w.events]) for row in rows for w in row]
        return [windows, len(self.flops), self.recomputed]


class Measured:
    """The step of a preset at several sizes, on one kind of GPU; ``layers``: how many of its blocks are captured.

    ``like``: the steps of a model with equal events but other widths. It provides the exponents, so one size is enough.
    """

    def __init__(self, preset: Preset, mode: str, layers: int | None, points: Points, at: list[At], like=None):
        self.preset, self.layers, self.points, self.at, self.like = preset, layers, points, at, like
        self.blocks = len(groups_of(whole_step(preset, mode).model)) - 1
        self.found: list[np.ndarray] = []  # coefficients in the order of the requests

    @classmethod
    def of(cls, preset: Preset, mode: str, kind: str, known: Sequence[Measured] = ()) -> Measured:
        """The step at all sizes; with few blocks if their windows repeat. `known`: steps of similar models."""
        points = points_of(preset)
        layers, first = None, None
        if preset.repeats:
            layers, first = CAPTURED, cls.captured(preset, mode, kind, CAPTURED, points.first, RANKS)
            try:
                for policy in (NONE, PER_BLOCK):
                    deep(first.rows[policy], CAPTURED + 1)
            except ShardingError:
                layers, first = None, None
        first = first or cls.captured(preset, mode, kind, None, points.first, RANKS)
        for like in known:
            if like.like is None and like.layers == layers and first.shape() == like.at[0].shape():
                with contextlib.suppress(NotExact):
                    alone = cls(preset, mode, layers, points, [first], like)
                    alone.formulas()
                    return alone
        others = points[1:] if mode in (HALF, SINGLE) and kind == "8.0" else points[1:2]
        rest = [cls.captured(preset, mode, kind, layers, point, RANKS[:1]) for point in others]
        return cls(preset, mode, layers, points, [first, *rest])

    def _terms(self, values: list) -> np.ndarray:
        """Coefficients of the values of each size, requested in the order of `like`."""
        if self.like is None:
            found = terms(values, self.points)
        else:
            found = terms_like(values[0], self.like.found[len(self.found)], self.points.first)
        self.found.append(found)
        return found

    @staticmethod
    def captured(preset: Preset, mode: str, kind: str, layers, point: Point, ranks: Sequence[int] = ()) -> At:
        length = point.length * UNIT if preset.has_tokens else None
        config = plan_config(preset, mode, KINDS[kind], point.batch, length, layers)
        return At(CapturedStep.of(config), point, mode, ranks, layers is not None)

    def inputs(self) -> list[int]:
        return self._inputs

    def formulas(self) -> tuple[dict, dict[str, dict]]:
        """The formulas of the step, and of its sharded versions by mode."""
        self.found.clear()
        self._inputs = _trimmed(self._terms([at.inputs for at in self.at]).sum(axis=0))
        by_node = self._terms([at.flops for at in self.at])
        common = {"blocks": self.blocks, **self._flops(by_node, self.at[0].recomputed)}
        runs = {name: self._events([at.rows[name] for at in self.at]) for name in self.at[0].rows}
        single = {**common, **self._policies(runs, CATEGORIES)}
        sharded = {}
        for name in self.at[0].sharded:
            runs = {}
            for number, policy in enumerate((NONE, PER_BLOCK)):
                same = [at.sharded[name][RANKS[0]][number] for at in self.at]
                runs[policy] = self._events(same, [self.at[0].sharded[name][n][number] for n in RANKS])
            flops = self._flops(by_node, self.at[0].recomputed_by_ranks)
            sharded[name] = {"blocks": self.blocks, **flops, **self._policies(runs, CATEGORIES_OF_A_RANK)}
        return single, sharded

    def _flops(self, by_node: np.ndarray, recomputed: Sequence[int]) -> dict:
        """FLOPs of the step, of per-block checkpointing, and per number of checkpointed blocks: for none and each."""
        first = self.at[0]
        count = 1 + (self.layers or self.blocks)
        flops, again = (np.zeros((count, len(TERMS)), dtype=np.int64) for _ in range(2))
        for node, owner in enumerate(first.owners):
            flops[owner] += by_node[node]
        for node in recomputed:
            again[first.owners[node]] += by_node[node]
        found: dict[str, Any] = {"flops": _trimmed(self._total(flops)), "recomputed": _trimmed(self._total(again))}
        if self.layers is not None:
            found["recomputed_by_m"] = [_trimmed(again[1] - again[2]), _trimmed(again[2])]
        return found

    def _total(self, by_group: np.ndarray) -> np.ndarray:
        if self.layers is None:
            return by_group.sum(axis=0)
        return by_group[ROOT] + by_group[1] + (self.blocks - 2) * by_group[2] + by_group[CAPTURED]

    def _events(self, rows: list[list[Window]], by_ranks: Sequence[list[Window]] = ()) -> list[tuple[str, int, Events]]:
        """Phase, group and events of each window; `rows`: one per point, `by_ranks`: one per number of ranks."""
        events = []
        for windows in zip(*rows, strict=True):
            first = windows[0]
            categories = [category for _, category in first.events]
            for other in windows:
                if (other.phase, other.group, [c for _, c in other.events]) != (first.phase, first.group, categories):
                    raise NotExact(f"{self.preset.name}: the events of {first.phase} of group {first.group} differ")
            sizes = self._terms([[size for size, _ in window.events] for window in windows])
            events.append((first.phase, first.group, Events(sizes, categories)))
        return self._with_ranks(events, by_ranks) if by_ranks else events

    def _with_ranks(self, events, by_ranks):
        """`events` with a column for each number of ranks, for the events that do not depend on sizes."""
        wide = []
        for (phase, group, one), windows in zip(events, zip(*by_ranks, strict=True)):
            columns = np.zeros((len(one.category), len(RANKS)), dtype=np.int64)
            sizes = one.sizes.copy()
            for event, of_ranks in enumerate(zip(*(window.events for window in windows), strict=True)):
                values = [size for size, _ in of_ranks]
                if {category for _, category in of_ranks} != {one.category[event]}:
                    raise NotExact(f"{self.preset.name}: the events of a rank depend on the number of ranks")
                if len(set(values)) > 1:
                    if sizes[event, 1:].any():
                        raise NotExact(f"{self.preset.name}: an event depends on sizes and on the number of ranks")
                    columns[event], sizes[event] = values, 0
            wide.append((phase, group, Events(np.concatenate([sizes, columns], axis=1), one.category)))
        return wide

    def _policies(self, runs: dict, categories: Sequence[str]) -> dict:
        is_sharded = runs[NONE][0][2].sizes.shape[1] > len(TERMS)
        m_values = sorted({2, self.blocks // 4, self.blocks // 2, 3 * self.blocks // 4, self.blocks - 2} - {0, 1})
        policies, end = {}, None
        for policy in runs:
            if policy == FIRST_BLOCKS and self.blocks < 2 * CAPTURED:
                continue
            row = [Run(events) for _, _, events in runs[policy]] if self.layers is None else self._deep(runs, policy)
            live, last = instants(row, len(categories), runs[NONE][0][2].sizes.shape[1])
            chosen = upper(live, self._places(is_sharded), m_values if policy == FIRST_BLOCKS else [0])
            policies[policy] = [_by_category(instant, categories) for instant in chosen]
            if end is not None and not np.array_equal(end, last):
                raise NotExact(f"{self.preset.name}: policies end with different bytes")
            end = last
        assert end is not None
        return {"peaks": policies, "end": _by_category(end, categories)}

    def _deep(self, runs: dict, policy: str) -> list[Run]:
        """The row of windows of all blocks: repeated windows represent the blocks between the first and the last.

        With m checkpointed blocks, the windows of blocks 1, m, m + 1 and the last are those of blocks 1 to 4 of a step
        with 2 checkpointed blocks; those between are as in a step with all blocks checkpointed, or none.
        """
        row = []
        for place, (phase, group, events) in enumerate(runs[policy]):
            if policy != FIRST_BLOCKS:
                row += [Run(events, self.blocks - 2)] if group == 2 else [Run(events)] if group != 3 else []
                continue
            between = {2: Run(runs[PER_BLOCK][place][2], -2, 1), 3: Run(runs[NONE][place][2], self.blocks - 2, -1)}
            around = [between[group]] if group in between else []
            before = group == 2 if phase == FORWARD else group == 3
            row += [*around, Run(events)] if before else [Run(events), *around]
        return row

    def _places(self, is_sharded: bool) -> np.ndarray:
        longest = self.preset.longest
        lengths = [length / UNIT for length in (*LENGTHS, longest) if 0 < length <= longest] or [1]
        points = [(batch, length) for batch in BATCHES for length in lengths]
        return features(points, RANKS if is_sharded else ())


def _trimmed(coefficients) -> list[int]:
    """Coefficients without the zeros at their end."""
    values = [int(value) for value in coefficients]
    while values and not values[-1]:
        values.pop()
    return values


def _by_category(instant: np.ndarray, categories: Sequence[str]) -> dict[str, list]:
    """Formulas (category, power of m, term) by category: coefficients, then those of m and of ranks if there are any.

    A formula is ``[sizes]``, ``[sizes, sizes per m]`` or ``[sizes, sizes per m, numbers by ranks, those per m]``.
    """
    found = {}
    for category, (fixed, per_m) in zip(categories, instant):
        parts = [_trimmed(part) for part in (fixed[: len(TERMS)], per_m[: len(TERMS)])]
        parts += [_trimmed(part) for part in (fixed[len(TERMS) :], per_m[len(TERMS) :])]
        while parts and not parts[-1]:
            parts.pop()
        if parts:
            found[category] = parts
    return found
