"""A model is captured as eager computes it, whatever torch's settings are outside, and in place where eager is."""

import pytest
import torch
from conftest import assert_as_eager, measured_step, model_of, raises
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ackpt

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("as_outputs", [False, True])  # the defaults of torch 2.11 and of later ones
def test_incoming_gradients_keep_their_strides(as_outputs):
    """Contiguous copies of them are summed in another order, and the last bit differs."""
    torch.manual_seed(0)
    model = model_of(
        lambda self: (self.weight * 2).movedim(0, -1) + self.bias,
        weight=nn.Parameter(torch.randn(7, 31, 5)),
        bias=nn.Parameter(torch.zeros(())),
    )
    gradients = []
    with functorch_config.patch(guess_tangent_strides_as_outputs=as_outputs):
        step = ackpt.compile(model, policy="none", differentiate="all")
        for call in (model, step):
            model.bias.grad = None
            call().sin().sum().backward()
            gradients.append(model.bias.grad)
    assert torch.equal(*gradients)


def _check(function, **options):
    def forward(self, x):
        hidden = self.layers(x)
        return self.function(hidden.T @ hidden + torch.eye(8)).sum()

    torch.manual_seed(0)
    model = model_of(forward, layers=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), function=function)
    x = torch.randn(16, 8)
    assert_as_eager(model, ackpt.compile(model, x, regions=False, **options), x)


def _checked(matrix):
    torch._assert_async((matrix < 1000).all(), "too large")
    return matrix.sin()


@pytest.mark.parametrize("options", [{"policy": "full"}, {"budget": "1MiB"}])
@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.cholesky,
        torch.linalg.inv,
        torch.linalg.slogdet,
        # Runs only on positive definite matrices, also to measure its workspace. Torch 2.14 has removed it.
        *([torch.cholesky] if hasattr(torch.ops.aten, "cholesky") else []),
        lambda matrix: torch.linalg.solve(matrix, matrix.sin()),
        lambda matrix: torch.linalg.lu_factor(matrix)[0],
        _checked,
    ],
)
def test_operations_with_effects_are_planned(function, options):
    """Torch would make their effects tokens, which are inputs of the step."""
    if function is torch.linalg.slogdet:
        function = lambda matrix: torch.linalg.slogdet(matrix)[1]  # noqa: E731
    _check(function, **options)


def test_the_error_of_an_operation_is_raised_where_nothing_reads_its_check():
    model = model_of(lambda self, x: torch.linalg.inv(self.layer(x)).sum(), layer=nn.Linear(8, 8))
    step = ackpt.compile(model, torch.randn(8, 8), policy="full")
    raises(torch.linalg.LinAlgError, "the input matrix is singular", lambda: step(torch.zeros(8, 8)))


CALLS = []


@torch.library.custom_op("ackpt_tests::noted", mutates_args=())
def noted(x: torch.Tensor) -> None:
    CALLS.append(x.shape)


noted.register_fake(lambda x: None)


@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_custom_operation_without_results_runs_once_per_step(policy):
    def forward(self, x):
        hidden = self.layers(x)
        noted(hidden.detach())
        return hidden.sin().sum()

    model = model_of(forward, layers=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()))
    x = torch.randn(4, 8)
    step = ackpt.compile(model, x, policy=policy)
    CALLS.clear()
    step(x).backward()
    assert CALLS == [(4, 8)]


def _in_range(matrix):
    with torch.profiler.record_function("range"):
        return matrix.sin()


def test_record_function_inside_the_model():
    _check(_in_range, policy="full")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_default_dtype_that_the_forward_sets_is_planned(policy, dtype):
    def forward(self, x):
        torch.set_default_dtype(self.dtype)
        try:
            scale = (torch.linspace(0, 1, 16) / 3 + torch.rand(16) + torch.tensor(1 / 3)).float()
        finally:
            torch.set_default_dtype(torch.float32)
        return torch.tanh(self.layer(x) * scale).sum()

    model, x = model_of(forward, layer=nn.Linear(16, 16), dtype=dtype), torch.randn(4, 16)
    assert_as_eager(model, ackpt.compile(model, x, policy=policy), x)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).float()


def product_as_it_is(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


def product_of_drawn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.dropout(x) @ weight).float() * (2 if torch.is_autocast_enabled("cpu") else 3)


def _custom(function, autocast=None):
    """`function` as a custom operation whose result is float32 without data."""
    operation = torch.library.custom_op(f"ackpt_tests::{function.__name__}_{autocast}", function, mutates_args=())
    operation.register_fake(lambda x, weight: x.new_empty(x.shape, dtype=torch.float32))

    def backward(ctx, gradient):
        x, weight = (each.float() for each in ctx.saved_tensors)
        return gradient.float() @ weight.t(), x.t() @ gradient.float()

    operation.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    if autocast is not None:
        operation.register_autocast("cpu", autocast)
    return operation


CUSTOM = {
    "casts inside": _custom(product),
    "draws": _custom(product_of_drawn),
    "kernel for autocast": _custom(product, torch.float16),
    "autocast's dtype": _custom(product_as_it_is),
}


def _under_autocast(operation):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            for layer, weight in zip(self.layers, self.weights):
                x = torch.tanh(operation(layer(x).float(), weight)).float()
        with torch.autocast("cpu", torch.float16), torch.autocast("cpu", enabled=False):
            return product(operation(x, self.weights[0]), self.weights[1]).sum()

    layers, weights = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)], torch.randn(2, 16, 16)
    return model_of(forward, layers=nn.ModuleList(layers), weights=nn.ParameterList(nn.Parameter(w) for w in weights))


@pytest.mark.parametrize("options", [{"policy": "none"}, {"policy": "full"}, {"budget": "1GiB", "regions": True}])
@pytest.mark.parametrize("name", CUSTOM)
def test_a_custom_operation_runs_under_the_models_autocast(name, options):
    model, x = _under_autocast(CUSTOM[name]), torch.randn(4, 16)
    step = ackpt.compile(model, x, **options)
    if name == "autocast's dtype" and "regions" not in options:
        raises(ackpt.CheckpointError, "of module '' returns torch.bfloat16, but its fake", lambda: step(x))
    else:
        assert_as_eager(model, step, x)


# What eager mode writes in place takes no memory in a baseline, and keeps the strides by which operations round.


INDEX = torch.arange(8)


def filled(y):
    table = torch.zeros(1024, 32)
    table[:64] = y.detach()
    table[64:].add_(1)
    return y.sum() + table.sum()


def make_model(head, linear=None):
    return model_of(lambda self, x: self.head(self.linear(x)), head=head, linear=linear or nn.Linear(32, 32))


def queue():
    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.queue[:64] = y
        return y.sum()

    return model_of(forward, linear=nn.Linear(32, 32), queue=nn.Buffer(torch.zeros(1024, 32)))


CASES = {
    "an operation": lambda: make_model(lambda y: y.sum() + y.detach().repeat(16, 1).mul_(2).sum()),
    "a part": lambda: make_model(filled),
    "random numbers": lambda: make_model(lambda y: y.sum() + torch.empty(1024, 32).normal_().sum()),
    "through a view": lambda: make_model(lambda y: y.sum() + y.detach().repeat(16, 1).t().add_(1).sum()),
    "a buffer": queue,
    # The formula of its gradient writes into zeros.
    "a gradient": lambda: make_model(lambda y: y.index_select(0, INDEX).sum(), nn.Linear(32, 1024)),
}


@pytest.mark.parametrize("name", CASES)
def test_fractions_are_relative_to_the_step_of_the_model(name):
    model, x = CASES[name](), torch.randn(64, 32)
    own = measured_step(model, model, x).dynamic_peak_bytes
    step = ackpt.compile(model, x, policy="none")
    measured = measured_step(model, step, x).dynamic_peak_bytes
    assert measured == step.plan.dynamic_peak_bytes > own  # the graph does all of it out of place
    assert own - x.numel() * 4 <= step.plan.baseline_dynamic_peak_bytes <= own  # a variable may hold a result longer
    with pytest.raises(ackpt.BudgetError):
        ackpt.compile(model, x, policy="none", budget=1.0)


@pytest.mark.parametrize("way", ["compile", "backend"])
def test_a_model_that_checkpoints_itself_is_warned_what_a_fraction_is_relative_to(way):
    def forward(self, x):
        return checkpoint(self.layers, checkpoint(self.layers, x, use_reentrant=False), use_reentrant=False).sum()

    layers = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))
    model, x = model_of(forward, layers=layers), torch.randn(64, 32)
    with pytest.warns(UserWarning, match="peak without torch's checkpointing"):
        if way == "compile":
            ackpt.compile(model, x, budget=0.9)
        else:
            torch.compile(model, backend="ackpt", options={"budget": 0.9})(x)


SUMS = {
    "two gradients": lambda h: (h * 2, h * 3),
    "three gradients": lambda h: (h * 2, h * 3, h * 4),
    "a gradient that is read again": lambda h: (h * 2, h.sin() * h),
    "a residual": lambda h: (h + torch.tanh(h) * 2,),
    "twice the same": lambda h: (h.sin() * h.sin(),),
}


@pytest.mark.parametrize("name", SUMS)
def test_gradients_are_summed_in_place_where_autograd_does_so(name):
    model, x = make_model(SUMS[name]), torch.randn(64, 32)

    def peak_bytes(call):
        def once():
            model.zero_grad()
            outputs = call(x)
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

        return ackpt.measure(once, "cpu", resident=(model, x), repeats=0).dynamic_peak_bytes

    own, plan = peak_bytes(model), ackpt.compile(model, x, policy="none", differentiate="all").plan
    assert own - x.numel() * 4 - 16 <= plan.baseline_dynamic_peak_bytes <= own  # a node may hold a gradient longer


def test_the_tables_of_max_norm_are_not_copied_in_the_baseline():
    ids, results = torch.randint(50, (4, 12)), []
    for planned in (False, True):
        torch.manual_seed(0)
        # Its tables are changed in place by the forward.
        model = model_of(
            lambda self, ids: F.cross_entropy(self.head(self.table(ids).sum(1) + self.bag(ids)), ids[:, 0]),
            table=nn.Embedding(50, 32, max_norm=1.0),
            bag=nn.EmbeddingBag(50, 32, max_norm=1.0),
            head=nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 50)),
        )
        step = ackpt.compile(model, ids, policy="full") if planned else model
        own = ackpt.measure(lambda: step(ids).backward(), resident=(model, ids), warmup=0, repeats=0)  # noqa: B023
        if planned:
            # 8 bytes more than the graph's results are counted until the end of the operations of EmbeddingBag
            assert 0 <= step.plan.baseline_dynamic_peak_bytes - results[0][0] <= 8
            assert own.dynamic_peak_bytes <= step.plan.dynamic_peak_bytes
        results.append((own.dynamic_peak_bytes, [*model.parameters(), *(each.grad for each in model.parameters())]))
    assert all(map(torch.equal, results[0][1], results[1][1]))


@pytest.mark.parametrize("name", ["weight", "buffer"])
def test_replaced_data_of_a_parameter_or_buffer_is_refused(name):
    """The capture computes with other tensors, whose data the model's code would replace instead."""

    def forward(self, x):
        tensor = self.linear.weight if self.name == "weight" else self.scale
        tensor.data = tensor.data.clamp(-0.1, 0.1)
        return (self.linear(x) * self.scale).sum()

    model = model_of(forward, linear=nn.Linear(4, 4), name=name, scale=nn.Buffer(torch.ones(4)))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ackpt.TraceError, match="replaces the data of a tensor at .*test_eager.py:.*copy_"):
        ackpt.trace(model, torch.ones(2, 4))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


# Tensors that are changed in place keep eager's strides, so that what reads them rounds as in eager mode.


class Cell(nn.Module):
    """A recurrent cell, whose C++ changes parts of a split tensor in place."""

    def __init__(self, cell, width):
        super().__init__()
        self.first, self.cell = nn.Linear(width, width), cell(width, width)

    def forward(self, x):
        state = self.cell(self.first(x))
        return sum(part.square().mean() for part in (state if isinstance(state, tuple) else (state,)))


def recurrent(layer):
    return model_of(lambda self, x: self.layer(x)[0].square().mean(), layer=layer)


def one_pixel():
    """An image of one pixel, changed in place: channels last in eager mode, which the next layers read."""

    def forward(self, x):
        x = self.norm(self.first(x))
        x = nn.functional.interpolate(torch.relu_(x), size=(2, 2), mode="nearest")
        return self.last(x.add_(1.0)).square().mean()

    return model_of(
        forward, first=nn.Conv2d(8, 32, 1), norm=nn.GroupNorm(4, 32), last=nn.Conv2d(32, 32, 3, padding=1, bias=False)
    )


MODELS = {
    **{f"GRU cell, {width}": lambda width=width: (Cell(nn.GRUCell, width), (7, width)) for width in (8, 16, 20, 33)},
    "LSTM cell": lambda: (Cell(nn.LSTMCell, 20), (7, 20)),
    "GRU, 20": lambda: (recurrent(nn.GRU(20, 20, batch_first=True)), (3, 5, 20)),
    "one pixel": lambda: (one_pixel(), (2, 1, 1, 8)),
}
LIKE_ALL = "GRU cell, 20", "one pixel"  # whose peaks are measured, and which run at other sizes


def build(name):
    torch.manual_seed(0)
    model, shape = MODELS[name]()
    x = torch.randn(shape)
    return model, x.permute(0, 3, 1, 2) if name == "one pixel" else x


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_step_is_the_model_bit_for_bit(name, policy):
    model, x = build(name)
    step = ackpt.compile(model, x, policy=policy)
    assert_as_eager(model, step, x)
    if name in LIKE_ALL:
        assert measured_step(model, step, x).dynamic_peak_bytes == step.plan.dynamic_peak_bytes


@pytest.mark.parametrize("name", LIKE_ALL)
def test_one_capture_serves_other_sizes(name):
    model, x = build(name)
    step = ackpt.compile(model, x, policy="full")
    for other in (torch.cat([x, x, x]), torch.cat([x, x])):
        assert_as_eager(model, step, other)


def test_widths_of_whole_vector_loops_are_not_copied():
    for width, copies in ((20, True), (32, False)):
        graph = ackpt.trace(Cell(nn.GRUCell, width), torch.randn(7, width))
        assert any("with_strides" in node.target for node in graph.nodes) == copies
