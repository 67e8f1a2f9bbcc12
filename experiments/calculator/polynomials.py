"""Exact formulas for the memory of a step in batch size, length, ranks and number of checkpointed blocks.

Every event of a step allocates ``c b^i t^j`` bytes, with batch size b and length t in units of `UNIT` tokens; events of
collectives depend on the number of ranks instead. The exponents follow from plans of two sizes and must reproduce a
third to the byte. Live bytes are sums of such terms, and a peak is the largest of several sums. A row of
windows keeps only the sums that are the largest for some sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

UNIT = 128  # tokens
TERMS = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2))  # exponents of b and t
BLOCK = 512  # bytes to which CUDA's allocator rounds
# Labels of language models have one more column: its bytes and their term, one block for small batches.
COLUMNS = ((0, 0), (BLOCK, 0), (-BLOCK, 0), (8, 1), (-8, 1))
RANKS = (2, 4, 8, 16, 32, 64)


class NotExact(ValueError):
    """Sizes that are not monomials in batch size and length, so that no formula is stored."""


class Point(NamedTuple):
    """A batch size, and a length in units; 1 for images."""

    batch: int
    length: int = 1


class Points(NamedTuple):
    """Two sizes whose different ratios determine the exponents, and one that checks them."""

    first: Point
    second: Point
    check: Point


def terms(values: Sequence[Sequence[int]], points: Points) -> np.ndarray:
    """Coefficients (event, term) of the monomials that have `values` (point, event) at `points`.

    Raises:
        NotExact: if a value is no such monomial, or if the check differs.

    Example:
        >>> points = Points(Point(4, 1), Point(12, 4), Point(2, 2))
        >>> terms([[20, 4], [240, 16], [20, 8]], points).tolist()
        [[0, 0, 0, 5, 0, 0], [0, 0, 4, 0, 0, 0]]
    """
    coefficients = np.zeros((len(values[0]), len(TERMS)), dtype=np.int64)
    for event, sizes in enumerate(zip(*values, strict=True)):
        for more, term in COLUMNS:
            i, j = TERMS[term]
            rest = [size - more * point.batch**i * point.length**j for size, point in zip(sizes, points)]
            if found := _monomial(rest, points):
                coefficients[event, TERMS.index(found[1:])] += found[0]
                coefficients[event, term] += more
                break
        else:
            raise NotExact(f"event {event} has {sizes} bytes at {', '.join(map(str, points))}")
    return coefficients


def terms_like(values: Sequence[int], reference: np.ndarray, at: Point) -> np.ndarray:
    """Coefficients (event, term) of `values` at one size, with the exponents of `reference`, which has the same events.

    Raises:
        NotExact: if the events differ, or if no such terms have these values.
    """
    if len(values) != len(reference):
        raise NotExact(f"{len(values)} events are not {len(reference)}")
    coefficients = np.zeros_like(reference)
    for event, (value, row) in enumerate(zip(values, reference.tolist())):
        used = [term for term, coefficient in enumerate(row) if coefficient]
        if len(used) == 2:
            i, j = TERMS[used[0]]
            coefficients[event, used[0]] = row[used[0]]
            value -= row[used[0]] * at.batch**i * at.length**j
        if not used:
            used = [0]
        i, j = TERMS[used[-1]]
        coefficients[event, used[-1]] += value // (at.batch**i * at.length**j)
        if value % (at.batch**i * at.length**j) or (not value) != (not any(row)):
            raise NotExact(f"event {event} has {value} bytes at {at}, which no term with these exponents has")
    return coefficients


def _monomial(sizes: Sequence[int], points: Points) -> tuple[int, int, int] | None:
    """Coefficient and exponents of the monomial with these values; None if no monomial has them."""
    batches, lengths = points.second.batch // points.first.batch, points.second.length // points.first.length
    ratio = sizes[1] / sizes[0] if sizes[0] else 1
    for i, j in TERMS:
        if ratio == batches**i * lengths**j:
            coefficient, part = divmod(sizes[0], points.first.batch**i * points.first.length**j)
            values = [coefficient * point.batch**i * point.length**j for point, _ in zip(points, sizes)]
            return (coefficient, i, j) if not part and values == list(sizes) else None
    return None


class Events(NamedTuple):
    """Events of one window: ``sizes`` (event, term), and ``category``, one number each."""

    sizes: np.ndarray
    category: Sequence[int]

    def inside(self, categories: int) -> np.ndarray:
        """Live bytes (event, category, term) since the window's begin, after every event."""
        spread = np.zeros((len(self.category), categories, self.sizes.shape[1]), dtype=np.int64)
        spread[np.arange(len(self.category)), list(self.category)] = self.sizes
        return spread.cumsum(axis=0)


class Run(NamedTuple):
    """A window that repeats ``fixed + per_m * m`` times, with m checkpointed blocks."""

    events: Events
    fixed: int = 1
    per_m: int = 0


def instants(runs: Sequence[Run], categories: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Live bytes (instant, category, power of m, term) of a row of windows, and those at its end.

    For a window that repeats, the first and the last are enough: live bytes are linear between them.
    """
    live = np.zeros((categories, 2, width), dtype=np.int64)
    rows = [live[None].copy()]
    for run in runs:
        inside = run.events.inside(categories)
        if not len(inside):
            continue
        net = inside[-1]
        for fixed, per_m in dict.fromkeys([(0, 0), (run.fixed - 1, run.per_m)]):
            at = np.repeat(live[None], len(inside), axis=0)
            at[:, :, 0] += inside + fixed * net
            at[:, :, 1] += per_m * net
            rows.append(at)
        live = live.copy()
        live[:, 0] += run.fixed * net
        live[:, 1] += run.per_m * net
    return np.concatenate(rows), live


def features(points: Sequence[tuple[int, float]], ranks: Sequence[int] = ()) -> np.ndarray:
    """The values of all terms (place, term); with `ranks`, the values for every number of ranks follow."""
    of_sizes = np.array([[b**i * t**j for i, j in TERMS] for b, t in points], dtype=float)
    if not ranks:
        return of_sizes
    columns = np.eye(len(RANKS))[[RANKS.index(n) for n in ranks]]
    return np.array([[*row, *column] for row in of_sizes for column in columns])


def upper(live: np.ndarray, places: np.ndarray, blocks: Sequence[int]) -> np.ndarray:
    """The rows of `live` that are the largest (the first of equals) for some of `places` (place, term) and `blocks`."""
    total = live.sum(axis=1)  # instant, power of m, term
    chosen: set[int] = set()
    for m in blocks:
        values = (total[:, 0] + m * total[:, 1]) @ places.T
        chosen |= set(values.argmax(axis=0).tolist())
    return live[sorted(chosen)]
