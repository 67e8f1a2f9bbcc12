"""Formulas for checkpointing a chain of equal layers (Chen et al. 2016, section 4): its memory and recomputation.

The paper is arXiv:1604.06174. With sqrt(n) segments of equal length, only the outputs between segments are saved, and
the inside of a segment is recomputed when backward reaches it: O(sqrt n) memory for less than one extra forward. The
same recursively inside each segment gives g(n) = k + g(n / (k + 1)): with k = 1, O(log n) memory for O(n log n) extra
forwards.

The functions count outputs of layers, one unit each. A layer's backward reads its input and its output. The chain's
input belongs to the caller, and gradients are not counted. Neither split is optimal: segments that get shorter towards
the end need sqrt(2 n) (`ackpt.checkpointing.sequential.segment_lengths`), and `revolve` recomputes least for every
number of saved states.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple


class Counts(NamedTuple):
    """``boundaries``: outputs saved between segments; ``extra_forwards``: layers recomputed; ``peak``: live outputs.

    Example:
        >>> sqrt_counts(100).peak
        19
    """

    segments: int
    boundaries: int
    extra_forwards: int
    peak: int


def sqrt_counts(n: int) -> Counts:
    """The counts for `n` layers in floor(sqrt n) segments whose lengths differ by at most one, the longer ones first.

    The last segment is not recomputed, nor is the last layer of the others, whose output is a boundary. Code that
    recomputes whole segments, such as ``torch.utils.checkpoint``, runs ``extra_forwards + boundaries`` layers.

    Example:
        >>> sqrt_counts(16)
        Counts(segments=4, boundaries=3, extra_forwards=9, peak=7)
    """
    _check(n)
    segments = isqrt(n)
    length, boundaries = n // segments, segments - 1
    return Counts(segments, boundaries, n - length - boundaries, boundaries + length)


def recursive_peak(n: int) -> int:
    """The peak number of live outputs if one output splits `n` layers into halves, and so on down to single layers.

    Example:
        >>> [recursive_peak(n) for n in (1, 3, 7, 1023)]
        [1, 2, 3, 10]
    """
    _check(n)
    return n.bit_length()


def recursive_extra_forwards(n: int) -> int:
    """Layers recomputed by the recursion of `recursive_peak`: every half runs once for each half that contains it.

    Example:
        >>> [recursive_extra_forwards(n) for n in (1, 3, 7, 1023)]
        [0, 1, 5, 4097]
    """
    _check(n)
    return _evaluations(n) - n


def _evaluations(n: int) -> int:
    if n <= 1:
        return n
    before = (n - 1) // 2
    return before + 1 + _evaluations(before) + _evaluations(n - before - 1)


def _check(n) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"a chain has a whole number of layers, at least 1; got {n!r}")
