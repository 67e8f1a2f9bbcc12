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
