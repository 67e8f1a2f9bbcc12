"""The modules that run a schedule, and the proof that finds any that take other bytes than were simulated."""

import sys
import types

import pytest
import torch
from conftest import assert_equal, raises
from torch import nn

import ackpt
from ackpt.graph import PlannedStep, RewriteError, lower, rewrite
from ackpt.planner.request import Request
from ackpt.planner.schedule.added_operations import run_again, run_and_save
from ackpt.planner.schedule.listing import Line
from ackpt.planner.schedule.schedule import missing, scheduled


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())


@pytest.fixture
def graph():
    return ackpt.trace(model(), torch.ones(3, 4))


def targets(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def test_a_recomputed_batch_norm_leaves_its_statistics_alone(graph):
    rewritten = rewrite(graph, lower(graph, ()))
    assert torch.ops.aten._native_batch_norm_legit_functional.default in targets(rewritten.forward)
    again = targets(rewritten.backward)
    assert torch.ops.aten._native_batch_norm_legit.no_stats in again
    assert torch.ops.aten._native_batch_norm_legit_functional.default not in again
    assert torch.ops.aten.copy_.default not in again


def test_dropout_is_recomputed_from_the_saved_state(graph):
    rewritten = rewrite(graph, lower(graph, ()))
    assert targets(rewritten.forward).count(run_and_save) == targets(rewritten.backward).count(run_again) == 1
    plain = rewrite(graph, lower(graph, graph.analysis.savable))
    assert run_and_save not in targets(plain.forward) and run_again not in targets(plain.backward)


def test_replaying_gives_the_same_numbers_and_leaves_the_generator():
    state, drawn = run_and_save(torch.ops.aten.rand.default, [8])
    torch.rand(3)
    before = torch.get_rng_state()
    assert torch.equal(run_again(state, torch.ops.aten.rand.default, [8]), drawn)
    assert torch.equal(torch.get_rng_state(), before)


def longer_lived(listing):
    """Hold the result of the first product to the end, by using it again in the last operation."""
    first = next(line for line in listing.lines if line.target is torch.ops.aten.addmm.default)
    listing.lines.insert(-1, Line("call_function", torch.ops.aten.alias.default, (first,)))


def test_a_module_with_other_bytes_is_reported(graph, monkeypatch):
    implementation = sys.modules["ackpt.planner.schedule.rewriting"]
    build = implementation._rewritten

    def tampered(*args):
        rewritten = build(*args)
        longer_lived(rewritten.forward_listing)
        return rewritten

    monkeypatch.setattr(implementation, "_rewritten", tampered)
    raises(RewriteError, "bytes live.*were simulated", lambda: rewrite(graph, lower(graph, ())))


class Views(nn.Module):
    """One result, read by backward as it is, transposed, and in part; drawn anew in between."""

    def __init__(self):
        super().__init__()
        self.first, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        hidden = self.dropout(self.first(x).tanh())
        return (hidden.t() @ hidden).sin().sum() + hidden[1:].view(-1).exp().sum()


def for_every_use(graph):
    """The schedule that keeps nothing: every operation of backward has all that it reads computed for itself."""
    analysis = graph.analysis
    live = {*analysis.sources, *(place for place in analysis.outputs if place is not None)}
    backward = []
    for place in analysis.needed_backward:
        backward += missing(analysis, place, live)
        live.add(place)
    return scheduled(graph, None, backward)


def views():
    torch.manual_seed(0)
    return Views()


def test_one_node_is_recomputed_for_every_use():
    graph = ackpt.trace(views(), torch.ones(3, 4))
    schedule = for_every_use(graph)
    assert schedule.saved == tuple(sorted(s for s in schedule.saved if s in graph.analysis.live_to_end))
    rewritten = rewrite(graph, schedule)
    again = targets(rewritten.backward)
    assert again.count(torch.ops.aten.tanh.default) == again.count(run_again) + 1 > 2
    assert again.count(torch.ops.aten.t.default) > targets(rewritten.forward).count(torch.ops.aten.t.default)
    values = [node for node in rewritten.backward.graph.nodes if node.target is torch.ops.aten.tanh.default]
    assert all(node.users for node in values)  # each run is read


def for_policy(policy):
    return lambda graph: ackpt.plan(graph, policy=policy).schedule


@pytest.mark.parametrize(
    "make, schedule", [(model, for_policy("none")), (model, for_policy("full")), (views, for_every_use)]
)
def test_rewritten_steps_are_bit_equal_to_eager(make, schedule):
    eager, planned = make(), make()
    lowered = lambda graph: types.SimpleNamespace(schedule=schedule(graph), limit_bytes=None)  # noqa: E731
    step = PlannedStep(planned, Request(planner=lowered, differentiate="all"))
    for seed in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        for call in (eager, step):
            torch.manual_seed(seed)
            call(x).square().sum().backward()
    assert_equal([p.grad for p in eager.parameters()], [p.grad for p in planned.parameters()], "gradient")
    assert_equal([*eager.buffers()], [*planned.buffers()], "buffer")
