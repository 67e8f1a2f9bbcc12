"""Does offload pay? Whether the copies of a block fit into the time that computing leaves for them.

Per block and step the same bytes go out once and come back once:

- the *copy out* begins when the block's forward does and may last as long as that forward: what is behind it waits;
- the *copy in* of a region's input begins half-way through the backward of the region behind it, when half of what
  that one recomputed has been freed, and must end with it: half of a block's backward (without the recompute);
- tensors that are offloaded without recompute come back all through a block's backward.

A copy takes ``bytes per token x tokens / bandwidth`` seconds, computing ``fixed + linear x tokens + quadratic x
tokens^2`` (launches, matrix products, attention), fitted to what was measured. So long sequences hide their copies as
soon as there is a quadratic part; without one the ratio of two constants decides.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from statistics import median

import torch

from .store import host_memory, pinned_memory
from .transport import transport_for

__all__ = ["OffloadPays", "offload_pays"]

LARGEST_TRIAL = 1 << 26  # bytes; a bandwidth does not change beyond
# The order breaks ties: with one length proportional, with two a fixed or a quadratic part beside the linear one.
PARTS = ((1,), (0,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2))


@dataclass(frozen=True)
class OffloadPays:
    """Copies and computing of one block at ``tokens`` tokens; ``print`` says it in words.

    ``copy_seconds``: one copy, out or in. ``forward_seconds``, ``backward_seconds``: computing, recompute not counted.
    ``hidden_share``: of the copies' time, what computing hides (1.0: all); ``hidden``: whether that is all of it.
    ``hidden_from``: the length in tokens from which on all copies are hidden; 1: at any, None: from none on.
    ``bandwidth``: bytes per second, as given or measured.

    Example:
        >>> import ackpt
        >>> found = ackpt.offload_pays(4096, {1024: 0.002}, bandwidth=16e9)
        >>> found.copy_seconds, found.hidden
        (0.000262144, True)
        >>> str(found).split(":")[0]
        'At 1024 tokens copies are hidden'
    """

    tokens: int
    hidden: bool
    hidden_share: float
    copy_seconds: float
    forward_seconds: float
    backward_seconds: float
    hidden_from: int | None
    bandwidth: float

    def __str__(self) -> str:
        here = "are hidden" if self.hidden else f"are hidden to {math.floor(100 * self.hidden_share)} %"
        if self.hidden_from is None:
            where = "there is no length from which on all are"
        else:
            where = "all are at any length" if self.hidden_from == 1 else f"all are from {self.hidden_from} tokens on"
        return (
            f"At {self.tokens} tokens copies {here}: one takes {1e3 * self.copy_seconds:.3g} ms at "
            f"{self.bandwidth / 1e9:.3g} GB/s, a block {1e3 * self.forward_seconds:.3g} ms forward and "
            f"{1e3 * self.backward_seconds:.3g} ms backward; {where}."
        )


def offload_pays(
    bytes_per_token: float,
    seconds: dict[int, float],
    *,
    backward_seconds: dict[int, float] | None = None,
    bandwidth: float | None = None,
    tokens: int | None = None,
    recompute: bool = True,
    device: torch.device | str = "cpu",
) -> OffloadPays:
    """Whether the copies of offloaded blocks can be hidden behind computing, and from which sequence length on.

    Args:
        bytes_per_token: bytes that one block offloads for each token; for a checkpointed Transformer block, its width
            times the bytes of a number.
        seconds: ``{tokens: seconds}``, one block's forward as measured at one or several lengths. One length gives a
            proportional law, two a fixed or a quadratic part as well, three all parts (least squares of the relative
            errors, no part negative).
        backward_seconds: the same for its backward without recompute; None: twice the forward.
        bandwidth: bytes per second between device and store; None: measured here, the slower way of the two.
        tokens: the length that is asked about; None: the longest of `seconds`.
        recompute: True for inputs of checkpointed regions, False for tensors offloaded without recompute.
        device: where a bandwidth is measured, ``"cpu"`` or ``"cuda"``.

    Returns:
        :class:`~ackpt.offloading.pays.OffloadPays`.

    Raises:
        ValueError: for numbers that are not positive, lengths that are no whole numbers, no length at all.
        OffloadError: if a bandwidth is to be measured on a device without copy streams.

    Model: a copy out has one forward to hide behind, a copy in half of a backward (``recompute=True``) or a whole one.
    ``hidden_share`` is the mean of both ways. Latencies, the first and the last block, and one direction slowing
    the other down are left out. Where backward is twice the forward, the condition is ``copy <= forward``.
    Source: derived from when ``ackpt/offloading/engine.py`` starts its copies; copies behind a layer's computing are
    those of Rhu et al. 2016, vDNN (arXiv:1602.08124).

    Example:
        >>> import ackpt
        >>> pays = ackpt.offload_pays(4096, {1024: 0.001, 4096: 0.007}, bandwidth=2e9)
        >>> pays.hidden, pays.hidden_from
        (False, 5518)
    """
    size = _positive("bytes_per_token", bytes_per_token)
    forward = _fit(_lengths("seconds", seconds))
    longest = max(seconds)
    backward = tuple(2 * part for part in forward)
    if backward_seconds is not None:
        backward = _fit(_lengths("backward_seconds", backward_seconds))
    tokens = _whole("tokens", longest if tokens is None else tokens)
    if bandwidth is None:
        bandwidth = _measured_bandwidth(device, math.ceil(size * tokens))
    bandwidth = _positive("bandwidth", bandwidth)

    copy = size / bandwidth
    windows = forward, tuple(part / 2 for part in backward) if recompute else backward
    covered = [min(1.0, _at(window, tokens) / (copy * tokens)) for window in windows]
    starts = [_covers_from(window, copy) for window in windows]
    known = [start for start in starts if start is not None]
    return OffloadPays(
        tokens=tokens,
        hidden=min(covered) == 1,
        hidden_share=sum(covered) / 2,
        copy_seconds=copy * tokens,
        forward_seconds=_at(forward, tokens),
        backward_seconds=_at(backward, tokens),
        hidden_from=max(known) if len(known) == len(starts) else None,
        bandwidth=bandwidth,
    )


def _at(parts, tokens) -> float:
    return sum(part * tokens**power for power, part in enumerate(parts))


def _covers_from(window, copy: float) -> int | None:
    """The first length from which on ``window(tokens) >= copy * tokens`` always holds; None if there is none."""
    fixed, linear, quadratic = window
    slope = linear - copy
    if quadratic == 0:
        return 1 if slope >= 0 else None
    inside = slope**2 - 4 * quadratic * fixed
    if slope >= 0 or inside < 0:
        return 1
    root = (-slope + math.sqrt(inside)) / (2 * quadratic)
    near = round(root)  # a root that is a whole number may be missed by a rounding
    return max(1, near if math.isclose(root, near, rel_tol=1e-9) else math.ceil(root))


def _fit(measured: dict[int, float]) -> tuple[float, float, float]:
    """Fixed, linear and quadratic part, none negative: the best of the fits with no more parts than lengths."""
    best, least = (0.0, 0.0, 0.0), math.inf
    lengths = torch.tensor(list(measured), dtype=torch.float64)
    times = torch.tensor(list(measured.values()), dtype=torch.float64)
    for powers in itertools.takewhile(lambda powers: len(powers) <= len(measured), PARTS):
        columns = torch.stack([lengths**power / times for power in powers], 1)  # times 1: relative errors
        scale = columns.norm(dim=0)
        ones = torch.ones(len(measured), 1, dtype=torch.float64)
        found = torch.linalg.lstsq(columns / scale, ones).solution[:, 0]
        off = float((columns / scale @ found - 1).square().sum())
        if float(found.min()) >= 0 and off < least - 1e-12:
            least, parts = off, dict(zip(powers, (found / scale).tolist()))
            best = parts.get(0, 0.0), parts.get(1, 0.0), parts.get(2, 0.0)
    return best


def _measured_bandwidth(device, size: int) -> float:
    """Bytes per second of a copy through the device's transport, of the slower way."""
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is unknown: choose 'cpu' or 'cuda', or give the bandwidth") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' but torch sees no CUDA GPU: give the bandwidth in bytes per second")
    size = min(size, LARGEST_TRIAL)
    transport = transport_for(device)
    buffer = (pinned_memory if device.type == "cuda" else host_memory)(size)
    memory = transport.allocate(size)
    ways = {
        "out": lambda: transport.copy_out(memory, 0, buffer, size, ()),
        "in": lambda: transport.copy_in(buffer, memory, size, ()),
    }
    return size / max(median([_timed(copy) for _ in range(6)][1:]) for copy in ways.values())


def _timed(copy) -> float:
    event = copy()
    event.wait()
    return event.seconds()


def _lengths(name: str, measured) -> dict[int, float]:
    if not isinstance(measured, dict) or not measured:
        raise ValueError(f"{name} must be {{tokens: seconds}} with at least one length; got {measured!r}")
    return {_whole(f"a length in {name}", n): _positive(f"{name}[{n}]", value) for n, value in measured.items()}


def _whole(name: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of tokens, 1 or more; got {value!r}")
    return value


def _positive(name: str, value) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a positive number; got {value!r}")
    return float(value)
