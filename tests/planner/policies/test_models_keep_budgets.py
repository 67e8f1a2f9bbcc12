"""Small models of many kinds under the default policy: a budget is refused or kept, and they train as unplanned."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import assert_equal, left_by_steps, measured_step, model_of
from torch import nn

import ackpt
from experiments.steps.captured_step import CapturedStep

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = 20
ENDS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


def with_labels():
    found = torch.randint(WORDS, (2, 12))
    return {"input_ids": found, "labels": found}


def llama():
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32, **ENDS
    )
    return transformers.LlamaForCausalLM(config), {**with_labels(), "use_cache": False}


def distilbert():
    config = transformers.DistilBertConfig(dim=16, hidden_dim=32, n_layers=2, n_heads=2, **ENDS)
    return transformers.DistilBertForMaskedLM(config), with_labels()


def convnext():
    config = transformers.ConvNextConfig(hidden_sizes=[4, 8, 8, 8], depths=[1, 1, 1, 1], num_labels=5)
    images = torch.randn(2, 3, 32, 32)
    return transformers.ConvNextForImageClassification(config), {"pixel_values": images, "labels": torch.tensor([1, 2])}


def lstm():
    def forward(self, input_ids):
        hidden, _ = self.layers(self.embedding(input_ids))
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), input_ids.flatten())}

    return model_of(
        forward, embedding=nn.Embedding(WORDS, 32), head=nn.Linear(32, WORDS), layers=nn.LSTM(32, 32, 3, dropout=0.2)
    ), {"input_ids": torch.randint(WORDS, (48, 4))}


MODELS = {"llama": llama, "distilbert": distilbert, "convnext": convnext, "lstm": lstm}


def loss_of(step):
    """Calls that keep the loss only."""
    return lambda **kwargs: step(**kwargs)["loss"]


@pytest.mark.parametrize("name", MODELS)
def test_budgets_are_kept_or_refused(name):
    model, kwargs = MODELS[name]()
    model.train()
    initial, plain = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
    captured = CapturedStep(model, **kwargs)
    graph = captured.graph
    baseline = ackpt.plan(graph, policy="none").dynamic_peak_bytes
    expected = left_by_steps(plain, loss_of(plain), [()] * 3, **kwargs)
    with pytest.raises(ackpt.BudgetError) as refused:
        ackpt.plan(graph, budget=1e-3)
    least = float(re.findall(r"or ([\d.]+) of the baseline", str(refused.value))[0])
    assert least < 1
    for budget in {max(0.5, least), least}:
        model.load_state_dict(initial)
        plan = ackpt.plan(graph, budget)
        step = captured.planned(plan)
        assert_equal(left_by_steps(model, loss_of(step), [()] * 3, **kwargs), expected, "training")
        found = measured_step(model, loss_of(step), **kwargs).dynamic_peak_bytes
        assert found <= 1.01 * budget * baseline
        assert abs(plan.dynamic_peak_bytes - found) <= 0.01 * found
