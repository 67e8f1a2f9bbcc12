"""The code that runs a schedule dispatches the captured operations, without views that change nothing."""

import weakref

import pytest
import torch
from conftest import assert_as_eager, model_of
from steps import listing_of
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import ackpt
from ackpt.planner.schedule.listing import CALLS, FUNCTIONS, METHODS, SIZES, Line, Listing, boxed, direct, simplified

_ATEN = torch.ops.aten
_ROWS, _COLUMN = torch.randn(4, 6), torch.randn(4, 1)
_ARGUMENTS = {
    _ATEN.t.default: (_ROWS,),
    _ATEN.transpose.int: (_ROWS, 0, -1),
    _ATEN.unsqueeze.default: (_ROWS, 1),
    _ATEN.squeeze.dim: (_COLUMN, 1),
    _ATEN.select.int: (_ROWS, 0, 2),
    _ATEN.clone.default: (_ROWS,),
    _ATEN.view.default: (_ROWS, [2, -1]),
    _ATEN.expand.default: (_COLUMN, [4, 5]),
    _ATEN.permute.default: (_ROWS, [1, 0]),
    _ATEN.mm.default: (_ROWS, _ROWS.t()),
    _ATEN.bmm.default: (_ROWS[None], _ROWS.t()[None]),
    _ATEN.addmm.default: (_COLUMN, _ROWS, _ROWS.t()),
    _ATEN.sum.dim_IntList: (_ROWS, [0], True),
    _ATEN.native_layer_norm.default: (_ROWS, [6], None, None, 1e-5),
    _ATEN._softmax.default: (_ROWS, -1, False),
    _ATEN._log_softmax.default: (_ROWS, -1, False),
    _ATEN.embedding.default: (_ROWS, torch.tensor([0, 3]), 1),
    _ATEN.convolution.default: (torch.randn(1, 2, 5), torch.randn(3, 2, 3), None, [1], [0], [1], False, [0], 1),
    _ATEN.cat.default: ([_ROWS, _COLUMN], 1),
}
_KWARGS = {
    _ATEN.clone.default: {"memory_format": torch.contiguous_format},
    _ATEN.gelu.default: {"approximate": "tanh"},
    _ATEN.sum.dim_IntList: {"dtype": torch.float64},
}


class Recorded(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _arguments(overload):
    if overload in _ARGUMENTS:
        return _ARGUMENTS[overload]
    return tuple(_ROWS for each in overload._schema.arguments if each.type.kind() == "TensorType")


def _recorded(run):
    with torch.no_grad(), Recorded() as recorded:
        result = run()
    return result, recorded.calls


def _is_same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one is other or (torch.equal(one, other) and one.stride() == other.stride())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("overload", [*METHODS, *SIZES, *FUNCTIONS], ids=str)
@pytest.mark.parametrize("with_keywords", [False, True])
def test_a_direct_call_dispatches_the_same_operation_with_the_same_arguments(overload, with_keywords):
    args, kwargs = _arguments(overload), _KWARGS.get(overload, {}) if with_keywords else {}
    if overload in FUNCTIONS:
        direct = lambda: FUNCTIONS[overload](*args, **kwargs)  # noqa: E731
    elif overload in METHODS:
        direct = lambda: getattr(args[0], METHODS[overload])(*args[1:], **kwargs)  # noqa: E731
    else:
        direct = lambda: getattr(args[0], SIZES[overload])(*args[1])  # noqa: E731
    (result, ((func, seen, keywords),)), (other, ((other_func, other_seen, other_keywords),)) = (
        _recorded(run) for run in (lambda: overload(*args, **kwargs), direct)
    )
    assert func is other_func is overload
    assert _is_same(seen, other_seen) and keywords == other_keywords
    assert _is_same(result, other)


def _captured(function, *args) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def _targets(listing: Listing) -> list[str]:
    return [str(direct(line)[0]) for line in simplified(listing).lines if line.op in CALLS]


def test_a_view_that_undoes_others_is_left_out():
    def function(x):
        return (x.t().unsqueeze(0).squeeze(0).t() + 1, x.view(8, 3).view(4, 6) * 2)

    x = torch.randn(4, 6)
    module = _captured(function, x)
    listing = listing_of(module)
    run = boxed(module, listing)
    given = [x]
    results = run(given)
    assert given == []
    assert _targets(listing) == ["aten.add.Tensor", "aten.mul.Tensor"]  # with numbers, which are no tensors
    assert all(map(torch.equal, results, function(x)))


def test_an_argument_that_only_left_out_views_read_is_freed_at_once():
    x = torch.ones(4, 6)
    listing = listing_of(_captured(lambda x, y: (x.detach(), y.relu())[1], x, x))
    given, freed = [x.clone(), x], []
    held = weakref.ref(given[0])
    listing.lines.insert(-1, Line("call_function", lambda: freed.append(held() is None)))
    assert torch.equal(boxed(nn.Module(), listing)(given), x)
    assert freed == [True]


def test_a_view_with_other_strides_or_that_is_returned_stays():
    def function(x):
        square = x.t().relu()
        return square.t().t(), square.t()

    x = torch.randn(4, 4)
    module = _captured(function, x)
    listing = listing_of(module)
    first, second = boxed(module, listing)([x])
    assert first.stride() == function(x)[0].stride() and second.stride() == function(x)[1].stride()
    assert first is not second and torch.equal(first, x.t().relu())
    assert _targets(listing).count("t") == 4


def test_an_operation_on_a_number_keeps_its_overload():
    module = _captured(lambda x: torch.add(x, 2.5) + x, torch.ones(3))
    listing = listing_of(module)
    assert torch.equal(boxed(module, listing)([torch.ones(3)]), torch.full((3,), 4.5))
    targets = [direct(line)[0] for line in simplified(listing).lines if line.op in CALLS]
    assert targets == [_ATEN.add.Tensor, torch.add]


@torch.library.custom_op("ackpt_tests::increment", mutates_args={"x"})
def increment(x: torch.Tensor) -> None:
    x.add_(1.0)


increment.register_fake(lambda x: None)


class Incremented(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        increment(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_operations_that_write_into_arguments_run_under_modes():
    """AOTAutograd makes them higher-order operators, which torch's counter of FLOPs does not call."""

    def forward(self, x):
        hidden = Incremented.apply(self.layer(x))
        return (hidden * hidden.tanh()).sum()

    model, x = model_of(forward, layer=nn.Linear(8, 8)), torch.randn(64, 8)
    step = ackpt.compile(model, x, policy="full")
    assert ackpt.count_flops(lambda: step(x).backward()) == ackpt.count_flops(lambda: model(x).backward()) == 16384
    peaks = [ackpt.measure(lambda: call(x).backward(), resident=[model, x]).peak_bytes for call in (model, step)]  # noqa: B023
    assert peaks[0] == peaks[1]


def _is_below_autograd() -> bool:
    keys = torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView
    return all(map(torch._C._dispatch_tls_is_dispatch_key_excluded, keys))


@pytest.mark.parametrize("operation, is_below", [(_ATEN.relu.default, True), ("custom", False), ("saved", False)])
def test_operations_of_torch_run_below_autograd_where_no_kernel_may_need_it(operation, is_below):
    x, seen = torch.randn(4, 6), []
    listing = Listing()
    given = listing.add("placeholder", "x", name="x")
    if operation == "saved":
        run = listing.add("call_function", lambda operation, x: operation(x), (squared, given))
    else:
        run = listing.add("call_function", squared if operation == "custom" else operation, (given,))
    listing.add("call_function", lambda: seen.append(_is_below_autograd()))
    view = listing.add("call_function", _ATEN.select.int, (run, 0, 1))
    listing.add("output", "output", ((run, view),))
    with torch.no_grad():
        result, row = boxed(nn.Module(), listing)([x])
    assert seen == [is_below] and row._is_view() != is_below and not _is_below_autograd()
    assert torch.equal(result, x.relu() if is_below else x * x) and torch.equal(row, result[1])


def test_a_buffer_that_changes_in_place_gets_the_version_of_eager():
    def forward(self, x):
        self.calls += 1
        return self.layer(x).tanh().sum() * self.calls

    model, x = model_of(forward, layer=nn.Linear(6, 6), calls=nn.Buffer(torch.zeros(()))), torch.randn(4, 6)
    step = ackpt.compile(model, x, policy="none")
    versions = []
    for call in (model, step, step):
        before = model.calls._version
        call(x).backward()
        versions.append(model.calls._version - before)
    assert versions == [1, 1, 1] and model.calls == 3


torch.library.define("ackpt_tests::squared", "(Tensor x) -> Tensor")
torch.library.define("ackpt_tests::slope", "(Tensor x) -> Tensor")
squared = torch.ops.ackpt_tests.squared.default


@torch.library.impl("ackpt_tests::squared", "CompositeExplicitAutograd")
def _squared(x):
    return x * x


@torch.library.impl("ackpt_tests::slope", "CompositeExplicitAutograd")
def _slope(x):
    """2 x, by autograd: of an operation without a derivative, torch lets kernels record."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad((leaf * leaf).sum(), leaf)[0]


for _name in ("squared", "slope"):
    torch.library.register_fake(f"ackpt_tests::{_name}", lambda x: torch.empty_like(x))


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.ops.ackpt_tests.squared(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.ops.ackpt_tests.slope(ctx.saved_tensors[0])


@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_kernel_of_the_users_may_run_autograd(policy):
    model = model_of(lambda self, x: Squared.apply(self.layer(x)).sum(), layer=nn.Linear(6, 6))
    x = torch.randn(4, 6)
    assert_as_eager(model, ackpt.compile(model, x, policy=policy), x)
