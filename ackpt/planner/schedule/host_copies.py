"""When the copies of a schedule to and from host memory run, and how long computation waits for them."""

from __future__ import annotations

from collections.abc import Iterator

from .schedule import COMPUTE, KINDS, OFFLOAD, PACK, PREFETCH, UNPACK, WAIT, Schedule

_LAST_ON_DEVICE = KINDS.index(UNPACK)  # the kinds of steps after this one copy


def copies(schedule: Schedule) -> bool:
    """Whether the schedule offloads anything."""
    return any((steps.kinds > _LAST_ON_DEVICE).any() for steps in (schedule.forward_arrays, schedule.backward_arrays))


def waiting(profile, schedule: Schedule) -> float:
    """Seconds in which computation waits for copies; 0 where nothing is copied or the profile has no times."""
    times = clock(profile, schedule) if profile.swap_seconds is not None and copies(schedule) else None
    return 0.0 if times is None else times[1]


def clock(profile, schedule: Schedule) -> tuple[float, float] | None:
    """(seconds of the step, seconds of these in which computation waits for copies); None without times in the profile.

    Three streams: operations, packing included, run one after another on the first, copies to the host on the second,
    and copies back on the third, in the order in which they were started. A copy starts when computation has reached
    its step and its stream is idle.
    """
    if profile.seconds is None or (profile.swap_seconds is None and copies(schedule)):
        return None
    now = exposed = 0.0
    for kind, _, start, end in timed(profile, schedule):
        if kind == WAIT:
            exposed += end - start
        if kind in (COMPUTE, PACK, UNPACK, WAIT):
            now = end
    return now, exposed


def timed(profile, schedule: Schedule) -> Iterator[tuple[str, int, float, float]]:
    """Every step but the frees, as (kind, id, start, end) in seconds; a copy starts in its stream, perhaps later."""
    swaps = profile.swap_seconds or ()
    now = 0.0
    idle = dict.fromkeys((OFFLOAD, PREFETCH), 0.0)
    done: dict[int, float] = {}
    for kind, number in (*schedule.forward, *schedule.backward):
        if kind in idle:
            start = max(now, idle[kind])
            done[number] = idle[kind] = start + swaps[number]
            yield kind, number, start, done[number]
        elif kind == WAIT:
            start, now = now, max(now, done[number])
            yield kind, number, start, now
        elif kind in (COMPUTE, PACK, UNPACK):
            seconds = profile.seconds if kind == COMPUTE else profile.pack_seconds
            start, now = now, now + seconds[number]
            yield kind, number, start, now
