"""``predict`` against ``measure``: the same bytes for operations without workspace."""

import contextlib
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import model_of, raises
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import ackpt
from ackpt.metering.meter import measure
from ackpt.metering.prediction import predict, with_sorted_frees
from ackpt.metering.timeline import MeterError


class Attention(torch.nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = torch.nn.LayerNorm(dim), torch.nn.Linear(dim, 3 * dim)
        self.out = torch.nn.Linear(dim, dim)
        self.mlp = torch.nn.Sequential(
            torch.nn.LayerNorm(dim), torch.nn.Linear(dim, 4 * dim), torch.nn.GELU(), torch.nn.Linear(4 * dim, dim)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class LanguageModel(torch.nn.Module):
    def __init__(self, vocabulary=200, dim=64, layers=3):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, dim)
        self.blocks = torch.nn.ModuleList(Attention(dim, 4) for _ in range(layers))
        self.head = torch.nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def mlp():
    model = torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())))
    return model, torch.ones(32, 64), lambda model, x: model(x).sum()


def transformer(checkpointed=False):
    model = LanguageModel()
    if checkpointed:
        ackpt.apply_activation_checkpointing(model, Attention)
    return model, torch.ones(2, 100, dtype=torch.int64), lambda model, tokens: model(tokens)


def both(make, optimizer=None, dtype=None, **options):
    results = []
    for meter, mode in ((measure, contextlib.nullcontext()), (predict, FakeTensorMode())):
        with mode:
            model, inputs, loss_of = make()
        stepper = optimizer(model.parameters()) if optimizer else None

        def step():
            with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
                loss = loss_of(model, inputs)  # noqa: B023
            loss.backward()
            if stepper:  # noqa: B023
                stepper.step()  # noqa: B023
            model.zero_grad()  # noqa: B023

        resident = (model, inputs, stepper) if stepper else (model, inputs)
        results.append(meter(step, resident=resident, **({"repeats": 0} if meter is measure else options)))
    return results


@pytest.mark.parametrize("make", [mlp, transformer, lambda: transformer(checkpointed=True)])
def test_equal_to_the_byte(make):
    measured, predicted = both(make)
    assert predicted.categories == measured.categories
    assert predicted.peak_bytes == measured.peak_bytes
    assert predicted.flops == measured.flops
    boundaries = [result.timeline.live[result.timeline.boundary] for result in (measured, predicted)]
    assert boundaries[0] == boundaries[1]
    if make is mlp:  # a measured step passes through further levels: what kernels take and give back inside
        assert set(predicted.timeline.live) <= set(measured.timeline.live)
        assert max(predicted.timeline.categories["gradients"]) == max(measured.timeline.categories["gradients"])


def regions(run):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.Dropout(0.1), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
    blocks += [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))]
    x = torch.randn(1024, 32, requires_grad=True)
    return nn.ModuleList(blocks), x, lambda model, x: functools.reduce(lambda y, block: run(block, y), model, x).sum()


@pytest.mark.parametrize(
    "run",
    [
        *(functools.partial(ackpt.checkpoint, offload=mode) for mode in (None, "sync", "async")),
        *(functools.partial(checkpoint, use_reentrant=is_reentrant) for is_reentrant in (False, True)),
        functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
        lambda block, x: ackpt.checkpoint(
            lambda y: ackpt.checkpoint(block, y.sin(), offload="async"), x, offload="async"
        ),
    ],
    ids=["kept", "sync", "async", "torch", "torch, reentrant", "torch, no state", "nested"],
)
def test_regions_are_equal_to_the_byte_with_prefetches_and_rng_states(run):
    measured, predicted = both(functools.partial(regions, run))
    assert predicted.peak_bytes == measured.peak_bytes


def test_the_states_of_own_generators_count_and_are_as_before():
    def forward(self, x):
        draws = torch.rand(x.shape, generator=self.generator), torch.poisson(x.abs(), self.generator)
        return self.linear(x * (draws[0] > 0.3) + draws[1])

    def make():
        generators = [torch.Generator().manual_seed(3) for _ in range(2)]
        blocks = (model_of(forward, linear=nn.Linear(16, 16), generator=each) for each in generators)
        return nn.Sequential(*blocks), torch.ones(4, 16, requires_grad=True), loss_of

    def loss_of(model, x):
        return ackpt.checkpoint_sequential(model, 2, x).sum()

    measured, predicted = both(make)
    assert predicted.dynamic_peak_bytes == measured.dynamic_peak_bytes
    with FakeTensorMode():
        model, x, _ = make()
    states = [block.generator.get_state() for block in model]
    predict(lambda: loss_of(model, x).backward(), resident=(model, x))
    assert all(torch.equal(state, block.generator.get_state()) for state, block in zip(states, model))


@pytest.mark.parametrize("cached", [True, False])
def test_a_step_inside_an_active_autocast(cached):
    """In which casts of weights last from step to step; none of the prediction is left after it."""
    results = []
    for meter, mode in ((measure, contextlib.nullcontext()), (predict, FakeTensorMode())):
        with mode:
            model, x, loss_of = mlp()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            results.append(meter(lambda: loss_of(model, x).backward(), resident=(model, x)))  # noqa: B023
    assert results[0].categories == results[1].categories


def test_other_threads_change_no_bytes(monkeypatch):
    """While others run, regions compare outputs to find out who drew random numbers; that needs values."""
    with torch.device("meta"):
        model, x, loss_of = regions(ackpt.checkpoint)
    peaks = set()
    for count in (1, 2):
        monkeypatch.setattr("threading.active_count", lambda count=count: count)
        peaks.add(predict(lambda: loss_of(model, x).backward(), resident=(model, x)).peak_bytes)
    assert len(peaks) == 1


def test_random_numbers_are_as_before():
    with FakeTensorMode():
        model, x, loss_of = regions(ackpt.checkpoint)
    state = torch.get_rng_state()
    predict(lambda: loss_of(model, x).backward(), resident=(model, x))
    assert torch.equal(state, torch.get_rng_state())


def compiled(**options):
    model, x, loss_of = mlp()
    call = torch.compile(model, **options)
    return model, x, lambda model, x: loss_of(call, x)


def test_a_planned_step_behind_torch_compile(fresh_dynamo):
    measured, predicted = both(lambda: compiled(backend="ackpt", options={"policy": "full"}))
    plain, _ = both(mlp)
    assert predicted.peak_bytes == measured.peak_bytes != plain.peak_bytes
    assert predicted.flops == measured.flops > plain.flops


def test_code_of_inductor_is_refused(fresh_dynamo):
    x = torch.empty(8, 4, device="meta")
    call = torch.compile(lambda x: x @ x.t())
    with pytest.raises(MeterError, match="a step that Inductor compiled cannot be predicted"):
        predict(lambda: call(x), resident=(x,))


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_a_step_with_adamw_is_equal_to_the_byte(options):
    measured, predicted = both(mlp, lambda parameters: torch.optim.AdamW(parameters, **options))
    assert predicted.resident_bytes == measured.resident_bytes
    # A Python number that meets a tensor is wrapped into a tensor of 8 or 4 bytes below what a mode can see.
    assert 0 <= measured.dynamic_peak_bytes - predicted.dynamic_peak_bytes <= 16


def test_transformer_with_adamw_and_autocast():
    measured, predicted = both(transformer, torch.optim.AdamW, torch.bfloat16)
    # bf16 matrix products on a CPU copy strided operands and take a workspace: both inside the operation.
    assert abs(predicted.peak_bytes / measured.peak_bytes - 1) < 0.01


def test_meta_tensors_have_the_bytes_of_real_ones():
    measured, _ = both(mlp)
    model, _, loss_of = mlp()
    model, x = model.to("meta"), torch.empty(32, 64, device="meta")
    model.zero_grad()

    def step():
        loss_of(model, x).backward()
        model.zero_grad()

    predicted = predict(step, resident=(model, x))
    assert predicted.categories == measured.categories and predicted.seconds is None


def test_predict_inside_a_measured_step():
    model, x = torch.nn.Linear(4, 4, device="meta"), torch.empty(2, 4, device="meta")
    peaks = []

    def step():
        peaks.append(predict(lambda: model(x).sum().backward(), resident=(model, x)).peak_bytes)

    step()
    measure(step, "cpu", warmup=0, repeats=0)
    assert peaks[1] == peaks[0] > 0


def test_bytes_are_rounded_as_the_allocator_rounds_them():
    _, exact = both(mlp)
    _, rounded = both(mlp, round_to=512)
    assert exact.peak_bytes < rounded.peak_bytes
    assert {value % 512 for value in rounded.timeline.live} == {0}
    assert rounded.resident_bytes % 512 == 0


def test_gradients_and_state_that_exist_before():
    with FakeTensorMode():
        model, x, loss_of = mlp()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    predicted = predict(step, resident=(model, optimizer, x))
    weights = 4 * (64 * 64 + 64) * 4
    assert predicted.timeline.live[0] == predicted.timeline.live[-1] == weights
    assert min(predicted.timeline.live) < 64 * 64 * 4
    first = predict(lambda: loss_of(model, x).backward(), resident=(model, x), warmup=0)
    assert first.timeline.live[0] == weights  # the gradients of the steps before


def test_nothing_is_left_behind_after_an_error():
    with FakeTensorMode():
        model, x, _ = mlp()

    def step():
        model(x).sum().backward()
        raise KeyError("from the step")

    with pytest.raises(KeyError):
        predict(step, resident=(model, x), warmup=0)
    assert not any(leaf._post_accumulate_grad_hooks for leaf in model.parameters())
    assert torch.ones(2).sum().item() == 2  # no mode stays


def test_a_resized_storage_counts():
    with FakeTensorMode():
        x = torch.empty(100)

    def step():
        y = x + 1
        y.resize_(1000)
        del y

    assert predict(step, resident=(x,), warmup=0).timeline.live == (0, 400, 412, 400, 0, 4000, 0)


def on_a_fake_gpu():
    with FakeTensorMode():
        return torch.empty(2, device="cuda")


def in_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x


ARGUMENTS = {
    "device": (lambda: {"device": "tpu"}, "'tpu' cannot be predicted"),
    "data": (lambda: {"resident": [torch.nn.Linear(3, 2)]}, r"parameters, \[2, 3\]\) has data"),
    "fake GPU": (lambda: {"resident": [on_a_fake_gpu()]}, "fake cuda"),
}
ON_META = {
    "autocast": (in_autocast, "autocast does nothing to meta"),
    "a CPU tensor": (lambda x: x + torch.arange(4), "does not run on meta tensors, make the model, .*on device cpu"),
    "a value": (lambda x: x * float(x.sum().item()), "does not run on meta tensors.* under FakeTensorMode"),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), "attention on meta tensors is not that of any"),
}


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_invalid_arguments_are_refused(arguments, message):
    raises(MeterError, message, lambda: predict(lambda: None, **arguments()))


@pytest.mark.parametrize(("forward", "message"), ON_META.values(), ids=ON_META)
def test_unsupported_operations_on_meta_tensors_are_named(forward, message):
    x = torch.empty(1, 1, 4, 4, device="meta", requires_grad=True)
    raises(MeterError, message, lambda: predict(lambda: forward(x).sum().backward(), resident=(x,)))


@pytest.mark.parametrize("activation", [F.silu, F.mish, F.gelu, torch.tanh, F.hardswish])
def test_an_operation_is_one_kernel_also_where_its_flops_are_counted(activation):
    def made():
        return torch.nn.Linear(64, 64), torch.randn(256, 64)

    def step():
        layer.zero_grad()
        activation(layer(x)).square().mean().backward()

    layer, x = made()
    measured = measure(step, resident=(layer, x), repeats=0).dynamic_peak_bytes
    with FakeTensorMode():
        layer, x = made()
        assert predict(step, resident=(layer, x)).dynamic_peak_bytes == measured


def test_casts_that_die_in_a_row_have_one_order():
    births = [("alloc", 7, 10), ("alloc", 5, 20), ("alloc", 6, 30), ("alloc", 8, 40)]
    for order in itertools.permutations([("free", 5), ("free", 7), ("free", 6)]):
        first, *others = order
        actions = [*births, first, ("free", 8), *others, ("alloc", 5, 1), ("free", 5)]
        expected = [*births, ("free", 7), ("free", 8), ("free", 5), ("free", 6), ("alloc", 5, 1), ("free", 5)]
        assert list(with_sorted_frees(actions, {0, 1, 2})) == expected
        assert list(with_sorted_frees(actions, set())) == actions
