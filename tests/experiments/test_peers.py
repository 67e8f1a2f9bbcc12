"""Torch's own tools on tiny models: what they run again, to the FLOP, and the model afterwards."""

import pytest
import torch
from torch import nn
from torch._functorch import config

import ackpt
from experiments.steps.frontier_models import checked_sizes, workload
from experiments.steps.frontier_runs import Runs
from experiments.steps.peers import CHECKPOINT, MEMORY_BUDGET, SELECTIVE, peer
from experiments.steps.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"layers": 2, "dim": 16, "heads": 2, "ff_dim": 32, "vocab_size": 20, "seq_len": 24, "batch_size": 2}
TOKENS = 2 * 24


@pytest.fixture(scope="module")
def runs():
    work = workload("transformer", checked_sizes("transformer", SIZES), 0)
    found = Runs(work, 0, 0)
    graph = ackpt.trace(work.model, *work.args)
    found.first(ackpt.plan(graph, policy="none"))
    return found


def run(runs, name, setting=None):
    with peer(name, runs.work, setting) as call:
        return runs.of(call, compiles=name == MEMORY_BUDGET)


def test_checkpoint_recomputes_every_block_except_its_last_product(runs):
    found = run(runs, CHECKPOINT)
    x = torch.randn(2, 24, 16)
    with torch.no_grad():
        forward = sum(ackpt.count_flops(lambda block=block: block(x)) for block in runs.work.blocks)
    assert found["recompute_flops"] == forward - 2 * 2 * TOKENS * 32 * 16
    assert found["gradients_difference"] == found["buffers_difference"] == 0.0


def test_selective_recomputes_no_product_and_saves_more(runs):
    kept = [parameter.detach().clone() for parameter in runs.work.model.parameters()]
    assert 0 < runs.rounding()["gradients_difference"] < 1e-4
    assert all(map(torch.equal, kept, runs.work.model.parameters()))
    baseline, blocks, found = runs.of(runs.work.model), run(runs, CHECKPOINT), run(runs, SELECTIVE)
    assert found["recompute_flops"] == baseline["recompute_flops"] == 0
    peaks = [row["measured_peak_bytes"] for row in (blocks, found, baseline)]
    assert peaks == sorted(peaks) and len({*peaks}) == 3
    assert found["gradients_difference"] == 0.0


def test_a_smaller_memory_budget_recomputes_more(runs):
    most, half = (run(runs, MEMORY_BUDGET, setting) for setting in (1.0, 0.5))
    assert 0 == most["recompute_flops"] < half["recompute_flops"]
    assert half["measured_peak_bytes"] < most["measured_peak_bytes"]
    assert max(most["gradients_difference"], half["gradients_difference"]) < 1e-5


def test_the_model_and_torch_are_as_before(runs):
    run(runs, CHECKPOINT)
    assert not any("forward" in vars(block) for block in runs.work.blocks)
    with peer(SELECTIVE, runs.work) as call, pytest.raises(IndexError):
        call(runs.work.args[0] + 20, runs.work.args[1])
    assert not any("forward" in vars(block) for block in runs.work.blocks)
    with peer(MEMORY_BUDGET, runs.work, 0.5):
        assert config.activation_memory_budget == 0.5
    assert config.activation_memory_budget == 1.0


class _Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_buffers_that_checkpoint_updates_twice_are_wrong():
    model = _Normed()
    work = Workload(model, (torch.randn(6, 8) + 1,), tuple(model.blocks))
    runs = Runs(work, 0, 0)
    runs.first(ackpt.plan(ackpt.trace(model, *work.args), policy="none"))
    for found in (runs.of(model), runs.of(model)):  # from the same buffers every time
        assert found["gradients_difference"] == found["buffers_difference"] == 0.0
    assert 0 < runs.rounding()["buffers_difference"] < 1e-5
    found = run(runs, CHECKPOINT)
    assert found["gradients_difference"] == 0.0 and found["buffers_difference"] == 1.0  # of num_batches_tracked
