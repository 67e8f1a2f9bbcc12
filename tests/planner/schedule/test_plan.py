"""Plans: fates, table, JSON that reads back, the graph they belong to, and the policies that make them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import assert_as_eager, model_of, raises
from planned_models import Mean
from torch import nn

import ackpt
from ackpt.graph import PlanError, Step
from ackpt.metering.meter import memory_format
from ackpt.planner.costs.devices import device
from ackpt.planner.policies import POLICIES
from ackpt.planner.schedule.allocations import device_memory


def model():
    torch.manual_seed(0)
    forward = lambda self, x: x + self.down(nn.functional.gelu(self.up(x)))  # noqa: E731
    blocks = (model_of(forward, up=nn.Linear(8, 32), down=nn.Linear(32, 8)) for _ in range(4))
    return nn.Sequential(*blocks, Mean())


X = torch.ones(64, 8)


@pytest.fixture(scope="module")
def graph():
    return ackpt.trace(model(), X)


def test_a_plan_lists_the_fate_of_every_activation(graph):
    none, full = ackpt.plan(graph), ackpt.plan(graph, policy="full")
    assert set(none.fates.values()) == {"saved"} and none.recompute_flops == 0
    assert none.peak_bytes == none.baseline_peak_bytes == full.baseline_peak_bytes
    assert "recomputed" in full.fates.values() and full.saved_bytes < none.saved_bytes
    assert none.fates.keys() <= full.fates.keys()
    for plan in (none, full):
        kept = sum(activation.bytes for activation in plan.activations if activation.fate == "saved")
        assert kept == plan.saved_bytes
        assert plan.timeline.peak_bytes == plan.dynamic_peak_bytes == plan.peak_bytes - plan.resident_bytes
    modules = {activation.module for activation in none.activations}
    assert {"0.up", "0", "3.up"} <= modules


def test_the_table_names_the_promise_and_the_largest(graph):
    plan = ackpt.plan(graph, policy="full")
    lines = plan.table().splitlines()
    assert lines[0].split() == ["policy", "full"]
    assert plan.peak_node in plan.table()
    saved = sum(fate == "saved" for fate in plan.fates.values())
    again = sum(fate == "recomputed" for fate in plan.fates.values())
    assert f"{saved} of {len(plan.fates)} saved, " in plan.table() and f"; {again} recomputed, 0 off" in plan.table()
    assert repr(plan).startswith("<Plan of policy 'full': peak ") and len(repr(plan)) < 120
    assert len(lines) == 9 + min(10, len(plan.groups())) + 2 + len(plan.decisions)


def test_the_table_has_one_line_for_equal_layers(graph):
    plan = ackpt.plan(graph)
    groups = plan.groups()
    assert sorted(a.name for group in groups for a in group) == sorted(plan.fates)
    up = next(group for group in groups if group[0].module.endswith(".up"))
    assert [a.module for a in up] == ["0.up", "1.up", "2.up", "3.up"]
    line = next(line for line in plan.table().splitlines() if "*.up" in line)
    file = Path(__file__).relative_to(Path.cwd()) if Path(__file__).is_relative_to(Path.cwd()) else Path(__file__)
    assert line.startswith(f"{memory_format(sum(a.bytes for a in up))} ")
    assert f"4 x *.up (addmm): {memory_format(up[0].bytes)} each, {file}:" in line


def test_equal_layers_with_different_fates_have_a_line_each(graph):
    plan = ackpt.plan(graph, 0.8)
    assert len(set(plan.fates.values())) > 1
    assert all(len({(a.fate, a.bytes, a.source) for a in group}) == 1 for group in plan.groups())


def test_a_plan_reads_back_and_runs(graph, tmp_path):
    plan = ackpt.plan(graph, budget=0.9, policy="full")
    read = ackpt.Plan.load(plan.save(tmp_path / "plan.json"))
    assert read == plan and read.table() == plan.table()
    other = model()
    step = ackpt.compile(other, X, plan=read)
    assert step.plan is read
    assert_as_eager(other, step, X)


def without(key):
    return lambda data: {name: value for name, value in data.items() if name != key}


def edited(change):
    return lambda text: json.dumps(change(json.loads(text)))


NO_PLANS = [
    *(
        (lambda text, share=share: text[: int(share * len(text))], "is not a plan: .*truncated")
        for share in (0, 0.3, 0.9, 0.999)
    ),
    (edited(lambda data: []), "not a plan of this version"),
    (edited(lambda data: 3), "not a plan of this version"),
    (edited(lambda data: {**data, "version": 99}), "not a plan of this version"),
    (edited(lambda data: {**data, "schema": "other"}), "not a plan of this version"),
    (edited(without("schedule")), "not a complete plan .*schedule"),
    (edited(without("peak_bytes")), "not a complete plan .*peak_bytes"),
    (edited(lambda data: {**data, "schedule": None}), "not a complete plan"),
    (edited(lambda data: {**data, "activations": [{}]}), "not a complete plan"),
    *(
        (edited(lambda data, name=name: {**data, name: 1}), "plan.json was changed after it was saved.*plan again")
        for name in ("peak_bytes", "limit_bytes", "flops", "cost", "policy", "digest")
    ),
]


@pytest.mark.parametrize(("change", "message"), NO_PLANS)
def test_a_file_that_is_no_plan_is_refused(graph, tmp_path, change, message):
    path = ackpt.plan(graph).save(tmp_path / "plan.json")
    path.write_text(change(path.read_text()))
    raises(PlanError, message, lambda: ackpt.Plan.load(path))
    raises(PlanError, "cannot be read: Is a directory; give the file", lambda: ackpt.Plan.load(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"saved_bytes": 1}, r"its saved_bytes are 1, but .* they are \d+\. Plan again"),
        ({"resident_bytes": 1}, r"its resident_bytes are 1, but .* at least \d+"),
        ({"peak_bytes": 10**4}, r"its peak_bytes are 10000, but .* at least \d+"),
        ({"limit_bytes": 10}, r"its peak_bytes are \d+, but .* at most \d+"),
    ],
)
def test_a_plan_that_says_other_bytes_than_its_schedule_is_refused(graph, change, message):
    raises(PlanError, message, lambda: ackpt.compile(model(), X, plan=replace(ackpt.plan(graph), **change)))


@pytest.mark.parametrize("steps", [(), (Step("compute", 10**6),), (Step("free", 0),), (Step("compute", "x"),)])
def test_a_plan_whose_schedule_cannot_run_is_refused(graph, steps):
    plan = ackpt.plan(graph)
    with pytest.raises(PlanError, match="the schedule of this plan cannot run"):
        ackpt.compile(model(), X, plan=replace(plan, schedule=replace(plan.schedule, forward=steps)))


def test_a_plan_without_optimizer_state_is_refused_for_a_step_with_it(graph):
    own = model()
    adam = torch.optim.Adam(own.parameters())
    with pytest.raises(PlanError, match="its resident_bytes are .* and the optimizer, the accumulated gradients"):
        ackpt.compile(own, X, plan=ackpt.plan(graph), optimizer=adam)
    with pytest.raises(PlanError, match="its resident_bytes are .* the accumulated gradients and the scaler that are"):
        ackpt.compile(own, X, plan=ackpt.plan(graph), accumulation=True)
    plan = ackpt.plan(ackpt.trace(own, X, optimizer=adam))
    for optimizer in (adam, None):
        assert ackpt.compile(own, X, plan=plan, optimizer=optimizer).plan is plan


def test_a_missing_file_is_named(graph, tmp_path):
    raises(ackpt.RecordError, "is a folder: name a file in it", lambda: ackpt.plan(graph).save(tmp_path))
    with pytest.raises(FileNotFoundError):
        ackpt.Plan.load(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    raises(PlanError, "is not a plan", lambda: ackpt.Plan.load(tmp_path / "binary"))


@pytest.mark.parametrize("change", ["dtype", "model"])
def test_a_plan_for_another_graph_is_refused(graph, change):
    plan, own, x = ackpt.plan(graph), model(), X
    if change == "dtype":
        own, x = own.double(), X.double()
    else:
        own[0] = nn.ReLU()
    raises(PlanError, "made for another graph .*Plan again", lambda: ackpt.compile(own, x, plan=plan))
    step = ackpt.compile(model(), X, plan=plan)
    raises(PlanError, "a part of a larger tensor.*clone", lambda: step(X[:3]))
    step(X[:3].clone())


@pytest.mark.parametrize(("what", "value"), [("budget", 0.5), ("policy", "full"), ("options", {"fates": {}})])
def test_a_plan_excludes_options_that_make_one(graph, what, value):
    with pytest.raises(ValueError, match=f"either (a )?{what} or a plan"):
        ackpt.compile(model(), X, plan=ackpt.plan(graph), **{what: value})


def test_an_unknown_policy_is_refused_with_the_known_ones(graph):
    names = ", ".join(POLICIES)
    for call in (lambda: ackpt.plan(graph, policy="magic"), lambda: ackpt.compile(model(), X, policy="magic")):
        raises(ValueError, f"policy 'magic' is not known; the policies are {names}", call)
    for name, message in [
        ("ful", r"'ful' is not known \(did you mean 'full'\?\); the"),
        (["full"], r"\['full'\] is not"),
    ]:
        with pytest.raises(ValueError, match=message):
            ackpt.compile(model(), X, policy=name)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ([1], TypeError, "options must be a dict of options of the policy.*got list"),
        ("time_limit", TypeError, "options must be a dict of options of the policy.*got str"),
        ({"budget": 0.5}, TypeError, "'budget' is not an option of a policy: pass it as an argument of its own"),
        ({"compiler": "inductor"}, TypeError, "'compiler' is an option of torch.compile"),
        ({"fuel": 3}, TypeError, "'fuel' is not an option of a plan"),
    ],
)
def test_unknown_options_are_refused(options, error, message):
    raises(error, message, lambda: ackpt.compile(model(), X, options=options))


def test_a_keyword_that_the_model_does_not_take_is_refused_with_those_of_compile():
    with pytest.raises(TypeError, match="unexpected keyword argument 'fuel'.* but those of ackpt.compile: .*options"):
        ackpt.compile(model(), X, policy="full", fuel=3)


def test_manual_fates_are_used_or_refused_by_name(graph):
    names = list(ackpt.plan(graph).fates)
    chosen = {name: "recomputed" for name in names if name.startswith("gelu")}
    plan = ackpt.plan(graph, policy="manual", fates=chosen)
    assert all(plan.fates[name] == fate for name, fate in chosen.items())
    assert ackpt.plan(graph, policy="manual", fates={}).schedule == ackpt.plan(graph).schedule
    bad = [
        ({"nobody": "saved"}, "no activation is called 'nobody'"),
        ({names[0]: "lost"}, "a fate is 'saved', 'packed', 'recomputed' or 'offloaded', got 'lost'"),
        ({names[0]: ["saved"], names[1]: 3}, r"a fate is 'saved', 'packed', .* or 'offloaded', got \['saved'\]"),
        ({3: "saved", "gleu": "saved"}, "no activation is called 3; the names"),
    ]
    for fates, message in bad:
        with pytest.raises(ValueError, match=message):
            ackpt.plan(graph, policy="manual", fates=fates)
    for fates in ([names[0]], None, "saved", 3):
        with pytest.raises(TypeError, match="fates must be a dict {name of an activation: fate}, got"):
            ackpt.plan(graph, policy="manual", fates=fates)
    raises(TypeError, "fates", lambda: ackpt.plan(graph, policy="manual"))


def test_values_without_a_fate_are_saved_only_if_backward_reads_them():
    chain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), Mean())
    graph = ackpt.trace(chain, X)
    none = ackpt.plan(graph)
    plan = ackpt.plan(graph, policy="manual", fates=dict.fromkeys(none.fates, "recomputed"))
    relus = [name for name in none.fates if name.startswith("relu")]
    assert relus and none.saved_bytes - plan.saved_bytes >= len(relus) * X.nbytes
    other = ackpt.plan(graph, policy="manual", fates={"addmm": "saved", "relu": "recomputed"})
    assert {"addmm": "saved", "relu": "recomputed", "relu_1": "saved"}.items() <= other.fates.items()


def test_one_operation_has_one_fate():
    class Sorted(nn.Linear):
        def forward(self, x):
            values, places = super().forward(x).sort()
            return values.sin() * places

    graph = ackpt.trace(Sorted(8, 8), X)
    first, second = (name for name in ackpt.plan(graph).fates if name.startswith(("getitem", "sort")))
    with pytest.raises(ValueError, match="outputs of one operation"):
        ackpt.plan(graph, policy="manual", fates={first: "saved", second: "recomputed"})


def test_a_model_passed_as_graph_is_refused():
    for call in (ackpt.plan, ackpt.profile):
        with pytest.raises(TypeError, match=r"graph must come from ackpt.trace\(model, \*args\), got Linear"):
            call(torch.nn.Linear(2, 2))


def test_a_budget_of_reserved_bytes_holds_for_the_allocator_of_the_device():
    block = lambda: nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256))  # noqa: E731
    model = nn.Sequential(*[block() for _ in range(8)])
    graph = ackpt.trace(model, torch.zeros(8192, 256))
    profile = ackpt.profile(graph, "t4")

    def reserved(plan):
        return device_memory(graph, profile.workspace_bytes, plan.schedule, device("t4"), 0).reserved

    allocated, bounded = (ackpt.plan(graph, budget, profile=profile) for budget in ("300MiB", "300MiB reserved"))
    assert (
        reserved(allocated) > 300 * 2**20 >= reserved(bounded) and bounded.recompute_flops > allocated.recompute_flops
    )
    with pytest.raises(ackpt.BudgetError, match="no plan was found for which the allocator reserves at most 99.0 MiB"):
        ackpt.plan(graph, "99MiB reserved", profile=profile)
    with pytest.raises(ackpt.BudgetError, match="allocator reserves at most 99.0 MiB"):
        ackpt.compile(model, torch.zeros(8192, 256), budget="99MiB reserved", device_profile="t4")
    # A CPU's allocator reserves nothing.
    assert ackpt.plan(graph, "300MiB reserved").limit_bytes == ackpt.plan(graph, "300MiB").limit_bytes


def test_a_budget_of_reserved_bytes_is_refused_where_only_allocated_ones_are_planned():
    model, x = torch.nn.Linear(8, 8), torch.zeros(4, 8)
    with pytest.raises(ValueError, match="'50% reserved' bounds what a GPU's allocator reserves: give bytes"):
        ackpt.compile(model, x, budget="50% reserved")
    with pytest.raises(ValueError, match="regions=True plans allocated bytes"):
        ackpt.compile(model, x, budget="1GiB reserved", regions=True)
