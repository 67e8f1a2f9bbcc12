"""Packed dropout masks: a bit per element between forward and backward, and the same bits as in eager afterwards."""

import dataclasses

import pytest
import torch
from conftest import assert_as_eager, model_of, raises
from dynamic_steps import Words, check, ids
from torch import nn
from torch.nn import functional as F

import ackpt
from ackpt.graph import Plan, PlannedStep, ScheduleError, Step, profile, rewrite, simulate
from ackpt.planner.capture import mask_bits
from ackpt.planner.choose import check_runs, default_profile
from ackpt.planner.request import Request
from ackpt.planner.schedule.allocations import allocations
from ackpt.planner.schedule.offload_steps import packed
from ackpt.planner.schedule.schedule import FREE, PACK, UNPACK, everything, from_json, to_json
from ackpt.planner.schedule.simulator import peak_of

OPERATIONS = torch.ops.ackpt_graph
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((1,), (7,), (8,), (9,), (3, 5, 7), (2**17 + 5,))
ROWS, WIDTH = 5, 13  # 65 elements: 9 bytes of bits


def deep(dropouts: int = 3) -> nn.Module:
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()) for _ in range(dropouts)]
    return nn.Sequential(*(layer for each in layers for layer in each))


@pytest.fixture(scope="module")
def graph():
    return ackpt.trace(deep(), torch.ones(ROWS, WIDTH))


def masks_of(graph, schedule) -> list[int]:
    return sorted(graph.analysis.masks.keys() & schedule.saved)


def all_packed(graph):
    saving = everything(graph)
    return packed(graph, saving, masks_of(graph, saving))


def fates_of(graph, fate: str) -> dict[str, str]:
    return {graph.nodes[graph.analysis.base_of[s]].name: fate for s in masks_of(graph, everything(graph))}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", [0.1, 1 / 3, 0.5, 0.999])
def test_unpacked_masks_are_those_of_eager(shape, dtype, p):
    x = torch.empty(shape, dtype=dtype)
    for like in (x, x.movedim(0, -1), torch.empty(*shape, 2, dtype=dtype)[..., 0]):
        mask = torch.empty_like(like).bernoulli_(1 - p).div_(1 - p)  # as eager's dropout draws it
        bits = OPERATIONS.pack_bits(mask)
        assert bits.untyped_storage().nbytes() == -(-mask.numel() // 8)
        again = OPERATIONS.unpack_bits(bits, mask.shape, mask.stride(), dtype, mask_bits.one_of(dtype, p))
        integers = mask_bits._INTEGERS[dtype.itemsize]  # -0.0 and 0.0 differ
        assert again.stride() == mask.stride() and torch.equal(again.view(integers), mask.view(integers))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 2**17 + 5])
def test_both_ways_of_packing_agree(size):
    """What runs on a GPU, run on the CPU."""
    mask = (torch.rand(size) < 0.3).to(torch.uint8)
    bits, same = (torch.empty(-(-size // 8), dtype=torch.uint8) for _ in range(2))
    mask_bits.pack_by_numpy(mask, bits)
    mask_bits.pack_in_place(mask, same)
    assert torch.equal(bits, same)
    unpacked, too = torch.full_like(mask, 9), torch.full_like(mask, 9)
    mask_bits.unpack_by_numpy(bits, unpacked, 1)
    mask_bits.unpack_in_place(bits, too)
    assert torch.equal(unpacked, mask) and torch.equal(too, mask)


def test_a_packed_mask_takes_a_bit_per_element(graph):
    saving, packing = everything(graph), all_packed(graph)
    whole, small = (simulate(graph, profile(graph), each) for each in (saving, packing))
    assert len(packing.packed) == 3 and not masks_of(graph, packing)
    assert whole.saved_bytes - small.saved_bytes == 3 * (4 * ROWS * WIDTH - 9)
    assert small.recompute_flops == 0 and packing.replayed == ()
    assert small.peak_bytes == peak_of(graph, packing, [0] * len(graph.nodes)) < whole.peak_bytes
    blocks = allocations(graph, packing, [0] * len(graph.nodes))
    assert sum(block.bytes == 9 and block.kind == "saved" for block in blocks) == 3
    assert not any(block.kind == "recomputed" for block in blocks)
    rewrite(graph, packing)  # proves the bytes on fake tensors


def test_a_mask_is_unpacked_again_for_a_distant_reader(graph, monkeypatch):
    monkeypatch.setattr("ackpt.planner.schedule.offload_steps._SOON", 0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    graph = ackpt.trace(model, torch.ones(ROWS, WIDTH))
    fates = {"tanh": "recomputed", "mul": "recomputed", **fates_of(graph, "packed")}
    schedule = ackpt.plan(graph, policy="manual", fates=fates).schedule
    assert [step.kind for step in schedule.backward].count(UNPACK) == 2
    assert simulate(graph, profile(graph), schedule).peak_bytes == peak_of(graph, schedule, [0] * len(graph.nodes))
    rewrite(graph, schedule)


def test_impossible_steps_are_refused(graph):
    saving, packing = everything(graph), all_packed(graph)
    mask = packing.packed[0]
    other = next(storage for storage in saving.saved if storage not in graph.analysis.masks)
    raises(ScheduleError, "cannot be packed", lambda: packed(graph, saving, [other]))
    raises(ScheduleError, "cannot be packed", lambda: packed(graph, packing, [mask]))

    def refused(match, **changes):
        raises(ScheduleError, match, lambda: simulate(graph, profile(graph), dataclasses.replace(packing, **changes)))

    pack, free, unpack = Step(PACK, mask), Step(FREE, mask), Step(UNPACK, mask)
    forward, backward = packing.forward, packing.backward
    at = forward.index(pack)
    refused("packed twice", forward=(*forward[:at], pack, *forward[at:]))
    refused("but it is not live", forward=(*forward[:at], free, pack, *forward[at + 2 :]))
    refused("never unpacked", backward=tuple(step for step in backward if step != unpack))
    refused("still live", backward=(unpack, *backward))
    refused("not packed", forward=tuple(step for step in forward if step not in (pack, free)))
    refused("no dropout mask", forward=(*forward[:at], Step(PACK, other), *forward[at:]))


def test_manual_fates():
    model, x = deep(), torch.randn(ROWS, WIDTH)
    graph = ackpt.trace(model, x)
    names = [*fates_of(graph, "packed")]
    plan = ackpt.plan(graph, policy="manual", fates={names[0]: "packed", names[1]: "recomputed"})
    assert [plan.fates[name] for name in names] == ["packed", "recomputed", "saved"]
    assert "1 packed" in plan.table() and plan.lower_bound is None
    with pytest.raises(ValueError, match="'tanh' cannot be packed: only dropout masks"):
        ackpt.plan(graph, policy="manual", fates={"tanh": "packed"})
    timed = dataclasses.replace(default_profile(graph), pack_seconds=None)
    with pytest.raises(ackpt.PlanError, match="none of packing"):
        ackpt.plan(graph, policy="manual", profile=timed, fates={names[0]: "packed"})
    with pytest.raises(ackpt.PlanError, match="Inductor does not run"):
        check_runs(dataclasses.replace(graph, replays_random=False), plan)


def test_a_packed_plan_survives_a_file(tmp_path, graph):
    plan = ackpt.plan(graph, policy="manual", fates=fates_of(graph, "packed"))
    again = Plan.load(plan.save(tmp_path / "plan.json"))
    assert again == plan and again.schedule == plan.schedule and list(again.fates.values()).count("packed") == 3
    assert from_json(to_json(plan.schedule)) == plan.schedule
    model, x = deep(), torch.ones(ROWS, WIDTH)
    step = ackpt.compile(model, x, plan=again)
    assert step.plan.schedule == plan.schedule
    assert_as_eager(model, step, x)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast", "native", "permuted"])
def test_packed_steps_are_bit_equal(kind):
    model, x = deep(), torch.randn(ROWS, WIDTH)
    if kind == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16()
    elif kind == "native":
        # Dropout as a GPU computes it, with a boolean mask.
        layers = {name: nn.Linear(WIDTH, WIDTH) for name in ("first", "last")}
        model = model_of(lambda self, x: self.last(torch.native_dropout(self.first(x), 0.3, True)[0]), **layers)
    elif kind == "permuted":
        x = torch.randn(WIDTH, ROWS).t()
        model = nn.Sequential(nn.Dropout(0.3), *model)

    def plan(graph):
        return ackpt.plan(graph, policy="manual", fates=fates_of(graph, "packed"))

    step = PlannedStep(model, Request(planner=plan, differentiate="all"))
    for _ in range(2):  # a plan is not used up
        assert_as_eager(model, step, x, autocast=kind == "autocast")
    assert "packed" in step.plan.fates.values()
    if kind == "float32":
        model.zero_grad()
        loss = step(x).sum()  # two backward passes of one forward
        loss.backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        loss.backward()
        assert all(map(torch.equal, first, [p.grad for p in model.parameters()]))


def test_the_measured_peak_is_the_simulated_one():
    model = Words(layers=3)
    fates = fates_of(ackpt.trace(model, ids(6, 20)), "packed")
    step = ackpt.compile(model, ids(6, 20), policy="manual", options={"fates": fates})
    assert "packed" in step.plan.fates.values()
    check(step, model, ids(6, 20))


def test_masks_of_all_lengths_are_packed():
    model = Words(layers=3)
    step = ackpt.compile(model, ids(6, 20), budget=0.75, dynamic=True)
    for batch, length in ((6, 33), (3, 18), (7, 21)):
        check(step, model, ids(batch, length))
        assert "packed" in step.plan.fates.values()


def test_outputs_of_the_step_are_not_packed():
    graph = ackpt.trace(
        model_of(lambda self, x: (F.dropout(torch.ones_like(x), 0.3), x.sum())), torch.ones(4, 4, requires_grad=True)
    )
    assert not graph.analysis.masks.keys() & graph.analysis.callers
