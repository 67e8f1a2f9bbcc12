"""`ackpt.print_saved`: one line per saved tensor, in eager mode, for any function."""

import pytest
import torch
from torch import nn

import ackpt

HERE = __file__


def saved(capsys, function, *args, **kwargs) -> list[str]:
    ackpt.print_saved(function, *args, **kwargs)
    return (
        capsys.readouterr()
        .out.replace(f"{HERE}:", "here:")
        .replace("tests/planner/explain/test_print_saved.py", "here")
        .splitlines()
    )


class Branch(nn.Module):
    """Decides by values, which no capture accepts."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.norm(x)
        x = torch.tanh(x) if x.sum() > 1e9 else torch.relu(x)
        return {"logits": self.head(x)}


def line_of(function, text: str) -> int:
    import inspect

    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


def test_every_saved_tensor_has_a_line(capsys):
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    lines = saved(capsys, lambda x: model(x), torch.ones(2, 8))
    where = f"here:{line_of(test_every_saved_tensor_has_a_line, 'lambda x: model')}"
    assert lines == [
        f"float32[2,16]  128 B  Tanh.result of '1', {where}",
        f"float32[16,4]  256 B  Addmm.mat2 of '2', {where} [parameter]",
        f"float32[2,16]  128 B  Addmm.mat1 of '2', {where} [shares the memory of another line]",
        f"float32[2,8]    64 B  Addmm.mat1 of '0', {where} [input]",
        "saved: 128 B in 1 tensor, in addition to 256 B of parameters and 64 B of inputs",
    ]


def test_equal_layers_share_a_line_and_the_largest_are_first(capsys):
    layers = [nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(3)]
    lines = saved(capsys, nn.Sequential(*layers, nn.Linear(8, 64, bias=False), nn.Sigmoid()), torch.ones(4, 8))
    where = f"here:{line_of(saved, 'ackpt.print_saved')}"
    assert lines == [
        f"float32[4,64]     1.0 KiB  Sigmoid.result of '4', {where}",
        f"float32[4,8]   128 B each  3 x Tanh.result of '*.*', {where}",
        f"float32[8,64]     2.0 KiB  Mm.mat2 of '3', {where} [parameter]",
        f"float32[8,8]   256 B each  2 x Mm.mat2 of '*.*', {where} [parameter]",
        f"float32[4,8]   128 B each  2 x Mm.self of '*.*', {where} [shares the memory of another line]",
        f"float32[4,8]        128 B  Mm.self of '0.0', {where} [input]",
        f"float32[4,8]        128 B  Mm.self of '3', {where} [shares the memory of another line]",
        "saved: 1.4 KiB in 4 tensors, in addition to 2.5 KiB of parameters and 128 B of inputs",
    ]


def test_a_view_has_the_bytes_of_its_storage_so_that_lines_add_up_to_the_sum(capsys):
    layer = nn.Linear(8, 24)
    lines = saved(capsys, lambda x: layer(x).chunk(3, -1)[1].sin(), torch.ones(2, 8))
    assert lines[0].startswith("float32[2,8]  192 B  Sin.self") and lines[0].endswith("[view of a larger storage]")
    assert lines[-1].startswith("saved: 192 B in 1 tensor")


def test_a_model_that_no_capture_accepts(capsys):
    model = Branch()
    with pytest.raises(ackpt.TraceError):
        ackpt.explain(model, torch.ones(2, 8))
    lines = saved(capsys, model, torch.ones(2, 8))
    relu = [line for line in lines if "Relu.result of the model itself" in line]
    assert len(relu) == 1 and f"here:{line_of(Branch.forward, 'torch.relu')}" in relu[0]
    assert not [line for line in lines if "Tanh" in line]
    assert any("NativeLayerNorm.weight of 'norm'" in line and line.endswith("[parameter]") for line in lines)


def test_buffers_are_not_counted_as_saved(capsys):
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    lines = saved(capsys, model, torch.ones(16, 8))
    assert sum(line.endswith("[buffer]") for line in lines) == 2  # running mean and variance
    assert ackpt.plan(ackpt.trace(model, torch.ones(16, 8))).saved_bytes == 4 * (16 * 4 + 2 * 4) == 288
    assert lines[-1] == (
        "saved: 288 B in 3 tensors, in addition to 16 B of parameters, 32 B of buffers and 512 B of inputs"
    )


def test_tensors_saved_by_custom_functions_and_regions_are_listed(capsys):
    class Double2(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(4, requires_grad=True)
    (line, _) = saved(capsys, lambda x: Double2.apply(x * 1), x)
    assert line.startswith("float32[4]  16 B  Double2, ") and "[input]" not in line

    layer = nn.Linear(4, 4)
    block = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 4))
    assert "Tanh" not in "".join(saved(capsys, lambda x: ackpt.checkpoint(block, x), x))


def test_a_tensor_that_autograd_no_longer_holds_is_not_listed(capsys):
    def dropped(x):
        torch.tanh(x)  # its result is gone when the function returns
        return x.square()

    lines = saved(capsys, dropped, torch.ones(4, requires_grad=True))
    assert len(lines) == 2 and "Pow.self" in lines[0] and "[input]" in lines[0]


def test_lines_of_a_model_with_a_budget_are_the_caller_s(capsys):
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    ackpt.apply_budget(model, torch.ones(2, 8), "100%")
    lines = saved(capsys, lambda x: model(x), torch.ones(2, 8))
    where = f"here:{line_of(test_lines_of_a_model_with_a_budget_are_the_caller_s, 'lambda x: model')}"
    assert len(lines) > 1 and all(where in line for line in lines[:-1])


def test_meta_tensors_and_methods(capsys):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    lines = saved(capsys, model.forward, torch.ones(2, 8, device="meta"))
    assert "Tanh.result of '1'" in lines[0] and lines[-1].startswith("saved: 64 B in 1 tensor,")


def test_no_hooks_remain_after_the_call(capsys):
    model = nn.Linear(8, 8)
    with pytest.raises(RuntimeError):
        ackpt.print_saved(model, torch.ones(2, 9))
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks
    assert model(torch.ones(2, 8)).grad_fn.next_functions
    with pytest.raises(TypeError, match="must be a module or a function, got int"):
        ackpt.print_saved(3)  # pyright: ignore[reportArgumentType]
