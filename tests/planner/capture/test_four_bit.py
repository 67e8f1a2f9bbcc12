"""Frozen 4-bit weights of bitsandbytes: their state is an input of the step, and counts as parameters."""

import copy
import warnings
from typing import Any

import pytest
import torch
from conftest import assert_equal, left_by, measured_step, raises
from torch import nn

import ackpt

bnb = pytest.importorskip("bitsandbytes")


class Adapted(nn.Module):
    def __init__(self, inputs, outputs, **options):
        super().__init__()
        self.base = bnb.nn.Linear4bit(inputs, outputs, bias=False, **options)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(Adapted(64, 256, **options), nn.GELU(), Adapted(256, 64, **options)) for _ in range(2)]
        self.first, self.blocks = nn.Linear(64, 64), nn.Sequential(*blocks)

    def forward(self, x):
        return self.blocks(self.first(x)).square().mean()


def quantized(**options) -> Any:
    return Model(**options).to("cpu")


OPTIONS = {
    "nf4, nested": {"quant_type": "nf4"},
    "fp4": {"quant_type": "fp4", "compress_statistics": False},
    "packed as bfloat16": {"quant_type": "nf4", "quant_storage": torch.bfloat16},
    "products in bfloat16": {"quant_type": "nf4", "compute_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("autocast", [False, True])
def test_a_planned_step_is_bit_equal_and_takes_the_planned_bytes(options, autocast):
    model, x = quantized(**options), torch.randn(32, 64)
    eager = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        step = ackpt.apply_budget(model, x, budget=0.9)
    expected = left_by(eager, eager, x, autocast=autocast)
    assert_equal(left_by(model, model, x, autocast=autocast), expected, "step")
    measured = measured_step(model, model, x, autocast=autocast)
    assert measured.dynamic_peak_bytes <= step.plan.dynamic_peak_bytes
    assert measured.resident_bytes == step.plan.resident_bytes


def test_measured_is_planned_to_the_byte():
    model, x = quantized(quant_type="nf4"), torch.randn(32, 64)
    step = ackpt.apply_budget(model, x, budget=0.8)
    measured = measured_step(model, model, x)
    assert (measured.peak_bytes, measured.resident_bytes) == (step.plan.peak_bytes, step.plan.resident_bytes)
    state = model.blocks[0][0].base.weight.quant_state
    assert state.nested and state.absmax.dtype is torch.uint8


def test_weights_that_merging_replaces_are_read_in_the_next_call():
    model, x = quantized(quant_type="nf4"), torch.randn(32, 64)
    eager = copy.deepcopy(model)
    step = ackpt.apply_budget(model, x, budget=0.9)
    plan = step.plan
    for kind in ("nf4", "fp4"):
        weight, options = torch.randn(256, 64), {"quant_type": kind, "compress_statistics": kind == "nf4"}
        for each in (model, eager):
            layer = each.blocks[0][0].base
            layer.weight = bnb.nn.Params4bit(weight, module=layer, **options).to("cpu")
        assert_equal(left_by(model, model, x), left_by(eager, eager, x), "step")
        assert (step.plan is plan) == (kind == "nf4")


def test_shapes_alone_are_planned_and_predicted_as_the_model_is():
    model, x = quantized(quant_type="nf4"), torch.randn(32, 64)
    without_data = ackpt.from_shapes(lambda: (Model(quant_type="nf4"), torch.randn(32, 64)))
    assert ackpt.trace(*without_data).bytes() == ackpt.trace(model, x).bytes()
    predicted = ackpt.predict(lambda: without_data[0](without_data[1]).backward(), resident=without_data)
    measured = ackpt.measure(lambda: model(x).backward(), resident=(model, x))
    assert predicted.unknown_workspace == ()
    assert (predicted.peak_bytes, predicted.resident_bytes) == (measured.peak_bytes, measured.resident_bytes)
    loaded = quantized(quant_type="nf4")
    left_by(loaded, loaded, x)  # the library's tables have data


def test_a_trained_weight_is_refused():
    model = quantized(quant_storage=torch.float32, compute_dtype=torch.float32)
    model.blocks[0][0].base.weight.requires_grad = True
    raises(ackpt.TraceError, "Freeze it. To plan", lambda: ackpt.apply_budget(model, torch.randn(32, 64), budget=0.9))


def test_regions_restore_the_weight_that_the_first_forward_moves():
    def build() -> Any:
        torch.manual_seed(0)
        layers = (bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False) for _ in range(2))
        return nn.Sequential(nn.Linear(64, 64), *(nn.Sequential(each, nn.Tanh()) for each in layers)).to("cpu")

    x = torch.randn(8, 64)
    eager, model = build(), build()
    ackpt.apply_activation_checkpointing(model, lambda module: isinstance(module, nn.Sequential))
    for each in (eager, model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            each(x).sum().backward()
    assert torch.equal(eager[0].weight.grad, model[0].weight.grad)
