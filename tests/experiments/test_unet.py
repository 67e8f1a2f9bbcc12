"""The U-Net of Stable Diffusion XL: its published size, a checkpointed step, its plan, bad input."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_equal, raises

import ackpt
from ackpt.planner.workloads.step_request import StepRequest, training_step
from experiments.models import UNet, UNetConfig

TINY = UNetConfig(widths=(32, 64), depths=(0, 2), head_dim=16, text_tokens=5, text_dim=24, pooled_dim=8)


def batch(size=8):
    torch.manual_seed(0)
    latents, noise = torch.randn(2, 4, size, size), torch.randn(2, 4, size, size)
    return latents, torch.tensor([3, 700]), torch.randn(2, 5, 24), torch.randn(2, 8), torch.randint(64, (2, 6)), noise


def test_the_default_has_the_parameters_of_the_published_checkpoint():
    with torch.device("meta"):
        model = UNet()
    assert sum(parameter.numel() for parameter in model.parameters()) == 2_567_463_684
    assert (len(model.down), len(model.up)) == (6, 9)


def test_the_loss_is_the_mean_squared_error_and_depends_on_every_input():
    model = UNet(TINY).double()
    *given, noise = (tensor.double() if tensor.is_floating_point() else tensor for tensor in batch())
    predicted = model(*given)
    assert predicted.shape == noise.shape
    assert model(*given, noise).item() == pytest.approx(F.mse_loss(predicted, noise).item(), rel=1e-6)
    for place, tensor in enumerate(given):
        changed = [tensor + 1 if place == other else same for other, same in enumerate(given)]
        assert not torch.allclose(model(*changed), predicted)


def test_a_checkpointed_step_has_the_same_bits():
    model, inputs = UNet(TINY), batch()
    other = copy.deepcopy(model)
    ackpt.apply_activation_checkpointing(other)
    for one in (model, other):
        one(*inputs).backward()
    assert_equal([p.grad for p in other.parameters()], [p.grad for p in model.parameters()], "gradients")


def test_latents_have_an_eighth_of_the_image():
    fields = {"widths": [32, 64], "depths": [0, 1], "head_dim": 16}
    inputs = training_step(StepRequest("sdxl-unet", 3, image_size=64, fields=fields)).inputs
    assert inputs["latents"].shape == inputs["noise"].shape == (3, 4, 8, 8)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: UNetConfig(widths=(32,), depths=(1,)), "widths and depths must name the same two or more"),
        (lambda: UNetConfig(widths=(32, 64), depths=(1,)), "widths and depths must name the same two or more"),
        (lambda: UNetConfig(widths=(32, 72), depths=(0, 1), head_dim=8), "widths must be multiples of 32"),
        (lambda: UNetConfig(residuals=0), "residuals must be a positive integer, got 0"),
        (lambda: UNet(TINY)(*batch(9)), r"latents must be \[batch, 4, .* multiples of 2"),
    ],
)
def test_bad_input_is_refused(make, says):
    raises(ValueError, says, make)
