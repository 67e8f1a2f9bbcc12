"""``offload_pays``: whether the copies of a block overlap with compute completely, so that offload adds no time.

A copy takes ``bytes per token x tokens / bandwidth`` seconds. Compute takes ``fixed + linear x tokens + quadratic x
tokens^2`` seconds (launches, matrix products, attention), fitted to measurements. With a quadratic part, copies overlap
completely from some length on. Without it, the ratio of two constants decides.
"""

import itertools
import math
from dataclasses import dataclass
from statistics import median

import torch

from .store import host_memory, pinned_memory
from .transport import transport_for

__all__ = ["OffloadPays", "offload_pays"]

LARGEST_TRIAL = 1 << 26  # bytes; larger copies have the same bandwidth
# The exponents of each fit. Their order breaks ties: one length gives a proportional fit, two lengths a linear and a
# fixed or quadratic part.
PARTS = ((1,), (0,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2))


@dataclass(frozen=True)
class OffloadPays:
    """The time of one block's copies and compute at ``tokens`` tokens; ``print`` shows it as a sentence.

    ``copy_seconds``: one copy, in one direction. ``forward_seconds``, ``backward_seconds``: compute without
    recomputation. ``overlapped_share``: the fraction of the copies' time that overlaps with compute; ``overlapped``:
    whether it is 1. ``overlapped_from``: the number of tokens from which on all copies overlap completely; 1 for any
    number, None for no number. ``bandwidth``: bytes per second, given or measured.

    Example:
        >>> import ackpt
        >>> pays = ackpt.offload_pays(4096, {1024: 0.002}, bandwidth=16e9)
        >>> pays.copy_seconds, pays.overlapped
        (0.000262144, True)
        >>> str(pays).split(":")[0]
        'At 1024 tokens, copies overlap completely with compute'
    """

    tokens: int
    overlapped: bool
    overlapped_share: float
    copy_seconds: float
    forward_seconds: float
    backward_seconds: float
    overlapped_from: int | None
    bandwidth: float

    def __str__(self) -> str:
        share = f"{math.floor(100 * self.overlapped_share)} % of the copies' time overlaps"
        at_tokens = "copies overlap completely" if self.overlapped else share
        if self.overlapped_from is None:
            at_others = "Copies overlap completely at no length"
        elif self.overlapped_from > 1:
            at_others = f"Copies overlap completely from {self.overlapped_from} tokens on"
        else:
            at_others = "Copies overlap completely at any length"
        return (
            f"At {self.tokens} tokens, {at_tokens} with compute: a copy takes {1e3 * self.copy_seconds:.3g} ms "
            f"at {self.bandwidth / 1e9:.3g} GB/s, and a block takes {1e3 * self.forward_seconds:.3g} ms forward and "
            f"{1e3 * self.backward_seconds:.3g} ms backward. {at_others}."
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
    """Return whether the copies of offloaded blocks overlap completely with compute, and from how many tokens on.

    Args:
        bytes_per_token: bytes that one block offloads per token; for a checkpointed Transformer block, its width times
            the bytes of an element.
        seconds: ``{tokens: seconds}``, one block's forward, measured at one or several lengths. One length gives a
            proportional fit, two lengths add a fixed or a quadratic part, three lengths allow all parts (least squares
            of the relative errors; no part is negative).
        backward_seconds: the same for the block's backward without recomputation; None: twice the forward.
        bandwidth: bytes per second between device and store; None: measured, in the slower direction.
        tokens: the length to answer for; None: the longest in `seconds`.
        recompute: True for inputs of checkpointed regions, False for tensors offloaded without recomputation.
        device: the device whose bandwidth is measured, ``"cpu"`` or ``"cuda"``.

    Returns:
        :class:`~ackpt.offloading.pays.OffloadPays`.

    Raises:
        ValueError: for numbers that are not positive, lengths that are not whole numbers, or no length.
        OffloadError: if the bandwidth must be measured on a device without copy streams.

    Model: a copy out overlaps with one forward, because the next copy waits for it. A copy in overlaps with all of a
    backward, or with half of it (``recompute=True``), because it starts when half of the recomputed activations have
    been freed. ``overlapped_share`` is the mean of both directions. If backward takes twice the forward, the condition
    is ``copy <= forward``. The model ignores latencies, the first and the last block, and any slowdown of one direction
    by the other.

    Source: derived from the points at which ``ackpt/offloading/engine.py`` starts its copies; overlapping copies with a
    layer's compute is from Rhu et al. 2016, vDNN (arXiv:1602.08124).

    Example:
        >>> import ackpt
        >>> pays = ackpt.offload_pays(4096, {1024: 0.001, 4096: 0.007}, bandwidth=2e9)
        >>> pays.overlapped, pays.overlapped_from
        (False, 5518)
    """
    if isinstance(bytes_per_token, torch.nn.Module):
        raise TypeError(
            "offload_pays() got a model: it takes what one block offloads per token, in bytes, and the seconds of "
            "the block's forward, as in offload_pays(4096 * 2, {2048: 0.004}); ackpt.audit(model, batch) takes a model"
        )
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
    finite = [start for start in starts if start is not None]
    return OffloadPays(
        tokens=tokens,
        overlapped=min(covered) == 1,
        overlapped_share=sum(covered) / 2,
        copy_seconds=copy * tokens,
        forward_seconds=_at(forward, tokens),
        backward_seconds=_at(backward, tokens),
        overlapped_from=max(finite) if len(finite) == len(starts) else None,
        bandwidth=bandwidth,
    )


def _at(parts, tokens) -> float:
    return sum(part * tokens**power for power, part in enumerate(parts))


def _covers_from(window, copy: float) -> int | None:
    """The smallest length from which on ``window(tokens) >= copy * tokens`` always holds; None if there is none."""
    fixed, linear, quadratic = window
    slope = linear - copy
    if quadratic == 0:
        return 1 if slope >= 0 else None
    inside = slope**2 - 4 * quadratic * fixed
    if slope >= 0 or inside < 0:
        return 1
    root = (-slope + math.sqrt(inside)) / (2 * quadratic)
    near = round(root)  # rounding errors may move a root that is a whole number
    return max(1, near if math.isclose(root, near, rel_tol=1e-9) else math.ceil(root))


def _fit(measured: dict[int, float]) -> tuple[float, float, float]:
    """The fixed, linear and quadratic part of the best fit with at most as many parts as lengths; none is negative."""
    best, least = (0.0, 0.0, 0.0), math.inf
    lengths = torch.tensor(list(measured), dtype=torch.float64)
    times = torch.tensor(list(measured.values()), dtype=torch.float64)
    for powers in itertools.takewhile(lambda powers: len(powers) <= len(measured), PARTS):
        columns = torch.stack([lengths**power / times for power in powers], 1)  # times 1: relative errors
        scale = columns.norm(dim=0)
        ones = torch.ones(len(measured), 1, dtype=torch.float64)
        solution = torch.linalg.lstsq(columns / scale, ones).solution[:, 0]
        error = float((columns / scale @ solution - 1).square().sum())
        if float(solution.min()) >= 0 and error < least - 1e-12:
            least, parts = error, dict(zip(powers, (solution / scale).tolist()))
            best = parts.get(0, 0.0), parts.get(1, 0.0), parts.get(2, 0.0)
    return best


def _measured_bandwidth(device, size: int) -> float:
    """Bytes per second of a copy through the device's transport, in the slower direction."""
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
    copies = {
        "out": lambda: transport.copy_out(memory, 0, buffer, size, ()),
        "in": lambda: transport.copy_in(buffer, memory, size, ()),
    }
    return size / max(median([_timed(copy) for _ in range(6)][1:]) for copy in copies.values())


def _timed(copy) -> float:
    event = copy()
    event.error()  # waits
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
