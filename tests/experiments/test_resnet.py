"""ResNet and the U-Net of Stable Diffusion XL: published sizes, values, checkpointed steps, bytes, bad input."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import raises

from ackpt.planner.workloads.step_request import StepRequest, training_step
from experiments.models import ResNet, ResNetConfig, UNet, UNetConfig, resnet18, resnet50, resnet152

TINY = {kind: ResNetConfig(kind, (2, 1, 2, 2), width=8, num_classes=10) for kind in ("basic", "bottleneck")}
LABELS = torch.tensor([3, 9, 0, 3])


def images(size=48):
    return torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize(
    ("make", "parameters", "entries"),
    [
        (resnet18, 11_689_512, 122),
        (lambda: ResNet(ResNetConfig("basic", (3, 4, 6, 3))), 21_797_672, 218),
        (resnet50, 25_557_032, 320),
        (lambda: ResNet(ResNetConfig("bottleneck", (3, 4, 23, 3))), 44_549_160, 626),
        (resnet152, 60_192_808, 932),
    ],
)
def test_published_sizes_are_exact(make, parameters, entries):
    with torch.device("meta"):
        model = make()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(model.state_dict()) == entries


def oracle(config):
    reference = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=config.width,
            hidden_sizes=[config.features >> shift for shift in (3, 2, 1, 0)],
            depths=list(config.depths),
            layer_type=config.block,
            num_labels=config.num_classes,
        )
    )
    return reference.train()


def renamed(name):
    """The name that an entry of the oracle's state dict has here."""
    *path, kind, entry = name.split(".")
    if name.startswith("classifier"):
        return f"fc.{entry}"
    here = {"convolution": "conv", "normalization": "bn"}[kind]
    if "embedder" in path:
        return f"{here}1.{entry}"
    stage, block = int(path[3]) + 1, path[5]
    if path[6] == "shortcut":
        return f"layer{stage}.{block}.downsample.{('conv', 'bn').index(here)}.{entry}"
    return f"layer{stage}.{block}.{here}{int(path[7]) + 1}.{entry}"


@pytest.mark.parametrize("config", TINY.values(), ids=TINY)
def test_values_gradients_and_statistics_are_those_of_transformers(config):
    reference, model = oracle(config), ResNet(config)
    model.load_state_dict({renamed(name): value for name, value in reference.state_dict().items()})
    for training in (True, False):
        logits = model.train(training)(images())
        assert logits.shape == (4, 10)
        torch.testing.assert_close(logits, reference.train(training)(images()).logits)
    model(images(), LABELS).backward()
    reference(images(), labels=LABELS).loss.backward()
    expected = {renamed(name): p.grad for name, p in reference.named_parameters()}
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, expected)
    expected = {renamed(name): value for name, value in reference.state_dict().items()}
    torch.testing.assert_close(dict(model.state_dict()), expected)


@pytest.mark.parametrize(
    ("x", "labels", "message"),
    [
        (torch.zeros(3, 48, 48), None, r"floats \[batch, 3, height, width\], got torch.float32 \[3, 48, 48\]"),
        (torch.zeros(4, 3, 48, 48, dtype=torch.uint8), None, "got torch.uint8"),
        (torch.zeros(4, 3, 48, 48), LABELS[:3], r"labels must be int64 of shape \[4\], got torch.int64 \[3\]"),
        (torch.zeros(4, 3, 48, 48), LABELS + 1, r"from 1 to 10, allowed are 0 to 9 \(and -100.*num_classes is 10"),
    ],
)
def test_bad_arguments_are_named(x, labels, message):
    raises(ValueError, message, lambda: ResNet(TINY["basic"])(x, labels))


TINY_UNET = UNetConfig(widths=(32, 64), depths=(0, 2), head_dim=16, text_tokens=5, text_dim=24, pooled_dim=8)


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
    model = UNet(TINY_UNET).double()
    *given, noise = (tensor.double() if tensor.is_floating_point() else tensor for tensor in batch())
    predicted = model(*given)
    assert predicted.shape == noise.shape
    assert model(*given, noise).item() == pytest.approx(F.mse_loss(predicted, noise).item(), rel=1e-6)
    for place, tensor in enumerate(given):
        changed = [tensor + 1 if place == other else same for other, same in enumerate(given)]
        assert not torch.allclose(model(*changed), predicted)


def test_latents_have_an_eighth_of_the_image():
    fields = {"widths": [32, 64], "depths": [0, 1], "head_dim": 16}
    inputs = training_step(StepRequest("sdxl-unet", 3, image_size=64, fields=fields)).inputs
    assert inputs["latents"].shape == inputs["noise"].shape == (3, 4, 8, 8)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: UNetConfig(widths=(32, 64), depths=(1,)), "widths and depths must name the same two or more"),
        (lambda: UNetConfig(widths=(32, 72), depths=(0, 1), head_dim=8), "widths must be multiples of 32"),
        (lambda: UNetConfig(residuals=0), "residuals must be a positive integer, got 0"),
        (lambda: UNet(TINY_UNET)(*batch(9)), r"latents must be \[batch, 4, .* multiples of 2"),
    ],
)
def test_bad_input_is_refused(make, says):
    raises(ValueError, says, make)
