"""What a schedule has in host memory: which storages have a copy there, and which copies are on their way.

Bytes follow from the steps alone, never from how long a copy takes: the device's memory is taken from the prefetch on
and given back by a free, which may come only after a wait. A copy in host memory lives from its offload to the last
step that names its storage.
"""

from __future__ import annotations

from collections import Counter

from ackpt.capture.analysis import Facts

from .schedule import COMPUTE, OFFLOAD, PREFETCH, WAIT, Schedule, ScheduleError

_COPIES = (OFFLOAD, PREFETCH, WAIT)


def copies(schedule: Schedule) -> bool:
    """Whether anything is offloaded."""
    return any(step.kind in _COPIES for step in (*schedule.forward, *schedule.backward))


class Host:
    """The host's side while a schedule is followed; every method refuses what cannot be with `ScheduleError`.

    ``there``: storages with a copy, arriving or arrived; ``moving``: ``{storage: the step that started its copy}``.
    """

    def __init__(self, known: Facts, schedule: Schedule):
        steps = (*schedule.forward, *schedule.backward)
        self.known = known
        self.there: set[int] = set()
        self.moving: dict[int, str] = {}
        self._left = Counter(step.id for step in steps if step.kind in _COPIES)
        self._taken: set[int] = set()

    def offload(self, storage: int) -> None:
        if storage in self.known.resident or storage in self.known.held:
            raise ScheduleError(f"storage {storage} is the caller's and stays on the device: it cannot be offloaded")
        if storage not in self.known.cover:
            raise ScheduleError(f"storage {storage} holds no tensor: it cannot be offloaded")
        if storage in self._taken:
            raise ScheduleError(f"storage {storage} is offloaded twice: one copy in host memory is enough")
        self._taken.add(storage)
        self.there.add(storage)
        self.moving[storage] = OFFLOAD

    def prefetch(self, storage: int) -> None:
        if storage not in self.there:
            raise ScheduleError(f"storage {storage} is prefetched, but it was never offloaded")
        self.refuse_moving(storage, "prefetched")
        self.moving[storage] = PREFETCH

    def wait(self, storage: int) -> bool:
        """Whether it was a copy back that is done now."""
        if storage not in self.moving:
            raise ScheduleError(f"storage {storage} is waited for, but no copy of it is on its way")
        return self.moving.pop(storage) == PREFETCH

    def is_last(self, storage: int) -> bool:
        """To be called after every step of a copy: whether no later one names `storage`."""
        self._left[storage] -= 1
        if self._left[storage] == 0:
            self.there.discard(storage)
        return self._left[storage] == 0

    def refuse_moving(self, storage: int, what: str) -> None:
        """Refuse to have something done to a storage whose copy is on its way."""
        if storage in self.moving:
            raise ScheduleError(f"storage {storage} is {what} before the wait for its {self.moving[storage]}")

    def refuse_any(self, where: str) -> None:
        """Refuse copies that are still on their way."""
        if self.moving:
            raise ScheduleError(f"copies of storages {sorted(self.moving)} are on their way at the end of the {where}")


def waiting(profile, schedule: Schedule) -> float:
    """Seconds in which computing stands still for copies; 0 where nothing is copied or the profile has no times."""
    times = clock(profile, schedule) if copies(schedule) else None
    return 0.0 if times is None else times[1]


def clock(profile, schedule: Schedule) -> tuple[float, float] | None:
    """Seconds of the step and, of these, those in which computing stands still for copies.

    Three streams: operations run one after another on one, copies out on the second, copies in on the third, each way
    in the order in which they were started. A copy starts when computing has come to its step and its stream is idle.
    None where the profile lacks the times of what the schedule does.
    """
    if profile.seconds is None or (profile.swap_seconds is None and copies(schedule)):
        return None
    swaps = profile.swap_seconds or ()
    now = exposed = 0.0
    idle = dict.fromkeys((OFFLOAD, PREFETCH), 0.0)
    done: dict[int, float] = {}
    for kind, number in (*schedule.forward, *schedule.backward):
        if kind in idle:
            done[number] = idle[kind] = max(now, idle[kind]) + swaps[number]
        elif kind == WAIT:
            exposed += max(0.0, done[number] - now)
            now = max(now, done[number])
        elif kind == COMPUTE:
            now += profile.seconds[number]
    return now, exposed
