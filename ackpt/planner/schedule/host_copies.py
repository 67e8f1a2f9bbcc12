"""Account for the copies of a schedule in host memory, and for the time that computation waits for them.

Bytes follow from the steps alone, never from how long a copy takes: a prefetch allocates the device's memory and a free
releases it, which is allowed only after a wait. A copy in host memory lives from its offload to the last step that
names its storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ackpt.planner.capture.joint_graph import Analysis

from .schedule import COMPUTE, KINDS, OFFLOAD, PACK, PREFETCH, UNPACK, WAIT, Schedule, ScheduleError

_COPIES = (OFFLOAD, PREFETCH, WAIT)
_LAST_ON_DEVICE = KINDS.index(UNPACK)  # the kinds of steps after this one are the `_COPIES`


def copies(schedule: Schedule) -> bool:
    """Whether the schedule offloads anything."""
    return any((steps.kinds > _LAST_ON_DEVICE).any() for steps in (schedule.forward_arrays, schedule.backward_arrays))


class Host:
    """The copies in host memory at one moment of a schedule; every method raises `ScheduleError` for impossible steps.

    ``in_host``: storages with a copy, complete or not; ``moving``: ``{storage: the step that started its copy}``.
    """

    def __init__(self, analysis: Analysis, schedule: Schedule):
        steps = (*schedule.forward, *schedule.backward)
        self.analysis = analysis
        self.in_host: set[int] = set()
        self.moving: dict[int, str] = {}
        self._left = Counter(step.id for step in steps if step.kind in _COPIES)
        self._taken: set[int] = set()

    def offload(self, storage: int) -> None:
        if storage in self.analysis.resident or storage in self.analysis.callers:
            raise ScheduleError(f"storage {storage} belongs to the caller: it cannot be offloaded")
        if storage not in self.analysis.base_of:
            raise ScheduleError(f"storage {storage} holds no tensor: it cannot be offloaded")
        if storage in self._taken:
            raise ScheduleError(f"storage {storage} is offloaded twice: one copy in host memory is enough")
        self._taken.add(storage)
        self.in_host.add(storage)
        self.moving[storage] = OFFLOAD

    def prefetch(self, storage: int) -> None:
        if storage not in self.in_host:
            raise ScheduleError(f"storage {storage} is prefetched, but it was never offloaded")
        self.refuse_moving(storage, "prefetched")
        self.moving[storage] = PREFETCH

    def wait(self, storage: int) -> bool:
        """Whether the copy that is waited for was one back to the device."""
        if storage not in self.moving:
            raise ScheduleError(f"storage {storage} is waited for, but no copy of it is in progress")
        return self.moving.pop(storage) == PREFETCH

    def is_last(self, storage: int) -> bool:
        """Whether no later step names `storage`; to be called after every step that copies."""
        self._left[storage] -= 1
        if self._left[storage] == 0:
            self.in_host.discard(storage)
        return self._left[storage] == 0

    def refuse_moving(self, storage: int, action: str) -> None:
        """Raise an error if a copy of `storage` is in progress; `action` says what was to be done to it."""
        if storage in self.moving:
            raise ScheduleError(f"storage {storage} is {action} before the wait for its {self.moving[storage]}")

    def refuse_any(self, where: str) -> None:
        """Raise an error if any copy is in progress at the end of the forward or backward, named by `where`."""
        if self.moving:
            raise ScheduleError(f"copies of storages {sorted(self.moving)} are in progress at the end of the {where}")


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
