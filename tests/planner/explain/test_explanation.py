"""`ackpt.explain`: lines and categories that add up to the byte, and suggestions that hold when they are applied."""

from fnmatch import fnmatch

import pytest
import torch
from conftest import measured_step, model_of
from torch import nn

import ackpt
from ackpt.cli import plan_text
from ackpt.models import LanguageModel, TransformerConfig
from ackpt.planner.capture.optimizer_state import eight_bit_bytes, optimizer_bytes
from ackpt.planner.explain.page import page
from ackpt.planner.sharding.sharded_model import ShardedModel
from ackpt.planner.sharding.sharding import Sharding
from ackpt.planner.workloads.planned_shapes import PlanConfig, run_plan
from ackpt.planner.workloads.step_request import StepRequest

TOKENS = 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        return x + self.down(hidden)


def make_model():
    def forward(self, x, scale=1.0):
        for block in self.blocks:
            x = block(x)
        return (scale * x).square().mean()

    return model_of(forward, blocks=nn.ModuleList(Block() for _ in range(4)))


X = torch.ones(64, 8)


def language_model():
    model = LanguageModel(TransformerConfig(dim=64, ff_dim=128, layers=2, head_dim=16, vocab_size=5000))
    ids, starts = torch.randint(5000, (TOKENS,)), torch.tensor([0, TOKENS], dtype=torch.int32)
    return model, {"tokens": ids, "cu_seqlens": starts, "max_seqlen": TOKENS, "targets": ids}


@pytest.fixture(scope="module")
def explained():
    model, batch = language_model()
    return ackpt.explain(model, batch, optimizer=torch.optim.AdamW(model.parameters()))


def suggestion(explanation, words: str):
    (one,) = (s for s in explanation.suggestions if s.title.startswith(words) and " and chunk" not in s.title)
    return one


def test_lines_add_up_to_what_the_baseline_saves(explained):
    saved = explained.plan.saved_bytes
    assert sum(line.bytes for line in explained.saved) == saved == sum(line.saved_bytes for line in explained.saved)
    assert sum(explained.by_block.values()) == sum(explained.by_type.values()) == saved
    assert len({(line.module, line.source) for line in explained.saved}) == len(explained.saved)
    names = [name for line in explained.saved for name in line.nodes]
    assert sorted(names) == sorted(explained.plan.fates)


def test_live_kinds_add_up_to_the_peak(explained):
    assert sum(explained.at_peak.values()) == sum(a.bytes for a in explained.live) == explained.plan.peak_bytes
    sizes = explained.graph.bytes()
    assert explained.at_peak["parameters"] == sizes["parameter"]
    assert explained.at_peak["optimizer"] == explained.graph.optimizer_bytes


def test_a_plan_s_fates_and_recomputed_bytes_are_shown():
    explanation = ackpt.explain(make_model(), X, 0.7)
    assert explanation.plan.policy == "auto" and explanation.plan.recompute_flops > 0
    assert sum(line.saved_bytes for line in explanation.saved) <= explanation.plan.saved_bytes
    assert sum(line.bytes for line in explanation.saved) > explanation.plan.saved_bytes
    assert "recomputed" in {fate for line in explanation.saved for fate in line.fates}
    assert "[recomputed]" in str(explanation)


@pytest.mark.parametrize("batch", [X, (X,), [X, 2.0], {"x": X, "scale": 2.0}])
def test_a_batch_is_a_tensor_arguments_or_keywords(batch):
    line = ackpt.explain(make_model(), batch).saved[0]
    assert (line.module, line.operations, line.bytes) == ("blocks.0", ("tanh",), 64 * 32 * 4)
    assert line.source.startswith(f"{__file__}:")
    assert line.flops == 2 * 64 * 8 * 32  # of the product before it; tanh counts none


def test_a_slice_is_named_with_the_storage_that_it_keeps():
    whole = torch.ones(100, 64, 8)
    views = (
        "The inputs count with their whole storage: argument x of shape [64, 8] is a view of 200.0 KiB. "
        "To count a view alone, pass its clone()."
    )
    explanation = ackpt.explain(make_model(), {"x": whole[0]})
    assert explanation.at_peak["inputs"] == whole.nbytes
    assert f"note              {views}" in repr(explanation).splitlines()
    assert views in page(explanation)
    copied = ackpt.explain(make_model(), {"x": whole[0].clone()})
    assert copied.views == "" and "note  " not in repr(copied)


def test_a_device_gives_seconds_and_the_same_peak():
    cpu, gpu = ackpt.explain(make_model(), X), ackpt.explain(make_model(), X, device="h200")
    assert cpu.plan.peak_bytes == gpu.plan.peak_bytes
    for explanation in (cpu, gpu):
        assert all(line.seconds is not None and line.seconds > 0 for line in explanation.saved)
        assert " ms " in str(explanation) and "FLOP" not in str(explanation)
    assert cpu.saved[0].seconds > gpu.saved[0].seconds


def test_equal_modules_are_one_line():
    text = str(ackpt.explain(make_model(), X))
    assert "4 x blocks.* (tanh): 8.0 KiB each, " in text
    assert text.splitlines()[0].startswith("peak ")


def test_one_of_several_results_has_the_name_of_its_operation():
    explanation = ackpt.explain(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()), X)
    (norm,) = (line for line in explanation.saved if line.module == "0")
    assert set(norm.operations) == {"native_layer_norm"} and all(name.startswith("getitem") for name in norm.nodes)
    assert " 0 (native_layer_norm)\n" in str(explanation) and "getitem" not in str(explanation)


def test_activations_that_cannot_be_recomputed_are_marked():
    def forward(self, x):
        return (x * torch.rand(8, generator=self.generator) * self.weight).sum()

    own = model_of(forward, weight=nn.Parameter(torch.ones(8)), generator=torch.Generator())
    explanation = ackpt.explain(own, X)
    assert ["generator" in line.reason for line in explanation.saved] == [True]
    assert "cannot" in str(explanation)


def test_checkpointing_saves_what_a_plan_of_policy_full_saves():
    model = make_model()
    explanation = ackpt.explain(model, X)
    best = suggestion(explanation, "checkpoint")
    step = ackpt.compile(model, X, policy="full")
    assert (best.peak_bytes, best.cost) == (step.plan.peak_bytes, step.plan.cost)
    assert best.saved_bytes == explanation.plan.peak_bytes - step.plan.peak_bytes > 0
    assert best.title == "checkpoint 3 x blocks.*"  # recomputing the last one would not lower the peak


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("words", ["chunk the head", "checkpoint * and chunk the head"])
def test_a_head_in_chunks_keeps_the_budget_that_is_suggested(trained, words):
    model, batch = language_model()
    model.head.weight.requires_grad_(trained)
    explanation = ackpt.explain(model, batch)
    (best,) = (s for s in explanation.suggestions if fnmatch(s.title, words))
    names = {"ackpt": ackpt, "model": model, "batch": batch}
    plan = eval(best.fix, names).plan  # noqa: S307
    assert best.peak_bytes <= plan.limit_bytes + plan.resident_bytes
    assert measured_step(model, model, **batch).peak_bytes <= plan.limit_bytes + plan.resident_bytes


def test_without_a_cross_entropy_no_chunks_are_suggested():
    explanation = ackpt.explain(make_model(), X)
    assert not [s for s in explanation.suggestions if "chunk" in s.title]
    assert any(reason.startswith("chunk the head: ") for reason in explanation.not_computed)


def test_eight_bits_count_scales_and_leave_small_tensors():
    model = nn.Linear(64, 128)
    adam = torch.optim.AdamW(model.parameters())
    state, _ = optimizer_bytes(adam)
    assert state - eight_bit_bytes(adam) == 2 * (4 * 8192 - (8192 + 4 * 8192 // 256))
    best = suggestion(ackpt.explain(model, torch.ones(4, 64), optimizer=adam), "8-bit")
    assert best.saved_bytes == state - eight_bit_bytes(adam)


def test_a_fused_optimizer_saves_what_its_own_plan_saves():
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.ones(2, 64)
    best = suggestion(
        ackpt.explain(model, x, optimizer=torch.optim.AdamW(model.parameters(), foreach=True)),
        "an optimizer's step that allocates nothing",
    )
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    assert best.peak_bytes == ackpt.plan(ackpt.trace(model, x, optimizer=fused)).peak_bytes


def test_a_plan_that_offloads_adds_up_as_well():
    model, batch = language_model()
    explanation = ackpt.explain(model, batch, 0.9, device="h200")
    assert explanation.plan.schedule.offloaded and "[offloaded]" in str(explanation)
    assert sum(explanation.at_peak.values()) == explanation.plan.peak_bytes
    assert "shard over 8 ranks: plans that offload are not simulated for shards" in explanation.not_computed


def test_sharding_saves_what_the_planner_for_shards_finds():
    config = PlanConfig(StepRequest("bert-base", 2, 16, None, {"dim": 32, "layers": 2, "heads": 2, "ff_dim": 64}))
    best = suggestion(plan_text.explanation(run_plan(config)), "shard over 8")
    assert best.peak_bytes == ShardedModel(config).plan(Sharding(8), policy="none").peak_bytes


def test_the_state_of_an_optimizer_of_any_class_is_sharded():
    class Own(torch.optim.SGD):
        def __init__(self, params, speed):
            super().__init__(params, lr=speed, momentum=0.9)

    model = make_model()
    with_momentum, without = (
        suggestion(ackpt.explain(model, X, optimizer=optimizer), "shard over 8").peak_bytes
        for optimizer in (Own(model.parameters(), 0.1), torch.optim.SGD(model.parameters()))
    )
    shards = sum(4 * -(-len(p) // 8) * p[0].numel() for p in model.parameters())
    assert with_momentum - without == shards


def test_missing_suggestions_have_a_reason():
    linear = ackpt.explain(nn.Linear(8, 8), X)
    assert linear.saved == () and "saved for backward: 0 B" in str(linear)
    (reason,) = (reason for reason in linear.not_computed if reason.startswith("shard over 8 ranks: Linear has no"))
    assert "--fsdp" not in reason
    with pytest.raises(ValueError, match="ranks must be a whole number of at least 2, got 1"):
        ackpt.explain(make_model(), X, ranks=1)


def test_suggestions_are_sorted_and_are_about_the_plan(explained):
    savings = [s.saved_bytes for s in explained.suggestions]
    assert savings == sorted(savings, reverse=True) and min(savings) > 0
    assert all(s.peak_bytes == explained.plan.peak_bytes - s.saved_bytes for s in explained.suggestions)
    assert not ackpt.explain(make_model(), X, policy="full").suggestions


def test_a_model_that_checkpoints_itself_is_explained_without_it_and_with_a_note():
    class Checkpointed(torch.nn.Linear):
        def forward(self, x):
            inner = super().forward
            return torch.utils.checkpoint.checkpoint(lambda x: inner(x).tanh(), x, use_reentrant=False)

    x = torch.ones(4, 8)
    with pytest.warns(UserWarning, match="(?s)torch.utils.checkpoint itself.*statistics .* once per step"):
        explanation = ackpt.explain(Checkpointed(8, 8), x)
    first, second, *_ = str(explanation).splitlines()
    assert first.startswith("left out          torch.utils.checkpoint, which the model calls")
    assert second.endswith("ackpt.print_saved(model, batch)")
    assert "left out" not in str(ackpt.explain(torch.nn.Linear(8, 8), x))
