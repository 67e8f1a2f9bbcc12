"""A step that FSDP2 shards: equal to the byte to what two processes measure, and to itself at another depth."""

import pytest
import torch
from conftest import model_of, raises
from torch import nn

import ackpt
from ackpt.core.budget import from_text
from ackpt.core.errors import BudgetError
from ackpt.planner.capture.optimizer_state import optimizer_bytes
from ackpt.planner.schedule.schedule import scheduled
from ackpt.planner.sharding.planner import CAPTURED, Choice, deep
from ackpt.planner.sharding.sharded_model import ShardedModel
from ackpt.planner.sharding.sharding import (
    Group,
    GroupBytes,
    Sharding,
    ShardingError,
    Walk,
    Weight,
    groups_of,
    sharded_optimizer,
    timeline,
)
from ackpt.planner.workloads.planned_shapes import PlanConfig
from ackpt.planner.workloads.step_request import StepRequest, training_step
from experiments.sharded_check import METHODS, SELECTIVE, check

DEEP = 5


def request(layers) -> StepRequest:
    fields = {"dim": 32, "ff_dim": 64, "layers": layers, "head_dim": 16, "vocab_size": 101}
    return StepRequest("lm", 4, 48, None, fields)


@pytest.fixture(scope="module")
def short():
    return ShardedModel(PlanConfig(request(DEEP)))


@pytest.fixture(scope="module")
def whole():
    return ShardedModel(PlanConfig(request(DEEP)), whole=True)


# In bfloat16 the matrix products of some CPUs take scratch memory; shards of float64 are cast as well.
def test_two_processes_measure_the_predicted_bytes():
    plain, again = check(request(3), Sharding(2, torch.float64, torch.float64, gloo=True))
    for found in (plain, again):
        assert found.measured_bytes == (found.predicted_bytes, found.predicted_bytes), found.method
        assert found.resident_bytes == (found.predicted_resident_bytes, found.predicted_resident_bytes)
    assert again.predicted_bytes < plain.predicted_bytes


def test_torchtitans_step_is_predicted_to_the_byte():
    """Selective checkpointing with results that nobody reads, the last block not resharded, logits that are held."""
    fields = {"dim": 32, "layers": 5, "heads": 4, "kv_heads": 2, "ff_dim": 48, "vocab_size": 96, "positions": 32}
    sharding = Sharding(2, torch.float64, torch.float64, gloo=True, keeps_last=True, holds_outputs=True)
    for found in check(StepRequest("torchtitan-llama", 2, 32, None, fields), sharding, (*METHODS, SELECTIVE)):
        assert found.measured_bytes == (found.predicted_bytes, found.predicted_bytes), found.method
        assert found.resident_bytes == (found.predicted_resident_bytes, found.predicted_resident_bytes)


def test_a_recomputed_block_leaves_out_its_last_projection(whole):
    tokens, dim, ff_dim = 4 * 48, 32, 64
    attention = 2 * tokens * dim * 4 * dim + 4 * tokens * 48 * dim
    assert whole.plan(Sharding(2), policy="full").recompute_flops == DEEP * (attention + 2 * tokens * dim * ff_dim)


def test_blocks_that_share_the_position_biases_of_the_first_are_planned():
    fields = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 101}
    model = ShardedModel(PlanConfig(StepRequest("hf:T5Config", 8, 48, fields=fields)))
    plain, again = (model.plan(Sharding(2), policy=policy) for policy in ("none", "full"))
    assert again.recompute_flops > 0 == plain.recompute_flops
    assert again.at_peak()["activations"] < plain.at_peak()["activations"]


def test_sizes_of_a_group_padded_along_the_first_dimension():
    group = Group("", (Weight("a", (5, 3), torch.bfloat16), Weight("b", (4,), torch.bfloat16, trained=False)))
    sizes = GroupBytes(group, Sharding(4, torch.float32, torch.float32))
    assert sizes.shards == 4 * (2 * 3 + 1)
    assert sizes.cast == 2 * (2 * 3 + 1)
    assert sizes.gather == sizes.unsharded == 4 * sizes.cast
    assert sizes.gathered_from_others == 3 * sizes.cast
    assert (sizes.reduce, sizes.received, sizes.reduced) == (4 * 4 * 6, 4 * 6, 0)
    assert sizes.reduced_to_others == 3 * 4 * 6
    other = GroupBytes(group, Sharding(4, torch.float32))
    assert (other.reduce, other.received, other.reduced) == (4 * 2 * 6, 2 * 6, 4 * 6)
    assert GroupBytes(group, Sharding(4)).cast == 0
    assert GroupBytes(group, Sharding(4, block_bytes=512)).unsharded == 2 * 512


def test_equal_blocks_represent_a_deeper_model(short, whole):
    assert (len(short.blocks.groups) - 1, len(whole.blocks.groups) - 1) == (CAPTURED, DEEP)
    sharding = Sharding(4)
    assert len(short.blocks.choices) == len(whole.blocks.choices) > 4
    for few, all_ in zip(short.blocks.choices, whole.blocks.choices):
        row = short.blocks.windows(short.blocks.uniform(few), sharding)
        expected = whole.blocks.windows(whole.blocks.uniform(all_), sharding)
        assert [w.events for w in deep(row, DEEP)] == [w.events for w in expected], few.name


@pytest.mark.parametrize("policy", ["none", "full", "auto"])
def test_plans_of_a_shortened_model_are_those_of_the_whole(short, whole, policy):
    sharding = Sharding(4, torch.float32)
    budget = None if policy != "auto" else 0.6
    found, expected = short.plan(sharding, budget, policy), whole.plan(sharding, budget, policy)
    assert found.timeline == expected.timeline
    for name in ("resident", "baseline_bytes", "flops", "recompute_flops", "runs", "communication"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.cost == pytest.approx(expected.cost)


def test_a_mix_of_choices_has_the_windows_of_its_parts(whole):
    choices, sharding = whole.blocks.choices, Sharding(2)
    numbers = [0, 3, 1, 0, 4, 1]
    expected = whole.blocks.windows(whole.blocks.schedule([choices[number] for number in numbers]), sharding)
    rows = [whole.blocks.windows(whole.blocks.uniform(choice), sharding) for choice in choices]
    found = [rows[numbers[window.group]][place] for place, window in enumerate(rows[0])]
    assert [w.net for w in found] == [w.net for w in expected]
    assert [w.highest for w in found] == [w.highest for w in expected]


def test_a_budget_is_kept_at_the_least_cost_of_its_mixes(whole):
    sharding = Sharding(4)
    plain, full = whole.plan(sharding), whole.plan(sharding, policy="full")
    assert plain.recompute_flops == 0 and plain.dynamic_peak_bytes == plain.baseline_bytes
    costs = []
    for share in (1.0, 0.8, 0.6, 0.5):
        plan = whole.plan(sharding, share)
        assert plan.dynamic_peak_bytes <= share * plain.dynamic_peak_bytes
        assert plan.flops == plain.flops + plan.recompute_flops
        costs.append(plan.cost)
    assert costs == sorted(costs) and costs[0] == 0 < costs[-1]
    assert whole.plan(sharding, full.peak_bytes).recompute_flops <= full.recompute_flops
    with pytest.raises(BudgetError, match="smallest feasible budget of this policy") as error:
        whole.plan(sharding, 0.01)
    assert whole.plan(sharding, error.value.least_bytes).peak_bytes == error.value.least_bytes
    typed = str(error.value).split("this policy is ")[1].split(" (")[0]
    assert whole.plan(sharding, typed).peak_bytes <= from_text(typed)


def test_every_block_is_gathered_twice_and_all_is_reduced_once(whole):
    found = whole.plan(Sharding(4)).communication
    sizes = [GroupBytes(group, Sharding(4)) for group in whole.groups]
    assert (found.gathers, found.reduces) == (2 * DEEP + 1, DEEP + 1)
    assert found.gathered_bytes == 3 * (sizes[0].gather + 2 * sum(s.gather for s in sizes[1:])) // 4
    assert found.reduced_bytes == 3 * sum(size.reduce for size in sizes) // 4


def test_after_the_step_only_gradients_outputs_and_shards_remain(whole):
    live = timeline(whole.blocks.windows(whole.blocks.plain, Sharding(4)))
    left = {name: series[-1] for name, series in live.categories.items() if series[-1]}
    sizes = [GroupBytes(group, Sharding(4)) for group in whole.groups]
    assert left.pop("gradients") == sum(size.received for size in sizes)
    outputs = {s for p in whole.blocks.graph.outputs for s in whole.blocks.graph.nodes[p].storages}
    tangent = 4
    assert sum(left.values()) == sum(whole.blocks.analysis.bytes[s] for s in outputs) + tangent


def test_the_optimizer_of_many_blocks_is_known_from_three(whole):
    sharding = Sharding(4, torch.float32)
    shards = [
        nn.Parameter(torch.empty(weight.rows(4), *weight.shape[1:], device="meta"))
        for group in whole.groups
        for weight in group.weights
    ]
    expected = optimizer_bytes(torch.optim.AdamW(shards), on_cpu=False)
    assert sharded_optimizer(torch.optim.AdamW, whole.groups, sharding, on_cpu=False) == expected


def test_a_block_that_runs_twice_is_refused():
    def forward(self, x):
        for block in [*self.blocks, *self.blocks]:
            x = block(x).relu()
        return x.sum()

    model = model_of(forward, blocks=nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
    graph = ackpt.trace(model, torch.ones(2, 4))
    profile = ackpt.profile(graph)
    walk = Walk(graph, ackpt.plan(graph).schedule, profile.workspace_bytes, groups_of(model), Sharding(2))
    with pytest.raises(ShardingError, match="block blocks.0 runs more than once in the forward"):
        walk.windows()


def test_recomputing_outside_of_a_blocks_backward_is_refused(whole):
    nothing = Choice("nothing", tuple(frozenset() for _ in whole.groups))
    blocks = whole.blocks
    backward = [step.id for step in blocks.uniform(nothing).backward if step.kind == "compute"]
    recomputed = (place for place in backward if place < blocks.graph.boundary and place in blocks.analysis.allocated)
    early = next(place for place in recomputed if blocks.owners[place] == 2)
    moved = [early, *(place for place in backward if place != early)]
    with pytest.raises(ShardingError, match="runs in backward out of turn"):
        blocks.windows(scheduled(blocks.graph, None, moved), Sharding(2))


def test_models_that_cannot_be_sharded_are_refused():
    raises(ValueError, "Linear has no blocks to shard one by one", lambda: groups_of(nn.Linear(2, 2)))
    tied = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    tied[1][0].weight = tied[0][0].weight
    raises(ValueError, "parameter 1.0.weight is shared by 1 and 0, which are sharded apart", lambda: groups_of(tied))
    single = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    single[0].register_parameter("scale", nn.Parameter(torch.ones(())))
    raises(ValueError, "parameter 0.scale is a single number, which FSDP cannot shard", lambda: groups_of(single))
    with pytest.raises(ValueError, match="policy 'mu-two' does not plan shards"):
        ShardedModel(PlanConfig(request(2))).plan(Sharding(2), policy="mu-two")


def test_blocks_are_the_repeated_ones_of_activation_checkpointing():
    resnet = training_step(StepRequest("resnet18", 1)).model
    assert [group.name for group in groups_of(resnet)[:3]] == ["", "layer1.0", "layer1.1"]
