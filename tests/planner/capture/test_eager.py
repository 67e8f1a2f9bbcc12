"""A model is captured as eager computes it, whatever torch's settings are outside."""

import pytest
import torch
from conftest import assert_as_eager, model_of, raises
from torch import nn
from torch._functorch import config as functorch_config

import ackpt


def permuted():
    """The memory of its output runs in another order than the output's dimensions; its backward sums over both."""
    return model_of(
        lambda self: (self.weight * 2).movedim(0, -1) + self.bias,
        weight=nn.Parameter(torch.randn(7, 31, 5)),
        bias=nn.Parameter(torch.zeros(())),
    )


@pytest.mark.parametrize("as_outputs", [False, True])  # the defaults of torch 2.11 and of later ones
def test_incoming_gradients_keep_their_strides(as_outputs):
    """Contiguous copies of them are summed in another order, and the last bit differs."""
    torch.manual_seed(0)
    model, gradients = permuted(), []
    with functorch_config.patch(guess_tangent_strides_as_outputs=as_outputs):
        step = ackpt.compile(model, policy="none", differentiate="all")
        for call in (model, step):
            model.bias.grad = None
            call().sin().sum().backward()
            gradients.append(model.bias.grad)
    assert torch.equal(*gradients)


def _check(function, **options):
    torch.manual_seed(0)
    model, x = wide(function), torch.randn(16, 8)
    assert_as_eager(model, ackpt.compile(model, x, regions=False, **options), x)


def wide(function):
    def forward(self, x):
        hidden = self.layers(x)
        return self.function(hidden.T @ hidden + torch.eye(8)).sum()

    return model_of(forward, layers=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), function=function)


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


def make_noted():
    def forward(self, x):
        hidden = self.layers(x)
        noted(hidden.detach())
        return hidden.sin().sum()

    return model_of(forward, layers=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()))


@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_custom_operation_without_results_runs_once_per_step(policy):
    model, x = make_noted(), torch.randn(4, 8)
    step = ackpt.compile(model, x, policy=policy)
    CALLS.clear()
    step(x).backward()
    assert CALLS == [(4, 8)]


def _in_range(matrix):
    with torch.profiler.record_function("range"):
        return matrix.sin()


def test_record_function_inside_the_model():
    _check(_in_range, policy="full")


def other_default(dtype):
    """Computes in another default dtype for a while."""

    def forward(self, x):
        torch.set_default_dtype(self.dtype)
        try:
            scale = (torch.linspace(0, 1, 16) / 3 + torch.rand(16) + torch.tensor(1 / 3)).float()
        finally:
            torch.set_default_dtype(torch.float32)
        return torch.tanh(self.layer(x) * scale).sum()

    return model_of(forward, layer=nn.Linear(16, 16), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_default_dtype_that_the_forward_sets_is_planned(policy, dtype):
    model, x = other_default(dtype), torch.randn(4, 16)
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
