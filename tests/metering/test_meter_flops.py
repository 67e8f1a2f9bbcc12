"""``count_flops`` against FLOPs counted by hand."""

import functools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ackpt
from ackpt.metering.flops import UncountedFlops, count_flops, formula

N, D = 32, 64


@pytest.fixture
def mlp():
    return torch.nn.Sequential(*(torch.nn.Linear(D, D) for _ in range(4))), torch.randn(N, D)


def test_recompute_is_one_more_forward(mlp):
    model, x = mlp
    x.requires_grad_()
    forward = 4 * 2 * N * D * D
    assert count_flops(lambda: model(x)) == forward
    assert count_flops(lambda: model(x).sum().backward()) == 3 * forward
    assert count_flops(lambda: torch_checkpoint(model, x, use_reentrant=True).sum().backward()) == 4 * forward
    # These leave out the last layer, whose output backward does not read.
    for run in (functools.partial(torch_checkpoint, use_reentrant=False), ackpt.checkpoint):
        assert count_flops(lambda run=run: run(model, x).sum().backward()) == 4 * forward - forward // 4


def test_flash_attention_of_the_cpu_counts():
    batch, heads, length, dim = 2, 3, 16, 8
    q, k, v = (torch.randn(batch, heads, length, dim, requires_grad=True) for _ in range(3))
    products = 2 * batch * heads * length * length * dim
    assert count_flops(lambda: F.scaled_dot_product_attention(q, k, v)) == 2 * products
    # Backward forms the scores again, then the gradients of scores, v, q and k.
    assert count_flops(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward()) == 7 * products
    backward = formula("aten._scaled_dot_product_flash_attention_for_cpu_backward")
    assert backward is not None and backward(None, q, k, v) == 0  # as after an operation that gives no gradient


def test_grouped_query_attention_counts():
    heads, length, dim = 6, 16, 8
    q = torch.randn(2, heads, length, dim, requires_grad=True)
    k, v = (torch.randn(2, 2, length, dim, requires_grad=True) for _ in range(2))
    products = 2 * 2 * heads * length * length * dim

    def step():
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]

    assert count_flops(step) == 2 * products
    assert count_flops(lambda: step().sum().backward()) == 7 * products


def test_checkpointed_parameters_without_input_gradient():
    layer = torch.nn.Linear(D, D)
    x = torch.randn(N, D)
    assert count_flops(lambda: ackpt.checkpoint(layer, x).sum().backward()) == 2 * 2 * N * D * D


class TestCompiled:
    """Compiled code is counted as it runs, and is not compiled again."""

    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("cold", [True, False])
    def test_a_planned_step_behind_torch_compile(self, mlp, cold):
        """FLOPs include recomputation, and bytes are those of the plan, so it is not the uncompiled model that ran."""
        model, x = mlp
        plans = []
        call = torch.compile(model, backend="ackpt", options={"policy": "full", "on_plan": plans.append})

        def step():
            model.zero_grad()
            call(x).sum().backward()

        if not cold:
            step()
        measured = ackpt.measure(step, resident=(model, x), repeats=0)
        assert len(plans) == 1
        plain = ackpt.measure(lambda: model(x).sum().backward(), resident=(model, x), repeats=0)
        assert measured.flops == plans[0].flops == plain.flops + plans[0].recompute_flops
        assert measured.dynamic_peak_bytes != plain.dynamic_peak_bytes

    def test_a_backend_is_called_once_and_runs_every_time(self, mlp):
        model, x = mlp
        seen = []

        def backend(gm, example_inputs):
            seen.append("compiles")

            def run(*args):
                seen.append("runs")
                return gm(*args)

            return run

        call = torch.compile(model, backend=backend)
        assert count_flops(lambda: call(x)) == count_flops(lambda: call(x)) == 4 * 2 * N * D * D
        call(x)
        assert seen == ["compiles", "runs", "runs", "runs"]

    def test_planning_a_new_shape_is_not_counted(self, mlp):
        model, x = mlp
        step = ackpt.compile(model, x[:2], policy="none", differentiate="all")
        expected = count_flops(lambda: model(x).sum().backward())
        assert count_flops(lambda: step(x).sum().backward()) == expected  # captures and plans
        assert count_flops(lambda: step(x).sum().backward()) == expected

    def test_code_of_inductor(self):
        """A single matrix product, which Inductor delegates to torch, so that no C++ is compiled."""
        x = torch.randn(N, D)
        call = torch.compile(lambda x: x @ x.t())
        with pytest.raises(UncountedFlops, match=r"code that Inductor generated \(1 times\)"):
            count_flops(lambda: call(x))
        with pytest.warns(UserWarning, match="code that Inductor generated") as warned:
            measured = ackpt.measure(lambda: call(x), resident=(x,), repeats=0)
        assert measured.flops is None and measured.dynamic_peak_bytes == N * N * 4
        assert warned[0].filename == __file__
        assert count_flops(lambda: x @ x.t()) == 2 * N * N * D  # nothing of it stays


def test_operations_whose_library_comes_with_the_step():
    """`varlen_attn` brings its operators and their formulas when it is imported."""
    program = (
        "import torch, ackpt\n"
        "from ackpt.models import attention\n"
        "q = torch.zeros(16, 2, 8, dtype=torch.bfloat16, device='meta', requires_grad=True)\n"
        "cu_seqlens = torch.tensor([0, 8, 16], dtype=torch.int32, device='meta')\n"
        "print(ackpt.count_flops(lambda: attention(q, q, q, cu_seqlens, 8).sum().backward()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{7 * 2 * 2 * 2 * 8 * 8 * 8}\n", done.stderr  # sequences x heads x length x length x dim
