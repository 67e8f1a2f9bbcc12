"""Offload in schedules: where copies start and end, what they take, and how long compute waits; on a simulated GPU."""

import dataclasses
import types

import pytest
import torch
from conftest import assert_as_eager, peak_with_host_bytes, raises
from simulated_cuda import Machine, SimulatedTransport, Span
from torch import nn

import ackpt
from ackpt.graph import Plan, PlanError, PlannedStep, ScheduleError, Step, lower, profile, rewrite, simulate
from ackpt.planner.choose import check_runs, default_profile
from ackpt.planner.costs.devices import device
from ackpt.planner.request import Request
from ackpt.planner.schedule import added_operations as copies
from ackpt.planner.schedule.added_operations import offload, prefetch, wait
from ackpt.planner.schedule.offload_steps import offloadable, offloaded
from ackpt.planner.schedule.schedule import COMPUTE, FREE, OFFLOAD, PREFETCH, WAIT, everything

VALUE = 2 * 4 * 4  # bytes of each result
ANY = 10**9  # bytes: no limit


@pytest.fixture(scope="module")
def graph():
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return ackpt.trace(nn.Sequential(*layers), torch.ones(2, 4))


@pytest.fixture(scope="module")
def tanhs(graph):
    """Storages of the results of the first two Tanh; the third is the output."""
    return [graph.storages[s].id for s in offloadable(graph, everything(graph))]


def timed(graph, copy_seconds: float):
    """A profile in which every operation takes a second and every copy `copy_seconds`; views take no time."""
    seconds = tuple(
        1.0 if graph.analysis.allocated.get(n.id) and n.id not in graph.analysis.sources else 0.0 for n in graph.nodes
    )
    copies = (float(copy_seconds),) * len(graph.storages)
    return dataclasses.replace(profile(graph), seconds=seconds, swap_seconds=copies)


def moved(graph, storages, copy_seconds, limit=ANY):
    costs = timed(graph, copy_seconds)
    schedule = offloaded(graph, everything(graph), storages, costs, limit)
    return schedule, simulate(graph, costs, schedule)


# The forward runs six operations: addmm, tanh, three times. The first Tanh's result is there after 2 s, the second's
# after 4 s. The backward runs eleven: tanh_backward, mm (for the input), mm (for the weight), sum, three times, but
# for the input of the model. It reads the second Tanh's result after 2 s, in mm, and the first one's after 6 s.


def test_copies_that_overlap_with_compute_cost_nothing(graph, tanhs):
    schedule, found = moved(graph, tanhs[:1], 2)
    assert (found.seconds, found.exposed_seconds) == (17.0, 0.0)
    # Out from second 2 to 4, so it is freed right after the second Tanh; in from second 4 to 6 of the backward.
    names = {step.id: graph.nodes[step.id].target for step in schedule.forward if step.kind == COMPUTE}
    steps = [names.get(step.id) if step.kind == COMPUTE else step.kind for step in schedule.forward]
    at = steps.index(WAIT)
    assert steps[at + 1] == FREE and schedule.forward[at + 1].id == tanhs[0]
    before = [step for step in steps[:at] if step not in (FREE, OFFLOAD, None)]
    assert before[-1] == "aten.tanh.default" and before.count("aten.tanh.default") == 2
    after = schedule.backward[schedule.backward.index(Step(PREFETCH, tanhs[0])) :]
    rest = [graph.nodes[step.id].target for step in after if step.kind == COMPUTE]
    assert rest.count("aten.tanh_backward.default") == 2  # it starts with the second of three
    assert schedule.saved == (tanhs[1], *graph.analysis.live_to_end & set(everything(graph).saved))
    assert schedule.offloaded == (tanhs[0],)


def test_exposed_copies_add_waiting_time(graph, tanhs):
    _, found = moved(graph, tanhs[:1], 8)
    # Out from second 2 to 10, and the forward ends at 6: 4 s. In from 0 to 8 of the backward, needed at 6: 2 s.
    assert (found.seconds, found.exposed_seconds) == (17.0 + 4 + 2, 6.0)


def test_copies_of_one_way_follow_each_other(graph, tanhs):
    _, found = moved(graph, tanhs, 3)
    # Out from 2 to 5 and from 5 to 8: 2 s after the forward. In from 0 to 3, needed at 2: 1 s; then from 4 to 7 (the
    # prefetch stands before the tanh_backward at 4, as the second has come by then), needed at 7.
    assert (found.seconds, found.exposed_seconds) == (17.0 + 2 + 1, 3.0)


def test_copies_in_both_directions_run_at_once(graph, tanhs):
    """A copy in does not wait for a copy out that another storage has begun."""
    plain = everything(graph)
    last = next(at for at, step in reversed([*enumerate(plain.forward)]) if step.kind == COMPUTE)
    first, second = tanhs
    away = offloaded(graph, plain, [first], timed(graph, 0))
    end = [Step(PREFETCH, first), Step(WAIT, first), Step(FREE, first)]
    forward = list(away.forward)
    at = forward.index(Step(FREE, first)) + 1
    born = next(
        at for at, step in enumerate(forward) if step.kind == COMPUTE and step.id == graph.analysis.base_of[second]
    )
    assert at <= born < last + 3
    # The second leaves while the first comes back, both in 5 s, after second 4.
    both = [*forward[: born + 1], Step(OFFLOAD, second), *end[:1], *forward[born + 1 :], end[1], end[2]]
    both.append(Step(WAIT, second))
    schedule = dataclasses.replace(away, forward=tuple(both))
    seconds = timed(graph, 5)
    copies = tuple(5.0 if s in tanhs else 0.0 for s in range(len(graph.storages)))
    found = simulate(graph, dataclasses.replace(seconds, swap_seconds=copies), schedule)
    # The first leaves from 2 to 7 and is waited for at once after its last use at 3: 4 s. So the second is there after
    # 8 s, and both copies end at 13, the forward without them at 10: 3 s. Back the first needs 5 s, and is needed at
    # once: 5 s.
    assert found.exposed_seconds == 4 + 3 + 5
    assert found.seconds == 17 + 12


def test_bytes_do_not_depend_on_times(graph, tanhs):
    schedule, found = moved(graph, tanhs, 0)
    assert found.host_bytes == 2 * VALUE and found.saved_bytes == VALUE
    for seconds in (1, 100):
        assert simulate(graph, timed(graph, seconds), schedule).timeline == found.timeline
    untimed = simulate(graph, profile(graph), schedule)
    assert (untimed.timeline, untimed.seconds, untimed.exposed_seconds) == (found.timeline, None, None)
    boundary = found.timeline.boundary
    assert found.host_live[boundary] == 2 * VALUE and found.host_live[-1] == 0
    assert found.timeline.live[boundary] == VALUE
    assert [c.way for c in found.timeline.copies] == ["out", "out", "in", "in"]
    assert {c.bytes for c in found.timeline.copies} == {VALUE}
    plain = simulate(graph, timed(graph, 1), everything(graph))
    assert plain.exposed_seconds == plain.host_bytes == 0 and peak_with_host_bytes(plain) == plain.peak_bytes


def deep(width=16, layers=6, batch=256):
    torch.manual_seed(0)
    parts = (layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh()))
    return nn.Sequential(*parts), torch.randn(batch, width)


def test_the_limit_decides_between_bytes_and_seconds():
    model, x = deep()
    graph = ackpt.trace(model, x)
    plain, value = everything(graph), 256 * 16 * 4
    everywhere = offloadable(graph, plain)

    def run(copy_seconds, limit):
        costs = timed(graph, copy_seconds)
        return simulate(graph, costs, offloaded(graph, plain, everywhere, costs, limit))

    tight, at_once = run(3, 0), run(0, 0)
    assert tight.peak_bytes == at_once.peak_bytes < simulate(graph, profile(graph), plain).peak_bytes - 2 * value
    found = [run(3, tight.peak_bytes + more * value) for more in range(4)]
    assert all(each.peak_bytes <= tight.peak_bytes + more * value for more, each in enumerate(found))
    waits = [each.exposed_seconds for each in found]
    assert waits == sorted(waits, reverse=True) and waits[0] > waits[-1]


def away_and_again(graph):
    """Some offloaded, some recomputed from what is offloaded."""
    analysis = graph.analysis
    kept = [s for s in everything(graph).saved if graph.nodes[analysis.base_of[s]].target == "aten.tanh.default"]
    schedule = lower(graph, kept[::2])
    return offloaded(graph, schedule, offloadable(graph, schedule), profile(graph))


def test_an_offloaded_step_is_bit_equal_and_has_the_simulated_peak():
    model, x = deep()
    step = PlannedStep(model, lambda graph: types.SimpleNamespace(schedule=away_and_again(graph), limit_bytes=None))
    step.prepare(x)
    graph = ackpt.trace(model, x)
    found = simulate(graph, profile(graph, workspace="measured"), step.plan.schedule)
    assert len(step.plan.schedule.offloaded) == 3 and found.recompute_flops > 0

    for seed in range(2):
        assert_as_eager(model, step, torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))

    def fresh():
        model.zero_grad()
        output = step(x)
        output.backward(torch.ones_like(output))

    measured = ackpt.measure(fresh, "cpu", resident=(model, x), warmup=1, repeats=0)
    assert measured.dynamic_peak_bytes == peak_with_host_bytes(found) > found.peak_bytes


def test_operations_of_copies_move_whole_storages():
    whole = torch.arange(12, dtype=torch.float64)
    view = whole.as_strided((2, 3), (1, 4), 1)
    host = wait(offload(view), view)
    assert host.numel() == 12 * 8 and host.dtype == torch.uint8
    back = wait(prefetch(host, view.device, view.dtype, view.shape, view.stride(), view.storage_offset()), host)
    assert torch.equal(back, view) and back.stride() == view.stride()
    assert torch.equal(back.as_strided((12,), (1,), 0), whole)
    assert back.untyped_storage()._cdata not in (host.untyped_storage()._cdata, whole.untyped_storage()._cdata)


def test_schedules_that_cannot_run_are_refused(graph, tanhs):
    first = tanhs[0]
    away = offloaded(graph, everything(graph), [first], profile(graph))

    def changed(part, step, others):
        steps = list(getattr(away, part))
        at = steps.index(step)
        return dataclasses.replace(away, **{part: (*steps[:at], *others, *steps[at + 1 :])})

    out, back, wait, free = (Step(kind, first) for kind in (OFFLOAD, PREFETCH, WAIT, FREE))
    output = next(iter(graph.analysis.live_to_end & set(everything(graph).saved)))
    weight = next(s.id for s in graph.storages if s.category == "parameter")
    freed = next(step.id for step in away.forward if step.kind == FREE)
    wrong = [
        (changed("forward", out, []), f"storage {first} is waited for, but no copy of it is in progress"),
        (changed("forward", wait, []), f"storage {first} is freed before the wait for its offload"),
        (changed("forward", out, [out, out]), f"storage {first} is offloaded twice"),
        (changed("forward", free, []), f"storage {first} is prefetched while it is still live"),
        (changed("forward", free, [free, back]), f"copies of storages \\[{first}\\] are in progress at the end of"),
        (changed("forward", free, [free, Step(PREFETCH, tanhs[1])]), "is prefetched, but it was never offloaded"),
        (changed("forward", out, [out, Step(OFFLOAD, weight)]), f"storage {weight} belongs to the caller"),
        (changed("forward", free, [free, Step(OFFLOAD, freed)]), f"storage {freed} is offloaded, but it is not live"),
        (changed("forward", free, [free, Step("lose", first)]), "'lose' is not a kind of step"),
        (changed("backward", back, [back, back]), f"storage {first} is prefetched while it is still live"),
        (changed("backward", back, []), f"storage {first} is waited for, but no copy of it is in progress"),
        (changed("backward", wait, []), "which is not live: .* or not waited for its prefetch"),
        (changed("backward", wait, [free, wait]), f"storage {first} is freed before the wait for its prefetch"),
    ]
    for schedule, message in wrong:
        with pytest.raises(ScheduleError, match=message):
            simulate(graph, profile(graph), schedule)
        with pytest.raises(ScheduleError, match=message):
            rewrite(graph, schedule)
    for storages in ([output], [weight]):
        with pytest.raises(ScheduleError, match="are not saved, or the caller holds them"):
            offloaded(graph, everything(graph), storages, profile(graph))
    raises(ScheduleError, "offloads already", lambda: offloaded(graph, away, [tanhs[1]], profile(graph)))


def names_of(graph, storages):
    return [graph.nodes[graph.analysis.base_of[s]].name for s in storages]


def test_plans_say_what_is_offloaded(graph, tanhs, tmp_path):
    first, second = names_of(graph, tanhs)
    costs = profile(graph, "h200")
    fates = {first: "offloaded", second: "recomputed"}
    plan = ackpt.plan(graph, 1.0, policy="manual", profile=costs, fates=fates)
    assert plan.fates[first] == "offloaded" and plan.fates[second] == "recomputed"
    assert plan.host_bytes == VALUE and plan.exposed_seconds > 0
    seconds = [simulate(graph, costs, made).seconds for made in (everything(graph), plan.schedule)]
    assert plan.cost == pytest.approx(seconds[1] / seconds[0] - 1)  # recomputing and waiting
    assert plan.lower_bound is None  # it holds for recomputing alone
    assert "offloaded         1, " in plan.table() and first in plan.table()
    loaded = Plan.load(plan.save(tmp_path / "plan.json"))
    assert loaded == plan and loaded.schedule.offloaded == (tanhs[0],)


def test_without_a_link_nothing_is_offloaded(graph, tanhs):
    fates = dict.fromkeys(names_of(graph, tanhs[:1]), "offloaded")
    with pytest.raises(PlanError, match="policy 'manual' offloads, but the profile of 'cpu' has no times of copies"):
        ackpt.plan(graph, policy="manual", fates=fates)
    output = names_of(graph, graph.analysis.live_to_end & set(everything(graph).saved))[0]
    with pytest.raises(ValueError, match=f"{output!r} cannot be offloaded: backward does not read it, or the caller"):
        ackpt.plan(graph, policy="manual", profile=profile(graph, "h200"), fates={output: "offloaded"})


def test_a_plan_that_offloads_does_not_run_on_the_cpu():
    model, x = deep(layers=3, batch=4)
    graph = ackpt.trace(model, x)
    name = names_of(graph, offloadable(graph, everything(graph)))[0]
    plan = ackpt.plan(graph, policy="manual", profile=profile(graph, "h200"), fates={name: "offloaded"})
    raises(PlanError, "this plan offloads, but the model is on the CPU", lambda: ackpt.compile(model, x, plan=plan))
    elsewhere = types.SimpleNamespace(on_cpu=False, replays_random=True)
    assert check_runs(elsewhere, plan) is plan
    elsewhere.replays_random = False
    raises(PlanError, "which Inductor does not run", lambda: check_runs(elsewhere, plan))


def test_a_schedule_that_offloads_serves_other_sizes():
    model, x = deep(layers=3, batch=8)
    request = Request(
        planner=lambda graph: types.SimpleNamespace(schedule=away_and_again(graph), limit_bytes=None), dynamic=True
    )
    step = PlannedStep(model, request)
    for rows in (8, 5, 13):
        assert_as_eager(model, step, x.repeat(2, 1)[:rows].clone())
        assert step.plan.schedule.offloaded
    assert [event.kind for event in step.history if event.kind != "refused"] == ["dynamic capture", "plan", "plan"]


def test_away_from_the_cpu_offload_is_a_fate_without_options():
    model, x = deep(batch=4096)
    on_cpu = ackpt.trace(model, x)
    elsewhere = dataclasses.replace(on_cpu, on_cpu=False)
    link = dataclasses.replace(device("h200"), link_bytes_per_second=1e15)
    assert default_profile(on_cpu, link).swap_seconds is None
    plan = ackpt.plan(elsewhere, 0.7, profile=default_profile(elsewhere, link))
    assert check_runs(elsewhere, plan) is plan
    assert "offloaded" in plan.fates.values() and plan.recompute_flops == 0


SHAPE = (4, 8)
LAYOUT = (torch.device("cpu"), torch.float32, SHAPE, (8, 1), 0)  # where the machine's memory really lies


class Pinned(Span):
    def numel(self):
        return self.data.numel()


class Setting:
    def __init__(self, monkeypatch, kind=SimulatedTransport):
        self.machine, self.buffers = Machine(), []
        transport = kind(self.machine)
        monkeypatch.setattr(copies, "_transport", lambda *_: transport)
        monkeypatch.setattr(copies, "_pinned", self.pinned)

    def pinned(self, size):
        """Torch takes page-locked memory back only behind the copies that use it; here it is kept."""
        span = self.machine.host_memory(size)
        self.buffers.append(span)
        return Pinned(span.machine, span.block, span.data)

    def computed(self, value: float) -> torch.Tensor:
        """A tensor that the computing stream has filled."""
        storage = self.machine.allocate(4 * 32)
        found = torch.empty(0).set_(storage, 0, SHAPE, LAYOUT[3])
        found.fill_(value)
        self.machine.launch(writes=[storage])
        return found

    def read(self, tensor):
        self.machine.launch(reads=[tensor.untyped_storage()])


def step(setting: Setting, waits_out=True, waits_in=True):
    """Two tensors leave and come back; the memory of the first goes to the second, and both blocks are used again."""
    hosts = []
    for value in (1.0, 2.0):
        source = setting.computed(value)
        moved = copies.offload(source)
        hosts.append(copies.wait(moved, source) if waits_out else moved[0])
        del source
    setting.computed(3.0)
    found = []
    for host in reversed(hosts):
        moved = copies.prefetch(host, *LAYOUT)
        back = copies.wait(moved, host) if waits_in else moved[0]
        setting.read(back)
        found.append(back)
    assert [set(back.flatten().tolist()) for back in found] == [{2.0}, {1.0}]
    assert all(back.shape == SHAPE for back in found)
    return setting.machine.races


def test_copies_are_ordered_with_computing(monkeypatch):
    setting = Setting(monkeypatch)
    assert step(setting) == []
    assert setting.machine.reused > 0 and setting.machine.host_waits == 0  # the host goes on


@pytest.mark.parametrize("left_out", ["waits_out", "waits_in"])
def test_without_a_wait_there_is_a_race(monkeypatch, left_out):
    assert step(Setting(monkeypatch), **{left_out: False})


def test_pageable_memory_replaces_memory_that_cannot_be_pinned_with_a_warning(monkeypatch):
    def refuses(*_, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("no page-locked memory")
        return empty(*_, **kwargs)

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", refuses)
    copies._warn.cache_clear()
    with pytest.warns(UserWarning, match="pinning host memory failed \\(no page-locked memory\\)"):
        assert copies._pinned(16).numel() == 16
    assert copies._pinned(16).numel() == 16  # said once


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_bytes_come_back_and_the_memory_is_given_back():
    whole = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    expected, layout = whole.cpu(), (whole.device, whole.dtype, whole.shape, whole.stride(), 0)
    before = torch.cuda.memory_allocated()
    moved = copies.offload(whole)
    host = copies.wait(moved, whole)
    del moved, whole
    assert host.is_pinned() and before - torch.cuda.memory_allocated() == 4 << 20
    moved = copies.prefetch(host, *layout)
    assert torch.equal(copies.wait(moved, host).cpu(), expected)
