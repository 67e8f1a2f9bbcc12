"""``ackpt plan --fsdp``: a rank's share, what is said of it, and what cannot be planned so."""

import json
from dataclasses import replace

import pytest
import torch
from test_cli_plan import LM

from ackpt.cli import main
from ackpt.planner.sharding.sharded_model import ShardedModel
from ackpt.planner.sharding.sharding import Sharding
from ackpt.planner.workloads.planned_shapes import PlanConfig
from ackpt.planner.workloads.step_request import StepRequest

pytestmark = pytest.mark.usefixtures("captured_once")


def test_a_rank_has_its_share_of_the_shards(capsys):
    options = ["--fsdp", "2", "8", "--dtype", "bfloat16", "--shard-dtype", "float32", "--json"]
    assert main(["plan", *LM, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["sweep"], [own["ranks"] for own in found["plans"]]) == ("fsdp", [2, 8])
    two, eight = (own["at_peak"] for own in found["plans"])
    parameters = found["plans"][0]["parameters"]
    assert two["parameters"] == 2 * parameters
    assert 8 * eight["parameters"] > 4 * parameters  # padded: eight do not divide a hundred words
    for own in found["plans"]:
        assert own["peak_bytes"] == sum(own["at_peak"].values()) == own["resident_bytes"] + own["dynamic_peak_bytes"]
        shards = own["fsdp"]
        assert (shards["all_gathers"], shards["reduce_scatters"], own["recompute_flops"]) == (5, 3, 0)
        assert shards["blocks"][0]["count"] == 2 and own["device"] is None


def test_a_sharded_plan_prints_its_parts(capsys):
    assert main(["plan", *LM, "--fsdp", "2", "8", "--budget", "1GiB", "--device-profile", "h100-80g"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "blocks            2: blocks.0 to blocks.1"
    assert sum(line.endswith(", all that backward reads") for line in lines) == 2
    assert lines[-1] == "fewest that fit   2 ranks"


def torchtitan(logits=True, words=1000, **changes) -> ShardedModel:
    fields = {"dim": 128, "layers": 6, "heads": 4, "kv_heads": 2, "ff_dim": 256, "vocab_size": words, "positions": 128}
    fields |= {"returns_logits": logits}
    request = StepRequest("torchtitan-llama", 2, 128, None, fields, torch.bfloat16)
    options = {"save": "every-second-matmul", "every_n_layers": 2}
    return ShardedModel(PlanConfig(request, device="l4", options=options, **changes))


@pytest.fixture(scope="module")
def held():
    return torchtitan(hold_outputs=True, clipping=True)


MIXED = Sharding(2, torch.float32, torch.float32)
SHARDINGS = [
    MIXED,
    replace(MIXED, version=(2, 4), keeps_last=True),
    replace(MIXED, reduction=torch.bfloat16, replicas=2),
    replace(MIXED, reduction=torch.bfloat16, replicas=2, version=(2, 5)),
]


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("policy", ["none", "full", "selective", "auto"])
def test_every_block_of_a_rank_is_freed_as_it_was_allocated(held, policy, sharding):
    """Also in deep models, of which the first and the last block stand for the others; without cuBLAS's workspaces."""
    budget = held.plan(sharding, None, "selective").peak_bytes if policy == "auto" else None
    plan = held.plan(sharding, budget, policy)
    memory = held.memory(plan)
    assert memory is not None and memory.allocated - 2 * 8_519_680 == plan.peak_bytes
    assert memory.reserved >= memory.allocated


def test_what_the_loop_and_fsdp_keep_is_in_the_peak(held):
    """Logits of the step before, the parameters of the last block, and what selective checkpointing stores unread."""
    logits, sharding = 4 * 2 * 128 * 1000, replace(MIXED, keeps_last=True)
    forward = [held.plan(MIXED, None, policy).timeline for policy in ("none", "full")]
    dropped = torchtitan().plan(MIXED, None, "full").timeline
    assert forward[1].live[1] == logits and dropped.live[1] < logits
    gathers = [held.plan(each, None, "full").communication.gathers for each in (MIXED, sharding)]
    assert gathers == [2 * 6 + 1, 2 * 6]
    runs = held.plan(MIXED, None, "selective").runs
    assert [(run.count, run.choice) for run in runs] == [(1, "plain"), (1, "selective")] * 3
    assert sum("w2.mm" in name for name in runs[1].names) == 1


def test_the_head_runs_in_chunks_as_the_budget_needs():
    model = torchtitan(False, 8000, chunk_head=True, optimizer="none")
    whole = torchtitan(False, 8000, optimizer="none").plan(MIXED, None, "full")
    chunked = model.plan(MIXED, None, "full")
    assert chunked.peak_bytes < whole.peak_bytes and chunked.baseline_bytes == whole.baseline_bytes
    fewer = model.plan(MIXED, chunked.peak_bytes - 1, "auto")
    assert fewer.peak_bytes < chunked.peak_bytes


def test_the_users_own_model_is_planned(tmp_path, capsys):
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self, layers):\n"
        "        super().__init__()\n"
        "        from torch.nn import GELU, Linear, ModuleList, Sequential\n"
        "        self.blocks = ModuleList(Sequential(Linear(64, 64), GELU(), Linear(64, 64)) for _ in range(layers))\n"
        "    def forward(self, x):\n"
        "        for block in self.blocks:\n"
        "            x = x + block(x)\n"
        "        return x.square().mean()\n"
        "def make(batch_size, layers=6):\n"
        "    return Model(layers), {'x': torch.empty(batch_size, 64)}\n"
        "def wrong(batch_size):\n"
        "    return Model(2)\n"
    )
    options = ["--batch-size", "32", "--fsdp", "2x4", "--json"]
    assert main(["plan", "--model", f"{file}:make", *options, "--set", "layers=8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fsdp"]["blocks"][0]["count"] == 8 and found["fsdp"]["replicas"] == 2
    for name, message in {"wrong": "must return a model and a dict", "none": "has no function 'none'"}.items():
        assert main(["plan", "--model", f"{file}:{name}", *options]) == 2
        assert message in capsys.readouterr().err
    assert main(["plan", "--model", f"{file}:make", *options, "--seq-len", "4"]) == 2
    assert "is called with batch_size, seq_len by name, but" in capsys.readouterr().err


def test_a_rank_fits_by_reserved_bytes_and_context_as_a_single_gpu_does(capsys):
    options = [*LM, "--fsdp", "2", "--device-profile", "t4"]

    def planned(*more):
        assert main(["plan", *options, *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    found = planned()
    memory, size = found["device"]["memory"], found["device"]["memory_bytes"]
    workspaces = 2 * 8_519_680  # of cuBLAS, in forward and backward
    assert memory["allocated"] - workspaces == found["peak_bytes"] and memory["reserved"] % 2**20 == 0
    assert memory["margin"] == size - memory["reserved"] - memory["context"] > 0 and found["device"]["fits"]
    most = int(size - 1.08 * memory["reserved"]) // 2**20
    assert most < (size - found["peak_bytes"]) // 2**20
    for context, fits in ((most, True), (most + 1, False)):
        assert planned("--context-mib", str(context))["device"]["fits"] is fits
    reserved = memory["reserved"] / 2**20
    more = (size - memory["reserved"]) // 2**20 + 1
    for context, verdict in ((most + 1, "may not fit"), (more, "does not fit")):
        assert main(["plan", *options, "--context-mib", str(context)]) == 0
        assert f"  device          {verdict} t4: {reserved:.1f} MiB reserved and " in capsys.readouterr().out
