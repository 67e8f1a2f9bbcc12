"""Buffers change once per step, changes between forward and backward are detected, and names are restored."""

import dataclasses
from collections import deque
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    Case,
    assert_equal,
    assert_same_step,
    assert_same_training,
    batch,
    bit_equal,
    model_of,
    plain_call,
    raises,
    seed,
    total,
    with_layer,
)
from torch import nn
from torch.nn.utils import parametrizations

import ackpt
from ackpt.checkpointing.evidence import RECORDED_RUNS, subject_of

Error = ackpt.CheckpointError


class MovingAverage(nn.Module):
    """Reads a buffer, then updates it: in place, or by giving the name another tensor."""

    def __init__(self, rebinds, elements=4):
        super().__init__()
        self.rebinds = rebinds
        self.register_buffer("mean", torch.zeros(elements))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.plain = torch.ones(())

    def forward(self, x):
        out = (x - self.mean[:4]) * self.plain.clone() / (1 + self.steps)
        with torch.no_grad():
            mean = torch.zeros_like(self.mean)
            mean[:4] = x.mean(0)
            if self.rebinds:
                self.mean = 0.9 * self.mean + 0.1 * mean
                self.steps = self.steps + 1
                self.plain = self.plain * 0.5
            else:
                self.mean.mul_(0.9).add_(0.1 * mean)
                self.steps += 1
                self.plain.mul_(0.5)
        return out


def code_book():
    """Vector quantisation with codes that follow their inputs (van den Oord et al. 2017, appendix A)."""

    def forward(self, x):
        nearest = torch.cdist(x, self.codes).argmin(1)
        quantised = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                hits = nn.functional.one_hot(nearest, 5).to(x.dtype)
                self.counts.mul_(0.9).add_(0.1 * hits.sum(0))
                self.codes.add_(0.1 * (hits.t() @ x) / self.counts[:, None])
        return x + (quantised - x).detach()

    return model_of(forward, codes=nn.Buffer(torch.randn(5, 4)), counts=nn.Buffer(torch.ones(5)))


def counter():
    """Numbers that change with every call, and a tensor made in the first."""

    def forward(self, x):
        self.calls += 1
        self.rate *= 0.5
        if not self.started:
            self.cache, self.started = torch.arange(4.0), True
        return x * self.calls + self.rate * self.cache + x * self.started

    return model_of(forward, calls=0, rate=1.0, cache=None, started=False)


def frozen(write, **tensors):
    """Writes a frozen weight, or replaces its data, and reads it."""

    def forward(self, x):
        write(self.weight, x.detach().mean(0))
        return x * self.weight.clone()

    return model_of(forward, **(tensors or {"weight": nn.Parameter(torch.ones(4), requires_grad=False)}))


def replace_data(weight, mean):
    weight.data = weight.data * 0.9 + mean


def set_first(weight, mean):
    weight[:2] = mean[:2]


class Unregistered(nn.Module):
    """Modules, tensors and a generator that torch does not know of, in lists and dicts."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.BatchNorm1d(4), nn.Sequential(MovingAverage(True))]
        self.counts = {"mean": torch.zeros(4)}
        self.generators = [torch.Generator().manual_seed(0)]

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        self.counts["mean"].add_(x.detach().mean(0))
        return x * torch.rand(4, generator=self.generators[0]) + self.counts["mean"]


class Renorm(nn.BatchNorm1d):
    """A subclass that normalises with the running statistics while it trains."""

    def forward(self, x):
        out = (x - self.running_mean) / (self.running_var + self.eps).sqrt()
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.1)
            self.running_var.lerp_(x.var(0), 0.1)
            self.num_batches_tracked += 1
        return out * self.weight + self.bias


class BatchNormAndReLU(nn.BatchNorm1d):
    """A subclass with its own forward."""

    def forward(self, x):
        return super().forward(x).relu()


class FunctionalBatchNorm(nn.BatchNorm1d):
    """A subclass that calls the function instead."""

    def forward(self, x):
        training = self.training or self.running_mean is None
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training, 0.1)


class OwnStatistics(nn.Module):
    """An ordinary module that normalises with its own buffers; both are views of one where `stacked`."""

    def __init__(self, function=F.batch_norm, stacked=False, grad=True):
        super().__init__()
        self.function, self.stacked, self.grad = function, stacked, grad
        self.register_buffer("stats", torch.stack([torch.zeros(4), torch.ones(4)]))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        mean, var = (self.stats[0], self.stats[1]) if self.stacked else (self.mean, self.var)
        shaped = x if self.function is F.batch_norm else x.unflatten(1, (4, 1)).expand(-1, -1, 3)
        with torch.set_grad_enabled(self.grad):
            out = self.function(shaped, mean, var, None, None, True, 0.1)
        return x + (out if self.function is F.batch_norm else out.mean(-1)) + mean * var


def reads_statistics():
    """Its result depends on the running statistics that its own batch norm has just updated.

    It clones them: autograd saves them, and does not see that the next forward's kernel writes them."""
    return model_of(
        lambda self, x: self.norm(x) * self.norm.running_var.clone() + (x * self.norm.running_mean.clone()).sin(),
        norm=nn.BatchNorm1d(4),
    )


class PastAutograd(nn.Module):
    """A code book that is updated through ``.data`` or numpy, as older libraries do."""

    def __init__(self, through):
        super().__init__()
        self.through = through
        self.register_buffer("book", torch.ones(4))

    def forward(self, x):
        out = x * self.book.clone()
        if self.through == "data":
            self.book.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        else:
            self.book.detach().numpy()[:] += 1
        return out


class Replaces(nn.Module):
    """Each forward assigns the ``.data`` of a momentum copy, as in MoCo, and of a weight that it clips."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        self.query.weight.data = self.query.weight.data.clamp(-0.4, 0.4) * 0.9
        for key, query in zip(self.key.parameters(), self.query.parameters()):
            key.data = key.data * 0.9 + query.data * 0.1
        return self.query(x) + self.key(x)


class InSlots(nn.Module):
    """A moving average and a counter in an object with slots, both bound again."""

    def __init__(self):
        super().__init__()
        self.kept = Slots(torch.ones(4), 1)

    def forward(self, x):
        self.kept.t = self.kept.t * 0.9 + x.detach().mean(0)
        self.kept.generator += 1
        return x.sin() * self.kept.t * self.kept.generator


class FakeQuantized(nn.Module):
    """Quantization-aware training: an observer's range moves in the kernel."""

    def __init__(self):
        super().__init__()
        for name, value in {"low": [0.0], "high": [0.0], "scale": [1.0], "ones": [1]}.items():
            self.register_buffer(name, torch.tensor(value))
        self.register_buffer("zero", torch.tensor([0], dtype=torch.int32))

    def forward(self, x):
        on = self.ones, self.ones, self.low, self.high, self.scale, self.zero
        return torch.fused_moving_avg_obs_fake_quant(x, *on, 0.1, 0, 255, 0)


class Growing(nn.Module):
    """Its buffers have no elements until the first forward, as those of per-channel observers, or grow in each."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.register_buffer("m", torch.zeros(0))
        self.register_buffer("made", None)

    def forward(self, x):
        with torch.no_grad():
            self.change(self, x.mean(0))
        return x * (self.m.sum() + (0 if self.made is None else self.made.sum()))


def _once(module, mean):
    if not module.m.numel():
        module.m.resize_(4).copy_(mean)


def _in_each(module, mean):
    module.m.resize_(module.m.numel() + 4)[-4:] = mean


def _shrink(module, mean):
    module.m.resize_(2 if module.m.numel() == 4 else 4).fill_(mean[0])


def _make(module, mean):
    module.made = mean if module.made is None else module.made * 0.9 + mean


LAYERS = {
    "buffer that grows once": lambda: Growing(_once),
    "buffer that grows": lambda: Growing(_in_each),
    "buffer that shrinks": lambda: Growing(_shrink),
    "buffer that is made": lambda: Growing(_make),
    "batch norm subclass": lambda: BatchNormAndReLU(4),
    "cumulative batch norm subclass": lambda: BatchNormAndReLU(4, momentum=None),
    "batch norm subclass without statistics": lambda: BatchNormAndReLU(4, track_running_stats=False),
    "frozen batch norm subclass": lambda: BatchNormAndReLU(4).eval(),
    "functional batch norm subclass": lambda: FunctionalBatchNorm(4),
    "functional batch norm": lambda: OwnStatistics(),
    "functional batch norm on views": lambda: OwnStatistics(stacked=True),
    "functional batch norm without gradients": lambda: OwnStatistics(grad=False),
    "functional instance norm": lambda: OwnStatistics(F.instance_norm),
    "statistics that are read": reads_statistics,
    "buffer changed through data": lambda: PastAutograd("data"),
    "parameters whose data is replaced": Replaces,
    "tensor and number in slots": InSlots,
    "buffer changed through numpy": lambda: PastAutograd("numpy"),
    "fake quantization": FakeQuantized,
    "batch norm": lambda: nn.BatchNorm1d(4),
    "cumulative batch norm": lambda: nn.BatchNorm1d(4, momentum=None),
    "batch norm without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "frozen batch norm": lambda: nn.BatchNorm1d(4).eval(),
    "batch norm 2d": lambda: nn.Sequential(nn.Unflatten(1, (2, 2, 1)), nn.BatchNorm2d(2), nn.Flatten()),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, affine=True, track_running_stats=True), nn.Flatten()
    ),
    "batch renorm": lambda: Renorm(4),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "average in place": lambda: MovingAverage(False),
    "average by rebinding": lambda: MovingAverage(True),
    "large average in place": lambda: MovingAverage(False, 300_000),
    "large average by rebinding": lambda: MovingAverage(True, 300_000),
    "code book": code_book,
    "numbers": counter,
    "unregistered modules": Unregistered,
    "frozen weight": lambda: frozen(lambda weight, mean: weight.mul_(0.9).add_(mean)),
    "frozen weight, its data": lambda: frozen(lambda weight, mean: weight.data.add_(mean)),
    "frozen weight, detached": lambda: frozen(lambda weight, mean: weight.detach().add_(mean)),
    "frozen weight, a slice": lambda: frozen(set_first),
    "frozen weight, other data": lambda: frozen(replace_data),
    "buffer, other data": lambda: frozen(replace_data, weight=nn.Buffer(torch.ones(4))),
}


class Slots:
    __slots__ = ("t", "generator")

    def __init__(self, t, generator):
        self.t, self.generator = t, generator


ROUTES = {
    "dict": (lambda t, g: {"step": 0, "t": t, "g": g}, lambda box: (box["t"], box["g"])),
    "list": (lambda t, g: [None, t, g], lambda box: box[1:]),
    "tuple": (lambda t, g: ("n", t, g), lambda box: box[1:]),
    "deep": (lambda t, g: {"a": [{"b": [{"c": [0, t, g]}]}]}, lambda box: box["a"][0]["b"][0]["c"][1:]),
    "long": (lambda t, g: [*range(200), t, g], lambda box: box[-2:]),
    "slots": (Slots, lambda box: (box.t, box.generator)),
}
UPDATES = {
    "in place": lambda t, g, h: t.mul_(0.9).add_(h.mean()),
    "operator": lambda t, g, h: t.__iadd__(h.mean()),
    "out": lambda t, g, h: torch.add(t, h.mean(), out=t),
    "view": lambda t, g, h: t[:1].copy_(h.mean()),
    "item": lambda t, g, h: t.__setitem__(0, h.mean()),
    "foreach": lambda t, g, h: torch._foreach_mul_([t], 0.5),
    "data": lambda t, g, h: t.data.mul_(0.5),
    "initializer": lambda t, g, h: nn.init.normal_(t, generator=g),
    "generator": lambda t, g, h: t.copy_(torch.rand(1, generator=g)),
}


@pytest.mark.parametrize("rows", [4, 40_000])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("route", ROUTES)
def test_state_by_every_route_changes_once(route, update, rows):
    """Those that a walk over names finds, and those that only operations show."""
    make, read = ROUTES[route]

    def train(call, depth):
        seed()
        layer, box = nn.Linear(8, 8), make(torch.ones(1), torch.Generator().manual_seed(0))

        def function(x):
            h = torch.tanh(layer(x))
            UPDATES[update](*read(box), h.detach())
            return h / read(box)[0].clone()

        for _ in range(depth):
            function = partial(call, function)
        for _ in range(5):
            function(torch.randn(rows, 8)).square().sum().backward()
        return [layer.weight.grad, read(box)[0], read(box)[1].get_state()]

    plain = train(plain_call, 1)
    for depth in (1, 2):
        assert_equal(plain, train(ackpt.checkpoint, depth), "gradient")


@bit_equal
def test_attributes_of_parameters_change_once(call):
    """As the quantized weight of bitsandbytes, which the first forward moves into the layer."""

    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.moved = nn.Parameter(torch.randn(4, 4), requires_grad=False), None
            self.weight.codes = (self.weight * 20).to(torch.int8)

        def forward(self, x):
            if self.weight.codes is not None:
                self.moved, self.weight.codes = self.weight.codes, None
            elif self.moved is None:
                self.moved = self.weight.to(torch.int8)
            return x @ self.moved.float()

    layer, x = with_layer(Quantized()), batch(6)
    for _ in range(3):
        total(call(layer, x)).backward()
    return [x.grad, *(each.grad for each in layer.parameters())]


def nested(function, *args):
    return ackpt.checkpoint(lambda *given: ackpt.checkpoint(function, *given), *args)


CALLS = {"region": ackpt.checkpoint, "nested": nested, "offload": partial(ackpt.checkpoint, offload="sync")}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_buffers_change_once_per_step(make, call):
    def build():
        return Case(with_layer(make()), (batch(6),))

    assert_same_step(build, call=call)


def test_buffers_of_a_scripted_module_change_once_per_step():
    def build():
        return Case(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), (batch(6),))

    assert_same_step(build)


def test_a_norm_that_is_evaluated_in_the_region_and_trained_before_its_backward():
    """The recomputation reads the statistics of its forward. (Plain autograd reads the present ones.)"""

    def run(call, trains):
        seed()
        norm, x = FunctionalBatchNorm(4), batch(6)
        loss = total(call(norm.eval(), x))
        if trains:
            norm.train()(batch(6))
        loss.backward()
        return [x.grad, norm.weight.grad]

    assert_equal(run(plain_call, False), run(ackpt.checkpoint, True), "gradient")


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_training_with_buffers_is_bit_equal(make):
    seed()
    assert_same_training(nn.Sequential(with_layer(make()), with_layer(make())), (batch(6).detach(),), steps=3)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@bit_equal
def test_buffers_are_exact_with_several_forwards_before_the_backwards(call, make):
    """Each recomputation starts from the values of its own forward; afterwards the present values are restored."""
    model = with_layer(make())
    inputs = [batch(6) for _ in range(3)]
    losses = [total(call(model, x)) for x in inputs]
    after_forward = [buffer.clone() for buffer in model.buffers()]
    for loss in (losses[1], losses[0], losses[2]):
        loss.backward()
    assert_equal(after_forward, list(model.buffers()), "buffer")
    return [x.grad for x in inputs] + [p.grad for p in model.parameters()] + after_forward


READS = {
    "nothing": lambda norm: 1,
    "clone": lambda norm: norm.running_mean.clone(),
    "view": lambda norm: norm.running_mean[:2].repeat(2),
    "earlier view": lambda norm: norm.view.clone(),
    "data": lambda norm: norm.running_mean.data.clone(),
    "numpy": lambda norm: torch.from_numpy(norm.running_mean.numpy().copy()),
    "evaluation": lambda norm: F.batch_norm(torch.ones(1, 4), norm.running_mean, norm.running_var)[0],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("reads_first", [False, True])
@bit_equal
def test_running_statistics_that_other_code_reads_are_those_of_each_forward(call, read, reads_first):
    norm, inputs = nn.BatchNorm1d(4), [batch(6), batch(6)]
    norm.view = norm.running_mean[:]

    def function(x):
        return read(norm) * norm(x) if reads_first else norm(x) * read(norm)

    for _ in range(3):  # after three recomputations, the region is small enough to run without a recorder
        for loss in [total(call(function, x)) for x in inputs]:
            loss.backward()
    return [*(x.grad for x in inputs), *(p.grad for p in norm.parameters()), *norm.buffers()]


@bit_equal
def test_a_norm_that_a_region_reaches_but_does_not_run_may_train_before_backward(call):
    model, x = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)), batch(6)

    def first(x):  # its closure reaches both
        return call(model[0], x).sin()

    total(call(model[1], call(first, x).cos())).backward()
    return [x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def test_small_regions_with_norms_are_recorded_in_their_first_runs_only():
    norm = nn.BatchNorm1d(4)
    for _ in range(RECORDED_RUNS):
        assert subject_of(norm) is None or subject_of(norm).passed < RECORDED_RUNS  # pyright: ignore
        total(ackpt.checkpoint(norm, batch(6))).backward()
    assert subject_of(norm).passed == RECORDED_RUNS  # pyright: ignore


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated", "ignore::FutureWarning")
@pytest.mark.parametrize("legacy", [nn.utils.spectral_norm, nn.utils.weight_norm])
def test_buffers_of_norms_in_forward_hooks_change_once(legacy):
    def run(wrap):
        seed()
        model = nn.Sequential(with_layer(legacy(nn.Linear(4, 4))), nn.Linear(4, 4))
        if wrap:
            ackpt.apply_activation_checkpointing(model, "0")
        x = batch(6)
        for _ in range(2):
            total(model(x)).backward()
        return [x.grad, *(p.grad for p in model.parameters()), *model.buffers()]

    assert_equal(run(False), run(True), "gradient")


@bit_equal
def test_a_large_buffer_that_changes_in_some_steps_only(call):
    layer, x, gradients = MovingAverage(False, 300_000), batch(6), []
    for updates in (False, True, False, True):
        call(lambda x: layer(x) if updates else x - layer.mean[:4], x).sum().backward()  # noqa: B023
        gradients.append(x.grad.clone())
    return [*gradients, layer.mean]


@bit_equal
def test_a_buffer_saved_by_another_operation_keeps_its_version(call):
    """Restoring old values does not change the version counter that autograd compares."""
    layer, x = MovingAverage(False), batch(6)
    loss = total(call(layer, x) * layer.mean)
    for _ in range(2):
        loss.backward(retain_graph=True)
    return [x.grad, layer.mean]


class _State(nn.Module):
    """Keeps statistics in an attribute, as `step` computes them from the old ones and a new value."""

    def __init__(self, start, step, read):
        super().__init__()
        self.linear, self.step, self.read = nn.Linear(4, 4), step, read
        start(self)

    def forward(self, x):
        h = self.linear(x)
        self.step(self, h.detach().mean(0))
        return torch.tanh(h - self.read(self))


def _set(name, value):
    return lambda module: setattr(module, name, value())


def _grow(counts):
    counts[0] += 1


STATES = {
    "tuple": (_set("m", lambda: (torch.zeros(4),)), lambda s, v: setattr(s, "m", (s.m[0] + v,)), lambda s: s.m[0]),
    "list": (_set("m", list), lambda s, v: setattr(s, "m", [*s.m, v][-2:]), lambda s: sum(s.m)),
    "dict": (_set("m", dict), lambda s, v: setattr(s, "m", {**s.m, "k": v + s.m.get("k", 0)}), lambda s: s.m["k"]),
    "made": (lambda s: None, lambda s, v: setattr(s, "m", v + getattr(s, "m", 0.0)), lambda s: s.m),
    "counter": (lambda s: None, lambda s, v: setattr(s, "m", getattr(s, "m", 0) + 1), lambda s: 0.1 * s.m),
    "items of a list": (_set("m", lambda: [0, 0]), lambda s, v: s.m.append(s.m.pop(0) + v), lambda s: s.m[0] + s.m[1]),
    "items of a dict": (_set("m", dict), lambda s, v: s.m.update(k=v + s.m.get("k", 0)), lambda s: s.m["k"]),
    "items of a deque": (_set("m", lambda: deque([0.0], 3)), lambda s, v: s.m.append(v), lambda s: sum(s.m)),
    "items of a set": (_set("m", set), lambda s, v: s.m.add(len(s.m)), lambda s: 0.1 * len(s.m)),
    "items inside": (_set("m", lambda: {"k": [0]}), lambda s, v: _grow(s.m["k"]), lambda s: 0.1 * s.m["k"][0]),
    "made dataclass": (
        _set("m", dataclasses.make_dataclass("Count", [("n", int, 0)])),
        lambda s, v: setattr(s.m, "n", s.m.n + 1),
        lambda s: 0.1 * s.m.n,
    ),
    "data": (
        lambda s: s.register_buffer("m", torch.zeros(4)),
        lambda s, v: setattr(s.m, "data", s.m * 0.9 + v),
        lambda s: s.m,
    ),
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", STATES)
def test_attributes_that_a_forward_makes_or_replaces_change_once(name, depth):
    def train(depth):
        torch.manual_seed(0)
        model, x, found = _State(*STATES[name]), torch.randn(3, 4), []
        call = model
        for _ in range(depth):
            call = partial(ackpt.checkpoint, call)
        for _ in range(2):
            call(x).sum().backward()
            found.append(model.linear.weight.grad.clone())
        return [*found, torch.as_tensor(model.read(model))]

    assert all(map(torch.equal, train(0), train(depth)))


class _KeepsItsOutput(nn.Module):
    """Keeps its output, with its history, in an attribute that exists before or is made by the first forward."""

    def __init__(self, made, wrapped):
        super().__init__()
        self.linear, self.wrapped = nn.Linear(4, 4), wrapped
        if not made:
            self.last = wrapped(torch.zeros(4))

    def forward(self, x):
        h = torch.tanh(self.linear(x))
        self.last = self.wrapped(h)
        return h * 0.5


@pytest.mark.parametrize("wrapped", [lambda h: h, lambda h: [h], lambda h: (h, 1)], ids=["tensor", "list", "tuple"])
@pytest.mark.parametrize("made", [False, True])
@bit_equal
def test_an_attribute_with_a_graph_is_the_one_of_the_last_forward(call, made, wrapped):
    """Two forwards, then two backwards: the recomputation of the first must not leave its output in the attribute."""
    model, kept = _KeepsItsOutput(made, wrapped), []
    for _ in range(2):
        losses = [call(model, torch.randn(3, 4)).sum() for _ in range(2)]
        sum(losses).backward()  # that of the second forward first
        kept.append((model.last if isinstance(model.last, torch.Tensor) else model.last[0]).detach().clone())
    return kept


@bit_equal
def test_an_attribute_with_a_graph_that_the_forward_reads_is_assigned_once_per_step(call):
    """As torch.func.functional_call leaves tied parameters; the value from before cannot be restored."""

    def decays(self, x):
        with torch.no_grad():
            decayed = self.scale * 0.9
        self.scale = decayed * self.linear.weight.sum().tanh().square()
        return torch.tanh(self.linear(x))

    model = model_of(decays, linear=nn.Linear(4, 4), scale=torch.ones(4))
    for _ in range(3):
        call(model, torch.randn(3, 4)).sum().backward()
    return [model.scale.detach().clone()]


def test_an_attribute_with_a_graph_keeps_no_graph_alive_after_backward():
    model = _KeepsItsOutput(False, lambda h: h)
    for _ in range(2):
        ackpt.checkpoint(model, torch.randn(3, 4)).sum().backward()
    raises(RuntimeError, "second time|checkpoint", lambda: model.last.sum().backward())
