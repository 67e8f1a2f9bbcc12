"""Ctrl-C during capture, search or compilation leaves the model, torch and the step as they were."""

import gc
import random
import sys

import pytest
import torch
from dynamic_steps import check, ids
from torch import nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import ackpt

# (file, function) that a KeyboardInterrupt interrupts when it is called
POINTS = [
    ("planner/capture/aot.py", "_exported"),
    ("planner/capture/tracing.py", "prepared"),
    ("planner/capture/tracing.py", "described_graph"),
    ("planner/schedule/simulator.py", "peak_of"),
    ("planner/policies/chains/block_options.py", "options_of_blocks"),
    ("planner/policies/search/refinement.py", "with_fewer_runs"),
]


class Interrupt:
    """Raises a KeyboardInterrupt when a function of this thread is called for the `number`-th time."""

    def __init__(self, file: str, function: str, number: int = 1):
        self.file, self.function, self.left = file, function, number

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_name == self.function and code.co_filename.endswith(self.file):
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def __enter__(self):
        sys.setprofile(self)

    def __exit__(self, *_):
        sys.setprofile(None)


def state(model):
    """What must be the same before and after."""
    tensors = [*model.parameters(), *model.buffers()]
    return [
        [(id(tensor), tensor._version, tensor.grad, tensor.detach().clone().numpy().tobytes()) for tensor in tensors],
        [(name, module.training, sorted(vars(module))) for name, module in model.named_modules()],
        [torch.get_rng_state().numpy().tobytes(), random.getstate()],
        [gc.isenabled(), torch.is_grad_enabled(), torch.compiler.is_compiling(), torch.is_inference_mode_enabled()],
        [_get_current_dispatch_mode_stack(), _get_current_function_mode_stack()],
        [functorch_config.backward_pass_autocast, functorch_config.donated_buffer],
        [torch.nn.functional.dropout, torch.nn.Module.__call__, torch.nn.Module.__setattr__, torch.Tensor.detach],
        [torch.ops.aten.native_dropout.default, FakeTensor.__torch_dispatch__, torch.utils._pytree.tree_flatten],
        sys.stderr,
    ]


class Net(nn.Module):
    """Two equal blocks with dropout between embeddings and a loss."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        wide = ([nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16)] for _ in range(2))
        self.blocks = nn.ModuleList(nn.Sequential(*layers) for layers in wide)
        self.head = nn.Linear(16, 50)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.fixture(scope="module")
def plan():
    """The plan of a call that nothing interrupts."""
    plan = ackpt.compile(Net(), ids(4, 12), budget=0.7).plan
    assert plan.cost > 0
    return plan


@pytest.mark.parametrize(("file", "function"), POINTS)
def test_an_interrupted_first_call_leaves_the_model_unchanged(tmp_path, plan, file, function):
    model = Net()
    before = state(model)
    with pytest.raises(KeyboardInterrupt), Interrupt(file, function):
        ackpt.compile(model, ids(4, 12), budget=0.7, cache=tmp_path)
    assert state(model) == before
    step = ackpt.compile(model, ids(4, 12), budget=0.7, cache=tmp_path)
    assert step.plan == plan
    check(step, model, ids(4, 12))
