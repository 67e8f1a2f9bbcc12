"""A captured step takes the ways that the plain model takes, also where a model asks whether it is compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from conftest import CAPTURED_AS_COMPILED, assert_equal
from torch import nn

import ackpt


class Asks(nn.Linear):
    def forward(self, x):
        return (super().forward(x) * (3 if torch.compiler.is_compiling() else 2)).square().sum()


class Looks(nn.Linear):
    """Looks at values, unless it is compiled."""

    def forward(self, x):
        if not torch.compiler.is_compiling() and not bool((x == x).all()):
            raise ValueError("not a number")
        return super().forward(x).square().sum()


def same(model, x):
    step = ackpt.compile(model, x, policy="full")
    found = []
    for run in (model, step):
        model.zero_grad()
        loss = run(x)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert_equal(*found, "loss and gradients")
    assert not torch.compiler.is_compiling()


def test_a_model_that_asks_is_captured_as_it_runs_plainly():
    torch.manual_seed(0)
    same(Asks(4, 4), torch.randn(3, 4))


def test_a_model_that_looks_at_values_unless_it_is_compiled_is_captured_so():
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="the model itself looks at .*test_capture_compiling.py.*are bit-equal"):
        same(Looks(4, 4), torch.randn(3, 4))


def test_a_new_size_under_a_profiler_needs_a_budget_in_bytes():
    torch.manual_seed(0)
    model, x = Looks(4, 4), torch.randn(6, 4)
    with pytest.warns(UserWarning, match="are bit-equal") as warned:
        for budget in ("1MiB", 0.9):
            step = ackpt.compile(model, x, budget=budget)
            step(x).backward()
            with torch.profiler.profile():
                if budget == "1MiB":
                    step(x[:3]).backward()
                else:
                    with pytest.raises(ackpt.BudgetError, match="while a profiler runs, that peak cannot be measured"):
                        step(x[:3])
    assert len(warned) == 1  # not one for every capture


class Larger(nn.Module):
    """Compiled, it has another formula, which takes more memory and rounds another way."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = Body(), nn.BatchNorm1d(16), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(nn.functional.dropout(self.norm(self.body(x)), 0.5)).square().mean()


class Body(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)

    def forward(self, x):
        x = super().forward(x)
        if torch.compiler.is_compiling():
            for _ in range(3):
                x = (x * 1.1).tanh().atanh() / 1.1
            return x
        return x.tanh() if x.sum() > 1e9 else x * 1.0


X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))


def measured(model, run):
    for parameter in model.parameters():
        parameter.grad = None
    return ackpt.measure(lambda: run(X).backward(), resident=[model, X], warmup=0, repeats=0).dynamic_peak_bytes


def test_the_difference_is_said_once_and_by_the_plan(tmp_path):
    with pytest.warns(UserWarning, match="module 'body' looks at .*not bit-equal") as said:
        step = ackpt.compile(Larger(), X)
    assert len(said) == 1
    assert "not bit-equal" in step.plan.note and "not bit-equal" in step.plan.table()
    assert "test_capture_compiling.py" in step.plan.note
    step.plan.save(tmp_path / "plan.json")
    assert ackpt.Plan.load(tmp_path / "plan.json").note == step.plan.note


@pytest.mark.filterwarnings(CAPTURED_AS_COMPILED)
def test_a_fraction_is_relative_to_the_models_own_step_as_measured():
    model = Larger()
    graph = ackpt.trace(model, X)
    baseline = measured(model, model)
    everything = ackpt.plan(graph, policy="none")
    assert everything.baseline_dynamic_peak_bytes == baseline < everything.dynamic_peak_bytes
    for budget in (1.0, 0.9, 0.5, 0.1):
        try:
            step = ackpt.compile(model, X, budget=budget)
        except ackpt.BudgetError as error:
            assert "torch.compile" in str(error)
            with pytest.raises(ackpt.BudgetError):
                ackpt.plan(graph, budget=budget)
        else:
            again = ackpt.plan(graph, budget=budget)
            # The note says how far rounding errors moved a gradient, which differs between runs.
            assert replace(again, note=None) == replace(step.plan, note=None)
            assert measured(model, step) == step.plan.dynamic_peak_bytes <= budget * baseline
    with pytest.raises(ackpt.BudgetError):
        ackpt.plan(graph, budget=1.0, policy="none")


@pytest.mark.filterwarnings(CAPTURED_AS_COMPILED)
def test_comparing_changes_nothing():
    model, stepped = Larger(), []
    model.body.weight.grad = torch.ones(16, 16)
    model.body.weight.register_post_accumulate_grad_hook(stepped.append)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    state, versions = torch.get_rng_state(), [parameter._version for parameter in model.parameters()]
    ackpt.compile(model, X)
    assert_equal(before, list(model.state_dict().values()), "state")
    assert torch.equal(torch.get_rng_state(), state) and not stepped
    assert [parameter._version for parameter in model.parameters()] == versions
    assert torch.equal(model.body.weight.grad, torch.ones(16, 16)) and model.head.weight.grad is None


@pytest.mark.filterwarnings(CAPTURED_AS_COMPILED)
def test_without_data_a_fraction_is_refused_and_bytes_are_kept():
    model, x = Larger().to("meta"), X.to("meta")
    for make in (lambda: ackpt.compile(model, x, budget=0.5), lambda: ackpt.plan(ackpt.trace(model, x), "50%")):
        with pytest.raises(ackpt.BudgetError, match="Give bytes"):
            make()
    assert ackpt.compile(model, x, budget="1GiB").plan.peak_bytes <= 2**30


class Fails(nn.Linear):
    def forward(self, x):
        if torch.compiler.is_compiling():
            raise NotImplementedError("no compiled variant")
        return super().forward(x).sum() if x.sum() > 0 else super().forward(x).mean()


class Reshapes(Fails):
    def forward(self, x):
        if torch.compiler.is_compiling():
            return nn.Linear.forward(self, x)
        return super().forward(x)


def test_what_fails_or_returns_something_else_as_compiled_is_refused_with_the_first_reason():
    with pytest.raises(ackpt.TraceError, match="values of a tensor .*is_compiling.*no compiled variant"):
        ackpt.trace(Fails(4, 4), torch.ones(3, 4))
    with pytest.raises(ackpt.TraceError, match="values of a tensor .*output 0 is .*3, 4.* instead of"):
        ackpt.trace(Reshapes(4, 4), torch.ones(3, 4))


JAMBA = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_experts": 2}
JAMBA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
JAMBA |= {"num_experts_per_tok": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "pad_token_id": 0}
NYSTROMFORMER = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
NYSTROMFORMER |= {"intermediate_size": 64, "max_position_embeddings": 32, "segment_means_seq_len": 16}
NYSTROMFORMER |= {"num_landmarks": 4, "conv_kernel_size": 5}
IDS = torch.arange(32).reshape(2, 16)


def test_a_jamba_says_what_its_own_step_takes():
    torch.manual_seed(0)
    model = transformers.JambaForCausalLM(transformers.JambaConfig(**JAMBA))
    with pytest.warns(UserWarning, match="captured as torch.compile runs it.*transformers"):
        graph = ackpt.trace(model, input_ids=IDS, labels=IDS, use_cache=False)

    def step():
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()

    own = ackpt.measure(step, resident=[model, IDS], warmup=0, repeats=0).dynamic_peak_bytes
    plan = ackpt.plan(graph, policy="none")
    assert plan.note and plan.baseline_dynamic_peak_bytes == own < plan.dynamic_peak_bytes


def test_a_nystromformer_that_fails_as_compiled_names_both_reasons():
    model = transformers.NystromformerForMaskedLM(transformers.NystromformerConfig(**NYSTROMFORMER))
    with pytest.raises(ackpt.TraceError, match="values of a tensor .*module 'nystromformer'.*is_compiling.*broadcast"):
        ackpt.trace(model, input_ids=IDS, labels=IDS, attention_mask=torch.ones_like(IDS))
