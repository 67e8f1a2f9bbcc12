"""Insert offload steps into a schedule: when each offloaded storage leaves the device, and when it comes back.

A copy to the host starts as soon as the storage is computed. The storage is freed when the copy is complete, or
earlier, after a wait, where the peak demands it. The copy back starts just early enough to be complete at the first
use, as far as the peak allows. Copies in one direction run one after another. `packed` inserts the steps that pack
dropout masks.
"""

import dataclasses
from collections.abc import Iterable
from itertools import accumulate

from ackpt.planner.capture.joint_graph import BACKWARD, FORWARD, Analysis, JointGraph
from ackpt.planner.costs.profiles import Profile

from .schedule import COMPUTE, FREE, OFFLOAD, PACK, PREFETCH, UNPACK, WAIT, Schedule, ScheduleError, Step
from .simulator import step_peaks

_SOON = 30  # two readers of a packed mask share one unpacking if the second follows this soon (not tuned)


def offloadable(graph: JointGraph, schedule: Schedule) -> list[int]:
    """Storages that `schedule` saves and that could be offloaded instead.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.schedule.schedule import everything
        >>> from ackpt.planner.schedule.offload_steps import offloadable
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> [graph.storages[storage].bytes for storage in offloadable(graph, everything(graph))]
        [128]
    """
    return [storage for storage in schedule.saved if storage not in graph.analysis.callers]


def offloaded(
    graph: JointGraph, schedule: Schedule, storages: Iterable[int], profile: Profile, limit_bytes: int = 0
) -> Schedule:
    """`schedule`, but with these saved `storages` in host memory between their uses in forward and backward.

    The dynamic peak stays within `limit_bytes`, or within the smallest peak that offloading these storages can give if
    that is larger. Without times in the profile, the step waits for every copy at once.

    Raises:
        ScheduleError: if `schedule` does not save one of `storages`, if the caller holds one, or if `schedule` already
            offloads.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.graph import simulate
        >>> from ackpt.planner.schedule.schedule import everything
        >>> from ackpt.planner.schedule.offload_steps import offloadable, offloaded
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> profile, plain = ackpt.profile(graph), everything(graph)
        >>> found = simulate(graph, profile, offloaded(graph, plain, offloadable(graph, plain), profile))
        >>> found.saved_bytes, found.host_bytes, found.recompute_flops
        (0, 128, 0)
    """
    storages = sorted(set(storages))
    if wrong := sorted(set(storages) - set(offloadable(graph, schedule))):
        raise ScheduleError(f"storages {wrong} are not saved, or the caller holds them: they cannot be offloaded")
    if schedule.offloaded:
        raise ScheduleError("the schedule offloads already: name all storages at once")
    copies = _Copies(graph, schedule, storages, profile, limit_bytes)
    copies.place_offloads()
    copies.place_prefetches()
    return copies.inserted()


@dataclasses.dataclass
class _Copy:
    """When one storage moves: indices of compute steps of the forward (``born``, ``last`` use, ``freed`` after) and of
    the backward (``prefetched`` before, ``first`` use). ``seconds``: of one copy."""

    storage: int
    size: int
    seconds: float
    born: int
    last: int
    first: int
    freed: int
    prefetched: int


class _Copies:
    """Chooses when storages move. ``forward``, ``backward``: dynamic bytes at every compute step, at first with each
    storage on the device as briefly as possible; ``limit``: their upper bound; ``step_seconds``: of every compute
    step."""

    def __init__(self, graph: JointGraph, schedule: Schedule, storages, profile, limit_bytes: int):
        analysis = graph.analysis
        self.schedule, self.dropped = schedule, analysis.dropped
        orders = schedule.forward_arrays.computed, schedule.backward_arrays.computed
        seconds, copy_seconds = profile.seconds, profile.swap_seconds
        if seconds is None or copy_seconds is None:
            seconds, copy_seconds = [0.0] * len(graph.nodes), [0.0] * len(graph.storages)
        self.step_seconds = [[seconds[node_id] for node_id in order] for order in orders]
        self.copies = _copies(analysis, storages, orders, copy_seconds)
        self.forward, self.backward = step_peaks(graph, schedule, profile.workspace_bytes)
        # Each is away after its last use in the forward and before its first in backward.
        _add(self.forward, [(copy.last + 1, len(self.forward), -copy.size) for copy in self.copies])
        _add(self.backward, [(0, copy.first, -copy.size) for copy in self.copies])
        self.limit = max(limit_bytes, *self.forward, *self.backward)

    def place_offloads(self) -> None:
        """Free each storage in the forward when its copy is complete, or earlier where it would exceed the limit."""
        now = idle = 0.0
        born, unused = _by(self.copies, "born"), _by(self.copies, "last")
        done: dict[int, float] = {}
        leaving: list[_Copy] = []  # no longer read in the forward, but still on the device
        leaving_bytes = 0
        for at, seconds in enumerate(self.step_seconds[0]):
            for copy in list(leaving):
                if done[copy.storage] <= now or self.forward[at] + leaving_bytes > self.limit:
                    now = max(now, done[copy.storage])
                    copy.freed = at - 1
                    leaving.remove(copy)
                    leaving_bytes -= copy.size
            self.forward[at] += leaving_bytes
            now += seconds
            for copy in born.get(at, ()):
                done[copy.storage] = idle = max(idle, now) + copy.seconds
            for copy in unused.get(at, ()):
                leaving.append(copy)
                leaving_bytes += copy.size
            leaving.sort(key=lambda copy: done[copy.storage])
        for copy in leaving:
            copy.freed = len(self.step_seconds[0]) - 1

    def place_prefetches(self) -> None:
        """Prefetch each storage in backward so that its copy is complete at its first use, if the limit allows."""
        begins = list(accumulate(self.step_seconds[1], initial=0.0))
        idle = begins[-1]  # from here on the link is busy with copies that are needed later
        for copy in sorted(self.copies, key=lambda copy: (-copy.first, -copy.storage)):
            begin = min(begins[copy.first], idle) - copy.seconds
            at = copy.first
            while at > 0 and begins[at] > begin and self.backward[at - 1] + copy.size <= self.limit:
                at -= 1
                self.backward[at] += copy.size
            copy.prefetched = at
            idle = max(begin, begins[at])

    def inserted(self) -> Schedule:
        out = {(copy.born, 0, copy.born, copy.storage): [Step(OFFLOAD, copy.storage)] for copy in self.copies}
        out |= {
            (copy.freed, 1, copy.born, copy.storage): [Step(WAIT, copy.storage), Step(FREE, copy.storage)]
            for copy in self.copies
        }
        back = {(copy.prefetched, 0, copy.first, copy.storage): [Step(PREFETCH, copy.storage)] for copy in self.copies}
        back |= {(copy.first, 1, copy.first, copy.storage): [Step(WAIT, copy.storage)] for copy in self.copies}
        out = {(at + 1, *rest): steps for (at, *rest), steps in out.items()}
        return _moved(self.schedule, {copy.storage for copy in self.copies}, self.dropped, out, back)


def packed(graph: JointGraph, schedule: Schedule, storages: Iterable[int]) -> Schedule:
    """`schedule`, but with these saved dropout masks packed between their uses in forward and backward.

    Each mask is unpacked before its first reader in backward, and freed and unpacked again if the next one follows
    late. Raises ScheduleError for storages that are not saved dropout masks.
    """
    analysis, storages = graph.analysis, set(storages)
    drawn = {s for node in schedule.backward_arrays.computed for s in analysis.allocated.get(node, ())}
    if wrong := sorted(storages - (analysis.masks.keys() & set(schedule.saved) - drawn)):
        raise ScheduleError(
            f"storages {wrong} cannot be packed: they are not saved, or recomputed in backward, or not dropout masks"
        )
    last = {}
    for at, node in enumerate(schedule.forward_arrays.computed):
        last.update(dict.fromkeys(storages.intersection(analysis.accessed[FORWARD][node]), at))
    out = {(at + 1, storage): [Step(PACK, storage), Step(FREE, storage)] for storage, at in last.items()}
    back: dict[tuple[int, int], list[Step]] = {}
    used: dict[int, int] = {}
    for at, node in enumerate(schedule.backward_arrays.computed):
        for storage in storages.intersection(analysis.accessed[BACKWARD][node]):
            reads_base = all(
                source == analysis.base_of[storage]
                for source in analysis.backward_reads[node]
                if storage in graph.nodes[source].storages
            )
            if storage not in used:
                back[at, storage] = [Step(UNPACK, storage)]
            elif reads_base and at - used[storage] > _SOON:
                back.setdefault((used[storage] + 1, storage), []).insert(0, Step(FREE, storage))
                back[at, storage] = [Step(UNPACK, storage)]
            used[storage] = at
    return _moved(schedule, storages, analysis.dropped, out, back)


def _moved(schedule: Schedule, gone: set[int], dropped: set[int], out, back) -> Schedule:
    """`schedule` with the steps `out` and `back` inserted, so that the storages `gone` are no longer saved."""
    forward = _inserted(schedule.forward, out)
    # The caller drops outputs when the forward is done, waits for copies included.
    is_dropped = [step.kind == FREE and step.id in dropped for step in forward]
    return dataclasses.replace(
        schedule,
        forward=(
            *(step for step, last in zip(forward, is_dropped) if not last),
            *(step for step, last in zip(forward, is_dropped) if last),
        ),
        backward=_inserted(schedule.backward, back),
        saved=tuple(storage for storage in schedule.saved if storage not in gone),
    )


def _by(copies: list[_Copy], name: str) -> dict[int, list[_Copy]]:
    groups: dict[int, list[_Copy]] = {}
    for copy in copies:
        groups.setdefault(getattr(copy, name), []).append(copy)
    return groups


def _add(sizes: list[int], spans) -> None:
    """Add the bytes to ``sizes[first:end]`` for every (first, end, bytes) of `spans`."""
    changes = [0] * (len(sizes) + 1)
    for begin, end, size in spans:
        changes[begin] += size
        changes[end] -= size
    sizes[:] = map(sum, zip(sizes, accumulate(changes)))


def _copies(analysis: Analysis, storages, orders, copy_seconds) -> list[_Copy]:
    forward, backward = orders
    wanted = set(storages)
    born = {node_id: at for at, node_id in enumerate(forward)}
    last = {
        s: at for at, node_id in enumerate(forward) for s in wanted.intersection(analysis.accessed[FORWARD][node_id])
    }
    first = {
        s: at
        for at, node_id in reversed([*enumerate(backward)])
        for s in wanted.intersection(analysis.accessed[BACKWARD][node_id])
    }
    return [
        _Copy(
            storage=s,
            size=analysis.bytes[s],
            seconds=copy_seconds[s],
            born=born[analysis.base_of[s]],
            last=last[s],
            first=first[s],
            freed=last[s],
            prefetched=first[s],
        )
        for s in storages
    ]


def _inserted(steps, moves: dict[tuple, list[Step]]) -> tuple[Step, ...]:
    """`steps` with `moves` inserted, in key order: before the compute step whose index starts the key."""
    waiting = sorted(moves, reverse=True)
    result: list[Step] = []
    at = 0
    for step in steps:
        if step.kind == COMPUTE:
            while waiting and waiting[-1][0] <= at:
                result += moves[waiting.pop()]
            at += 1
        result.append(step)
    while waiting:
        result += moves[waiting.pop()]
    return tuple(result)
