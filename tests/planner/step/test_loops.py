"""What the loop around a planned step holds: accumulated gradients, the optimizer, a scaler of the loss."""

import pytest
import torch
from conftest import model_of, raises
from planned_models import Mean
from torch import nn

import ackpt
from ackpt.planner.capture.optimizer_state import optimizer_bytes


def net(width=32):
    blocks = [(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(3)]
    return model_of(
        lambda self, x, targets: nn.functional.mse_loss(self.layers(x), targets),
        layers=nn.Sequential(*(layer for block in blocks for layer in block)),
    )


BATCH = tuple(torch.randn(2, 256, 32, generator=torch.Generator().manual_seed(0)).unbind())


@pytest.fixture
def model():
    torch.manual_seed(0)
    return net()


def accumulated(model, times=3):
    model.zero_grad()
    for _ in range(times):
        model(*BATCH).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def peak(step, model, *resident) -> int:
    model.zero_grad()
    return ackpt.measure(step, resident=(model, *BATCH, *resident), warmup=0, repeats=0).peak_bytes


def test_accumulated_gradients_count(model):
    expected = accumulated(model)
    model.zero_grad()
    step = ackpt.apply_budget(model, BATCH, budget=0.7, accumulation=True)
    assert all(map(torch.equal, accumulated(model), expected))

    def thrice():
        for _ in range(3):
            model(*BATCH).backward()

    assert peak(thrice, model) == step.plan.peak_bytes
    without = ackpt.compile(net(), *BATCH, budget=0.7).plan
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert step.plan.resident_bytes == without.resident_bytes + gradients
    assert step.plan.dynamic_peak_bytes == without.dynamic_peak_bytes


def test_gradients_that_the_plan_does_not_count_are_an_error_if_they_exceed_the_budget(model):
    ackpt.apply_budget(model, BATCH, budget=0.7)
    raises(ackpt.BudgetError, "of gradients exist.*give accumulation=True", lambda: accumulated(model))
    ackpt.apply_budget(model, BATCH, budget="1GiB")
    accumulated(model)  # within the budget


@pytest.mark.parametrize("accumulation", [False, True])
@pytest.mark.parametrize("name", ["adamw", "SGD"])
def test_an_optimizer_by_name_has_the_same_bytes(model, name, accumulation):
    kind = {"adamw": torch.optim.AdamW, "SGD": torch.optim.SGD}[name]
    optimizer = kind(model.parameters())
    graphs = [ackpt.trace(model, *BATCH, optimizer=each, accumulation=accumulation) for each in (name, optimizer)]
    assert len({(graph.resident_bytes, graph.optimizer_step_bytes) for graph in graphs}) == 1
    step = ackpt.apply_budget(model, BATCH, budget=0.7, optimizer=name, accumulation=accumulation)

    def whole():
        for _ in range(3 if accumulation else 1):
            model(*BATCH).backward()
        optimizer.step()

    whole()  # makes the state
    assert peak(whole, model, optimizer) == step.plan.peak_bytes


@pytest.mark.parametrize("optimizer", ["adamw", torch.optim.AdamW])
def test_the_peak_may_be_in_the_optimizers_step(optimizer):
    model, batch = net(), tuple(each[:2].clone() for each in BATCH)
    optimizer = optimizer if isinstance(optimizer, str) else optimizer(model.parameters())
    alone, accumulating = (
        ackpt.plan(ackpt.trace(model, *batch, optimizer=optimizer, accumulation=each)) for each in (False, True)
    )
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert alone.peak_node == "the optimizer's step"
    assert accumulating.resident_bytes == alone.resident_bytes + gradients
    # Backward with both gradients is more than the optimizer's step with one of them.
    assert accumulating.peak_bytes > alone.peak_bytes


def test_an_unknown_optimizer_is_refused(model):
    with pytest.raises(ValueError, match="no optimizer 'adamv' .did you mean 'adam"):
        ackpt.apply_budget(model, BATCH, optimizer="adamv")
    with pytest.raises(TypeError, match=r"got the class AdamW: create it, as in AdamW\(model.parameters\(\)\)"):
        ackpt.apply_budget(model, BATCH, optimizer=torch.optim.AdamW, budget="50%")
    raises(TypeError, "or a name such as 'adamw', got float", lambda: ackpt.apply_budget(model, BATCH, optimizer=1.0))


@pytest.mark.parametrize("optimizer_name", [None, "SGD", "AdamW"])
def test_a_scaler_counts_to_the_byte(model, optimizer_name):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    optimizer = None if optimizer_name is None else getattr(torch.optim, optimizer_name)(model.parameters())
    options = {"budget": 0.7, "optimizer": optimizer}
    without = ackpt.compile(model, *BATCH, **options).plan
    step = ackpt.compile(model, *BATCH, **options, scaler=scaler)
    assert step.plan.resident_bytes == without.resident_bytes + 8
    assert ackpt.compile(model, *BATCH, **options, scaler=torch.amp.GradScaler("cpu", enabled=False)).plan == without

    def loop():
        loss = step(*BATCH)
        scaler.scale(loss).backward()
        if optimizer is not None:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    loop()
    held = [optimizer] if optimizer is not None else []
    measured = peak(loop, model, *held, scaler._scale, scaler._growth_tracker)
    assert measured == step.plan.peak_bytes


def test_objects_that_are_no_scaler_are_refused(model):
    with pytest.raises(TypeError, match="scaler must be the torch.amp.GradScaler that scales the loss, got float"):
        ackpt.apply_budget(model, BATCH, budget=0.7, scaler=2.0)


def of_bitsandbytes(name):
    """An optimizer of bitsandbytes, and its model and batch; the optimizer must not change while it is simulated."""
    optim = pytest.importorskip("bitsandbytes").optim
    model, x = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), Mean()), torch.randn(8, 64)
    return getattr(optim, name)(model.parameters()), model, x


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize("name", ["AdamW", "PagedAdamW32bit"])
def test_optimizers_of_bitsandbytes_count(name):
    optimizer, model, x = of_bitsandbytes(name)
    before = {key: repr(value) for key, value in vars(optimizer).items()}
    step = ackpt.apply_budget(model, x, budget=1.0, optimizer=optimizer)
    assert before == {key: repr(value) for key, value in vars(optimizer).items()}

    def train():
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    measured = ackpt.measure(train, resident=[model, x, optimizer], warmup=2)
    assert measured.resident_bytes == step.plan.resident_bytes
    assert 0 <= step.plan.peak_bytes - measured.peak_bytes <= 8


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "AdEMAMix8bit"])
def test_8_bit_optimizers_of_bitsandbytes_count_on_a_gpu(name):
    optimizer, model, x = of_bitsandbytes(name)
    tables = {key: value.clone() for key, value in optimizer.name2qmap.items()}
    with pytest.raises(ackpt.TraceError, match=f"{name} updates 8-bit state by kernels whose memory on a CPU is not"):
        ackpt.apply_budget(model, x, budget=1.0, optimizer=optimizer)
    state, step = optimizer_bytes(optimizer, on_cpu=False)
    assert all(torch.equal(tables[key], value) for key, value in optimizer.name2qmap.items())
    model(x).backward()
    optimizer.step()
    tensors = {each: None for held in optimizer.state.values() for each in held.values() if torch.is_tensor(each)}
    assert state == sum(-(-each.nbytes // 512) * 512 for each in tensors) and step == 0


@pytest.mark.filterwarnings("ignore:Paged optimizers")
def test_paged_optimizers_are_refused_on_a_gpu():
    with pytest.raises(ackpt.TraceError, match="PagedAdamW8bit keeps its state in memory that CUDA moves"):
        optimizer_bytes(of_bitsandbytes("PagedAdamW8bit")[0], on_cpu=False)
