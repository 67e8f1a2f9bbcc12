"""``checkpoint_sequential``: run a chain of functions in segments, each segment but the last as one region."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn

from ackpt.offloading.saved_tensors import Offload, resolve

from .reentrant import checkpoint

_MISSING = object()


def checkpoint_sequential(
    functions: Iterable[Callable[[Any], Any]],
    segments: int | None = None,
    input: Any = _MISSING,
    *,
    preserve_rng_state: bool = True,
    offload: Offload | Literal["sync", "async"] | None = None,
) -> Any:
    """Run a chain of functions on `input`, checkpointed in segments; the last segment is not recomputed.

    Args:
        functions: an ``nn.Sequential`` or a sequence of callables. Each is called with the output of the previous one.
        segments: the number of segments; their lengths differ by at most one function. ``None`` chooses lengths with
            the smallest peak for functions that save as much as their input; see :func:`segment_lengths`. For functions
            that save much more, such as whole Transformer layers, ``segments=len(functions)`` has a smaller peak.
        input: the argument of the first function.
        preserve_rng_state: as in :func:`checkpoint`.
        offload: as in :func:`checkpoint`, for the inputs of the segments.

    Returns:
        The output of the last function.

    Raises:
        ValueError: if `segments` is not between 1 and the number of functions, or if there is no function.
        TypeError: if `input` is missing, or given in place of `functions`.

    Source: Chen et al. 2016 (arXiv:1604.06174), section 3.

    Example:
        >>> import torch, ackpt
        >>> chain = torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(16)))
        >>> ackpt.checkpoint_sequential(chain, 4, torch.zeros(2)).shape
        torch.Size([2])
    """
    if input is _MISSING:
        raise TypeError("checkpoint_sequential needs an input: checkpoint_sequential(functions, segments, input)")
    resolve(offload)
    if isinstance(functions, torch.Tensor):
        raise TypeError("the functions come first, not the input: checkpoint_sequential(functions, segments, input)")
    functions = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if not functions:
        raise ValueError("checkpoint_sequential got no functions")
    lengths = segment_lengths(len(functions), segments)
    start = 0
    for length in lengths[:-1]:
        part = _Chain(functions[start : start + length])
        input = checkpoint(part, input, preserve_rng_state=preserve_rng_state, offload=offload)
        start += length
    return _Chain(functions[start:])(input)


class _Chain:
    """Calls functions one after the other, each with the result of the previous one."""

    def __init__(self, functions):
        self.functions = functions

    def __call__(self, value):
        for function in self.functions:
            value = function(value)
        return value


def segment_lengths(layers: int, segments: int | None = None) -> list[int]:
    """Return the segment lengths, first to last, of a chain of `layers` equal layers.

    While segment i is recomputed, the inputs of the i - 1 segments before it are live in addition to its own
    activations. So with equal lengths the last segment determines the peak, ``(segments - 1) + length`` activations.
    With ``segments=None`` earlier segments are longer: lengths fall by one per segment. This needs ``p`` live
    activations for up to ``p (p + 1) / 2`` layers, which is about ``sqrt(2 n)`` instead of ``2 sqrt(n)``. Of all
    lengths with that peak it returns those with the least recomputation, that is, with the longest last segment.

    Example:
        >>> segment_lengths(16, 4)
        [4, 4, 4, 4]
        >>> segment_lengths(16)
        [4, 5, 4, 3]
    """
    if segments is not None:
        if isinstance(segments, bool) or not isinstance(segments, int) or not 1 <= segments <= layers:
            raise ValueError(
                f"segments must be a whole number from 1 to {layers} (the number of functions), got {segments!r}"
            )
        short, extra = divmod(layers, segments)
        return [short + 1] * extra + [short] * (segments - extra)
    peak = 1
    while peak * (peak + 1) // 2 < layers:
        peak += 1
    count = 1
    while sum(peak - i for i in range(count)) < layers:
        count += 1
    lengths: list[int] = []
    left = layers
    for i in reversed(range(count)):
        lengths.insert(0, min(peak - i, left - i))
        left -= lengths[0]
    return lengths
